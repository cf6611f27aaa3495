"""Where Triton kernels run: in Triton's interpreter with TRITON_INTERPRET=1, else on a GPU, else nowhere."""

import os

# Read when torch is imported, here and in all that tests start: workers of pytest-xdist share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from dkcls.ops.triton_host import interpreting


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """A test marked `interpreter` is a `gpu` test where kernels are not interpreted."""
    no_compiler = pytest.mark.skip(reason="TRITON_INTERPRET=1 is set: kernels cannot be compiled in this process")
    no_gpu = pytest.mark.skip(reason="no GPU here; TRITON_INTERPRET=1 runs these kernels on the CPU")
    for item in items:
        if item.get_closest_marker("compile") and interpreting():
            item.add_marker(no_compiler)
        if item.get_closest_marker("interpreter") and not interpreting():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(no_gpu)


@pytest.fixture
def triton_device() -> str:
    """The device on which Triton kernels run in this process."""
    return "cpu" if interpreting() else "cuda"
