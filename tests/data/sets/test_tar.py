"""Packing: tar shards give what is in the folder, and a second run resumes the first."""

import os
import tarfile
from random import Random

import numpy as np
import pytest

from dkcls.data import create_loader
from dkcls.data.file_index import FileIndex
from dkcls.data.sets import tar as module
from dkcls.data.sets.folder import ImageFolder
from dkcls.data.sets.tar import pack_split
from dkcls.data.transforms import EvalTransform
from dkcls.errors import UserError
from tests.data.common import assert_same_batches, make_dataset, photograph

NOT_AN_IMAGE = "not an image (JPEG, PNG, WebP, TIFF, BMP, PPM)"


def packed(folder, root, split="train", per_shard=9):
    source = ImageFolder(folder, split, EvalTransform(16), 16)
    done = []
    found = pack_split(source, split, root, per_shard, done.append)
    assert sum(done) == len(source)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_folder(shared_folder, tmp_path, workers):
    assert packed(shared_folder, tmp_path) == (3, 3)
    assert packed(shared_folder, tmp_path, "val") == (1, 1)
    assert packed(shared_folder, tmp_path, "val") == (1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train-00000.tar",
        "train-00001.tar",
        "train-00002.tar",
        "train.index",
        "val-00000.tar",
        "val.index",
    ]
    for split, training in (("train", True), ("val", False), ("test", False)):
        sets = [
            make_dataset(kind, root, split, training=training, image_size=24)
            for kind, root in (("folder", shared_folder), ("tar", tmp_path))
        ]
        assert sets[0].class_names == sets[1].class_names
        some, others = (
            list(create_loader(dataset, 4, training=training, workers=workers)) for dataset in sets
        )
        assert_same_batches(some, others)


def test_a_packed_set_tells_which_files_were_not_packed(folder, tmp_path):
    (folder / "train" / "class0" / "a.gif").touch()
    (folder / "train" / "class2" / "b.gif").touch()
    packed(folder, tmp_path / "tar")
    packed(folder, tmp_path / "tar", "val")
    notes = [make_dataset("tar", tmp_path / "tar", split).notes for split in ("train", "val")]
    assert notes == [
        (f"{tmp_path}/tar/train.index: files passed over for their endings (2): .gif 2",),
        (),
    ]
    assert str(folder).encode() not in (tmp_path / "tar" / "train.index").read_bytes()


def test_workers_open_files_of_their_own_after_the_parent_has_read(shared_folder, tmp_path):
    packed(shared_folder, tmp_path, "val", per_shard=3)
    dataset = make_dataset("tar", tmp_path, "val", image_size=16)
    expected = list(create_loader(dataset, 2, training=False))
    found = create_loader(dataset, 2, training=False, workers=1)
    assert_same_batches(list(found), expected)
    assert found.bad_files.count == 0


def test_shards_are_plain_tar_files(shared_folder, tmp_path):
    packed(shared_folder, tmp_path)
    with tarfile.open(tmp_path / "train-00000.tar") as archive:
        names = archive.getnames()
        assert names[:2] == ["class0/000.jpg", "class0/003.jpg"]
        assert (
            archive.extractfile(names[0]).read()
            == (shared_folder / "train" / names[0]).read_bytes()
        )


def test_an_interrupted_run_goes_on_where_it_stopped(shared_folder, tmp_path, monkeypatch):
    write, written = module._write, []

    def stop_at_the_third(source, members, path, *rest):
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        return write(source, members, path, *rest)

    monkeypatch.setattr(module, "_write", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        packed(shared_folder, tmp_path)
    with pytest.raises(UserError, match=r"there is no .*train\.index"):
        make_dataset("tar", tmp_path)
    packed(shared_folder, tmp_path)
    packed(shared_folder, tmp_path)
    assert written == ["train-00000.tar", "train-00001.tar", "train-00002.tar", "train-00002.tar"]
    assert len(make_dataset("tar", tmp_path)) == 22


def test_a_changed_folder_is_packed_again(folder, tmp_path):
    packed(folder, tmp_path / "tar")
    photograph(1).save(folder / "train" / "class2" / "zzz.jpg")
    packed(folder, tmp_path / "tar")
    assert len(make_dataset("tar", tmp_path / "tar")) == 23


@pytest.mark.parametrize(("same_size", "settled"), [(True, 2.0), (True, -1.0), (False, -1.0)])
def test_changed_content_is_packed_again(folder, tmp_path, monkeypatch, same_size, settled):
    """A file is replaced by another under the same name, with the same time."""
    monkeypatch.setattr(module, "SETTLED", settled)
    packed(folder, tmp_path / "tar")
    changed = folder / "train/class1/010.jpg"
    content, times = changed.read_bytes(), changed.stat()
    content = content[:-20] + bytes(18) + content[-2:] if same_size else content + b"more"
    changed.write_bytes(content)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "tar").glob("*.tar")}
    packed(folder, tmp_path / "tar")
    assert_packed(folder, tmp_path / "tar")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "tar").glob("*.tar")}
    assert [name for name in sorted(after) if after[name] != before[name]] == ["train-00001.tar"]


def assert_packed(folder, root, split="train"):
    """Check that the shards hold the folder's files, with its classes."""
    dataset = make_dataset("tar", root, split)
    files = sorted(folder.glob(f"{split}/*/*.jpg"))
    assert [dataset.index.name(i).decode() for i in range(len(dataset))] == [
        str(path.relative_to(folder / split)) for path in files
    ]
    assert [dataset.read(i) for i in range(len(dataset))] == [path.read_bytes() for path in files]
    classes = sorted(path.name for path in (folder / "train").iterdir())
    assert dataset.class_names == classes
    assert [dataset.target(i) for i in range(len(dataset))] == [
        classes.index(path.parent.name) for path in files
    ]


def test_a_class_that_is_added_is_one_of_every_split_that_is_packed_again(folder, tmp_path):
    for split in ("train", "val"):
        packed(folder, tmp_path / "tar", split)
    before = (tmp_path / "tar/val-00000.tar").stat().st_mtime_ns
    (folder / "train/aardvark").mkdir()
    photograph(1).save(folder / "train/aardvark/x.jpg")
    for split in ("train", "val"):
        packed(folder, tmp_path / "tar", split)
        assert_packed(folder, tmp_path / "tar", split)
    after = (tmp_path / "tar/val-00000.tar").stat().st_mtime_ns
    assert after == before  # its files are the same


def test_shards_of_an_interrupted_run_get_the_classes_of_the_next(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            packed(folder, tmp_path / "tar", "val")
    (folder / "train/aardvark").mkdir()
    packed(folder, tmp_path / "tar", "val")
    assert_packed(folder, tmp_path / "tar", "val")


def test_no_index_is_left_that_shards_do_not_fit(folder, tmp_path, monkeypatch):
    """Two files change places, and packing is interrupted: all sizes are as before."""
    packed(folder, tmp_path / "tar")
    one, other = (folder / "train" / name for name in ("class0/000.jpg", "class2/020.jpg"))
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    write = module._write

    def stop_after_one(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        packed(folder, tmp_path / "tar")
    with pytest.raises(UserError, match=r"there is no .*train\.index"):
        make_dataset("tar", tmp_path / "tar")
    monkeypatch.undo()
    assert packed(folder, tmp_path / "tar") == (3, 1)  # one is done, one holds the same as before
    assert_packed(folder, tmp_path / "tar")


def test_what_was_packed_is_not_read_again_while_its_times_are_the_same(
    folder, tmp_path, monkeypatch
):
    read, names = module._read_member, []
    monkeypatch.setattr(module, "_read_member", lambda n, most: names.append(n) or read(n, most))
    for settled, again in ((2.0, 22), (-1.0, 0)):  # files of this moment count as old, or not
        monkeypatch.setattr(module, "SETTLED", settled)
        packed(folder, tmp_path / f"tar{settled}")
        names.clear()
        assert packed(folder, tmp_path / f"tar{settled}") == (3, 0)
        assert len(names) == again
    os.utime(folder / "train/class0/000.jpg")
    assert packed(folder, tmp_path / "tar-1.0") == (3, 0)
    assert names == [str(folder / "train/class0/000.jpg")]


def test_a_damaged_index_is_refused_and_packed_again(shared_folder, tmp_path):
    packed(shared_folder, tmp_path)
    path = tmp_path / "train.index"
    content, random = path.read_bytes(), Random(0)
    for _ in range(60):
        place = random.randrange(len(content))
        flip = bytes([content[place] ^ 1 << random.randrange(8)])
        path.write_bytes(content[:place] + flip + content[place + 1 :])
        with pytest.raises(UserError, match=r"train\.index is damaged"):
            make_dataset("tar", tmp_path)
    packed(shared_folder, tmp_path)
    assert_packed(shared_folder, tmp_path)


def test_an_image_that_moved_to_another_class_is_packed_again(folder, tmp_path):
    packed(folder, tmp_path / "tar")
    (folder / "train/class0/000.jpg").rename(folder / "train/class1/000.jpg")
    packed(folder, tmp_path / "tar")
    dataset = make_dataset("tar", tmp_path / "tar")
    names = [dataset.index.name(index).decode() for index in range(22)]
    assert names == sorted(
        str(path.relative_to(folder / "train")) for path in folder.glob("train/*/*")
    )
    assert [dataset.target(index) for index in range(22)] == [int(name[5]) for name in names]


def test_an_image_that_was_renamed_is_packed_again(folder, tmp_path):
    """It keeps its place in the order, and all content is as before."""
    packed(folder, tmp_path / "tar")
    (folder / "train/class1/010.jpg").rename(folder / "train/class1/011.jpg")
    assert packed(folder, tmp_path / "tar") == (3, 1)
    assert_packed(folder, tmp_path / "tar")


def test_what_does_not_read_back_is_not_kept(shared_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "fsync", lambda file: damage(tmp_path / "train-00000.tmp"))
    with pytest.raises(OSError, match=r"class0/000\.jpg does not read back as it was written"):
        packed(shared_folder, tmp_path)
    assert not (tmp_path / "train-00000.tar").exists()


def damage(path):
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")


def test_a_damaged_member_is_a_bad_file_and_a_short_shard_is_refused(shared_folder, tmp_path):
    packed(shared_folder, tmp_path)
    dataset = make_dataset("tar", tmp_path, training=True, image_size=16)
    offset, size = (int(dataset.index.extra[key][4]) for key in ("offsets", "sizes"))
    shard = tmp_path / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[offset : offset + size] = b"x" * size
    shard.write_bytes(content)
    loaded = dataset.load(np.array([4]))
    assert loaded.batch.indices.tolist() == [5]
    assert loaded.bad[0].message == f"{shard}/{dataset.index.name(4).decode()}: {NOT_AN_IMAGE}"
    shard.write_bytes(content[:2000])
    with pytest.raises(
        UserError, match=r"train-00000\.tar must have \d+ bytes, as its index says, got 2000"
    ):
        make_dataset("tar", tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match="as its index says, got no file"):
        make_dataset("tar", tmp_path)


def test_a_shard_that_is_cut_while_the_run_goes_on(shared_folder, tmp_path):
    packed(shared_folder, tmp_path, per_shard=22)
    dataset = make_dataset("tar", tmp_path, image_size=16)
    with (tmp_path / "train-00000.tar").open("r+b") as file:
        file.truncate(int(dataset.index.extra["offsets"][21]) + 10)
    loaded = dataset.load(np.arange(22))
    assert len(loaded.batch.targets) == 21
    assert "10 of its" in loaded.bad[0].message


def test_links_are_not_packed(folder, tmp_path):
    link = folder / "train/class1/link.jpg"
    link.symlink_to("/etc/hostname")
    with pytest.raises(
        ValueError, match=r"link\.jpg is a link: what is packed must lie in the folder itself"
    ):
        packed(folder, tmp_path / "tar")
    link.unlink()
    (folder / "train/class9").symlink_to(folder / "val/class1")
    with pytest.raises(ValueError, match="class9 is a link"):
        packed(folder, tmp_path / "tar")
    assert not (tmp_path / "tar/train.index").exists()


def test_a_member_that_is_no_plain_file_is_bad(shared_folder, tmp_path):
    packed(shared_folder, tmp_path)
    dataset = make_dataset("tar", tmp_path, training=True, image_size=16)
    shard = tmp_path / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    # "2" is the kind of a symbolic link.
    content[int(dataset.index.extra["offsets"][4]) - 512 + 156] = ord("2")
    shard.write_bytes(content)
    loaded = dataset.load(np.array([4]))
    assert loaded.batch.indices.tolist() == [5]
    assert "not a plain file of the archive" in loaded.bad[0].message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"name": b"../../etc/passwd"},
            r"names '\.\./\.\./etc/passwd': names must not be absolute or contain '\.\.'",
        ),
        ({"name": b"/etc/passwd"}, "names '/etc/passwd': names must not be absolute"),
        ({"name": b"class0/a..b.jpg"}, None),
        ({"offsets": -512}, "outside its shards"),
        ({"sizes": 2**60}, "outside its shards"),
        ({"shards": 7}, "outside its shards"),
        ({"targets": 3}, "outside its shards or its classes"),
        ({"facts": {}}, "is not the index of a tar data set"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(shared_folder, tmp_path, change, message):
    packed(shared_folder, tmp_path)
    path = tmp_path / "train.index"
    index = FileIndex.open(path)
    names = [index.name(i) for i in range(len(index))]
    names[3] = change.get("name", names[3])
    arrays = {key: value.copy() for key, value in {"targets": index.targets, **index.extra}.items()}
    for key in arrays.keys() & change.keys():
        arrays[key][3] = change[key]
    FileIndex.build(names, arrays.pop("targets"), change.get("facts", index.facts), **arrays).save(
        path
    )
    if message is None:
        assert len(make_dataset("tar", tmp_path)) == 22
    else:
        with pytest.raises(UserError, match=message):
            make_dataset("tar", tmp_path)
