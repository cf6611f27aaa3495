"""Draw the effective receptive field of a feature map over images.

  dkcls erf checkpoint=runs/quickstart/best.pt images=embedded:4
  dkcls erf checkpoint=runs/quickstart/best.pt images=photo.jpg point=[120,80]
  dkcls erf checkpoint=w.safetensors model.name=resnet18 images=photo.jpg module=layer3
  dkcls erf model.name=convnext_atto images=photo.jpg       a network of timm's, random weights

The feature map is the network's last, or the output of any module. An image is resized, not
cropped, so that its shorter side is what the network takes. The field is that of the position that
looks nearest to the point: the norm of its derivative to each pixel, with offsets held constant.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_data_config
from torch import nn

from dkcls import cli
from dkcls.analysis import erf
from dkcls.analysis.theoretical import (
    nearest_position,
    position_centres,
    theoretical_receptive_field,
)
from dkcls.cli.arguments import REQUIRED, NamedModel
from dkcls.config import DataConfig, check_weights
from dkcls.config.checks import check_least
from dkcls.data import Normalize
from dkcls.data.decode import BadImage, EncodedImage, reason
from dkcls.data.named import find_images, read_image
from dkcls.engine.network import create_network, load
from dkcls.engine.task import Input
from dkcls.errors import UserError
from dkcls.report.network_plots import plot_over_images
from dkcls.report.style import save

MOST = 12  # images of one picture


@dataclass
class Arguments:
    """A network, the images that it looks at, and where."""

    # a file, a folder, embedded:4 (that many test images of the embedded data), or several of these
    # as [a,b]
    images: Any = REQUIRED
    checkpoint: str | None = None  # a file of the network; null: model.name with random weights
    model: NamedModel = field(default_factory=NamedModel)
    weights: str = "auto"  # of a checkpoint: auto (the moving average if there is one), ema, model
    point: list[float] = field(default_factory=list)  # [x,y], pixels of an image; none: its middle
    module: str | None = None  # whose output; null: the last feature map
    projections: int = 32  # random ones of the output's channels
    max_pixels: int = DataConfig.max_pixels  # an image file with more is not read
    output: Path | None = None  # null: erf.png beside the checkpoint

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_least("projections", self.projections, 1)
        check_least("max_pixels", self.max_pixels, 1)


def main() -> int:
    return cli.script(Arguments, draw_fields, __doc__)


def draw_fields(arguments: Arguments) -> None:
    model, taken = network_of(arguments)
    places = arguments.images if isinstance(arguments.images, list) else [arguments.images]
    names = find_images([str(place) for place in places])
    if not 1 <= len(names) <= MOST:
        raise UserError(f"images must be 1 to {MOST}, got {len(names)}")
    rows = [field_of(model, taken, name, arguments) for name in names]
    output = arguments.output
    if output is None:
        folder = Path(arguments.checkpoint).parent if arguments.checkpoint else Path(".")
        output = folder / "erf.png"
    save(plot_over_images(rows), output)
    print(output)


def network_of(arguments: Arguments) -> tuple[nn.Module, Input]:
    """Return the network, and the images that it takes."""
    model = arguments.model.config()
    if arguments.checkpoint:
        network = load(arguments.checkpoint, model, arguments.weights, task="classification")
        return network.model, network.input
    if model.name is None:
        raise UserError("checkpoint=FILE is needed, or model.name=NAME for random weights")
    fresh = create_network(model, 1000, 3)
    cfg = resolve_data_config(model=fresh)
    mean, std = list(cfg["mean"]), list(cfg["std"])
    taken = Input(len(mean), cfg["input_size"][-1], 1.0, "bilinear", mean, std)
    return fresh, taken.with_channels(3)


def field_of(
    model: nn.Module, taken: Input, name: str, arguments: Arguments
) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Return the resized image, [C, H, W] in 0 to 1, its field [H, W], and where it looks (x, y).

    What the field measures is printed.
    """
    picture = read(name, taken.channels, arguments.max_pixels)
    point = arguments.point or [(picture.width - 1) / 2, (picture.height - 1) / 2]
    if len(point) != 2 or not (0 <= point[0] < picture.width and 0 <= point[1] < picture.height):
        raise UserError(
            f"point must be [x,y] inside the image of {picture.width} x {picture.height}, "
            f"got {point}"
        )
    ratio = taken.image_size / min(picture.size)
    size = round(picture.width * ratio), round(picture.height * ratio)
    resized = np.array(picture.resize(size, Image.Resampling.BILINEAR))
    pixels = torch.from_numpy(resized).reshape(size[1], size[0], taken.channels).movedim(-1, 0)
    images = Normalize(taken.mean, taken.std)(pixels[None])
    try:
        centres = position_centres(model, images.shape[1:], arguments.module)
        position = nearest_position(centres, [(p + 0.5) * ratio - 0.5 for p in point])
        field = erf.effective_receptive_field(
            model,
            images,
            position,
            module=arguments.module,
            projections=arguments.projections,
        )[0]
        reach = theoretical_receptive_field(model, images.shape[1:], position, arguments.module)
    except AssertionError as error:  # timm's word for an image of another size
        raise UserError(
            f"the network does not take images of {size[0]} x {size[1]}: {error}"
        ) from error
    at = float(centres[1][position[1]]), float(centres[0][position[0]])
    print(
        f"{name}: position {position} looks at ({at[0]:g}, {at[1]:g}) of {size[0]} x {size[1]} "
        f"pixels; radius {erf.radius(field):.1f} pixels, {erf.area(field):.0f} pixels above 5 % of "
        f"the largest value, anisotropy {erf.anisotropy(field):.2f}; "
        f"theoretical field: {100 * reach.float().mean():.0f} % of the image"
    )
    return pixels.numpy() / 255, field.numpy(), at


def read(name: str, channels: int, max_pixels: int) -> Image.Image:
    try:
        pixels = EncodedImage(read_image(name, max_pixels), max_pixels).rows()
    except (OSError, BadImage) as error:
        raise UserError(f"{name} cannot be read: {reason(error)}") from error
    return Image.fromarray(pixels.movedim(0, -1).numpy()).convert("L" if channels == 1 else "RGB")
