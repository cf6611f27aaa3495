"""Export a network as a file for others, compared with the network before it gets its name.

safetensors: weights, with the card as JSON; `model.pretrained=` and eval.py take it back. onnx,
torch (a torch.export program) and aoti (compiled for this CPU): deformable kernels in standard
operators, for any number of images.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export import export as trace

from dkcls.config import Config
from dkcls.engine.network import Network, load
from dkcls.engine.task import Card
from dkcls.errors import UserError
from dkcls.files import write_atomically
from dkcls.ops import per_image
from dkcls.ops.deform_kernel import library, standard

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2", "aoti": ".aoti.pt2"}
BATCHES = (1, 2, 5)  # sizes of the batches that the file is compared on
LARGEST_BATCH = 2**16
OPSET = 20

Run = Callable[[Tensor], Tensor]


def export(network: Network, kind: str, path: Path) -> tuple[float, float]:
    """Write `path`, all or nothing. Return the largest differences of the logits on noise.

    The first is between file and network, the second between the network and itself in float64.
    UserError, and no file, if the first is neither small nor what rounding does anyway.
    """
    model = network.model.cpu().eval()
    shape = (network.input.channels, network.input.image_size, network.input.image_size)
    batches = [torch.randn(n, *shape, generator=torch.Generator().manual_seed(n)) for n in BATCHES]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        file = Path(folder) / path.name
        with torch.no_grad():
            run = WRITERS[kind](network, model, batches[1], file)
            expected = [model(batch) for batch in batches]
            difference = _largest_difference([run(batch) for batch in batches], expected)
            exact = copy.deepcopy(model).double()
            rounding = _largest_difference([exact(batch.double()) for batch in batches], expected)
        scale = max(logits.abs().max().item() for logits in expected)
        if not difference <= 1e-3 * scale + 10 * rounding:
            raise UserError(
                f"the {kind} file's logits differ from the network's by {difference:.3g}, "
                f"of up to {scale:.3g}"
            )
        # A new file: safetensors gives its own the mode 0600.
        write_atomically(path, file.read_bytes())
    return difference, rounding


def _largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


def metadata(network: Network) -> dict[str, str]:
    """Return the network's card as strings of JSON, without paths on this machine."""
    config = network.config
    data = replace(config.data, root=None)
    model = replace(config.model, pretrained=None)
    config = replace(config, out=Config.out, data=data, model=model)
    card = Card(config, network.class_names(), network.input)
    return {"dkcls": "1", **{key: json.dumps(value) for key, value in card.to_dict().items()}}


def _safetensors(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, file, {"format": "pt", **metadata(network)})
    return load(str(file)).model.eval()


def _onnx(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    try:
        import onnx
        import onnxscript  # noqa: F401

        from dkcls.engine.onnx import OnnxModel
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: pip install -e '.[onnx]'") from error
    program = torch.onnx.export(
        lower(model, images),
        (),
        opset_version=OPSET,
        external_data=False,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch"},),
    )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata(network))
    onnx.checker.check_model(proto, full_check=True)
    file.write_bytes(proto.SerializeToString())
    return OnnxModel(file)


def _torch(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    torch.export.save(lower(model, images), file, extra_files=metadata(network))
    return torch.export.load(file).module()


def _aoti(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    return aoti_load_package(aoti_compile_and_package(lower(model, images), package_path=str(file)))


WRITERS: dict[str, Callable[[Network, nn.Module, Tensor, Path], Run]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch": _torch,
    "aoti": _aoti,
}


def lower(model: nn.Module, images: Tensor) -> ExportedProgram:
    """Return a network's program of PyTorch's own operators, for any number of such images.

    The network is in evaluation mode; no custom operator is left.
    """
    batch = Dim("batch", min=1, max=LARGEST_BATCH)
    with torch.no_grad(), _all_kernels_at_once():
        program = trace(model, (images,), dynamic_shapes=({0: batch},))
    replacements: dict[Any, Callable[..., Any]] = {
        library.deform_kernel2d: standard.deform_kernel2d,
        torch.ops.aten.split.Tensor: _whole,
    }
    program = program.run_decompositions(default_decompositions() | replacements)
    for node in program.graph.nodes:
        # The stack trace names this machine's folders, and would go into files for others.
        node.meta.pop("stack_trace", None)
    return program


def _whole(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return [x] if size >= LARGEST_BATCH else NotImplemented


@contextmanager
def _all_kernels_at_once() -> Iterator[None]:
    """Make the kernels of all images at a time, as a program for any batch must."""
    before, per_image.KERNEL_BYTES = per_image.KERNEL_BYTES, 2**62
    try:
        yield
    finally:
        per_image.KERNEL_BYTES = before
