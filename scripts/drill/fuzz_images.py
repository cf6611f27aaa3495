"""Image files changed, cut and glued at random: each is an image or a bad file, soon."""

import io
import json
import os
import resource
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from dkcls.data.encoded import EncodedImages
from dkcls.data.transforms import EvalTransform, TrainTransform, Transform

from .lab import Lab, Row, fork_server

SECONDS = 20.0  # for one try
MEMORY = 1_000_000_000  # bytes by which the process may grow
SIZE = 64


class OneImage(EncodedImages):
    """A data set of one image file, kept in memory."""

    data = b""

    def __init__(self, transform: Transform):
        super().__init__(transform, SIZE, training=False, seed=0)
        self.class_names = ["image"]

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> bytes:
        return self.data

    def name(self, index: int) -> str:
        return "image"

    def target(self, index: int) -> int:
        return 0


def fuzz_images(lab: Lab) -> Row:
    """Decode, crop and resize random files in a separate process, whose answers are checked."""
    row = Row("image files changed, cut and glued at random", outcome="an image or a bad file")
    count, found = lab.many(5000, 100), lab.folder / "found.jsonl"
    process = fork_server().Process(target=_fuzz, args=(lab.random.getrandbits(32), count, found))
    process.start()
    process.join()
    for line in found.read_text().splitlines():
        row.check(*json.loads(line))
    if row.tried < count:
        row.check([f"the process ended with {process.exitcode}"], f"number {row.tried}")
    return row


def _fuzz(seed: int, count: int, found: Path) -> None:
    """Write what is wrong with each answer; a try is a function of seed and number."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libtiff writes
    warnings.simplefilter("ignore")
    sets = [OneImage(EvalTransform(SIZE)), OneImage(TrainTransform(SIZE))]
    whole = originals()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with found.open("w") as file:
        for number in range(count):
            data = changed(Random(f"{seed} {number}"), whole)
            problems = attempt(sets[number % 2], data)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            if grown > MEMORY:
                problems.append(f"the process has grown by {grown / 1e9:.1f} GB")
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            file.write(json.dumps([problems, f"number {number}"]) + "\n")
            file.flush()


def attempt(dataset: OneImage, data: bytes) -> list[str]:
    """Return what is wrong with how the data set takes these bytes."""
    dataset.data = data
    started = time.monotonic()
    try:
        (images, _, _), bad = dataset.load(np.arange(1))
    except Exception as error:
        return [f"{type(error).__name__} came through: {error}"]
    seconds = time.monotonic() - started
    problems = [f"it took {seconds:.0f} s"] if seconds > SECONDS else []
    if len(images) + len(bad) != 1 or images.shape[1:] != (3, SIZE, SIZE):
        problems.append(f"{len(images)} images and {len(bad)} bad files")
    return problems


def originals() -> list[bytes]:
    """Return two photographs in every format, in many ways of writing it."""
    exif = Image.Exif()
    exif[0x112] = 6
    written = []
    for pixels in load_sample_images().images:
        photo = Image.fromarray(pixels).resize((160, 107))
        grey = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
        for image, kind, options in (
            (photo, "JPEG", {}),
            (photo, "JPEG", {"progressive": True, "exif": exif}),
            (photo, "JPEG", {"quality": 95, "subsampling": 0, "restart_marker_rows": 1}),
            (photo.convert("L"), "JPEG", {}),
            (photo.convert("CMYK"), "JPEG", {}),
            (photo, "PNG", {"exif": exif}),
            (photo.quantize(), "PNG", {"transparency": 0}),
            (photo.convert("1"), "PNG", {}),
            (grey, "PNG", {}),
            (photo, "WEBP", {"exif": exif}),
            (photo.convert("RGBA"), "WEBP", {"lossless": True}),
            (photo, "WEBP", {"save_all": True, "append_images": [photo.rotate(9)]}),
            (photo, "TIFF", {"exif": exif}),
            (photo, "TIFF", {"compression": "tiff_lzw"}),
            (photo, "TIFF", {"compression": "jpeg"}),
            (photo.convert("1"), "TIFF", {"compression": "group4"}),
            (grey, "TIFF", {"compression": "tiff_adobe_deflate"}),
            (photo.quantize(), "BMP", {}),
            (grey, "PPM", {}),
        ):
            file = io.BytesIO()
            image.save(file, kind, **options)
            written.append(file.getvalue())
    return written


def changed(random: Random, whole: list[bytes]) -> bytes:
    """Return a file with one to three changes, most of them near its beginning."""
    data = bytearray(random.choice(whole))
    for _ in range(random.randint(1, 3)):
        random.choice(CHANGES)(random, data, random.choice(whole))
    return bytes(data)


def place(random: Random, data: bytes | bytearray) -> int:
    """Return the index of a byte, in half of the cases one of the header's."""
    most = random.choice((64, 700, 700, len(data), len(data), len(data)))
    return random.randrange(min(len(data), most) or 1)


def set_bytes(random: Random, data: bytearray, other: bytes) -> None:
    for _ in range(random.randint(1, 6)):
        at = place(random, data)
        data[at : at + 1] = bytes([random.choice((0, 1, 127, 128, 255, random.randrange(256)))])


def set_number(random: Random, data: bytearray, other: bytes) -> None:
    """Overwrite two or four bytes with a number of either order, as sizes and lengths are."""
    at, width = place(random, data), random.choice((2, 4))
    number = random.choice((0, 1, 255, 9000, 30_000, 65_535, 2**31 - 1, 2**31, 2**32 - 1))
    order = random.choice(("little", "big"))
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, order)


def set_size(random: Random, data: bytearray, other: bytes) -> None:
    """Promise another height or width, where a JPEG, PNG or BMP has it, with a PNG's checksum."""
    number = random.choice((0, 1, 2, 900, 13_000, 65_500, 1_000_000))
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if data.startswith(b"\x89PNG") and len(data) > 33:
        at = random.choice((16, 20))
        data[at : at + 4] = number.to_bytes(4)
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    elif data.startswith(b"BM"):
        at = random.choice((18, 22))
        data[at : at + 4] = number.to_bytes(4, "little")
    elif data.startswith(b"\xff\xd8") and frame > 0:
        at = frame + random.choice((5, 7))
        data[at : at + 2] = (number % 2**16).to_bytes(2)


def cut_out(random: Random, data: bytearray, other: bytes) -> None:
    at = place(random, data)
    del data[at : at + random.choice((1, 2, 16, 1000))]


def cut_off(random: Random, data: bytearray, other: bytes) -> None:
    del data[place(random, data) :]


def repeat(random: Random, data: bytearray, other: bytes) -> None:
    at = place(random, data)
    part = data[at : at + random.choice((2, 18, 100, 3000))]
    data[at:at] = part * random.choice((1, 3, 200))


def glue(random: Random, data: bytearray, other: bytes) -> None:
    """Insert a part of another file, or all that follows one of its bytes."""
    at, first = place(random, data), place(random, other)
    if random.randrange(2):
        data[at:] = other[first:]
    else:
        data[at:at] = other[first : first + random.choice((2, 12, 200, 5000))]


CHANGES: tuple[Callable[[Random, bytearray, bytes], None], ...] = (
    *(set_bytes, set_number, set_size),
    *(cut_out, cut_off, repeat, glue),
)
