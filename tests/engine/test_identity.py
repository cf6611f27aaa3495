"""A run goes on with the data that it began with, or says what has changed."""

import json
import shutil

import pytest

from dkcls.data.identity import DataIdentity
from dkcls.data.sets.folder import ImageFolder
from dkcls.data.sets.tar import pack_split
from dkcls.data.transforms import EvalTransform
from dkcls.engine import run
from dkcls.engine.trainer import Trainer
from dkcls.errors import UserError
from tests.data.common import make_dataset, make_folder, photograph
from tests.engine.common import last_state, small_config
from tests.tasks.detection.common import write_coco

pytestmark = pytest.mark.xdist_group("test_identity")  # its runs are made once
FOLDER = (
    "data.name=folder",
    "data.options.length=null",
    "data.options.num_classes=null",
    "train.batch_size=4",
    "train.checkpoint_every=1",
    "train.keep=9",
)  # 2 epochs of 5 steps


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return a folder with images and a run that was killed after three steps."""
    folder = tmp_path_factory.mktemp("begun")
    make_folder(folder / "images")
    with pytest.MonkeyPatch.context() as monkeypatch:
        live(folder, monkeypatch, until=3)
    return folder


@pytest.fixture
def folder(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "life", symlinks=True)


def live(folder, monkeypatch, *overrides, until=None):
    """Train; with `until`, die before the step of that number."""
    config = small_config(
        *FOLDER, f"data.root={folder / 'images'}", f"out={folder / 'runs'}", *overrides
    )
    step = Trainer.train_step

    def dying_step(self, batches):
        if self.step == until:
            raise Killed
        step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", dying_step)
        try:
            return run.train(config)
        except Killed:
            return None


def rename_class(images):
    for split in ("train", "val"):
        (images / split / "class1").rename(images / split / "zebra")


def add_class(images):
    (images / "train/aardvark").mkdir()
    photograph(1).save(images / "train/aardvark/x.jpg")


def remove_class(images):
    for split in ("train", "val"):
        shutil.rmtree(images / split / "class2")


def remove_images(images):
    for path in sorted(images.glob("train/class0/*"))[:4]:
        path.unlink()


def remove_an_image_of_val(images):
    next(images.glob("val/class0/*")).unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename_class, ["classes gone: class1", "new: zebra"]),
        (add_class, ["classes new: aardvark", "train images: 22, now 23"]),
        (remove_class, ["classes gone: class2", "train images: 22, now 15"]),
        (remove_images, ["(train images: 22, now 18)"]),
        (remove_an_image_of_val, ["(val images: 7, now 6)"]),
    ],
)
def test_a_run_does_not_go_on_with_other_data(folder, monkeypatch, change, words):
    shutil.copytree(folder / "images", folder / "before")
    before = files_of(folder / "runs")
    change(folder / "images")
    with pytest.raises(UserError) as refused:
        live(folder, monkeypatch)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == [], sentence
    same_number = change is not add_class and change is not remove_class
    assert ("resume=changed_data" in sentence) == same_number
    assert files_of(folder / "runs") == before
    shutil.rmtree(folder / "images")
    (folder / "before").rename(folder / "images")
    assert live(folder, monkeypatch)["images"] == 7


def files_of(root):
    return {
        path: path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("change", [rename_class, remove_images])
def test_changed_data_is_allowed_once_and_written_down(folder, monkeypatch, change, caplog):
    change(folder / "images")
    live(folder, monkeypatch, "resume=changed_data", until=5)
    assert "going on with other data" in caplog.text
    expected = {
        split: sum(1 for _ in (folder / "images" / split).rglob("*.jpg"))
        for split in ("train", "val")
    }
    assert last_state(folder)["data"]["images"] == expected
    live(folder, monkeypatch, until=6)
    remove_an_image_of_val(folder / "images")
    with pytest.raises(UserError, match="val images: 7, now 6"):
        live(folder, monkeypatch)


def test_changed_data_does_not_change_the_number_of_classes(folder, monkeypatch):
    add_class(folder / "images")
    with pytest.raises(
        UserError, match=r"classes new: aardvark.* has 3 outputs, and 4 are"
    ) as refused:
        live(folder, monkeypatch, "resume=changed_data")
    assert "\n" not in str(refused.value)


def test_changed_data_does_not_end_a_run_before_its_time(folder, monkeypatch):
    live(folder, monkeypatch, until=9)
    for path in sorted(folder.glob("images/train/*/*")):
        if path.name > "004.jpg":
            path.unlink()
    with pytest.raises(UserError, match=r"has taken 9 steps, and with this data there are 2 in"):
        live(folder, monkeypatch, "resume=changed_data")
    assert not (folder / "runs/small/result.json").exists()


def test_bad_files_of_the_data_before_are_forgotten(folder, monkeypatch):
    """They are known by their indices, which are other files now."""
    whole = {path: path.read_bytes() for path in folder.glob("images/train/class1/*")}
    for path in whole:
        path.write_bytes(b"")
    live(folder, monkeypatch, "data.bad_limit=1", until=4)
    assert last_state(folder)["bad_files"][0][0]["messages"]
    for path, content in whole.items():
        path.write_bytes(content)
    remove_images(folder / "images")
    live(folder, monkeypatch, "data.bad_limit=1", "resume=changed_data")
    assert not (folder / "runs/small/bad_files.txt").exists()


def test_nothing_but_a_checkpoint_is_needed_to_know(folder, monkeypatch):
    for path in (folder / "runs/small").iterdir():
        if path.name != "checkpoints":
            path.unlink()
    with pytest.raises(UserError, match=r"another config \(seed: 0 -> 1\)"):
        live(folder, monkeypatch, "seed=1")
    rename_class(folder / "images")
    with pytest.raises(UserError, match="classes gone: class1"):
        live(folder, monkeypatch)


def test_a_run_without_a_checkpoint_begins_with_what_there_is(folder, monkeypatch):
    shutil.rmtree(folder / "runs/small/checkpoints")
    add_class(folder / "images")
    live(folder, monkeypatch, until=2)
    assert last_state(folder)["classes"] == ["aardvark", "class0", "class1", "class2"]


def test_where_the_data_is_does_not_matter(folder, monkeypatch):
    (folder / "images").rename(folder / "elsewhere")
    for split in ("train", "val"):
        source = ImageFolder(folder / "elsewhere", split, EvalTransform(32), 32)
        pack_split(source, split, folder / "tar", 100)
    live(folder, monkeypatch, f"data.root={folder / 'elsewhere'}", until=5)
    packed = DataIdentity.of(*splits("tar", folder / "tar"))
    assert packed == DataIdentity.of(*splits("folder", folder / "elsewhere"))


def splits(name, root=None, **options):
    return [make_dataset(name, root, split, **options) for split in ("train", "val")]


@pytest.mark.parametrize("dry_run", [False, True])
def test_train_and_val_must_have_the_same_classes(tmp_path, monkeypatch, dry_run):
    """A class is added, and of a packed set only the train split is packed again."""
    images = make_folder(tmp_path / "images")
    for split in ("train", "val"):
        pack_split(ImageFolder(images, split, EvalTransform(32), 32), split, tmp_path / "tar", 100)
    add_class(images)
    source = ImageFolder(images, "train", EvalTransform(32), 32)
    pack_split(source, "train", tmp_path / "tar", 100)
    words = ("data.name=tar", f"data.root={tmp_path / 'tar'}", f"train.dry_run={dry_run}")
    with pytest.raises(UserError, match="only train has aardvark") as refused:
        live(tmp_path, monkeypatch, *words)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_a_category_that_is_renamed(tmp_path):
    root = write_coco(tmp_path / "coco", train=2, val=2)
    before = DataIdentity.of(*splits("coco", root))
    assert before.images == {"train": 2, "val": 2}
    rename_category(root / "annotations/instances_val2017.json")
    with pytest.raises(UserError, match="only train has Dress; only val has Gown"):
        DataIdentity.of(*splits("coco", root))
    rename_category(root / "annotations/instances_train2017.json")
    now = DataIdentity.of(*splits("coco", root))
    assert before.differences(now) == ["classes gone: Dress; new: Gown"]


def rename_category(path):
    content = json.loads(path.read_text())
    content["categories"][3]["name"] = "Gown"
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "options"),
    [("synthetic", {"length": 9, "num_classes": 4}), ("deformed_fashion", {"length": 9})],
)
def test_sets_without_files_have_an_identity_too(name, options):
    identity = DataIdentity.of(*splits(name, **options))
    assert identity.images == {"train": 9, "val": 9}
    assert DataIdentity.parse(json.loads(json.dumps(identity.to_dict()))) == identity
    assert identity.differences(identity) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("ab", "ab", []),
        ("ab", "ac", ["classes gone: b; new: c"]),
        ("ab", "abc", ["classes new: c"]),
        ("ab", "a", ["classes gone: b"]),
        ("ab", "ba", ["classes in another order: from a on"]),
        ("xab", "xba", ["classes in another order: from a on"]),
        ("abcdefgh", "h", ["classes gone: a, b, c, d, e and 2 more"]),
    ],
)
def test_what_differs_is_named(before, after, expected):
    some, others = (DataIdentity(list(names), {"train": 1}) for names in (before, after))
    assert some.differences(others) == expected


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        {"classes": "ab", "images": {}},
        {"classes": [1], "images": {}},
        {"classes": ["a"], "images": {"train": "1"}},
        {"classes": ["a"], "images": {"train": -1}},
        {"classes": ["a"], "images": [1]},
        {"classes": ["a"], "images": {}, "more": 1},
    ],
)
def test_what_is_no_identity_is_refused(values):
    with pytest.raises(ValueError, match="must be classes and numbers of images"):
        DataIdentity.parse(values)
