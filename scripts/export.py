"""Export a network to safetensors, ONNX, torch.export or AOTInductor.

    python scripts/export.py checkpoint=runs/NAME/best.pt format=onnx

    format=safetensors  weights with metadata: for eval.py, predict.py and model.pretrained=
    format=onnx         standard operators, any batch size: for eval.py and predict.py too
    format=torch        a torch.export program, .pt2: needs PyTorch, not dkcls
    format=aoti         the same compiled for this CPU by AOTInductor, .aoti.pt2: takes a minute
                        and a C++ compiler

The file is compared with the network before it gets its name. The largest difference of the logits
is printed, beside that of rounding alone. All formats take images as float32 [batch, channels,
image_size, image_size], normalised by the mean and std of the file's metadata.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import MISSING

from dkcls import cli
from dkcls.config import ModelConfig, check_weights
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.export import BATCHES, SUFFIXES, export


@dataclass
class Arguments:
    format: str = MISSING  # safetensors, onnx, torch, aoti
    checkpoint: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    weights: str = "auto"  # auto: the moving average if there is one; ema, model
    image_size: int | None = None  # null: as the network takes them
    output: Path | None = None  # null: beside the checkpoint, with the format's ending

    def __post_init__(self) -> None:
        check_weights(self.weights)


def main(arguments: Arguments) -> None:
    if arguments.format not in SUFFIXES:
        raise UserError(f"format must be one of {', '.join(SUFFIXES)}, got {arguments.format!r}")
    network = load(arguments.checkpoint, arguments.model, arguments.weights, task="classification")
    if network.path.endswith(".onnx"):
        raise UserError(f"{network.path} is exported already")
    if arguments.image_size:
        network = replace(network, input=replace(network.input, image_size=arguments.image_size))
    output = arguments.output or Path(network.path).with_suffix(SUFFIXES[arguments.format])
    if not str(output).endswith(SUFFIXES[arguments.format][-4:]):
        raise UserError(f"output must end in {SUFFIXES[arguments.format]}, got {output}")
    difference, rounding = export(network, arguments.format, output)
    print(f"{output}: {output.stat().st_size / 2**20:.2f} MiB")
    batches = ", ".join(map(str, BATCHES))
    print(
        f"largest difference of the logits {difference:.2e} "
        f"(float32 from float64 {rounding:.2e}), on batches of {batches}"
    )


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
