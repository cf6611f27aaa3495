"""How all pictures of the analysis look."""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

COLOURS = (
    "#444444",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a5a2b",
)  # Okabe and Ito's, mostly
NAMES = {
    "rigid": "rigid",
    "static": "static scope",
    "dcn": "DCN",
    "local_dk": "local DK",
    "global_dk": "global DK",
    "dcn_local_dk": "DCN + local DK",
    "cond": "CondConv",
}


def layer_label(name: str) -> str:
    """Return what pictures call a network, by the name of its depthwise layer."""
    return NAMES.get(name, name)


def tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def bare(axes: Axes) -> None:
    """A frame without ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color="0.6", linewidth=0.6)


def save(figure: Figure, picture: str | Path, dpi: int = 160) -> Path:
    """As a PNG of 256 colours, a third of the size: pictures go into a repository."""
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(png(figure, dpi))).convert("RGB").quantize(256).save(
        picture, optimize=True
    )
    return Path(picture)


def png(figure: Figure, dpi: int = 110) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
