"""Faster R-CNN with a feature pyramid over any network that timm gives features of."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, channels_last, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

STRIDES = (
    4,
    32,
)  # of the finest and the coarsest feature map that a pyramid stands on, unless levels are given
ASPECT_RATIOS = (0.5, 1.0, 2.0)
POOL = 7  # side of what is cut out of a feature map for a box


class PyramidBackbone(nn.Module):
    """A network and the feature pyramid over it.

    `body` is made by timm.create_model(features_only=True).
    """

    def __init__(self, body: nn.Module, channels: int):
        super().__init__()
        self.body, self.out_channels = body, channels
        maps = body.feature_info.channels()  # type: ignore[operator,union-attr]
        self.fpn = FeaturePyramidNetwork(maps, channels, LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.body(images.contiguous(memory_format=channels_last))
        return self.fpn(OrderedDict((str(level), each) for level, each in enumerate(maps)))


class Detector(FasterRCNN):
    """torchvision's Faster R-CNN, which resizes and normalises images of any sizes.

    In training it maps (images, targets) to losses, otherwise images to boxes, labels and scores.
    Images are float [C, H, W] from 0 to 1.

    Args:
        body: as `PyramidBackbone` takes it.
        anchor_sizes: pixels of the resized image, one for each feature map and one for the pool of
            the last.
        proposals: per image and level before suppression and per image after it, in training; in
            evaluation half as many.
    """

    def __init__(
        self,
        body: nn.Module,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        min_size: int = 800,
        max_size: int = 1333,
        fpn_channels: int = 256,
        box_channels: int = 1024,
        anchor_sizes: Sequence[float] = (32, 64, 128, 256, 512),
        proposals: int = 2000,
        box_samples: int = 512,
        anchor_samples: int = 256,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        detections: int = 100,
    ):
        maps = len(body.feature_info.channels())  # type: ignore[operator,union-attr]
        if len(anchor_sizes) != maps + 1:
            raise ValueError(
                f"anchor_sizes must be one for each of the {maps} feature maps "
                f"and one for the pool of the last, got {len(anchor_sizes)}"
            )
        some = max(1, proposals // 2)
        super().__init__(
            PyramidBackbone(body, fpn_channels),
            min_size=min_size,
            max_size=max_size,
            image_mean=list(mean),
            image_std=list(std),
            rpn_anchor_generator=AnchorGenerator(
                tuple((size,) for size in anchor_sizes), (ASPECT_RATIOS,) * (maps + 1)
            ),
            rpn_pre_nms_top_n_train=proposals,
            rpn_post_nms_top_n_train=proposals,
            rpn_pre_nms_top_n_test=some,
            rpn_post_nms_top_n_test=some,
            rpn_batch_size_per_image=anchor_samples,
            box_roi_pool=MultiScaleRoIAlign([str(level) for level in range(maps)], POOL, 2),
            box_head=TwoMLPHead(fpn_channels * POOL**2, box_channels),
            box_predictor=FastRCNNPredictor(box_channels, num_classes + 1),
            box_batch_size_per_image=box_samples,
            box_score_thresh=score_threshold,
            box_nms_thresh=nms_threshold,
            box_detections_per_img=detections,
        )

    @property
    def body(self) -> nn.Module:
        """The backbone as timm made it."""
        return self.backbone.body

    def get_classifier(self) -> nn.Module:
        """All but the backbone: what is fresh when the backbone has been trained before."""
        return nn.ModuleList([self.backbone.fpn, self.rpn, self.roi_heads])


def pyramid_levels(strides: Sequence[int]) -> list[int]:
    """Which of a network's feature maps, given their strides, a pyramid stands on."""
    levels = [level for level, stride in enumerate(strides) if STRIDES[0] <= stride <= STRIDES[1]]
    if not levels:
        raise ValueError(
            f"the network must have feature maps with strides from {STRIDES[0]} to {STRIDES[1]}, "
            f"got {strides}"
        )
    return levels


def freeze_norms_(model: nn.Module) -> None:
    """Scale and shift of batch normalisation do not train."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.requires_grad_(False)
