"""Export a network to safetensors, ONNX, torch.export or AOTInductor.

  dkcls export checkpoint=runs/NAME/best.pt format=onnx

  format=safetensors  weights with metadata: for dkcls eval, dkcls predict and model.pretrained=
  format=onnx         standard operators, any batch size: for dkcls eval and dkcls predict too
  format=torch        a torch.export program, .pt2: needs PyTorch, not dkcls
  format=aoti         the same compiled for this CPU by AOTInductor, .aoti.pt2: takes a minute
                      and a C++ compiler

The file is compared with the network before it gets its name. The largest difference of the logits
is printed, beside that of rounding alone. All formats take images as float32 [batch, channels,
image_size, image_size], normalised by the mean and std of the file's metadata.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from dkcls import cli
from dkcls.cli.arguments import REQUIRED, NamedModel
from dkcls.config import check_weights
from dkcls.config.checks import check_least
from dkcls.errors import UserError


@dataclass
class Arguments:
    """A network, and the file that it becomes."""

    checkpoint: str = REQUIRED  # a file of the network
    format: str = REQUIRED  # safetensors, onnx, torch, aoti
    model: NamedModel = field(default_factory=NamedModel)
    weights: str = "auto"  # of a checkpoint: auto (the moving average if there is one), ema, model
    image_size: int | None = None  # pixels; null: as the network takes them
    output: Path | None = None  # null: beside the checkpoint, with the format's ending

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_least("image_size", self.image_size, 1)


def main() -> int:
    return cli.script(Arguments, export, __doc__)


def export(arguments: Arguments) -> None:
    with cli.importing_torch():
        from dkcls import export
        from dkcls.engine.network import load
    if arguments.format not in export.SUFFIXES:
        choices = ", ".join(export.SUFFIXES)
        raise UserError(f"format must be one of {choices}, got {arguments.format!r}")
    suffix = export.SUFFIXES[arguments.format]
    network = load(
        arguments.checkpoint, arguments.model.config(), arguments.weights, task="classification"
    )
    if network.path.endswith(".onnx"):
        raise UserError(f"{network.path} is exported already")
    if arguments.image_size:
        network = replace(network, input=replace(network.input, image_size=arguments.image_size))
    output = arguments.output or Path(network.path).with_suffix(suffix)
    if not str(output).endswith(suffix[-4:]):
        raise UserError(f"output must end in {suffix}, got {output}")
    difference, rounding = export.export(network, arguments.format, output)
    print(f"{output}: {output.stat().st_size / 2**20:.2f} MiB")
    batches = ", ".join(map(str, export.BATCHES))
    print(
        f"largest difference of the logits {difference:.2e} "
        f"(float32 from float64 {rounding:.2e}), on batches of {batches}"
    )
