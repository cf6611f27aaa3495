"""Compare the paper's 22 networks with the counts here, and time them on this machine.

    python scripts/bench/models.py
    python scripts/bench/models.py --format csv --no-time > models.csv
    python scripts/bench/models.py --names resnet50_dw_cond resnet50_dw --batch 8 --memory

Multiply-adds (MACs) and activations are those of convolutions and linear layers at 224 x 224,
counted by dkcls.models.count_macs and count_activations. The time per image is that of the fastest
of some forward passes in eval mode, divided by the batch size. The exit code is 1 where a number of
parameters is not the expected one or does not round to the paper's, or where MACs are off by more
than 0.1 %.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterable

import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dkcls.cli.bench.measure import peak_bytes
from dkcls.models import PAPER, PaperRow, count_activations, count_macs, count_parameters

INPUT_SIZE = (3, 224, 224)
MACS_TOLERANCE = 1e-3


def faults(row: PaperRow, parameters: int, macs: int) -> list[str]:
    """Return what is wrong with the counts of a network, in words."""
    found = []
    if parameters != row.parameters:
        found.append(f"{row.name} has {parameters:,} parameters, not {row.parameters:,}")
    if round(parameters / 1e6, 1) != row.parameters_printed:
        found.append(
            f"{row.name} has {parameters:,} parameters, the paper prints {row.parameters_printed} M"
        )
    if abs(macs / row.macs - 1) > MACS_TOLERANCE:
        found.append(f"{row.name} has {macs:,} MACs, not {row.macs:,.0f}")
    return found


def milliseconds_per_image(model: nn.Module, device: str, batch: int, repeats: int) -> float:
    """Return the fastest of some forward passes: other work on the machine only adds time."""
    model.eval()
    images = torch.randn(batch, *INPUT_SIZE, device=device).contiguous(
        memory_format=torch.channels_last
    )
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):  # the first one warms up
            start = time.perf_counter()
            model(images)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:]) / batch


def train_step_mib(model: nn.Module, device: str, batch: int) -> float:
    """Return the peak of PyTorch's allocations in a forward and backward pass, in MiB.

    Activations and gradients are part of it.
    """
    model.train()
    images = torch.randn(batch, *INPUT_SIZE, device=device).contiguous(
        memory_format=torch.channels_last
    )

    def step() -> None:
        cross_entropy(model(images), torch.zeros(batch, dtype=torch.long, device=device)).backward()
        model.zero_grad()

    step()
    return peak_bytes(step, device) / 2**20


def summarize(row: PaperRow, arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the network's line in the table, and what is wrong with it."""
    with torch.device("meta"):
        model = timm.create_model(row.name)
    parameters, macs = count_parameters(model), count_macs(model, INPUT_SIZE)
    wrong = faults(row, parameters, macs)
    line = {
        "network": row.name,
        "top-1, paper": f"{row.top1}",
        "parameters / 1e6, paper": f"{row.parameters_printed}",
        "parameters": f"{parameters:,}" if arguments.format == "markdown" else f"{parameters}",
        "exact": "yes" if parameters == row.parameters else "NO",
        "GFLOPs, paper": f"{row.gflops_printed:.2f}",
        "MACs / 1e9": f"{macs / 1e9:.4f}",
        "activations / 1e6": f"{count_activations(model, INPUT_SIZE) / 1e6:.2f}",
    }
    if arguments.time or arguments.memory:
        model = (
            timm.create_model(row.name).to(memory_format=torch.channels_last).to(arguments.device)
        )
    if arguments.time:
        line["ms per image"] = f"""{
            milliseconds_per_image(
                model, arguments.device, arguments.batch, arguments.repeats
            ):.1f}"""
    if arguments.memory:
        line[f"train step, MiB at batch {arguments.batch}"] = (
            f"{train_step_mib(model, arguments.device, arguments.batch):.0f}"
        )
    return line, wrong


def print_lines(lines: Iterable[dict[str, str]], form: str) -> None:
    """Print lines as they come, because a network takes seconds."""
    writer = None
    for i, line in enumerate(lines):
        if form == "csv":
            writer = writer or csv.DictWriter(sys.stdout, list(line), lineterminator="\n")
            if i == 0:
                writer.writeheader()
            writer.writerow(line)
        else:
            if i == 0:
                print(f"| {' | '.join(line)} |\n|{'---|' * len(line)}")
            print(f"| {' | '.join(line.values())} |")
        sys.stdout.flush()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=("markdown", "csv"), default="markdown")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these networks")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to take the time"
    )
    parser.add_argument("--batch", type=int, default=4, help="images per forward pass")
    parser.add_argument(
        "--repeats", type=int, default=10, help="forward passes, the fastest of which counts"
    )
    parser.add_argument("--no-time", dest="time", action="store_false", help="count only")
    parser.add_argument(
        "--memory", action="store_true", help="also the peak memory of a train step"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names or ()) - {row.name for row in PAPER}
    if unknown:
        parser.error(
            f"{', '.join(sorted(unknown))}: not among the paper's; "
            f"those are {', '.join(row.name for row in PAPER)}"
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA or ROCm device on this machine")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    wrong: list[str] = []

    def lines() -> Iterable[dict[str, str]]:
        for row in PAPER:
            if not arguments.names or row.name in arguments.names:
                line, found = summarize(row, arguments)
                wrong.extend(found)
                yield line

    print_lines(lines(), arguments.format)
    for sentence in wrong:
        print(f"summarize_models: {sentence}.", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
