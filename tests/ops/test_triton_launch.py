"""Which devices have Triton kernels, and what runs on the others."""

from types import SimpleNamespace

import pytest
import torch

from dkcls.ops import sample_kernel, triton_launch
from dkcls.ops.checks import check_backend
from dkcls.ops.deform_kernel import library

GFX942, OTHER = "gfx942:sramecc+:xnack-", "gfx90a:sramecc+:xnack-"


@pytest.fixture
def amd(monkeypatch):
    """A function that puts an AMD device of an architecture into this machine."""

    def install(architecture: str) -> None:
        properties = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        triton_launch._architecture.cache_clear()
        triton_launch._warn.cache_clear()

    yield install
    triton_launch._architecture.cache_clear()


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda:0")

    def get_device(self) -> int:
        return 0


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).as_subclass(OnGpu)


@pytest.mark.parametrize(("architecture", "runs"), [(GFX942, "triton"), (OTHER, "tap_loop")])
def test_amd_devices_without_tiles_take_the_tap_loop(architecture, runs, amd, caplog):
    amd(architecture)
    for _ in range(2):
        assert library._choose("", on_gpu(2, 3, 5, 5)).__name__.endswith(f".{runs}")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (runs == "tap_loop")
    assert all("gfx90a" in line and "gfx942" in line for line in said)


def test_one_warning_for_several_devices_of_a_kind(amd, caplog):
    amd(OTHER)
    for i in (0, 1):
        tensor = SimpleNamespace(is_cuda=True, dtype=torch.float32, get_device=lambda i=i: i)
        assert not triton_launch.has_kernels(tensor)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("architecture", "in_one_launch"), [(GFX942, True), (OTHER, False)])
def test_amd_devices_without_tiles_sample_in_plain_pytorch(
    architecture, in_one_launch, amd, monkeypatch
):
    amd(architecture)
    ran = []
    monkeypatch.setattr(sample_kernel, "_sample_op", lambda *_: ran.append("Triton"))
    monkeypatch.setattr(sample_kernel, "_sample", lambda *_: ran.append("plain"))
    sample_kernel.sample_kernel2d(on_gpu(3, 1, 4, 4), on_gpu(2, 18), kernel_size=3)
    assert ran == ["Triton" if in_one_launch else "plain"]


def test_triton_is_refused_where_it_has_no_tiles(amd):
    amd(GFX942)
    check_backend("triton", on_gpu(1))
    amd(OTHER)
    with pytest.raises(
        ValueError, match='backend "triton" needs an NVIDIA device or gfx942, got gfx90a'
    ):
        check_backend("triton", on_gpu(1))


def test_the_choice_of_kernels_compiles(amd):
    amd(OTHER)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def double_with_kernels(x):
        return x * 2 if triton_launch._has_tiles(0) else x

    x = torch.ones(2)
    assert torch.equal(double_with_kernels(x), x)
