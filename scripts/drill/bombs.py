"""Image files that take far more than they seem to, or that are no files; and image files at random."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
showpage
%%EOF
"""


def png(width: int, height: int) -> bytes:
    """Return a black PNG of one bit per pixel, made row by row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    packer, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def jpeg(width: int, height: int, mode: str = "RGB", **options: bool) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "JPEG", **options)
    return file.getvalue()


def exif_segments(count: int, mode: str = "RGB") -> bytes:
    """Return a small JPEG with so many segments of EXIF, which say nothing."""
    content = b"Exif\0\0II*\0\x08\0\0\0\0\0"
    segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    data = jpeg(16, 16, mode)
    return data[:2] + segment * count + data[2:]


def scans(width: int, height: int, count: int) -> bytes:
    """Return a progressive JPEG whose last scan, of few bytes, is there so many times more."""
    data = jpeg(width, height, "L", progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:-2] + data[at:-2] * count + b"\xff\xd9"


def tiled_tiff(side: int, tile: int) -> bytes:
    """Return a grey TIFF of one deflated tile, that is larger than the image."""
    packer = zlib.compressobj(9)
    row = bytes(tile)
    pixels = b"".join(packer.compress(row) for _ in range(tile)) + packer.flush()
    values = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1}
    values |= {322: tile, 323: tile, 324: 8, 325: len(pixels)}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    first = b"II*\0" + struct.pack("<I", 8 + len(pixels))
    return first + pixels + struct.pack("<H", len(values)) + rows + bytes(4)


# What is written into a file named as an image.
CONTENTS: dict[str, Callable[[], bytes]] = {
    "long.jpg": lambda: jpeg(65500, 1),
    "tall.png": lambda: png(1, 1_000_000),
    "huge.png": lambda: png(13_000, 13_000),
    "scans.jpg": lambda: scans(2000, 2000, 3000),
    "tile.tif": lambda: tiled_tiff(8, 10_000),
    "eps.jpg": lambda: EPS,
}
