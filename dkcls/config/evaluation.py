"""The config of an evaluation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dkcls.config.checks import check_device, check_least, check_precision, check_weights
from dkcls.config.data import DataConfig
from dkcls.config.model import ModelConfig


@dataclass
class EvalConfig:
    """An evaluation. A checkpoint knows its network and its data; what is given goes on top."""

    PARTIAL: ClassVar[dict[str, type]] = {"data": DataConfig}  # only keys that were given are there

    # a path, or several as [a,b]; or an exported .safetensors or .onnx; short for model.pretrained
    checkpoint: Any = None
    # the network of weights that do not say what they are
    model: ModelConfig = field(default_factory=ModelConfig)
    # what differs from the checkpoint's data; with data.name, the data set is another one
    data: dict[str, Any] = field(default_factory=dict)
    split: str = "val"  # train, val, test
    weights: str = "auto"  # auto: the moving average if there is one; ema, model
    flip: bool = False  # the mean of the probabilities of an image and its mirror image
    batch_size: int = 256  # images per rank
    precision: str = "fp32"  # fp32, bf16, fp16
    device: str = "auto"  # auto, cpu, cuda
    output: str | None = None  # a .json file for the metrics
    per_class: str | None = None  # a .csv file for the metrics of every class
    confusion: str | None = None  # a .png file for the confusion matrix, of at most 100 classes
    timeout: float = 600.0  # seconds that a rank waits for the others, or for a file

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_device("device", self.device)
        check_precision(self.precision)
        check_least("batch_size", self.batch_size, 1)
