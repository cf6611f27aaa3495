"""Object detection: torchvision's Faster R-CNN over the registered networks, and COCO's metrics."""

from dkcls.tasks.detection.task import Detection

__all__ = ["Detection"]
