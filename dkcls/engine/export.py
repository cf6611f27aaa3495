"""A network as a file for others, compared with the network before it gets its name.

safetensors: weights, with config, classes and input as JSON; `model.pretrained=` and eval.py take it back. onnx, torch (a
torch.export program) and aoti (compiled for this CPU): deformable kernels in standard operators, for any number of images.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dkcls.config import Config, ModelConfig
from dkcls.engine.checkpoint import write_atomically
from dkcls.engine.errors import UserError
from dkcls.engine.lower import lower
from dkcls.engine.network import Network, load_network

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2", "aoti": ".aoti.pt2"}
BATCHES = (1, 2, 5)  # that the file is compared on
OPSET = 20

Run = Callable[[Tensor], Tensor]


def export(network: Network, kind: str, path: Path) -> tuple[float, float]:
    """Writes `path`, all or nothing. Returns, on noise, how far its logits are from the network's, and these from float64's.

    UserError if the first is neither small nor what rounding does to this network anyway: the file is then not written.
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
            difference = max(
                (run(x) - y).abs().max().item() for x, y in zip(batches, expected, strict=True)
            )
            exact = copy.deepcopy(model).double()
            rounding = max(
                (exact(x.double()) - y).abs().max().item()
                for x, y in zip(batches, expected, strict=True)
            )
        scale = max(y.abs().max().item() for y in expected)
        if not difference <= 1e-3 * scale + 10 * rounding:
            raise UserError(
                f"the {kind} file's logits differ from the network's by {difference:.3g}, of up to {scale:.3g}"
            )
        write_atomically(
            path, file.read_bytes()
        )  # a new file: safetensors gives its own the mode 0600
    return difference, rounding


def metadata(network: Network) -> dict[str, str]:
    """Return what a checkpoint says of its network, but for paths on this machine, as strings of JSON."""
    run = network.run
    data, model = replace(run.data, root=None), replace(run.model, pretrained=None)
    config = replace(run, out=Config.out, data=data, model=model).to_dict()
    facts = {"config": config, "classes": network.class_names(), "input": asdict(network.input)}
    return {"dkcls": "1", **{key: json.dumps(value) for key, value in facts.items()}}


def _safetensors(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, file, {"format": "pt", **metadata(network)})
    return load_network(ModelConfig(pretrained=str(file))).model.eval()


def _onnx(network: Network, model: nn.Module, images: Tensor, file: Path) -> Run:
    try:
        import onnx
        import onnxscript  # noqa: F401

        from dkcls.engine.onnx_network import OnnxModel
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: pip install -e '.[onnx]'") from error
    names: dict[str, Any] = {
        "input_names": ["images"],
        "output_names": ["logits"],
        "dynamic_shapes": ({0: "batch"},),
    }
    program = torch.onnx.export(
        lower(model, images), (), opset_version=OPSET, external_data=False, verbose=False, **names
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
