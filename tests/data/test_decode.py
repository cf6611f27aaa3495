"""Decoding of every kind of image file, upright and in three channels; damage is named."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image

from dkcls.data import decode as module
from dkcls.data.decode import BadImage, EncodedImage
from tests.data.common import encoded, photograph

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities of TorchVision are deprecated"
)
PHOTO = photograph(0)
EXIF_TURNED, EXIF_UPRIGHT = Image.Exif(), Image.Exif()
EXIF_TURNED[0x112], EXIF_UPRIGHT[0x112] = 6, 1


def decode(data: bytes) -> torch.Tensor:
    image = EncodedImage(data)
    pixels = image.rows()
    assert image.size == tuple(pixels.shape[1:])
    return pixels


def pils(data: bytes) -> torch.Tensor:
    from io import BytesIO

    return torch.from_numpy(np.array(Image.open(BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture(params=["simplejpeg", "torchvision"])
def decoder(request, monkeypatch):
    if request.param == "torchvision":
        monkeypatch.setattr(module, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    "data",
    [
        encoded(PHOTO),
        encoded(PHOTO, quality=100, subsampling=0),
        encoded(PHOTO, subsampling="4:2:2"),
        encoded(PHOTO, progressive=True),
        encoded(PHOTO, exif=EXIF_UPRIGHT),
        encoded(PHOTO.convert("L")),
        encoded(PHOTO.convert("CMYK")),
        encoded(PHOTO, keep_rgb=True),
        encoded(PHOTO) + b"trailing",
    ],
    ids=[
        "baseline",
        "4:4:4",
        "4:2:2",
        "progressive",
        "exif upright",
        "grey",
        "cmyk",
        "rgb",
        "trailing bytes",
    ],
)
def test_jpegs_are_pils_to_the_bit(data):
    assert torch.equal(decode(data), pils(data))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    "options",
    [{"subsampling": kind} for kind in ("4:4:4", "4:2:2", "4:2:0")]
    + [{"restart_marker_rows": 1}, {"progressive": True}, {"mode": "L"}],
    ids=str,
)
def test_rows_are_those_of_the_whole(options):
    mode = options.pop("mode", "RGB") if "mode" in options else "RGB"
    data = encoded(photograph(1, 150, 131).convert(mode), quality=92, **options)
    whole, image = pils(data), EncodedImage(data)
    for count in (1, 2, 7, 8, 9, 31, 32, 33, 64, 100, 122, 123, 130, 131):
        rows = image.rows(count)
        assert rows.shape[1] >= count
        assert torch.equal(rows[:, :count], whole[:, :count])


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_orientation_is_followed(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    steps = {2: [-1], 3: [-2, -1], 4: [-2], 5: [], 6: [-1], 7: [-2, -1], 8: [-2]}[orientation]
    expected = pils(encoded(PHOTO))
    expected = (expected.transpose(1, 2) if orientation > 4 else expected).flip(steps)
    assert torch.equal(decode(encoded(PHOTO, exif=exif)), expected)


@pytest.mark.parametrize("kind", ["png", "webp", "bmp", "tiff", "ppm"])
def test_other_formats(kind):
    options = {"lossless": True} if kind == "webp" else {}
    assert torch.equal(decode(encoded(PHOTO, kind, **options)), pils(encoded(PHOTO, "png")))


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "RGBA"])
def test_other_modes(mode):
    image = PHOTO.convert(mode)
    expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(decode(encoded(image, "png")), expected)


def test_alpha_is_dropped():
    image = PHOTO.copy()
    image.putalpha(128)
    assert torch.equal(decode(encoded(image, "png")), pils(encoded(PHOTO, "png")))


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_become_eight(kind):
    levels = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    expected = torch.from_numpy((levels >> 8).astype(np.uint8)).expand(3, 8, 8)
    assert torch.equal(decode(encoded(Image.fromarray(levels), kind)), expected)


def grey_levels(bits: int) -> np.ndarray:
    """Return 64 levels from black to white of a grey image with so many bits, [8, 8]."""
    return np.linspace(0, 2**bits - 1, 64).round().astype(np.int64).reshape(8, 8)


def pgm(levels: np.ndarray, largest: int) -> bytes:
    return b"P5 8 8 %d\n" % largest + levels.astype(">u2").tobytes()


def plain_pgm(levels: np.ndarray, largest: int) -> bytes:
    return b"P2 8 8 %d\n" % largest + b" ".join(b"%d" % level for level in levels.ravel())


def tiff(levels: np.ndarray, bits: int, kind: int = 1, order: str = "<") -> bytes:
    """Return a TIFF file; `kind` is 1 for unsigned integers, 2 for signed ones, 3 for floats."""
    if bits == 12:  # three bytes hold two pixels
        pairs = levels.reshape(-1, 2)
        pixels = b"".join(int(a << 12 | b).to_bytes(3, "big") for a, b in pairs)
    else:
        pixels = levels.astype(f"{order}{' uif'[kind]}{bits // 8}").tobytes()
    values = {
        256: 8,
        257: 8,
        258: bits,
        259: 1,
        262: 1,
        273: 8,
        277: 1,
        278: 8,
        279: len(pixels),
        339: kind,
    }
    rows = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in values.items())
    first = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(pixels))
    return first + pixels + struct.pack(f"{order}H", len(values)) + rows + bytes(4)


@pytest.mark.parametrize(
    ("data", "depth"),
    [
        (tiff(grey_levels(12), 12), 12),
        (tiff(grey_levels(16), 16), 16),
        (tiff(grey_levels(16), 16, order=">"), 16),
        (tiff(grey_levels(15), 16, kind=2), 15),
        (tiff(grey_levels(15), 16, kind=2, order=">"), 15),
        *((pgm(grey_levels(bits), 2**bits - 1), bits) for bits in (9, 10, 12, 16)),
        *((plain_pgm(grey_levels(bits), 2**bits - 1), bits) for bits in (9, 12, 16)),
    ],
    ids=["tiff 12", "tiff 16", "tiff 16 big", "tiff 16 signed", "tiff 16 signed big"]
    + [f"pgm {bits}" for bits in (9, 10, 12, 16)]
    + [f"plain pgm {bits}" for bits in (9, 12, 16)],
)
def test_grey_of_more_than_eight_bits_keeps_its_eight_highest(data, depth):
    expected = torch.from_numpy((grey_levels(depth) >> depth - 8).astype(np.uint8)).expand(3, 8, 8)
    pixels = decode(data)
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert torch.equal(pixels, expected)


def test_negative_pixels_are_black():
    levels = np.linspace(-(2**15), 2**15 - 1, 64).round().astype(np.int64).reshape(8, 8)
    assert torch.equal(decode(tiff(levels, 16, kind=2)), decode(tiff(levels.clip(0), 16, kind=2)))


@pytest.mark.parametrize(
    "data",
    [
        tiff(grey_levels(8), 32),
        tiff(grey_levels(8), 32, kind=2),
        tiff(grey_levels(8) / 255, 32, kind=3),
    ]
    + [b"Pf 8 8 -1.0\n" + grey_levels(8).astype("<f4").tobytes()],
    ids=["unsigned", "signed", "float", "pfm"],
)
def test_pixels_of_32_bits_are_named(data):
    with pytest.raises(
        BadImage,
        match="pixels must have at most 16 bits, got 32, of which nothing says what is white",
    ):
        decode(data)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"hello, I am text", "not an image"),
        (b"\xff\xd8\xff" + b"x" * 50, "not an image"),
        (encoded(PHOTO)[:700], "cannot be decoded .*truncated"),
        (encoded(PHOTO)[:-2], "cannot be decoded .*truncated"),
        (encoded(PHOTO, progressive=True)[:-300], "cannot be decoded .*truncated"),
        (encoded(PHOTO, "png")[:-500], "cannot be decoded"),
        (encoded(PHOTO, "png")[:40], "cannot be decoded|not an image"),
    ],
    ids=[
        "empty",
        "text",
        "garbage",
        "half",
        "end missing",
        "half progressive",
        "half png",
        "png header",
    ],
)
def test_damaged_files_are_named(data, message):
    with pytest.raises(BadImage, match=message):
        decode(data)
    with pytest.raises(BadImage, match=message):  # even if only the first rows are asked for
        EncodedImage(data).rows(1)


@pytest.mark.usefixtures("decoder")
@pytest.mark.filterwarnings(
    "ignore:Corrupt EXIF data", "ignore:Metadata Warning", "ignore:Truncated File Read"
)
def test_bytes_damaged_at_random_are_an_image_or_bad_and_nothing_else():
    generator = np.random.default_rng(0)
    whole = [
        encoded(PHOTO),
        encoded(PHOTO, progressive=True),
        encoded(PHOTO, exif=EXIF_UPRIGHT),
        encoded(PHOTO, "png"),
    ]
    for number in range(400):
        data = bytearray(whole[number % 4])
        for place in generator.integers(0, min(len(data), 700) if number % 3 else len(data), 5):
            data[place] = generator.integers(256)
        try:
            pixels = EncodedImage(bytes(data[: generator.integers(1, 2 * len(data))])).rows(20)
        except BadImage:
            continue
        assert pixels.dim() == 3
        assert len(pixels) == 3
