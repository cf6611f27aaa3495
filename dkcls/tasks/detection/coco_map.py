"""COCO's average precision and recall, by pycocotools."""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from dkcls.data import COCO_AREAS

# In the order of COCOeval's stats.
METRICS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar_1", "ar_10", "ar_100", "ar_small", "ar_medium", "ar_large"),
)
_LARGEST = 1e5**2  # COCO's own bound


def coco_map(
    truth: Mapping[str, Any],
    detections: Sequence[Mapping[str, Any]],
    areas: tuple[float, float] = COCO_AREAS,
    images: Collection[int] | None = None,
) -> dict[str, float]:
    """Return `METRICS` in percent, NaN where there is nothing to find.

    Args:
        truth: COCO's structure.
        detections: COCO's rows of results, {image_id, category_id, bbox (x, y, width, height),
            score}; of equal scores in an image the first row counts first.
        areas: where medium objects begin and end.
        images: ids of those that count; None for all of the truth.
    """
    if not 0 < areas[0] <= areas[1]:
        raise ValueError(f"areas must be two increasing numbers of pixels, got {tuple(areas)}")
    known = {image["id"] for image in truth["images"]}
    unknown = ({row["image_id"] for row in detections} | set(images or ())) - known
    if unknown:
        raise ValueError(f"detections must be of the images of the truth, got image {min(unknown)}")
    # From 1: COCOeval takes the id 0 for "not found".
    objects = [{**row, "id": number} for number, row in enumerate(truth["annotations"], 1)]
    found = [
        {**row, "id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
        for number, row in enumerate(detections, 1)
    ]
    with redirect_stdout(io.StringIO()):
        evaluation = COCOeval(_indexed(truth, objects), _indexed(truth, found), "bbox")
        if images is not None:
            evaluation.params.imgIds = sorted(images)
        small, large = areas
        evaluation.params.areaRng = [[0, _LARGEST], [0, small], [small, large], [large, _LARGEST]]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {
        name: float("nan") if value < 0 else 100 * float(value)
        for name, value in zip(METRICS, evaluation.stats, strict=True)
    }


def result_rows(
    output: Mapping[str, Tensor], image_id: int, category_id: Callable[[int], int]
) -> list[dict[str, Any]]:
    """Return the output of torchvision's detector for one image as COCO's rows of results."""
    corners, labels, scores = (output[key].tolist() for key in ("boxes", "labels", "scores"))
    return [
        {
            "image_id": image_id,
            "category_id": category_id(label),
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for (x1, y1, x2, y2), label, score in zip(corners, labels, scores, strict=True)
    ]


def _indexed(truth: Mapping[str, Any], annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    coco.dataset = {
        "images": truth["images"],
        "categories": truth["categories"],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco
