"""Image files: their bytes, what their headers promise, and upright pixels, uint8 [3, H, W].

A file may come from anybody. `read_plain` reads plain files alone, up to a size; `check_size` looks
at the header before anything is decoded; the formats are those of `_FORMATS`, no others. All else
is a BadImage.

JPEG goes through simplejpeg, or through torchvision where simplejpeg is not installed: both are
libjpeg-turbo and give PIL's pixels in less time. CMYK, files that these two refuse, and every other
format go through PIL: palettes and grey become RGB, alpha is dropped, as timm and torchvision do.
Of more than 8 bits the 8 highest are kept.
"""

import io
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    SAMPLEFORMAT,
    TILELENGTH,
    TILEWIDTH,
    TiffImageFile,
)
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from dkcls.config import DataConfig
from dkcls.files import NotPlain, open_plain

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# How a file begins, and PIL's class for it. Named one by one: of the formats that PIL knows, some
# start other programs.
_JPEG = b"\xff\xd8\xff"
_FORMATS: dict[bytes, Callable[[io.BytesIO], ImageFile]] = {
    _JPEG: JpegImageFile,
    b"\x89PNG": PngImageFile,
    b"RIFF": WebPImageFile,
    b"II": TiffImageFile,
    b"MM": TiffImageFile,
    b"BM": BmpImageFile,
    b"P": PpmImageFile,
}
# The longer side over the shorter. Evaluation resizes the shorter side, so the resized image takes
# up to this many times the memory of a square one.
_RATIO = 100
_SCANS = 100  # passes over all pixels, each of a few bytes; usual progressive files have 10
_PIXEL_BYTES = 8  # of the largest pixel in a file: four channels of 16 bits
_OTHER_BYTES = 2**24  # of what is not pixels: colour profiles, EXIF
_ORIENTATION = 0x112
_MARGIN = 8  # rows below those asked for, from which the chroma of the last ones is interpolated


class BadImage(Exception):
    """Error for a file that is not an image, cannot be decoded to the end, or is too large."""


def read_plain(path: str | bytes | os.PathLike, max_pixels: int, flags: int = 0) -> bytes:
    """Return the bytes of an image file. BadImage if it is no plain file, or too large.

    `flags` are added to those of `os.open`.
    """
    try:
        descriptor = open_plain(path, flags)
    except NotPlain:
        raise BadImage("not a plain file") from None
    try:
        size = os.fstat(descriptor).st_size
        check_bytes(size, max_pixels)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def reason(error: OSError | BadImage) -> str:
    """Return why a file cannot be read, without its name."""
    return str(getattr(error, "strerror", None) or error)


def check_bytes(size: int, max_pixels: int) -> None:
    """Raise BadImage if an image of `max_pixels` pixels needs less than `size` bytes."""
    most = max_pixels * _PIXEL_BYTES + _OTHER_BYTES
    if size > most:
        raise BadImage(f"must have at most {most} bytes (from data.max_pixels), got {size}")


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise BadImage if an image has too many pixels, or is too long for its other side."""
    if height * width > max_pixels:
        raise BadImage(
            f"must have at most {max_pixels} pixels (data.max_pixels), got {height} x {width}"
        )
    if max(height, width) > _RATIO * min(height, width):
        raise BadImage(
            f"one side must be at most {_RATIO} times the other, got {height} x {width} pixels"
        )


class EncodedImage:
    """Bytes of an image file, of at most `max_pixels` pixels.

    A JPEG's size is known before decoding, and decoding stops after the rows that are asked for.
    """

    def __init__(self, data: bytes, max_pixels: int = DataConfig.max_pixels):
        if not data:
            raise BadImage("empty file")
        self.data = data
        self._max_pixels = max_pixels
        self._header = _read_header(data)
        if self._header is None:
            self._pixels = _decode_with_pil(data, max_pixels)
        else:
            check_size(self._header.height, self._header.width, max_pixels)

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width in pixels."""
        if self._header is None:
            return self._pixels.shape[1], self._pixels.shape[2]
        height, width = self._header.height, self._header.width
        return (width, height) if self._header.orientation > 4 else (height, width)

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
            pixels = _decode_with_pil(self.data, self._max_pixels)
        if pixels.shape[1] < count or pixels.shape[2] != width:
            raise BadImage(f"its header promises {height} x {width} pixels")
        return pixels


class _Header(NamedTuple):
    height: int
    width: int
    height_at: int  # byte of the file at which the height stands, in two bytes
    sequential: bool  # coded in one pass from the first row to the last
    orientation: int  # EXIF's, from 1 to 8


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of a JPEG's segments up to the first scan, as libjpeg does."""
    at, last = 2, len(data) - 3
    while 0 <= (at := data.find(b"\xff", at)) < last:
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker <= 1 or 0xD0 <= marker <= 0xD7:  # markers without content
            at += 2
        else:
            end = at + 2 + (data[at + 2] << 8) + data[at + 3]
            yield marker, at + 4, end
            if marker == 0xDA:
                return
            at = max(end, at + 4)


def _read_header(data: bytes) -> _Header | None:
    """Return the header of a JPEG with one or three components, else None."""
    if not data.startswith(_JPEG):
        return None
    orientation = height_at = components = 0
    one_pass = False
    for marker, start, end in _segments(data):
        if marker == 0xE1 and not orientation and data.startswith(b"Exif\0\0", start):
            orientation = _orientation(data[start:end])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame
            if len(data) < start + 6:
                return None
            height_at, components = start + 1, data[start + 5]
            one_pass = marker in (0xC0, 0xC1)
        elif marker == 0xDA and start < len(data):  # the scan
            sequential = one_pass and data[start] == components
            if not sequential and data.count(b"\xff\xda", end) >= _SCANS:
                raise BadImage(f"must have at most {_SCANS} scans")
            if components not in (1, 3):
                return None
            height, width = struct.unpack_from(">HH", data, height_at)
            return _Header(height, width, height_at, sequential, orientation or 1)
    return None


def _without_exif(data: bytes) -> tuple[bytes, int]:
    """Return a JPEG without EXIF, and the orientation that it had. PIL joins all EXIF there is."""
    parts, kept, orientation = [], 0, 0
    for marker, start, end in _segments(data):
        if marker == 0xE1:
            if not orientation and data.startswith(b"Exif\0\0", start):
                orientation = _orientation(data[start:end])
            parts.append(data[kept : start - 4])
            kept = end
    return b"".join([*parts, data[kept:]]), orientation or 1


def _orientation(exif: bytes) -> int:
    """Return how EXIF asks to turn or mirror the image, from 1 to 8; 1 if it does not say."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for place in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, place)
            if (tag, kind) == (_ORIENTATION, 3):
                return value if 1 <= value <= 8 else 1
    except struct.error:  # cut off, or no EXIF
        pass
    return 1


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    """Turn and mirror [C, H, W] as EXIF's orientation asks."""
    if orientation > 4:
        pixels = pixels.transpose(1, 2)
    flips = [dim for dim, which in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in which]
    return pixels.flip(flips) if flips else pixels


def _decode_jpeg(data: bytes, header: _Header, rows: int) -> Tensor:
    """Decode at least `rows` rows of the upright image."""
    if simplejpeg is None:
        from torchvision.io import ImageReadMode, decode_jpeg  # here, because it takes a second

        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return _upright(decode_jpeg(encoded, ImageReadMode.RGB), header.orientation)
    rows += _MARGIN
    # A file without its end is cut off. Whatever rows are asked for, such a file must be known as
    # bad, so it is decoded up to the break.
    if (
        rows >= header.height
        or not header.sequential
        or header.orientation > 1
        or not data.endswith(b"\xff\xd9")
    ):
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
        return _upright(pixels, header.orientation)
    shorter = bytearray(data)
    shorter[header.height_at : header.height_at + 2] = rows.to_bytes(2)
    # Not strict, because bytes are left over.
    return torch.from_numpy(simplejpeg.decode_jpeg(shorter, strict=False)).permute(2, 0, 1)


def _decode_with_pil(data: bytes, max_pixels: int) -> Tensor:
    orientation = 1
    try:
        if data.startswith(_JPEG):
            data, orientation = _without_exif(data)
        with _pil_limit(max_pixels), _open(data) as file:
            _check_header(file, max_pixels)
            file.load()  # a PNG's EXIF may stand at its end; PIL turns TIFF by itself
            if not isinstance(file, TiffImageFile):
                orientation = max(orientation, _orientation(file.info.get("exif", b"")))
            if file.mode.startswith(("I", "F")):
                # PIL's own conversion would clip the levels.
                shift = _grey_bits(file) - 8
                grey = (np.maximum(np.asarray(file), 0) >> shift).astype(np.uint8)
                pixels = np.stack([grey] * 3, axis=2)
            else:
                pixels = np.array(file if file.mode == "RGB" else file.convert("RGB"))
    except BadImage:
        raise
    except Exception as error:  # PIL's decoders raise whatever they meet in damaged files
        raise BadImage(f"cannot be decoded ({str(error) or type(error).__name__})") from None
    return _upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation)


def _open(data: bytes) -> ImageFile:
    for start, kind in _FORMATS.items():
        if data.startswith(start):
            with suppress(SyntaxError):  # PIL's word for another format
                return kind(io.BytesIO(data))
    raise BadImage("not an image (JPEG, PNG, WebP, TIFF, BMP, PPM)")


@contextmanager
def _pil_limit(max_pixels: int) -> Iterator[None]:
    """Raise PIL's own limit, which some of its formats look at, to ours if that is higher."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = before and max(before, max_pixels)
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _check_header(file: ImageFile, max_pixels: int) -> None:
    check_size(file.height, file.width, max_pixels)
    if isinstance(file, TiffImageFile) and TILEWIDTH in file.tag_v2:
        # Decoded one by one, and the last ones reach beyond the image.
        pixels, most = file.tag_v2[TILELENGTH] * file.tag_v2[TILEWIDTH], DataConfig.max_pixels
        if pixels > max(max_pixels, most):
            raise BadImage(f"must have tiles of at most {most} pixels, got {pixels}")


def _grey_bits(file: ImageFile) -> int:
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
