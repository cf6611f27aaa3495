"""An exported .onnx file as a network: eval.py and predict.py run it in onnxruntime, on the CPU."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from dkcls.engine.errors import UserError
from dkcls.engine.network import Network, parse_facts
from dkcls.engine.weights import FACTS

try:
    import onnxruntime
except ImportError:
    onnxruntime = None


class OnnxModel(nn.Module):
    """Called as the network that it was exported from. Custom operators are not looked for, and no code in a file runs."""

    def __init__(self, path: str | Path):
        super().__init__()
        if onnxruntime is None:
            raise UserError(f"{path} needs onnxruntime: pip install -e '.[onnx]'")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own, without a common class
            raise UserError(
                f"{path} is not an ONNX file that onnxruntime takes: {str(error).splitlines()[0]}"
            ) from error

    def forward(self, images: Tensor) -> Tensor:
        (logits,) = self.session.run(
            None, {self.session.get_inputs()[0].name: images.float().cpu().contiguous().numpy()}
        )
        return torch.from_numpy(logits).to(images.device)


def load_onnx(path: str) -> Network:
    if not Path(path).is_file():
        raise UserError(f"there is no file {path} to take weights from")
    model = OnnxModel(path)
    said = model.session.get_modelmeta().custom_metadata_map
    if missing := [key for key in FACTS if key not in said]:
        raise UserError(
            f"{path} does not say what its network is: it was not exported by scripts/export.py ({missing[0]} is missing)"
        )
    try:
        facts = {key: json.loads(said[key]) for key in FACTS}
    except ValueError as error:
        raise UserError(f"{path} does not say what its network is: {error}") from error
    run, classes, taken = parse_facts(facts, path)
    return Network(path, model, len(classes), taken, run, classes)
