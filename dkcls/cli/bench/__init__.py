"""Time operators or networks on this machine, as ratios of one run.

  dkcls bench what=ops                                   over F.conv2d, four shapes on the CPU
  dkcls bench what=ops device=cuda shapes=models         the layers of R50-DW and MobileNet-V2
  dkcls bench what=ops shapes=[8x128x28x28,8x256x56x56s2] rounds=50 output=ops.csv
  dkcls bench what=networks                              over the rigid network and timm's resnet50
  dkcls bench what=networks names=[resnet50_dw_dcn,convnext_tiny] image_size=64 batch_size=2

Nothing is timed before the results are checked: operators against the float64 reference, outputs
and gradients, on a small case and on an image of each shape; networks for outputs that are finite.
Then all of them take turns in one process, in another order each round: what ran before leaves its
data in the caches and its threads spinning. Times are medians over the rounds. Run it on an idle
machine.

what=ops times forward, and forward + backward, and divides by the times of F.conv2d in its faster
memory format. what=networks times inference in eval mode, and a training step: forward,
cross-entropy, backward, SGD. Lower precisions are autocast's, as in training. Offset generators get
random weights, since all offsets of a fresh network are 0. Memory is the peak of PyTorch's
allocations in a training step: activations and gradients, but not weights and momentum.

Freed memory stays with the process where the C library allows it. Otherwise some calls, now of one
operator and now of another, would pay for hundreds of page faults.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dkcls import cli
from dkcls.cli.arguments import REQUIRED
from dkcls.config.checks import check, check_above_zero, check_choice, check_least
from dkcls.errors import UserError
from dkcls.files import write_output

# The keys that only one of the two takes.
OWN = {"ops": ("shapes",), "networks": ("names", "image_size")}


@dataclass
class Arguments:
    """The things to time, the device, and the length of it."""

    what: str = REQUIRED  # ops, networks
    device: str = "cpu"  # cpu, cuda
    dtype: str | None = None  # float32, float16, bfloat16; null: float32, on cuda float16
    # ops: NxCxHxW, NxCxHxWsSTRIDE, several of these as [a,b], or models: all layers of the paper's
    # networks; null: four shapes
    shapes: Any = None
    # networks: a name in timm, or several as [a,b]; null: a few of the paper's
    names: Any = None
    image_size: int | None = None  # networks: pixels; null: 224
    batch_size: int | None = None  # images of networks and of shapes=models; null: 8, on cuda 64
    rounds: int | None = None  # null: 40 for operators, 10 for networks
    # seconds for each operator and shape, or network, after which it sits out the other rounds;
    # null: 10 for operators, 60 for networks
    budget: float | None = None
    output: Path | None = None  # a .csv file, for the table; null: print it only

    def __post_init__(self) -> None:
        check_choice("what", self.what, tuple(OWN))
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("dtype", self.dtype, ("float32", "float16", "bfloat16", None))
        for key in ("image_size", "batch_size", "rounds"):
            check_least(key, getattr(self, key), 1)
        check_above_zero("budget", self.budget)
        for key in ("shapes", "names"):
            check(key, getattr(self, key), getattr(self, key) != [], "one or more")
        for what, keys in OWN.items():
            for key in keys:
                good = what == self.what or getattr(self, key) is None
                check(key, getattr(self, key), good, f"left out with what={self.what}")
        if self.output is not None:
            check("output", str(self.output), self.output.suffix == ".csv", "a file.csv")


def main() -> int:
    return cli.script(Arguments, bench, __doc__)


def bench(arguments: Arguments) -> None:
    with cli.importing_torch():
        import torch

        from dkcls.cli.bench import measure
        from dkcls.report.tables import csv_table

        timed = import_module(f"dkcls.cli.bench.{arguments.what}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device on this machine")
    measure.keep_freed_memory()
    dtype = arguments.dtype or ("float16" if arguments.device == "cuda" else "float32")
    rows = timed.table(arguments, getattr(torch, dtype))
    if arguments.output:
        machine = {"device": measure.describe(arguments.device), "dtype": dtype}
        text = csv_table([machine | row for row in rows])
        write_output(arguments.output, text.encode())
