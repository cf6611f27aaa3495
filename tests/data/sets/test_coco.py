"""Detection sets in COCO's layout: the content of good files, and each fault of bad ones."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from dkcls.data import create_loader
from dkcls.data.check import check
from dkcls.data.sets.coco import CocoDetection
from dkcls.errors import DataError, UserError
from tests.data.common import assert_same_batches, batches_from, make_dataset

# height, width, and the boxes (x, y, width, height) of category 1 + 4 * (number of the box).
PICTURES = [
    (40, 60, [(3, 5, 10, 20)]),
    (60, 40, [(20, 30, 15, 8), (2, 3, 9, 12)]),
    (40, 60, []),
    (50, 30, [(5, 5, 20, 40)]),
    (40, 60, [(40, 10, 20, 30)]),
    (44, 44, [(0, 0, 44, 10), (10, 20, 12, 14), (30, 30, 8, 9)]),
    (40, 52, [(25, 15, 6, 6)]),
    (60, 33, [(1, 40, 30, 15)]),
    (40, 60, [(33, 2, 7, 30)]),
]
SHADES = {1: 120, 5: 180, 9: 240}  # of a category's objects


def content_of(pictures=PICTURES):
    content = {
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": f"kind {i}"} for i in (9, 1, 5)],
    }
    for number, (height, width, boxes) in enumerate(pictures):
        image = {"id": 100 - number, "file_name": f"{number}.png", "height": height, "width": width}
        content["images"].append(image)
        for place, (x, y, w, h) in enumerate(boxes):
            identity = {
                "id": len(content["annotations"]) + 1,
                "image_id": image["id"],
                "category_id": 1 + 4 * place,
            }
            content["annotations"].append(
                {**identity, "bbox": [x, y, w, h], "area": w * h / 2, "iscrowd": 0}
            )
    return content


def write(root, content=None, split="train", file=None):
    """Write the pictures and an annotation file of them."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / split).mkdir(exist_ok=True)
    for number, (height, width, boxes) in enumerate(PICTURES):
        pixels = np.zeros((height, width), np.uint8)
        for place, (x, y, w, h) in enumerate(boxes):
            pixels[y : y + h, x : x + w] = SHADES[1 + 4 * place]
        picture = Image.fromarray(pixels)  # grey
        (picture if number % 2 else picture.convert("RGB")).save(root / split / f"{number}.png")
    file = root / "annotations" / (file or f"{split}.json")
    file.write_text(content if isinstance(content, str) else json.dumps(content or content_of()))
    return root


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return a folder of nine pictures; not to be changed."""
    root = tmp_path_factory.mktemp("coco")
    write(root, split="val")
    return write(root)


def load_all(dataset, epoch=0):
    return dataset.load(np.arange(len(dataset)), epoch)


def seen_boxes(image):
    """Return (label, x1, y1, x2, y2) of the objects as they are in the pixels."""
    found = []
    for label, shade in enumerate(SHADES.values(), 1):
        rows, columns = np.nonzero(image[0].numpy() == shade)
        if len(rows):
            found.append((label, columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    return found


def told_boxes(target):
    return sorted(
        (label, *box)
        for label, box in zip(target["labels"].tolist(), target["boxes"].tolist(), strict=True)
    )


def test_evaluation_has_every_image_as_it_is(shared):
    dataset = CocoDetection(shared, "val", hflip=1.0)  # of training alone
    batch, bad = load_all(dataset)
    assert (len(dataset), bad, dataset.notes, dataset.channels) == (9, [], (), 3)
    assert dataset.areas == (1024, 9216)
    assert dataset.class_names == ["kind 1", "kind 5", "kind 9"]
    assert [dataset.category_id(label) for label in (1, 2, 3)] == [1, 5, 9]
    assert [dataset.image_id(index) for index in range(9)] == list(range(100, 91, -1))
    assert batch.indices.tolist() == list(range(9))
    for index, (image, target) in enumerate(zip(batch.images, batch.targets, strict=True)):
        assert image.shape == (3, *dataset.size(index))
        assert dataset.size(index) == PICTURES[index][:2]
        assert (image.dtype, target["boxes"].dtype, target["labels"].dtype) == (
            torch.uint8,
            torch.float32,
            torch.int64,
        )
        assert target["boxes"].shape == (len(PICTURES[index][2]), 4)
        written = [
            (label, x, y, x + w, y + h) for label, (x, y, w, h) in enumerate(PICTURES[index][2], 1)
        ]
        assert seen_boxes(image) == told_boxes(target) == written


def test_training_leaves_out_images_without_objects_and_mirrors_boxes_with_their_images(shared):
    dataset = CocoDetection(shared, training=True, seed=1)
    assert len(dataset) == 8
    assert dataset.notes == (
        f"{shared}/annotations/train.json: images without objects are left out of training (1)",
    )
    assert [dataset.image_id(index) for index in range(3)] == [100, 99, 97]
    still = load_all(CocoDetection(shared, training=True, hflip=0.0)).batch
    mirrored = []
    for epoch in range(12):
        for image, target, image_as_it_is in zip(
            *load_all(dataset, epoch).batch[:2], still.images, strict=True
        ):
            assert seen_boxes(image) == told_boxes(target)
            mirrored.append(not torch.equal(image, image_as_it_is))
            assert torch.equal(image.flip(-1) if mirrored[-1] else image, image_as_it_is)
    assert 0.3 < np.mean(mirrored) < 0.7
    always = load_all(CocoDetection(shared, training=True, hflip=1.0)).batch
    assert all(
        torch.equal(one.flip(-1), other)
        for one, other in zip(always.images, still.images, strict=True)
    )


@pytest.mark.parametrize(
    "indices",
    [np.arange(9), np.array([2]), np.array([], np.int64)],
    ids=["all", "no object", "none"],
)
def test_a_batch_is_sent_as_it_is(shared, indices):
    batch = CocoDetection(shared, "val").load(indices).batch
    assert_same_batches([pickle.loads(pickle.dumps(batch))], [batch])


def test_a_sample_is_a_function_of_seed_epoch_and_index(shared):
    one, other = (CocoDetection(shared, training=True, seed=seed) for seed in (1, 2))
    whole = load_all(one, 3).batch
    single = one.load(np.array([5]), 3).batch
    assert_same_batches(
        [single], [type(whole)(whole.images[5:6], whole.targets[5:6], whole.indices[5:6])]
    )

    def flips(dataset, epoch):
        return [image.numpy().tobytes() for image in load_all(dataset, epoch).batch.images]

    assert flips(one, 3) == flips(one, 3) != flips(other, 3)
    assert flips(one, 3) != flips(one, 4)


def test_cocos_own_layout_comes_first_and_test_falls_back_to_val(tmp_path, shared):
    few = content_of(PICTURES[:3])
    write(tmp_path, few, "val2017", "instances_val2017.json")
    write(tmp_path, split="val")
    assert len(CocoDetection(tmp_path, "val")) == len(CocoDetection(tmp_path, "test")) == 3
    write(tmp_path, content_of(PICTURES[:2]), "test")
    assert len(CocoDetection(tmp_path, "test")) == 2


def test_the_ground_truth_is_the_files(shared):
    truth = CocoDetection(shared, "val").coco()
    content = content_of()
    assert truth["annotations"] == content["annotations"]
    assert truth["images"] == [
        {key: image[key] for key in ("id", "width", "height")} for image in content["images"]
    ]
    assert sorted(content["categories"], key=lambda row: row["id"]) == truth["categories"]
    json.dumps(truth)  # nothing of numpy's
    training = CocoDetection(shared, training=True).coco()
    assert [len(training[key]) for key in ("images", "annotations")] == [
        8,
        len(content["annotations"]),
    ]


def test_crowds_are_no_targets_but_stay_in_the_ground_truth(tmp_path):
    content = content_of()
    content["annotations"][1]["iscrowd"] = 1
    content["annotations"][3]["iscrowd"] = 1  # the only one of its image
    write(tmp_path, content)
    train, plain = CocoDetection(tmp_path, training=True), CocoDetection(tmp_path)
    assert [dataset.coco()["annotations"][1]["iscrowd"] for dataset in (train, plain)] == [1, 1]
    assert [
        image
        for image in range(100, 91, -1)
        if image not in [train.image_id(i) for i in range(len(train))]
    ] == [98, 97]
    targets = load_all(plain).batch.targets
    assert [len(target["boxes"]) for target in targets] == [1, 1, 0, 0, 1, 3, 1, 1, 1]
    assert targets[1]["labels"].tolist() == [2]


def test_a_missing_area_is_that_of_the_box_and_a_missing_iscrowd_is_0(tmp_path):
    content = content_of()
    for row in content["annotations"]:
        del row["area"], row["iscrowd"]
    rows = CocoDetection(write(tmp_path, content)).coco()["annotations"]
    assert all(
        (row["area"], row["iscrowd"]) == (row["bbox"][2] * row["bbox"][3], 0) for row in rows
    )


def test_check_counts_every_object(tmp_path):
    content = content_of()
    for row in content["annotations"]:
        row["category_id"] = 5
    report = check(CocoDetection(write(tmp_path, content)), workers=0)
    assert report.counts.tolist() == [0, 11, 0]
    assert report.sides.tolist() == [[height, width] for height, width, _ in PICTURES]


def test_groups_tell_portrait_from_landscape(shared, tmp_path):
    dataset = CocoDetection(shared, "val")
    assert dataset.groups().tolist() == [1, 0, 1, 0, 1, 1, 1, 0, 1]
    train = CocoDetection(shared, training=True)
    loader = create_loader(train, 2, training=True)
    turned = [{image.shape[1] > image.shape[2] for image in batch.images} for batch in loader]
    # 3 portraits and 5 landscapes: one batch holds the rests of both.
    assert sorted(map(len, turned)) == [1, 1, 1, 2]
    same = content_of([PICTURES[0], PICTURES[2], PICTURES[4]])
    assert CocoDetection(write(tmp_path, same)).groups() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restart_within_an_epoch_is_exact_with_any_number_of_workers(workers, shared):
    options = {"batch_size": 2, "training": True, "seed": 3}
    whole = batches_from(
        create_loader(CocoDetection(shared, training=True, seed=5), **options), 1, 0
    )
    resumed = create_loader(
        CocoDetection(shared, training=True, seed=5), workers=workers, **options
    )
    assert_same_batches(batches_from(resumed, 1, 1), whole[1:])
    assert_same_batches(batches_from(resumed, 1, 0), whole)


def test_workers_are_sent_little(tmp_path):
    """Check that a box and an image each take some tens of bytes."""
    pictures = [PICTURES[5]] * 1000
    dataset = CocoDetection(write(tmp_path, content_of(pictures)), training=True)
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000 * (3 * 20 + 60)
    assert (
        pickle.loads(sent)._target(999, False)["boxes"].tolist()
        == dataset._target(0, False)["boxes"].tolist()
    )


@pytest.mark.parametrize(
    ("box", "clipped", "note"),
    [
        ([-5, 30, 20, 20], [0, 30, 15, 40], "boxes that reach beyond their image are clipped (1)"),
        ([50.5, 0, 9.51, 10], [50.5, 0, 60, 10], None),  # rounded
        ([10, 10, 0, 5], None, "boxes without an area within their image are left out (1)"),
        ([10, 10, 5, -1], None, "boxes without an area within their image are left out (1)"),
        ([70, 10, 5, 5], None, "boxes without an area within their image are left out (1)"),
        ([-20, 10, 5, 5], None, "boxes without an area within their image are left out (1)"),
        (
            [10, 10, float("nan"), 5],
            None,
            "boxes without an area within their image are left out (1)",
        ),
        (
            [0, 0, float("inf"), 5],
            [0, 0, 60, 5],
            "boxes that reach beyond their image are clipped (1)",
        ),
    ],
)
def test_boxes_beyond_their_image_or_without_area(box, clipped, note, tmp_path):
    content = content_of()
    content["annotations"][0]["bbox"] = box
    root = write(tmp_path, content)
    dataset = CocoDetection(root)
    assert load_all(dataset).batch.targets[0]["boxes"].tolist() == (
        [] if clipped is None else [pytest.approx(clipped)]
    )
    assert dataset.notes == (() if note is None else (f"{root}/annotations/train.json: {note}",))
    truth = dataset.coco()["annotations"]
    assert (truth[0]["id"], len(truth)) == ((2, 10) if clipped is None else (1, 11))
    assert len(CocoDetection(root, training=True)) == (7 if clipped is None else 8)


BAD_FILES = {
    "missing": (os.remove, "No such file or directory"),
    "empty": (lambda path: path.write_bytes(b""), "empty file"),
    "text": (
        lambda path: path.write_text("hello"),
        "not an image (JPEG, PNG, WebP, TIFF, BMP, PPM)",
    ),
    "size": (
        lambda path: Image.new("RGB", (60, 41)).save(path),
        "height x width must be 40 x 60, as train.json has it, got 41 x 60",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_replaced_in_training_and_left_out_in_evaluation(kind, tmp_path):
    write(tmp_path)
    spoil, reason = BAD_FILES[kind]
    path = tmp_path / "train" / "4.png"
    spoil(path)
    loader = create_loader(CocoDetection(tmp_path), 4, training=False)
    assert [index for batch in loader for index in batch.indices.tolist()] == [
        0,
        1,
        2,
        3,
        5,
        6,
        7,
        8,
    ]
    assert loader.bad_files.names == [f"{path}: {reason}"]
    # Indices in training, which leaves out the image without objects.
    batch, bad = CocoDetection(tmp_path, training=True, hflip=1.0).load(np.array([3, 0]))
    assert [file.message for file in bad] == [f"{path}: {reason}"]
    assert batch.indices.tolist() == [4, 0]
    assert [seen_boxes(image) for image in batch.images] == [
        told_boxes(target) for target in batch.targets
    ]
    assert batch.images[0].shape == (3, 44, 44)


def test_a_batch_of_bad_files_is_skipped_and_a_set_of_them_refused(tmp_path):
    write(tmp_path)
    for number in (0, 1):
        (tmp_path / "train" / f"{number}.png").unlink()
    assert next(
        iter(create_loader(CocoDetection(tmp_path), 2, training=False))
    ).indices.tolist() == [2, 3]
    for path in (tmp_path / "train").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="8 files in a row cannot be read"):
        next(iter(create_loader(CocoDetection(tmp_path, training=True), 2, training=True)))


def changed(kind, place, **values):
    """Return the content with other values of one row; None removes the key."""
    content = content_of()
    row = {**content[kind][place], **values}
    content[kind][place] = {key: value for key, value in row.items() if value is not None}
    return content


OFFER = "data.options.bad_rows=skip leaves such rows out$"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [', r"train\.json must be JSON: Expecting value: line 1 column 13"),
        ("\x00", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", r"must hold the lists images, annotations, categories, got a list$"),
        (
            {"images": [], "annotations": {}, "info": 3},
            r"must hold the lists images, annotations, categories, "
            r"got images \(list\), annotations \(dict\), info \(int\)$",
        ),
        (
            {"images": [], "annotations": [], "categories": []},
            r"must list the categories of its objects, got an empty list$",
        ),
        (
            {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]},
            "holds no images$",
        ),
        (
            {"images": [3], "annotations": [], "categories": []},
            r"images\[0\] must have keys and values, got 3",
        ),
        (
            changed("images", 2, file_name=None),
            r"images\[2\] must have the key file_name, got {'id': 98",
        ),
        (changed("images", 2, width=None), r"images\[2\] must have the key width"),
        (changed("images", 2, width="60"), r"images\[2\] must have an integer as width"),
        (changed("images", 2, height=0), r"images\[2\] must have a height and a width above 0"),
        (changed("images", 2, id=100), r"images\[2\] must have an id of its own, got {'id': 100"),
        (
            changed("images", 2, id=2**70),
            rf"images\[2\] must have an integer as id, got {2**70}; {OFFER}",
        ),
        (
            changed("images", 2, id="98"),
            rf"images\[2\] must have an integer as id, got '98'; {OFFER}",
        ),
        (
            changed("images", 2, id=98.0),
            rf"images\[2\] must have an integer as id, got 98\.0; {OFFER}",
        ),
        (
            changed("images", 2, file_name="/etc/passwd"),
            r"images\[2\] must have as file_name a path within its folder",
        ),
        (
            changed("images", 2, file_name="../val/2.png"),
            "a path within its folder, got .*'../val/2.png'",
        ),
        (changed("images", 2, file_name="a\0b"), "a path within its folder"),
        (changed("images", 2, file_name="\ud800"), "a path within its folder"),
        (changed("images", 2, file_name=7), "a path within its folder"),
        (changed("annotations", 4, bbox=None), r"annotations\[4\] must have the key bbox"),
        (
            changed("annotations", 4, bbox=[1, 2, 3]),
            r"annotations\[4\] must have four numbers as bbox",
        ),
        (
            changed("annotations", 4, bbox=[1, 2, 3, "4"]),
            r"annotations\[4\] must have four numbers as bbox",
        ),
        (
            changed("annotations", 4, bbox=[1, 2, 3, 10**400]),
            r"annotations\[4\] must have four numbers as bbox",
        ),
        (changed("annotations", 4, area="large"), r"annotations\[4\] must have a number as area"),
        (changed("annotations", 4, id=1), r"annotations\[4\] must have an id of its own"),
        (
            changed("annotations", 4, image_id=7),
            rf"annotations\[4\] must have the id of one of the images as image_id, got 7; {OFFER}",
        ),
        (
            changed("annotations", 4, category_id=2),
            r"annotations\[4\] must have the id of one of the categories as category_id, "
            rf"got 2; {OFFER}",
        ),
        (changed("annotations", 4, category_id=[5]), rf"as category_id, got \[5\]; {OFFER}"),
        (changed("categories", 1, id=5), r"categories\[2\] must have an id of its own"),
        (changed("categories", 1, name=None), r"categories\[1\] must have the key name"),
    ],
)
def test_what_is_wrong_with_the_annotations_is_named_in_one_sentence(content, message, tmp_path):
    write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as error:
        CocoDetection(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "annotations" / "train.json") in str(error.value)


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path):
    """Check that images and objects with bad ids are skipped.

    Two images have no number, and so their three objects no image; one object is of an unknown
    image, and one of an unknown category.
    """
    content = content_of()
    for place, identity in ((1, "99"), (4, None)):
        for row in content["annotations"]:
            if row["image_id"] == content["images"][place]["id"]:
                row["image_id"] = identity
        content["images"][place]["id"] = identity
    for place, key, value in ((3, "image_id", 12345), (9, "category_id", [2])):
        content["annotations"][place][key] = value
    dataset = CocoDetection(write(tmp_path, content), bad_rows="skip")
    file = tmp_path / "annotations" / "train.json"
    assert dataset.notes == (
        f"{file}: images whose id is no integer are left out (2)",
        f"{file}: objects of unknown images or categories are left out (5)",
    )
    kept = [0, 2, 3, 5, 6, 7, 8]
    assert [dataset.image_id(index) for index in range(len(dataset))] == [
        100 - place for place in kept
    ]
    drawn = [list(enumerate(PICTURES[place][2], 1)) for place in kept]
    drawn[2] = drawn[5] = []
    targets = load_all(dataset).batch.targets
    assert [told_boxes(target) for target in targets] == [
        [(label, x, y, x + w, y + h) for label, (x, y, w, h) in boxes] for boxes in drawn
    ]
    truth = dataset.coco()
    assert [row["id"] for row in truth["annotations"]] == [1, 6, 7, 8, 9, 11]
    assert {row["image_id"] for row in truth["annotations"]} <= {
        row["id"] for row in truth["images"]
    }


def test_of_rows_after_those_left_out_the_number_in_the_file_is_told(tmp_path):
    content = changed("images", 5, width=None)
    content["images"][1]["id"] = "99"
    with pytest.raises(ValueError, match=r"images\[5\] must have the key width"):
        CocoDetection(write(tmp_path, content), bad_rows="skip")


def test_missing_files_are_named(tmp_path):
    expected = r"annotations must hold instances_train2017\.json or train\.json; there is neither"
    with pytest.raises(ValueError, match=expected):
        CocoDetection(tmp_path)
    write(tmp_path, split="val").joinpath("val").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"val must hold the images of .*val\.json; there is no such folder"
    ):
        CocoDetection(tmp_path, "val")
    write(tmp_path, content_of([(40, 60, [])]))
    with pytest.raises(ValueError, match=r"train\.json holds no images with objects"):
        CocoDetection(tmp_path, training=True)
    with pytest.raises(ValueError, match="bad_rows must be stop or skip, got 'keep'"):
        CocoDetection(tmp_path, bad_rows="keep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "coco"}, "data set 'coco' needs data.root=FOLDER"),
        ({"name": "coco", "root": "x", "image_size": 224}, "data set 'coco' takes no image_size"),
        (
            {"name": "coco", "root": "x", "erase_prob": 0.1, "interpolation": "bicubic"},
            r"data set 'coco' takes no data\.interpolation, augment\.erase_prob",
        ),
        (
            {"name": "coco", "root": "x", "length": 3},
            r"data\.options\.length: data set 'coco' takes no 'length'; it takes bad_rows",
        ),
        (
            {"name": "coco", "root": "x", "split": "dev"},
            "split must be one of train, val, test, got 'dev'",
        ),
        (
            {"name": "folder", "root": "x", "bad_rows": "skip"},
            r"data\.options\.bad_rows: data set 'folder' takes no 'bad_rows'",
        ),
        (
            {"name": "deformed_detection", "clutter": 2},
            "data set 'deformed_detection' takes no 'clutter'; it takes objects, object_scale, ",
        ),
        (
            {"name": "deformed_detection", "rand_augment": "rand-m9"},
            r"data set 'deformed_detection' takes no augment\.rand_augment",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        make_dataset(**arguments)


def test_both_kinds_by_name(shared):
    dataset = make_dataset("coco", shared, training=True, hflip=1.0, seed=2, bad_rows="skip")
    assert (type(dataset), dataset.hflip, dataset.seed) == (CocoDetection, 1.0, 2)
    canvases = make_dataset(
        "deformed_detection", image_size=64, object_scale=(0.4, 1.0), objects=(2, 3), length=9
    )
    assert (len(canvases), canvases.size(0), canvases.objects) == (9, (64, 64), (2, 3))
