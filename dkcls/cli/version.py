"""Lines for a bug report: versions, and the devices that PyTorch sees."""

import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from dkcls import __version__

PACKAGES = ("torch", "torchvision", "triton", "timm", "numba", "numpy", "hydra-core", "omegaconf")


def version_lines() -> Iterator[str]:
    yield f"dkcls {__version__}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} is not installed"
    yield from device_lines()


def device_lines() -> Iterator[str]:
    yield f"PyTorch's CUDA {torch.version.cuda}, HIP {torch.version.hip}, driver {driver()}"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        yield f"device {i}: {p.name}, {p.multi_processor_count} multiprocessors, {memory}"
    yield f"CPU: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def driver() -> str:
    """Return the version of NVIDIA's driver; "none" where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return said.stdout.splitlines()[0]
    return "none"
