"""Networks: inference and training, over their rigid form and over ResNet-50."""

from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from tqdm import tqdm

from dkcls.cli.bench import Arguments
from dkcls.cli.bench.measure import describe, medians, peak_bytes, seconds
from dkcls.config import ModelConfig
from dkcls.engine.network import create_network
from dkcls.errors import UserError
from dkcls.layers import offset_generators
from dkcls.models import PAPER
from dkcls.report.tables import markdown_table
from dkcls.words import near

NAMES = (
    "resnet50_dw_local4",
    "resnet50_dw_global4",
    "resnet50_dw_dcn_local4",
    "mobilenetv2_100_local4",
)
REFERENCE = "resnet50"
CLASSES = 1000
# A network of the paper's, or what it is built from -> the network with rigid convolutions alone.
RIGID = {name: row.base for row in PAPER for name in (row.name, row.base)}


class Subject:
    """A network on a device, with images, labels and an optimizer."""

    def __init__(
        self, name: str, batch_size: int, image_size: int, device: str, dtype: torch.dtype
    ):
        self.name, self.device, self.dtype = name, device, dtype
        cfg = timm.get_pretrained_cfg(name)
        fixed = cfg is not None and cfg.fixed_input_size  # as in ViTs, by position embeddings
        config = ModelConfig(name=name, kwargs={"img_size": image_size} if fixed else {})
        model = wake_(create_network(config, CLASSES, channels=3))
        layout = torch.channels_last
        self.model = model.to(device).to(memory_format=layout)  # type: ignore[call-overload]
        images = torch.randn(batch_size, 3, image_size, image_size)
        self.images = images.to(device).contiguous(memory_format=layout)
        self.labels = torch.randint(CLASSES, (batch_size,)).to(device)
        # The rate is too small to change the network, however many rounds there are.
        self.optimizer = SGD(self.model.parameters(), lr=1e-6, momentum=0.9)

    def infer(self) -> Tensor:
        """Return the outputs [N, classes], by running statistics if the model is in eval mode."""
        with torch.inference_mode(), self._autocast():
            return self.model(self.images)

    def step(self) -> None:
        with self._autocast():
            loss = cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inference_seconds(self) -> float:
        self.model.eval()
        return seconds(self.infer, self.device)

    def training_seconds(self) -> float:
        self.model.train()
        return seconds(self.step, self.device)

    def check(self) -> None:
        """Raise UserError unless the outputs are finite, by either kind of statistics."""
        for mode, training in (("eval", False), ("train", True)):
            self.model.train(training)
            if not self.infer().isfinite().all():
                raise UserError(
                    f"{self.name} gives outputs that are not finite, "
                    f"in {mode} mode in {self.dtype}; nothing is timed"
                )

    def step_bytes(self) -> int:
        """Return the peak memory of a training step that is not the first, which adds momentum."""
        self.model.train()
        self.step()
        return peak_bytes(self.step, self.device)

    def _autocast(self) -> torch.autocast:
        lower = None if self.dtype == torch.float32 else self.dtype
        return torch.autocast(self.device, lower, enabled=lower is not None)


@torch.no_grad()
def wake_(model: nn.Module) -> nn.Module:
    """Draw the weights of offset generators, for offsets of about one step in training.

    Those of a fresh network are zero, which is faster: every tap rests on one weight or pixel.
    """
    for _, generator in offset_generators(model):
        generator.weight.normal_(std=(2 / generator.weight[0].numel()) ** 0.5)
    return model


def with_references(names: Sequence[str]) -> list[str]:
    """Return the names, each after its rigid form, and all after ResNet-50."""
    found = [REFERENCE]
    for name in names:
        if not timm.is_model(name):
            hint = near(name, timm.list_models())
            raise UserError(f"names: there is no network {name!r}{hint}")
        found += [RIGID.get(name, name), name]
    return list(dict.fromkeys(found))


def table(arguments: Arguments, dtype: torch.dtype) -> list[dict[str, str]]:
    """Check and time the networks; print and return the table's rows."""
    device, rounds = arguments.device, arguments.rounds or 10
    batch_size = arguments.batch_size or (64 if device == "cuda" else 8)
    size = arguments.image_size or 224
    names = NAMES if arguments.names is None else arguments.names
    names = with_references([names] if isinstance(names, str) else [str(name) for name in names])
    if device == "cuda":
        torch.backends.cudnn.benchmark = True  # as in training
    subjects = []
    for name in tqdm(names, desc="checking", unit="network", leave=False):
        subjects.append(Subject(name, batch_size, size, device, dtype))
        subjects[-1].check()
    memory = [subject.step_bytes() for subject in tqdm(subjects, desc="memory", leave=False)]
    timers = [(subject.inference_seconds, subject.training_seconds) for subject in subjects]
    with tqdm(total=2 * len(timers) * rounds, desc="timing", unit="call", leave=False) as bar:
        times = medians(timers, rounds, arguments.budget or 60.0, bar)
    measures = {
        "inference s/image": [inference / batch_size for inference, _ in times],
        "training s/image": [training / batch_size for _, training in times],
        "memory MiB": [peak / 2**20 for peak in memory],
    }
    rows = [row(name, names, measures) for name in names]
    print(
        f"{describe(device)}, {dtype}, torch {torch.__version__}; "
        f"batches of {batch_size} images of {size} x {size}, medians of {rounds} rounds; "
        "over rigid, over resnet50: ratios, 1.00 = as fast or as large\n"
    )
    print(markdown_table(rows), end="")
    return [{"batch_size": str(batch_size), "image_size": str(size), **row} for row in rows]


def row(name: str, names: list[str], measures: dict[str, list[float]]) -> dict[str, str]:
    """Return a network's cells: each measure, over that of its rigid form, and of ResNet-50."""
    cells = {"network": name}
    for column, values in measures.items():
        of = dict(zip(names, values, strict=True))
        measure = column.split()[0]
        rigid = RIGID.get(name)
        cells[column] = f"{of[name]:.1f}" if measure == "memory" else f"{of[name]:.4g}"
        cells[f"{measure} over rigid"] = f"{of[name] / of[rigid]:.2f}" if rigid else ""
        cells[f"{measure} over {REFERENCE}"] = f"{of[name] / of[REFERENCE]:.2f}"
    return cells
