"""Draw the effective receptive field of a feature map over an image.

    python scripts/plot_erf.py checkpoint=runs/quickstart/best.pt image=boot.png point=[16,16]
    python scripts/plot_erf.py model=resnet18 weights=w.safetensors image=photo.jpg module=layer3
    python scripts/plot_erf.py model=convnext_atto image=photo.jpg  # of timm's, random weights

The feature map is the network's last, or the output of any module. The image is resized, not
cropped, so that its shorter side is what the network takes. The field is that of the position that
looks nearest to the point: the norm of its derivative to each pixel, with offsets held constant.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import MISSING
from PIL import Image, UnidentifiedImageError
from timm.data import resolve_data_config
from torch import nn

from dkcls import cli
from dkcls.analysis import erf
from dkcls.analysis.theoretical import (
    nearest_position,
    position_centres,
    theoretical_receptive_field,
)
from dkcls.config import ModelConfig
from dkcls.data import Normalize
from dkcls.engine.network import create_network, load
from dkcls.engine.task import Input
from dkcls.errors import UserError
from dkcls.report.network_plots import mark, show_field
from dkcls.report.style import bare, save


@dataclass
class Arguments:
    checkpoint: str | None = None  # of ours, which knows its network; or
    model: str | None = None  # a name in timm,
    weights: str | None = None  # with weights from a file; none: drawn at random
    image: Path = MISSING
    point: list[float] = field(default_factory=list)  # [x,y], pixels of the image; none: its middle
    module: str | None = None  # whose output; none: the last feature map
    projections: int = 32  # random ones of the output's channels
    output: Path = Path("erf.png")


def main(arguments: Arguments) -> None:
    model, takes = network_of(arguments)
    picture = read(arguments.image, takes.channels)
    point = arguments.point or [(picture.width - 1) / 2, (picture.height - 1) / 2]
    if len(point) != 2 or not (0 <= point[0] < picture.width and 0 <= point[1] < picture.height):
        raise UserError(
            f"point must be [x,y] inside the image of {picture.width} x {picture.height}, "
            f"got {point}"
        )
    ratio = takes.image_size / min(picture.size)
    resized = picture.resize(
        (round(picture.width * ratio), round(picture.height * ratio)), Image.Resampling.BILINEAR
    )
    pixels = (
        torch.from_numpy(np.array(resized))
        .reshape(resized.height, resized.width, takes.channels)
        .movedim(-1, 0)
    )
    images = Normalize(takes.mean, takes.std)(pixels[None])
    try:
        centres = position_centres(model, images.shape[1:], arguments.module)
        position = nearest_position(centres, [(p + 0.5) * ratio - 0.5 for p in point])
        options = {"module": arguments.module, "projections": arguments.projections}
        field = erf.effective_receptive_field(
            model,
            images,
            position,
            **options,  # type: ignore[arg-type]
        )[0]
        reach = theoretical_receptive_field(model, images.shape[1:], position, arguments.module)
    except AssertionError as error:  # timm's word for an image of another size
        raise UserError(
            f"the network does not take images of {resized.width} x {resized.height}: {error}"
        ) from error
    at = float(centres[1][position[1]]), float(centres[0][position[0]])
    save(draw(pixels.numpy() / 255, field.numpy(), at), arguments.output)
    print(
        f"{arguments.output}: position {position} looks at ({at[0]:g}, {at[1]:g}) "
        f"of {resized.width} x {resized.height} pixels"
    )
    print(
        f"radius {erf.radius(field):.1f} pixels, "
        f"{erf.area(field):.0f} pixels above 5 % of the largest value, ",
        end="",
    )
    print(
        f"anisotropy {erf.anisotropy(field):.2f}; "
        f"theoretical field: {100 * reach.float().mean():.0f} % of the image"
    )


def network_of(arguments: Arguments) -> tuple[nn.Module, Input]:
    if (arguments.checkpoint is None) == (arguments.model is None):
        raise UserError("either checkpoint=FILE or model=NAME is needed")
    if arguments.checkpoint or arguments.weights:
        path = arguments.checkpoint or arguments.weights
        network = load(path, ModelConfig(name=arguments.model), task="classification")
        return network.model, network.input
    model = create_network(ModelConfig(name=arguments.model), 1000, 3)
    cfg = resolve_data_config(model=model)
    mean, std = list(cfg["mean"]), list(cfg["std"])
    return model, Input(len(mean), cfg["input_size"][-1], 1.0, "bilinear", mean, std).with_channels(
        3
    )


def read(path: Path, channels: int) -> Image.Image:
    try:
        return Image.open(path).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that can be read") from error


def draw(image: np.ndarray, field: np.ndarray, point: tuple[float, float]) -> Figure:
    """Draw the image, [C, H, W] in 0 to 1, and the field beside it."""
    shown = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    height, width = field.shape
    figure = Figure(figsize=(7.2, 3.6 * height / width), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(shown, cmap="gray", vmin=0, vmax=1)
    mark(left, point)
    bare(left)
    show_field(right, shown, field, point)
    return figure


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
