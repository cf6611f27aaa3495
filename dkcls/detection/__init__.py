"""Object detection: torchvision's detectors over the registered networks, and COCO's measure."""
