"""Image files that take far more than they seem to, or that are no files, or cannot be read."""

import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from .data import FOLDER, VAL, make_folder, named, own_cache
from .lab import (
    ROOT,
    Lab,
    Row,
    finish,
    metrics,
    run_of,
    sentence,
    start_imported,
    start_ranks,
    until,
)

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


def exif_segments(count: int, mode: str = "RGB", length: int = 0) -> bytes:
    """Return a small JPEG with so many segments of EXIF, which say nothing in `length` bytes."""
    content = b"Exif\0\0II*\0\x08\0\0\0\0\0" + bytes(length)
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


def write_bombs(folder: Path) -> None:
    """Write each bomb into the folder, and what is no plain file or hardly fits on a disk."""
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content())
    os.mkfifo(folder / "fifo.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    (folder / "sparse.jpg").touch()
    os.truncate(folder / "sparse.jpg", 10**12)


# What is said of each, after its name.
REASONS = {
    "long.jpg": "one side must be at most 100 times the other, got 1 x 65500",
    "tall.png": "one side must be at most 100 times the other, got 1000000 x 1",
    "huge.png": "must have at most 89478485 pixels (data.max_pixels), got 13000 x 13000",
    "scans.jpg": "must have at most 100 scans",
    "tile.tif": "must have tiles of at most 89478485 pixels",
    "eps.jpg": "not an image",
    "fifo.jpg": "not a plain file",
    "zero.jpg": "not a plain file",
    "sparse.jpg": "must have at most 732605096 bytes",
}


def bombs(lab: Lab) -> Row:
    """Train on a folder with bombs, check the folder, and let a read hang."""
    row = Row(
        "image files that are bombs, FIFOs, devices, 1 TB; a read that hangs", outcome="named"
    )
    images = lab.folder / "images"
    make_folder(images)
    places = [min((images / split).iterdir()) for split in ("train", "val")]
    for place in places:
        write_bombs(place)
        (place / "exif.jpg").write_bytes(exif_segments(1600))  # a good one
    expected = {f"{place / name}: {text}" for place in places for name, text in REASONS.items()}
    overrides = (*FOLDER, f"data.root={images}", "data.bad_limit=0.2")
    for ranks in (1,) if lab.short else (1, 2):
        folder = lab.folder / f"run{ranks}"
        process = start_ranks(folder, *overrides, ranks=ranks, **own_cache(lab))
        problems = sentence(process, 0) + named(run_of(folder) / "bad_files.txt", expected)
        counted = metrics(folder)[-1]["images"]
        if counted != VAL + 1:
            problems.append(f"{counted} validation images instead of {VAL + 1}")
        row.check(problems, f"a run, {ranks} ranks")
    row.check(_check_data(lab, images, expected), "check-data")
    if lab.short:
        return row
    for place in places:
        for path in place.glob("*.*"):
            path.unlink()
    _hang(lab, row, images)
    return row


def _check_data(lab: Lab, images: Path, expected: set[str]) -> list[str]:
    output = lab.folder / "bad.txt"
    words = ("-m", "dkcls", "check-data", f"root={images}", "workers=1", f"output={output}")
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | own_cache(lab)["environment"],
        capture_output=True,
        text=True,
    )
    problems = [f"a traceback: {done.stderr[-1500:]}"] if "Traceback" in done.stderr else []
    problems += [f"exit code {done.returncode}"] if done.returncode != 1 else []
    return problems + named(output, expected)


def _hang(lab: Lab, row: Row, images: Path) -> None:
    """Let the read of a training or validation image hang, with and without a signal."""
    plugin = ("--plugin", "scripts.drill.stuck", *FOLDER, "data.name=stuck", f"data.root={images}")
    whole = lab.expected(*plugin, **own_cache(lab))
    mark, reading = images / "stuck", images / "reading"
    for split in ("train", "val"):
        name = str(sorted((images / split).rglob("*.jpg"))[7])
        mark.write_text(name)
        folder = lab.folder / f"asked_{split}"
        process = start_imported(folder, *plugin, **own_cache(lab))
        until(reading.exists, process)
        time.sleep(2)  # until the steps before it are done
        os.kill(process.pid, signal.SIGTERM)
        problems = sentence(process, 75, f"stopped by SIGTERM while waiting for {name}")
        mark.unlink()
        reading.unlink()
        row.check(problems or finish(folder, whole, *plugin, **own_cache(lab)), f"signal, {split}")
    mark.write_text(name)
    process = start_imported(lab.folder / "named", *plugin, "train.timeout=4", **own_cache(lab))
    row.check(sentence(process, 1, f"reading {name} has not ended in 3 s"), "no signal")
    mark.unlink()
