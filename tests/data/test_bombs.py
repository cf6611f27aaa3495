"""Files that take far more than they seem to: refused by name, at once, and in little memory."""

import json
import os
import resource
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from dkcls.data.check import check
from dkcls.data.decode import BadImage, EncodedImage, read_plain
from dkcls.data.sets.tar import pack_split
from dkcls.data.transforms import EvalTransform
from dkcls.engine.task import Input
from dkcls.tasks.classification.predict import ImageFiles
from scripts.drill.bombs import CONTENTS, REASONS, exif_segments, jpeg, png, scans, tiled_tiff
from tests.data.common import encoded, make_dataset, photograph

MOST = 89_478_485


@contextmanager
def little_memory():
    """Let the process have 300 MB on top of what it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_bombs_are_bad_files_at_once_and_in_little_memory(tmp_path):
    folder = tmp_path / "train/a"
    folder.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content())
    photograph(0).save(folder / "a.jpg")
    expected = {name: REASONS[name] for name in CONTENTS}
    for training in (False, True):
        dataset = make_dataset("folder", tmp_path, training=training)
        started = time.monotonic()
        with little_memory():
            bad = {file.message for file in dataset.load(np.arange(len(dataset))).bad}
        assert len(bad) == len(expected)
        for name, reason in expected.items():
            assert any(text.startswith(f"{folder}/{name}: {reason}") for text in bad)
        assert time.monotonic() - started < 3


def test_ghostscript_is_not_started(tmp_path, monkeypatch):
    gs, mark = tmp_path / "gs", tmp_path / "mark"
    gs.write_text(f"#!/bin/sh\ntouch {mark}\n")
    gs.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(gs))
    with pytest.raises(BadImage, match="not an image"):
        EncodedImage(CONTENTS["eps.jpg"]())
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["gif", "ico", "pcx", "tga", "sgi", "jpeg2000"])
def test_formats_that_the_docs_do_not_list_are_refused(kind):
    with pytest.raises(BadImage, match="not an image"):
        EncodedImage(encoded(photograph(0), kind))


@pytest.mark.parametrize(("mode", "count", "length"), [("RGB", 6000, 0), ("CMYK", 600, 65_000)])
def test_segments_of_exif_take_linear_time(mode, count, length):
    started = time.monotonic()
    assert EncodedImage(exif_segments(count, mode, length)).rows().shape == (3, 16, 16)
    assert time.monotonic() - started < 4


def test_usual_progressive_files_and_tiles_are_read():
    assert EncodedImage(scans(64, 64, 50)).size == (64, 64)
    assert EncodedImage(tiled_tiff(8, 512), max_pixels=100).size == (8, 8)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "bmp", "tiff", "ppm"])
def test_the_limit_is_max_pixels_and_not_pillows(kind, monkeypatch):
    data = encoded(photograph(0), kind)  # 47 x 61
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EncodedImage(data, 47 * 61).rows().shape == (3, 47, 61)
        with pytest.raises(BadImage, match=r"at most 2866 pixels \(data.max_pixels\), got 47 x 61"):
            EncodedImage(data, 47 * 61 - 1)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("size", [(400, 4), (4, 400), (401, 4), (4, 401)])
@pytest.mark.parametrize("make", [png, jpeg])
def test_one_side_may_be_a_hundred_times_the_other(make, size):
    if 401 in size:
        with pytest.raises(BadImage, match="one side must be at most 100 times the other, got"):
            EncodedImage(make(*size))
    else:
        image = EvalTransform(32)(EncodedImage(make(*size)), 0)
        assert image.shape == (3, 32, 32)


def not_files(folder):
    """Make what hangs, never ends, or is too large where it is read; return each one's fault."""
    os.mkfifo(folder / "fifo.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    (folder / "directory.jpg").mkdir()
    (folder / "sparse.jpg").touch()
    os.truncate(folder / "sparse.jpg", 10**12)
    return {
        "fifo.jpg": "not a plain file",
        "zero.jpg": "not a plain file",
        "directory.jpg": "not a plain file",
        "sparse.jpg": f"must have at most {8 * MOST + 2**24} bytes (from data.max_pixels), "
        f"got {10**12}",
    }


def test_only_plain_files_of_some_size_are_read(tmp_path):
    for name, reason in not_files(tmp_path).items():
        with pytest.raises(BadImage) as error:
            read_plain(tmp_path / name, MOST)
        assert str(error.value) == reason
    (tmp_path / "a.jpg").write_bytes(b"content")
    (tmp_path / "b.jpg").symlink_to("a.jpg")
    assert read_plain(tmp_path / "b.jpg", MOST) == b"content"
    assert read_plain(os.fsencode(tmp_path / "b.jpg"), MOST) == b"content"


def folder_set(root, names, **keys):
    (root / "train/a").mkdir(parents=True)
    for name in names:
        os.rename(root / name, root / "train/a" / name)
    return make_dataset("folder", root, **keys)


def coco_set(root, names, **keys):
    size = {"height": 47, "width": 61}
    images = [{"id": n, "file_name": name, **size} for n, name in enumerate(names)]
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (root / "train").mkdir()
    (root / "annotations").mkdir()
    (root / "annotations/train.json").write_text(json.dumps(content))
    for name in names:
        os.rename(root / name, root / "train" / name)
    return make_dataset("coco", root, **keys)


def files_set(root, names, max_pixels=MOST):
    taken = Input(3, 32, 1.0, "bilinear", [0.5], [0.5])
    return ImageFiles([str(root / name) for name in names], taken, max_pixels)


SETS = {"folder": folder_set, "coco": coco_set, "files": files_set}


@pytest.mark.parametrize("kind", SETS)
def test_every_set_reads_plain_files_alone(kind, tmp_path):
    reasons = not_files(tmp_path)
    reasons.pop("directory.jpg")  # folders are searched
    os.rmdir(tmp_path / "directory.jpg")
    report = check(SETS[kind](tmp_path, sorted(reasons)), 0)
    found = {os.path.basename(bad.message.split(": ")[0]): bad.message for bad in report.bad}
    assert {name: text.split(": ", 1)[1] for name, text in found.items()} == reasons


@pytest.mark.parametrize("kind", SETS)
def test_every_set_takes_max_pixels(kind, tmp_path):
    photograph(0).save(tmp_path / "a.jpg")
    loaded = SETS[kind](tmp_path, ["a.jpg"], max_pixels=47 * 61 - 1).load(np.arange(1))
    assert [bad.message.split(": ")[1] for bad in loaded.bad] == [
        "must have at most 2866 pixels (data.max_pixels), got 47 x 61"
    ]


def pack(source, output):
    return pack_split(source, "train", output, 10)


def test_a_packed_set_takes_max_pixels(tmp_path):
    photograph(0).save(tmp_path / "a.jpg")
    Image.new("L", (2000, 2000)).save(tmp_path / "b.bmp")
    source = folder_set(tmp_path, ["a.jpg", "b.bmp"])
    pack(source, tmp_path / "tar")
    dataset = make_dataset("tar", tmp_path / "tar", max_pixels=47 * 61 - 1)
    messages = [bad.message.rsplit(": ")[-1] for bad in dataset.load(np.arange(2)).bad]
    assert messages == [
        "must have at most 2866 pixels (data.max_pixels), got 47 x 61",
        "must have at most 2866 pixels (data.max_pixels), got 2000 x 2000",
    ]


@pytest.mark.parametrize("name", ["fifo.jpg", "sparse.jpg"])
def test_packing_refuses_what_is_no_plain_file(name, tmp_path):
    reason = not_files(tmp_path)[name]
    source = folder_set(tmp_path, [name])
    with pytest.raises(ValueError, match=r"train/a/.*\.jpg: ") as error:
        pack(source, tmp_path / "tar")
    assert str(error.value) == f"{source.name(0)}: {reason}"


def test_max_pixels_must_be_positive():
    with pytest.raises(ValueError, match=r"data.max_pixels must be at least 1, got 0"):
        make_dataset("folder", "x", max_pixels=0)
