"""Images by the names that people give: files, folders, and images of the embedded data."""

import io
import os
from collections.abc import Iterable
from functools import cache

import numpy as np
from PIL import Image

from dkcls.data.decode import read_plain
from dkcls.data.sets.deformed_fashion import DeformedFashion
from dkcls.data.sets.folder import EXTENSIONS
from dkcls.errors import UserError

EMBEDDED = "embedded:"


def find_images(places: Iterable[str]) -> list[str]:
    """Return the names of images, each of which `read_image` takes.

    A place is a file, a folder (all images below it, in the order of their names), or embedded:12,
    the first 12 test images of deformed_fashion.
    """
    found: list[str] = []
    for place in places:
        if place.startswith(EMBEDDED):
            found += [f"{EMBEDDED}{number}" for number in range(_embedded_number(place))]
        elif os.path.isdir(place):
            found += _images_below(place)
        else:
            found.append(place)  # whether it is an image is found out when it is read
    return found


def _images_below(folder: str) -> list[str]:
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    images = sorted(path for path in files if os.fsencode(path).lower().endswith(EXTENSIONS))
    if not images:
        raise UserError(f"there are no images in {folder}")
    return images


def read_image(name: str, max_pixels: int) -> bytes:
    """Return an encoded image; OSError or BadImage if it cannot be read."""
    if not name.startswith(EMBEDDED):
        return read_plain(name, max_pixels)
    pixels = _embedded_set().load(np.array([_embedded_number(name)])).batch.images[0, 0]
    data = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(data, "PNG")
    return data.getvalue()


def _embedded_number(name: str) -> int:
    number, most = name.removeprefix(EMBEDDED), len(_embedded_set())
    if not (number.isdecimal() and int(number) <= most):
        raise UserError(f"images={EMBEDDED}NUMBER must be of 1 to {most} images, got {name!r}")
    return int(number)


@cache
def _embedded_set() -> DeformedFashion:
    return DeformedFashion("test")
