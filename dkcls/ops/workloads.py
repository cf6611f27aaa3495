"""The depthwise layers of the paper's networks at 224 x 224: what benchmarks and reports run over."""

# (channels, input height, input width, stride, how many such layers)
WORKLOADS = {
    "ResNet-50-DW": [
        (128, 56, 56, 1, 3),
        (256, 56, 56, 2, 1),
        (256, 28, 28, 1, 3),
        (512, 28, 28, 2, 1),
        (512, 14, 14, 1, 5),
        (1024, 14, 14, 2, 1),
        (1024, 7, 7, 1, 2),
    ],
    "MobileNet-V2": [
        (32, 112, 112, 1, 1),
        (96, 112, 112, 2, 1),
        (144, 56, 56, 1, 1),
        (144, 56, 56, 2, 1),
        (192, 28, 28, 1, 2),
        (192, 28, 28, 2, 1),
        (384, 14, 14, 1, 4),
        (576, 14, 14, 1, 2),
        (576, 14, 14, 2, 1),
        (960, 7, 7, 1, 3),
    ],
}
