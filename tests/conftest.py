"""Hooks that choose where Triton kernels run, and a fixture with their device.

Kernels run in Triton's interpreter with TRITON_INTERPRET=1, else on a GPU, else nowhere.
"""

import gc
import os

# Read when torch is imported, here and in child processes: workers of pytest-xdist share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import cache
from pathlib import Path

import pytest
import torch

from dkcls.ops.triton_launch import interpreting

if interpreting():
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang

    @cache
    def languages(fn):
        return [value for value in fn.__globals__.values() if value in (tl, tl.core)]

    def patch_language_once(fn):
        """Skip what Triton repeats in each call of a device function: the launch has done it."""
        if any(tl.core.is_builtin(language.arange) for language in languages(fn)):
            return patch_language(fn)
        return interpreter._LangPatchScope()

    if hasattr(interpreter, "_LangPatchScope"):  # older Tritons patch once and for all
        interpreter._patch_lang = patch_language_once  # a third of the interpreter's time


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark `interpreter` tests as `gpu` tests where kernels are not interpreted."""
    no_compiler = pytest.mark.skip(
        reason="TRITON_INTERPRET=1 is set: kernels cannot be compiled in this process"
    )
    no_gpu = pytest.mark.skip(
        reason="no GPU here; TRITON_INTERPRET=1 runs these kernels on the CPU"
    )
    for item in items:
        if item.get_closest_marker("compile") and interpreting():
            item.add_marker(no_compiler)
        if item.get_closest_marker("interpreter") and not interpreting():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(no_gpu)


def pytest_collection_finish():
    """Leave what is imported by now out of garbage collections: each would scan all of it."""
    gc.freeze()


def pytest_unconfigure():
    """Let what was imported be collected as usual: some libraries report leaks."""
    gc.unfreeze()


@pytest.fixture
def triton_device() -> str:
    """Return the device on which Triton kernels run in this process."""
    return "cpu" if interpreting() else "cuda"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Return checkpoints of awake networks by their operator: rigid, local_dk and cond."""
    from tests.engine.checkpoints import write_checkpoint  # here, after the hooks above

    folder = tmp_path_factory.mktemp("checkpoints")
    names = ("rigid", "local_dk", "cond")
    return {name: write_checkpoint(folder / f"{name}.pt", spatial=name) for name in names}
