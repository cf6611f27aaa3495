"""Style of all pictures, and how they become files."""

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


def tidy(axes: Axes) -> None:
    """Give the panel a pale grid and no frame above and on the right."""
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def bare(axes: Axes) -> None:
    """Give the panel a frame without ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color="0.6", linewidth=0.6)


def save(figure: Figure, picture: str | Path, dpi: int = 160) -> Path:
    """Save a PNG of 256 colours, a third of the size: pictures go into a repository."""
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(png(figure, dpi))).convert("RGB").quantize(256).save(
        picture, optimize=True
    )
    return Path(picture)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """Return the picture as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
