"""Image folders: what is listed, remembered and forgotten, and each kind of bad file."""

import logging
import os
import pickle
import shutil
import time
from random import Random

import numpy as np
import pytest
import torch

from dkcls import files
from dkcls.data import create_loader
from dkcls.data.check import check
from dkcls.data.dataset import BadFile
from dkcls.data.file_index import FileIndex
from dkcls.data.loader import BadFiles
from dkcls.data.sets import folder as module
from dkcls.errors import UserError
from tests.data.common import assert_same_batches, make_dataset, make_folder, photograph

OLD = time.time() - 1000


def make_old(root):
    """Give all folders one time, as images of containers and archives do."""
    for path, _, _ in os.walk(root):
        os.utime(path, (OLD, OLD))


def dataset_of(root, split="train", **options):
    return make_dataset("folder", root, split, image_size=16, **options)


def test_classes_and_images(shared_folder):
    train, val = dataset_of(shared_folder), dataset_of(shared_folder, "val")
    assert train.class_names == val.class_names == ["class0", "class1", "class2"]
    assert (train.num_classes, train.channels, train.image_size, len(train), len(val)) == (
        3,
        3,
        16,
        22,
        7,
    )
    loaded = train.load(np.arange(22)).batch
    names = [train.name(index) for index in range(22)]
    assert names == sorted(names)
    assert loaded.targets.tolist() == [int(name.split("class")[1][0]) for name in names]
    assert [dataset_of(shared_folder, "test").name(i) for i in range(7)] == [
        val.name(i) for i in range(7)
    ]


def test_a_test_split_of_its_own_is_used(folder):
    (folder / "test" / "class1").mkdir(parents=True)
    photograph(3).save(folder / "test" / "class1" / "x.png")
    assert len(dataset_of(folder, "test")) == 1
    assert dataset_of(folder, "test").target(0) == 1


def test_val_may_lack_classes_of_train_but_not_the_other_way_round(folder):
    (folder / "train" / "aardvark").mkdir()
    photograph(1).save(folder / "train" / "aardvark" / "x.jpg")
    assert dataset_of(folder, "val").load(np.arange(7)).batch.targets.min() == 1
    (folder / "val" / "zebra").mkdir()
    photograph(1).save(folder / "val" / "zebra" / "x.jpg")
    with pytest.raises(UserError, match=r"val has classes that .*train lacks: zebra"):
        dataset_of(folder, "val")


@pytest.mark.parametrize("make", ["nothing", "empty split", "empty class"])
def test_a_folder_without_images_is_refused_in_one_sentence(tmp_path, make):
    if make != "nothing":
        (tmp_path / "train" / "class0" if make == "empty class" else tmp_path / "train").mkdir(
            parents=True
        )
    expected = (
        "must hold the folders train and val" if make == "nothing" else "train holds no images"
    )
    with pytest.raises(UserError, match=expected) as error:
        dataset_of(tmp_path)
    assert "\n" not in str(error.value)


def test_the_list_is_remembered_until_a_folder_changes(folder, monkeypatch):
    nested = folder / "train" / "class0" / "deeper"
    nested.mkdir()
    first = dataset_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(module, "scan", lambda folder: pytest.fail("listed again"))
        again = dataset_of(folder)
    assert [again.name(i) for i in range(len(again))] == [first.name(i) for i in range(len(first))]
    os.utime(nested)
    assert labels(dataset_of(folder)) == labels(first)
    photograph(9).save(nested / "new.jpg")
    assert len(dataset_of(folder)) == 23
    (folder / "train" / "class1" / "001.jpg").unlink()
    assert len(dataset_of(folder)) == 22
    (folder / "train" / "class9").mkdir()
    assert dataset_of(folder).num_classes == 4


def test_of_each_folder_one_list_is_kept(folder, cache):
    for number in range(3):
        photograph(number).save(folder / "train" / "class0" / f"new{number}.jpg")
        assert len(dataset_of(folder)) == 23 + number
    dataset_of(folder, "val")
    assert len(list(cache.iterdir())) == 2


def rename_a_file(root):
    (root / "class1/001.jpg").rename(root / "class1/zzz.jpg")


def add_a_file(root):
    photograph(1).save(root / "class2/deeper/new.jpg")


def rename_a_class(root):
    (root / "class0").rename(root / "class3")


def exchange_classes(root):
    (root / "class0").rename(root / "x")
    (root / "class1").rename(root / "class0")
    (root / "x").rename(root / "class1")


@pytest.mark.parametrize("change", [rename_a_file, add_a_file, rename_a_class, exchange_classes])
def test_a_list_of_other_files_is_not_used_where_times_never_change(folder, change):
    """As in images of containers and in archives, which give every folder the same time."""
    root = folder / "train"
    (root / "class2/deeper").mkdir()
    make_old(folder)
    before = labels(dataset_of(folder))
    change(root)
    make_old(folder)
    expected = labels_of_files(root)
    assert expected != before
    assert labels(dataset_of(folder)) == expected


def labels(dataset):
    return [(dataset.name(i), dataset.target(i)) for i in range(len(dataset))]


def labels_of_files(root):
    """Return path and class of each image, in their order, as the layout says it."""
    classes = sorted(path.name for path in root.iterdir())
    files = sorted(path.relative_to(root) for path in root.rglob("*.jpg"))
    return [(str(root / file), classes.index(file.parts[0])) for file in files]


def test_a_list_that_cannot_be_written_leaves_the_one_before(folder, cache, monkeypatch):
    expected = labels(dataset_of(folder))
    (path,) = cache.iterdir()
    before = path.read_bytes()
    (folder / "train/class0/000.jpg").unlink()

    def full_disk(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    assert labels(dataset_of(folder)) == expected[1:]
    assert [each.read_bytes() for each in cache.iterdir()] == [before]


def flipped(data, random):
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


DAMAGE = {
    "nonsense": lambda data, random: b"nonsense",
    "empty": lambda data, random: b"",
    "cut": lambda data, random: data[: random.randrange(len(data))],
    "longer": lambda data, random: data + b"x",
    "a flipped bit": flipped,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_list_is_made_anew(folder, cache, kind):
    expected, random = labels(dataset_of(folder)), Random(0)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    for _ in range(40 if kind == "a flipped bit" else 1):
        path.write_bytes(DAMAGE[kind](whole, random))
        assert labels(dataset_of(folder)) == expected
        assert [each.read_bytes() for each in cache.iterdir()] == [whole]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_keeps_the_list_that_it_opened(folder, cache, workers):
    dataset_of(folder)
    loader = create_loader(dataset_of(folder), 4, training=False, workers=workers)
    expected = list(create_loader(dataset_of(folder), 4, training=False))
    for path in cache.iterdir():
        os.truncate(path, 10)  # in its place: what is mapped from the file is gone too
    shutil.rmtree(cache)
    assert_same_batches(list(loader), expected)


def test_without_a_cache_folder_it_works_all_the_same(folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert len(dataset_of(folder)) == 22


def test_a_worker_shares_the_memory_of_the_list():
    names = [b"class/%012d.jpg" % i for i in range(20_000)]
    index = FileIndex.build(names, range(20_000), {"class_names": ["class"]})
    sent = pickle.dumps(index)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert [copy.name(i) for i in (0, 1, 19_999)] == [names[0], names[1], names[-1]]
    assert copy.targets.tolist() == list(range(20_000))
    assert os.path.samestat(os.fstat(copy._file.fileno()), os.fstat(index._file.fileno()))


def break_files(folder):
    """Add a bad file of each kind to class1 of train; return each one's fault, sorted by name."""
    broken = folder / "train" / "class1"
    (broken / "a.jpg").touch()
    whole = (broken / "001.jpg").read_bytes()
    (broken / "b.jpg").write_bytes(whole[: len(whole) // 2])
    (broken / "c.png").write_text("hello")
    (broken / "d.jpg").symlink_to(folder / "vanished.jpg")
    (broken / "e.jpg").symlink_to("e.jpg")
    return {
        "a.jpg": "empty file",
        "b.jpg": "truncated",
        "c.png": "not an image",
        "d.jpg": "No such file or directory",
        "e.jpg": "Too many levels of symbolic links",
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_named_counted_logged_once_and_replaced(folder, workers, caplog, tmp_path):
    reasons = break_files(folder)
    dataset = dataset_of(folder, training=True)
    assert len(dataset) == 27
    loader = create_loader(dataset, 9, training=True, workers=workers, bad_limit=0.2)
    with caplog.at_level(logging.WARNING):
        first, second = list(loader), list(loader)
    assert_same_batches(first, second)
    assert loader.bad_files.count == 5
    for name, (file, reason) in zip(loader.bad_files.names, reasons.items(), strict=True):
        assert name.startswith(str(folder / "train" / "class1" / file) + ": ")
        assert reason in name
    assert len([record for record in caplog.records if "bad file" in record.message]) == 5
    indices = torch.cat([batch.indices for batch in first]).tolist()
    bad = [i for i in range(27) if os.path.basename(dataset.name(i)) in reasons]
    assert sorted(indices) == sorted([i for i in range(27) if i not in bad] + [bad[-1] + 1] * 5)
    assert loader.bad_files.share == pytest.approx(5 / 27)
    assert not loader.bad_files.exceeded


def test_bad_files_found_before_a_restart_within_an_epoch_count_on(folder):
    bad = [
        folder / "train" / name for name in ("class0/000.jpg", "class1/010.jpg", "class2/020.jpg")
    ]
    for path in bad:
        path.write_bytes(b"")

    def loader():
        return create_loader(dataset_of(folder, training=True), 11, training=True, bad_limit=0.1)

    first, again = loader(), loader()
    next(iter(first))
    assert 0 < first.bad_files.count < 3  # some before the restart and some after it
    assert not first.bad_files.exceeded
    again.bad_files.load_state(first.bad_files.state())
    again.set_state(0, 1)
    list(again)
    assert again.bad_files.names == [f"{path}: empty file" for path in bad]
    assert again.bad_files.share == pytest.approx(3 / 22)
    assert again.bad_files.exceeded


def test_too_many_bad_files_set_a_flag(folder):
    break_files(folder)
    loader = create_loader(dataset_of(folder, training=True), 9, training=True, bad_limit=0.1)
    assert not loader.bad_files.exceeded
    assert len(list(loader)) == 3
    assert loader.bad_files.exceeded


def test_an_evaluation_leaves_bad_files_out(folder):
    break_files(folder)
    dataset = dataset_of(folder)
    loader = create_loader(dataset, 4, training=False)
    batches = list(loader)
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert sorted(indices) == [
        i for i in range(27) if os.path.basename(dataset.name(i))[0] not in "abcde"
    ]
    for batch in batches:
        alone = [dataset.load(np.array([index])).batch for index in batch.indices]
        assert torch.equal(batch.images, torch.cat([one.images for one in alone]))
        assert torch.equal(batch.targets, torch.cat([one.targets for one in alone]))
    assert loader.bad_files.count == 5


def test_a_file_that_vanishes_later_is_bad(folder):
    dataset = dataset_of(folder, training=True)
    os.unlink(dataset.name(3))
    loaded = dataset.load(np.array([3]))
    assert loaded.batch.indices.tolist() == [4]
    assert loaded.bad == [BadFile(3, f"{dataset.name(3)}: No such file or directory")]


def test_a_set_of_nothing_but_bad_files_ends_in_an_error(tmp_path):
    folder = make_folder(tmp_path, train=3, val=1, classes=1)
    dataset = dataset_of(folder, training=True)
    for index in range(3):
        open(dataset.name(index), "w").close()
    with pytest.raises(
        RuntimeError, match=r"3 files in a row cannot be read, the last is .*000\.jpg: empty file"
    ):
        dataset.load(np.array([1]))


def test_loops_of_links_are_cut_and_named(folder):
    loop = folder / "train" / "class0"
    (loop / "up").symlink_to(folder / "train")
    (loop / "self").symlink_to(loop)
    (folder / "train" / "class7").mkdir()
    dataset = dataset_of(folder)
    assert len(dataset) == 22
    notes = create_loader(dataset, 2, training=True).bad_files.names
    assert [note.rsplit("/", 1)[1] for note in sorted(notes)] == [
        "self: a link to a folder above it or listed already, not followed",
        "up: a link to a folder above it or listed already, not followed",
        "class7: a class without images",
    ]


def test_a_class_may_be_a_link_and_have_folders(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    photograph(5).save(elsewhere / "PICTURE.JPEG")
    (elsewhere / ".hidden.jpg").touch()
    (elsewhere / "notes.txt").touch()
    (folder / "train" / "linked").symlink_to(elsewhere.parent)
    dataset = dataset_of(folder)
    assert dataset.name(22).endswith("linked/deep/PICTURE.JPEG")
    assert len(dataset) == 23


def test_files_with_other_endings_are_counted(folder):
    """Check the counts by ending, most first, without hidden files and folders."""
    names = [
        "a.gif",
        "deep/b.GIF",
        "c.jp2",
        "deep/d.gif",
        "README",
        ".hidden.gif",
        ".git/e.gif",
        "f.gif/g.Jpg",
    ]
    for name in names:
        path = folder / "train" / "class1" / name
        path.parent.mkdir(exist_ok=True)
        photograph(1).save(path, "jpeg")
    (folder / "train" / "class2" / "x.jp2").touch()
    expected = (f"{folder}/train: files passed over for their endings (6): .gif 3, .jp2 2, none 1",)
    for _ in range(2):  # listed, and then remembered
        dataset = dataset_of(folder)
        assert (dataset.notes, len(dataset)) == (expected, 23)
    assert dataset_of(folder, "val").notes == ()


def test_of_many_endings_the_commonest_are_named(folder):
    for ending in "abcdefg":
        for number in range(2 if ending > "d" else 1):
            (folder / "train" / "class0" / f"{number}.{ending}").touch()
    [note] = dataset_of(folder).notes
    assert note.endswith("(10): .e 2, .f 2, .g 2, .a 1, .b 1 and 2 more")


def test_the_share_is_of_one_epoch_of_one_rank():
    bad = BadFiles(images_per_epoch=100, limit=0.02)
    bad.start_epoch()
    bad.add([BadFile(1, "a: x"), BadFile(2, "b: x")])
    bad.start_epoch()
    bad.add([BadFile(3, "c: x"), BadFile(3, "c: x")])
    assert (bad.count, bad.share, bad.exceeded) == (3, 0.02, False)
    bad.add([BadFile(4, "d: x"), BadFile(5, "e: x")])
    assert (bad.share, bad.exceeded) == (0.03, True)
    with pytest.raises(ValueError, match="bad_limit must be a share from 0 to 1, got 2"):
        BadFiles(1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_check_counts_everything(folder, workers):
    reasons = break_files(folder)
    dataset = dataset_of(folder)
    done = []
    report = check(dataset, workers, done.append)
    assert sum(done) == 27
    assert [os.path.basename(bad.message.split(": ")[0]) for bad in report.bad] == list(reasons)
    assert report.counts.tolist() == [8, 7, 7]
    good = report.bytes > 0
    assert good.sum() == 22
    assert (report.sides[good] == [47, 61]).all()
    assert report.bytes[0] == os.path.getsize(dataset.name(0))
