"""COCO's figures: those of pycocotools called by hand, a case worked out on paper, and ties."""

import contextlib
import io
import math
import random

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from dkcls.tasks.detection.coco_map import METRICS, coco_map, result_rows


def truth_of(objects, images=4, categories=3):
    """objects: (image, category, bbox) or with iscrowd."""
    annotations = [
        {
            "id": i,
            "image_id": row[0],
            "category_id": row[1],
            "bbox": row[2],
            "area": row[2][2] * row[2][3],
            "iscrowd": crowd,
        }
        for i, (*row, crowd) in enumerate(((*o, 0) if len(o) == 3 else o for o in objects), 1)
    ]
    return {
        "images": [{"id": i, "width": 200, "height": 200} for i in range(images)],
        "annotations": annotations,
        "categories": [{"id": i, "name": str(i)} for i in range(1, categories + 1)],
    }


def row(image, category, bbox, score):
    return {"image_id": image, "category_id": category, "bbox": bbox, "score": score}


@pytest.fixture(scope="module")
def case():
    """Objects of all sizes, crowds, and detections that are near them, beside them and twice."""
    generator = np.random.default_rng(0)
    objects, rows = [], []
    for image in range(11):  # the 12th has no objects
        for number in range(generator.integers(1, 7)):
            corner, side = generator.uniform(0, 60, 2), 4 * 30 ** generator.uniform(0, 1, 2)
            category = int(generator.integers(1, 4))
            objects.append((image, category, [*corner.tolist(), *side.tolist()], int(number == 5)))
            for _ in range(generator.integers(0, 3)):
                moved = np.concatenate([corner, side]) + generator.normal(0, 0.08, 4) * [
                    *side,
                    *side,
                ]
                rows.append(row(image, category, moved.tolist(), generator.uniform()))
    rows += [
        row(
            int(generator.integers(12)),
            2,
            generator.uniform(5, 70, 4).tolist(),
            generator.uniform(),
        )
        for _ in range(40)
    ]
    return truth_of(objects, images=12), rows


def by_hand(truth, rows, areas=(32**2, 96**2)):
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(rows), "bbox")
        evaluation.params.areaRng[1:] = [[0, areas[0]], [areas[0], areas[1]], [areas[1], 1e10]]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {
        name: 100 * value if value > -1 else math.nan
        for name, value in zip(METRICS, evaluation.stats, strict=True)
    }


@pytest.mark.parametrize("areas", [(32**2, 96**2), (14**2, 40**2)])
def test_the_figures_are_those_of_pycocotools(case, areas, capsys):
    truth, rows = case
    figures = coco_map(truth, rows, areas)
    assert capsys.readouterr().out == ""
    assert tuple(figures) == METRICS
    assert figures == pytest.approx(by_hand(*case, areas), abs=0, nan_ok=True)
    assert all(5 < value < 95 for value in figures.values())


@pytest.fixture(scope="module")
def ties():
    """Return some hundred detections with scores of one digit.

    There are several of each score around every object.
    """
    generator = np.random.default_rng(1)
    objects, rows = [], []
    for image in range(12):
        for _ in range(6):
            corner, side = generator.uniform(0, 80, 2), generator.uniform(10, 120, 2)
            objects.append(
                (image, int(generator.integers(1, 3)), [*corner.tolist(), *side.tolist()])
            )
            for _ in range(5):
                moved = np.concatenate([corner, side]) + generator.normal(0, 0.15, 4) * [
                    *side,
                    *side,
                ]
                rows.append(
                    row(image, objects[-1][1], moved.tolist(), round(generator.uniform(), 1))
                )
    return truth_of(objects, images=12), random.Random(0).sample(rows, len(rows))


def test_equal_scores_count_in_the_order_that_pycocotools_gives_them(ties):
    truth, rows = ties
    assert coco_map(truth, rows) == pytest.approx(by_hand(truth, rows), abs=0)
    assert coco_map(truth, rows[::-1]) == pytest.approx(by_hand(truth, rows[::-1]), abs=0)
    assert coco_map(truth, rows)["ap"] != coco_map(truth, rows[::-1])["ap"]  # the order tells


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_figures_do_not_depend_on_which_rank_has_which_image(ties, ranks):
    """Each image is on one rank, with its rows in their own order."""
    truth, rows = ties
    gathered = [row for rank in range(ranks) for row in rows if row["image_id"] % ranks == rank]
    assert gathered != rows
    assert coco_map(truth, gathered) == coco_map(truth, rows)


def test_a_case_on_paper():
    """Check two objects of one class, by hand.

    By score, one is found exactly, one detection is wrong, and one object is found with an overlap
    of 0.6.
    """
    truth = truth_of([(0, 1, [0, 0, 100, 100]), (1, 1, [0, 0, 10, 10])])
    rows = [
        row(0, 1, [0, 0, 100, 100], 0.9),
        row(2, 1, [0, 0, 50, 50], 0.8),
        row(1, 1, [0, 0, 10, 6], 0.7),
    ]
    figures = coco_map(truth, rows)
    # 101 points of recall: precision 1 up to 0.5, and 2/3 above where the second is found, else 0.
    half, both = 51 / 101, (51 + 50 * 2 / 3) / 101
    expected = {
        **{"ap": 100 * (3 * both + 7 * half) / 10, "ap50": 100 * both, "ap75": 100 * half},
        **{"ap_small": 30.0, "ap_medium": math.nan, "ap_large": 100.0},
        **{
            "ar_1": 65.0,
            "ar_10": 65.0,
            "ar_100": 65.0,
            "ar_small": 30.0,
            "ar_medium": math.nan,
            "ar_large": 100.0,
        },
    }
    assert figures == pytest.approx(expected, nan_ok=True)


def test_areas_tell_small_from_large():
    truth = truth_of([(0, 1, [0, 0, 10, 10]), (1, 1, [0, 0, 20, 20]), (2, 1, [0, 0, 40, 40])])
    rows = [row(1, 1, [0, 0, 20, 20], 0.9)]
    names = ("ap_small", "ap_medium", "ap_large")
    assert [coco_map(truth, rows, (15**2, 30**2))[name] for name in names] == pytest.approx(
        [0, 100, 0]
    )
    expected = [math.nan, math.nan, 100 * 34 / 101]
    assert [coco_map(truth, rows, (5**2, 8**2))[name] for name in names] == pytest.approx(
        expected, nan_ok=True
    )


def test_nothing_found_is_zero_and_nothing_to_find_is_nan():
    found_nothing = coco_map(truth_of([(0, 1, [0, 0, 10, 10])]), [])
    assert [found_nothing[name] for name in ("ap", "ap50", "ap_small", "ar_100")] == [0, 0, 0, 0]
    assert math.isnan(found_nothing["ap_large"])
    assert all(map(math.isnan, coco_map(truth_of([]), [row(0, 1, [0, 0, 10, 10], 0.5)]).values()))


def test_what_is_found_where_nothing_is_counts():
    truth = truth_of([(0, 1, [0, 0, 40, 40])])
    right, wrong = row(0, 1, [0, 0, 40, 40], 0.5), row(3, 1, [0, 0, 40, 40], 0.9)
    assert coco_map(truth, [right])["ap"] == pytest.approx(100)
    assert coco_map(truth, [right, wrong])["ap"] == pytest.approx(50)


def test_an_annotation_may_have_the_id_0():
    truth = truth_of([(0, 1, [0, 0, 40, 40])])
    truth["annotations"][0]["id"] = 0
    assert coco_map(truth, [row(0, 1, [0, 0, 40, 40], 0.5)])["ap"] == pytest.approx(100)
    assert truth["annotations"][0].keys() == {
        "id",
        "image_id",
        "category_id",
        "bbox",
        "area",
        "iscrowd",
    }  # left as it was


def test_only_the_images_asked_for_count():
    truth = truth_of([(0, 1, [0, 0, 40, 40]), (1, 1, [0, 0, 40, 40])])
    rows = [row(0, 1, [0, 0, 40, 40], 0.5)]
    assert coco_map(truth, rows)["ar_100"] == pytest.approx(50)
    assert coco_map(truth, rows, images=[0, 2])["ar_100"] == pytest.approx(100)
    assert math.isnan(coco_map(truth, rows, images=[])["ap"])


def test_rows_of_a_detectors_output():
    output = {
        "boxes": torch.tensor([[1.0, 2.0, 5.5, 4.0], [0.0, 0.0, 3.0, 3.0]]),
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.75, 0.5]),
    }
    assert result_rows(output, 7, {1: 10, 2: 30}.__getitem__) == [
        row(7, 30, [1.0, 2.0, 4.5, 2.0], 0.75),
        row(7, 10, [0.0, 0.0, 3.0, 3.0], 0.5),
    ]
    assert result_rows({key: value[:0] for key, value in output.items()}, 7, int) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"areas": (100, 10)}, r"areas must be two increasing numbers of pixels, got \(100, 10\)"),
        (
            {"detections": [row(9, 1, [0, 0, 1, 1], 0.5)]},
            "must be of the images of the truth, got image 9",
        ),
        ({"images": [0, 8]}, "must be of the images of the truth, got image 8"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        coco_map(**{"truth": truth_of([]), "detections": [], **arguments})
