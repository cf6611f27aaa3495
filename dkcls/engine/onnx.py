"""An exported .onnx file as a network, run in onnxruntime on the CPU."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from dkcls.engine.network import Network
from dkcls.engine.task import Card
from dkcls.errors import UserError

try:
    import onnxruntime
except ImportError:
    onnxruntime = None


class OnnxModel(nn.Module):
    """A network that is called as the one it was exported from.

    Custom operators are not looked for, and no code in a file runs.
    """

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
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{path} is not an ONNX file that onnxruntime takes: {reason}"
            ) from error

    def forward(self, images: Tensor) -> Tensor:
        inputs = {self.session.get_inputs()[0].name: images.float().cpu().contiguous().numpy()}
        (logits,) = self.session.run(None, inputs)
        return torch.from_numpy(logits).to(images.device)


def load_onnx(path: str) -> Network:
    if not Path(path).is_file():
        raise UserError(f"there is no file {path} to take weights from")
    model = OnnxModel(path)
    metadata = model.session.get_modelmeta().custom_metadata_map
    if missing := [key for key in Card.KEYS if key not in metadata]:
        raise UserError(
            f"{path} does not say what its network is: it was not exported by dkcls export "
            f"({missing[0]} is missing)"
        )
    try:
        values = {key: json.loads(metadata[key]) for key in Card.KEYS}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} does not say what its network is: {error}") from error
    card = Card.parse(values, path)
    shapes = [part.shape for part in (*model.session.get_inputs(), *model.session.get_outputs())]
    size = card.input.image_size
    expected = [[card.input.channels, size, size], [len(card.classes)]]
    if [shape[1:] for shape in shapes] != expected:
        raise UserError(
            f"{path} does not hold the network that it says: one that maps images of "
            f"{expected[0]} to {expected[1][0]} classes, got shapes {shapes}"
        )
    return Network(path, model, len(card.classes), card.input, card.config, card.classes)
