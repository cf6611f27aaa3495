"""Inputs and settings of a detector, by value, and sums of its losses and detections."""

import pytest
import torch
from torch import nn

from dkcls.config import DetectionConfig, ModelConfig
from dkcls.data.dataset import DetectionBatch
from dkcls.engine.distributed import World
from dkcls.engine.task import Input
from dkcls.tasks.detection.detector import Detector
from dkcls.tasks.detection.task import Detection, create_detector

WORLD = World(torch.device("cpu"))
INPUT = Input(1, 32, 1.0, "bilinear", [0.2], [0.5])
OPTIONS = {
    "min_size": 32,
    "max_size": 32,
    "fpn_channels": 4,
    "box_channels": 4,
    "anchor_sizes": [8, 16, 32],
    "levels": [1, 2],
    "proposals": 30,
    "box_samples": 7,
    "anchor_samples": 9,
    "score_threshold": 0.2,
    "nms_threshold": 0.6,
    "detections": 5,
}


@pytest.fixture(scope="module")
def detector() -> Detector:
    return create_detector(
        ModelConfig(name="mobilenetv2_nano"), DetectionConfig(**OPTIONS), 3, INPUT
    ).eval()


def batch_of(*images, indices=None) -> DetectionBatch:
    return DetectionBatch(
        list(images), [], torch.arange(len(images)) if indices is None else torch.tensor(indices)
    )


def test_the_body_is_fed_normalised_images(detector):
    """(pixel / 255 - mean) / std; nothing is resized at 32 x 32."""
    pixels = torch.arange(1024).view(1, 32, 32) % 256
    fed = []
    handle = detector.body.register_forward_pre_hook(
        lambda module, arguments: fed.append(arguments[0])
    )
    with torch.inference_mode():
        detector(Detection(None, WORLD.device).images(batch_of(pixels.byte())))
    handle.remove()
    (images,) = fed
    torch.testing.assert_close(images, (pixels[None] / 255 - 0.2) / 0.5)


def test_every_option_of_the_detector_is_where_torchvision_reads_it(detector):
    assert (detector.rpn._pre_nms_top_n, detector.rpn._post_nms_top_n) == (
        {"training": 30, "testing": 15},  # half in evaluation
        {"training": 30, "testing": 15},
    )
    assert detector.rpn.fg_bg_sampler.batch_size_per_image == 9
    assert detector.rpn.anchor_generator.sizes == ((8,), (16,), (32,))
    heads = detector.roi_heads
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.2, 0.6, 5)
    assert heads.fg_bg_sampler.batch_size_per_image == 7
    assert heads.box_predictor.cls_score.out_features == 1 + 3  # the background
    assert heads.box_head.fc6.out_features == 4
    assert detector.backbone.out_channels == 4
    assert (detector.transform.min_size, detector.transform.max_size) == ((32,), 32)


class Losses(nn.Module):
    def forward(self, images, targets):
        names = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
        return {
            name: torch.tensor(value)
            for name, value in zip(names, (1.0, 2.0, 4.0, 8.0), strict=True)
        }


def test_losses_are_means_over_images():
    task = Detection(None, WORLD.device)
    image = torch.zeros(1, 4, 4, dtype=torch.uint8)
    total, sums = task.loss(Losses(), batch_of(image, image, image))
    assert total.item() == 15
    assert sums.tolist() == [3, 45, 3, 6, 12, 24]
    more = sums + torch.tensor(
        [1.0, 5.0, 1.0, 2.0, 0.0, 2.0]
    )  # a batch of one image with smaller losses
    assert task.metrics(more.tolist()) == {
        **{
            "loss": 12.5,
            "loss_classifier": 1.0,
            "loss_box_reg": 2.0,
            "loss_objectness": 3.0,
            "loss_rpn_box_reg": 6.5,
        },
        "images": 4,
    }


class Three:
    """Three images with an object each, of 10, 20 and 40 pixels, of COCO's category 30."""

    areas = (15.0**2, 30.0**2)

    def image_id(self, index):
        return 100 + index

    def category_id(self, label):
        return {1: 30}[label]

    def coco(self):
        boxes = [{"bbox": [0, 0, side, side], "area": side**2} for side in (10, 20, 40)]
        return {
            "images": [{"id": 100 + i, "width": 50, "height": 50} for i in range(3)],
            "annotations": [
                {"id": i + 1, "image_id": 100 + i, "category_id": 30, "iscrowd": 0, **box}
                for i, box in enumerate(boxes)
            ],
            "categories": [{"id": 30, "name": "thing"}],
        }


class Finds(nn.Module):
    """The objects of the images whose brightness is given, exactly."""

    def forward(self, images):
        sides = [round(255 * image.max().item()) for image in images]
        return [
            {
                "boxes": torch.tensor([[0.0, 0.0, s, s]]),
                "labels": torch.tensor([1]),
                "scores": torch.tensor([0.9]),
            }
            for s in sides
        ]


def image_of(side: int) -> torch.Tensor:
    return torch.full((1, 50, 50), side, dtype=torch.uint8)


def test_only_images_that_were_seen_count_and_sizes_are_the_data_sets():
    """Leave out the first image, which could not be read, and use the data set's sizes.

    The second image's object is of medium size here, and small to COCO.
    """
    evaluation = Detection(Three(), WORLD.device).evaluation()
    evaluation.add(Finds(), batch_of(image_of(20), indices=[1]))
    evaluation.add(Finds(), batch_of(image_of(40), indices=[2]))
    metrics = evaluation.metrics(WORLD)
    assert metrics["images"] == 2
    assert (metrics["ap"], metrics["ar_100"]) == (pytest.approx(100), pytest.approx(100))
    assert (metrics["ap_medium"], metrics["ap_large"]) == (pytest.approx(100), pytest.approx(100))
    assert "ap_small" not in metrics  # there is none to find


class TwoRanks(World):
    """The other rank has seen the first image, and found nothing."""

    def gather(self, value):
        return [value, ([], [100])]


def test_metrics_are_over_the_images_of_all_ranks():
    evaluation = Detection(Three(), WORLD.device).evaluation()
    evaluation.add(Finds(), batch_of(image_of(20), indices=[1]))
    metrics = evaluation.metrics(TwoRanks(WORLD.device))
    assert metrics["images"] == 2
    assert (metrics["ar_100"], metrics["ap_small"]) == (pytest.approx(50), 0)
