"""Decoding of image files to upright pixels, uint8 [3, H, W].

JPEG goes through simplejpeg, or through torchvision where simplejpeg is not installed: both are
libjpeg-turbo and give PIL's pixels in less time. CMYK, files that these two refuse, and every other
format go through PIL: palettes and grey become RGB, alpha is dropped, as timm and torchvision do.
Of more than 8 bits the 8 highest are kept.
"""

import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLEFORMAT, TiffImageFile
from torch import Tensor

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_ORIENTATION = 0x112
_LARGEST = 80_000_000  # pixels; beyond, PIL decides whether a file is an image or an attack
_MARGIN = 8  # rows below those asked for, from which the chroma of the last ones is interpolated


class BadImage(Exception):
    """Error for bytes that are not an image, or cannot be decoded to the end."""


class EncodedImage:
    """Bytes of an image file.

    A JPEG's size is known before decoding, and decoding stops after the rows that are asked for.
    """

    def __init__(self, data: bytes):
        if not data:
            raise BadImage("empty file")
        self.data = data
        self._header = _read_header(data)
        if self._header is None:
            self._pixels = _decode_with_pil(data)

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width in pixels."""
        if self._header is not None:
            return self._header.height, self._header.width
        return self._pixels.shape[1], self._pixels.shape[2]

    def rows(self, count: int | None = None) -> Tensor:
        """Return at least the first `count` rows, all if None.

        Memory is channels_last where nothing was turned.
        """
        if self._header is None:
            return self._pixels
        height, width = self.size
        count = height if count is None else count
        try:
            pixels = _decode_jpeg(self.data, self._header, count)
        except (ValueError, RuntimeError):
            # A damaged file: PIL decodes what can be decoded, or says what is wrong.
            pixels = _decode_with_pil(self.data)
        if pixels.shape[1] < count or pixels.shape[2] != width:
            raise BadImage(f"its header promises {height} x {width} pixels")
        return pixels


class _Header(NamedTuple):
    height: int
    width: int
    height_at: int  # byte of the file at which the height stands, in two bytes
    sequential: bool  # coded in one pass from the first row to the last


def _read_header(data: bytes) -> _Header | None:
    """Return the header of an upright JPEG with one or three components, else None."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    header, components, at = None, 0, 2
    while len(data) > at + 9 and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xDA:  # the scan
            return (
                header._replace(sequential=header.sequential and data[at + 4] == components)
                if header
                else None
            )
        if marker == 0xE1 and data.startswith(b"Exif\0\0", at + 4) and _is_turned(data):
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame
            height, width = (
                int.from_bytes(data[at + 5 : at + 7]),
                int.from_bytes(data[at + 7 : at + 9]),
            )
            components = data[at + 9]
            if components not in (1, 3) or not 0 < height * width <= _LARGEST:
                return None
            header = _Header(height, width, at + 5, marker in (0xC0, 0xC1))
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _is_turned(data: bytes) -> bool:
    """Check whether EXIF asks to turn or mirror the image; few files have EXIF, so PIL may look."""
    try:
        with Image.open(io.BytesIO(data)) as file:
            return file.getexif().get(_ORIENTATION, 1) != 1
    except Exception:  # whatever PIL meets in damaged files; it will say so again
        return True


def _decode_jpeg(data: bytes, header: _Header, rows: int) -> Tensor:
    if simplejpeg is None:
        from torchvision.io import ImageReadMode, decode_jpeg  # here, because it takes a second

        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    rows += _MARGIN
    # A file without its end is cut off. Whatever rows are asked for, such a file must be known as
    # bad, so it is decoded up to the break.
    if rows >= header.height or not header.sequential or not data.endswith(b"\xff\xd9"):
        return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    shorter = bytearray(data)
    shorter[header.height_at : header.height_at + 2] = rows.to_bytes(2)
    # Not strict, because bytes are left over.
    return torch.from_numpy(simplejpeg.decode_jpeg(shorter, strict=False)).permute(2, 0, 1)


def _decode_with_pil(data: bytes) -> Tensor:
    try:
        with Image.open(io.BytesIO(data)) as file:
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith(("I", "F")):
                # PIL's own conversion would clip the levels.
                levels = np.maximum(np.asarray(image), 0) >> _grey_bits(file) - 8
                pixels = np.stack([levels.astype(np.uint8)] * 3, axis=2)
            else:
                pixels = np.array(image.convert("RGB"))
    except BadImage:
        raise
    except Image.UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Exception as error:  # PIL's decoders raise whatever they meet in damaged files
        raise BadImage(f"cannot be decoded ({str(error) or type(error).__name__})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _grey_bits(file: Image.Image) -> int:
    """Return how many bits white has, in a file of grey pixels of more than 8 bits."""
    # PIL scales integers to 16 bits, except those of TIFF.
    bits, signed = 32 if file.mode == "F" else 16, False
    if isinstance(file, TiffImageFile):
        bits, signed = file.tag_v2[BITSPERSAMPLE][0], file.tag_v2.get(SAMPLEFORMAT) == (2,)
    if bits > 16:
        raise BadImage(
            f"pixels must have at most 16 bits, got {bits}, of which nothing says what is white"
        )
    return bits - signed  # one bit is the sign
