"""Measure training images per second, against the pipelines of timm and torchvision.

    python scripts/bench/data.py                              # 500 JPEGs of 500x375, made here
    python scripts/bench/data.py --root /data/imagenet/train  # the first 500 JPEGs found there
    python scripts/bench/data.py --names 1300000              # instead: start-up and memory

Rates are per CPU-second on one core, and per second through a DataLoader. With --names, start-up
and memory are measured with that many file names.

Every pipeline reads the same files and yields uint8 batches: random crop to 224, flip, and with
jitter brightness, contrast and saturation, but no normalisation. timm is set to bilinear and to the
collation of its prefetcher. All take turns in one process, in another order each round. Results are
medians over the rounds, of rates and of ratios within a round, with the lowest and the highest
ratio. First, our pixels are compared with PIL's. Run it on an idle machine.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2
from tqdm import tqdm

from dkcls.config import AugmentConfig, DataConfig
from dkcls.data import create_dataset, create_loader
from dkcls.data.decode import EncodedImage
from dkcls.data.loader import worker_options
from dkcls.data.transforms import random_crop_box, resize
from dkcls.data.watch import make_places

SIZE, BATCH, CLASSES = 224, 50, 5
Load = Callable[[Sequence[int]], Any]


class Peer(Dataset):
    """The usual way: one image after the other through `read` and `transform`, then `collate`."""

    def __init__(
        self, paths: list[str], read: Callable[[str], Any], transform: Callable[[Any], Any]
    ):
        self.paths, self.read, self.transform = paths, read, transform

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.read(self.paths[index])), 0

    def __len__(self) -> int:
        return len(self.paths)


def read_with_pil(path: str) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def read_with_torchvision(path: str) -> Tensor:
    return decode_jpeg(read_file(path), ImageReadMode.RGB)


def v2_transform(jitter: float, pil: bool) -> Callable[[Any], Any]:
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.ColorJitter(jitter, jitter, jitter)] if jitter else []
    return v2.Compose([*steps, v2.PILToTensor()] if pil else steps)


def peers(paths: list[str], jitter: float) -> dict[str, tuple[Dataset, Callable]]:
    """Return {name: (data set, collation)}."""
    options: dict[str, Any] = {
        "color_jitter": jitter or None,
        "auto_augment": None,
        "use_prefetcher": True,
    }
    timms = create_transform(SIZE, is_training=True, interpolation="bilinear", **options)
    return {
        "timm": (Peer(paths, read_with_pil, timms), fast_collate),
        "torchvision, PIL": (
            Peer(paths, read_with_pil, v2_transform(jitter, pil=True)),
            default_collate,
        ),
        "torchvision, decode_jpeg": (
            Peer(paths, read_with_torchvision, v2_transform(jitter, pil=False)),
            default_collate,
        ),
    }


def ours_of(root: Path, jitter: float = 0.4) -> Any:
    """Return our data set of the training images below a folder."""
    config, augment = DataConfig("folder", str(root)), AugmentConfig(color_jitter=jitter)
    return create_dataset(config, "train", augment=augment, training=True)


def make_photographs(root: Path, count: int) -> None:
    """Save random pieces of two photographs as JPEGs of 500x375.

    Each piece is stretched, mirrored or not, and of another brightness.
    """
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    generator = np.random.default_rng(0)
    for i in range(count):
        photograph = photographs[i % 2]
        width, height = (int(side * generator.uniform(0.7, 1)) for side in photograph.size)
        left, top = (
            int(generator.integers(room + 1))
            for room in (photograph.width - width, photograph.height - height)
        )
        piece = photograph.resize(
            (500, 375), Image.Resampling.BICUBIC, (left, top, left + width, top + height)
        )
        piece = (
            piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else piece
        )
        brightness = generator.uniform(0.8, 1.2)
        folder = root / "train" / str(i % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        piece.point(
            lambda level, b=brightness: level * b,  # type: ignore[misc]
        ).save(folder / f"{i:05d}.jpg", quality=95)


def link_photographs(root: Path, source: Path, count: int) -> None:
    found = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[
        :count
    ]
    if not found:
        sys.exit(f"bench_data: there is no .jpg or .jpeg file below {source}")
    for i, path in enumerate(found):
        folder = root / "train" / str(i % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:05d}.jpg").symlink_to(path.resolve())


def check_pixels(paths: list[str]) -> str:
    """Compare our crop and resize with PIL's, and exit untimed if they differ too much."""
    worst, means = 0, []
    for seed, path in enumerate(paths[:20]):
        image = EncodedImage(Path(path).read_bytes())
        generator = torch.Generator().manual_seed(seed)
        top, left, height, width = random_crop_box(
            *image.size, (0.08, 1.0), (3 / 4, 4 / 3), generator
        )
        part = image.rows(top + height)[:, top : top + height, left : left + width]
        ours = resize(part, SIZE, SIZE).permute(1, 2, 0).numpy().astype(int)
        crop = read_with_pil(path).crop((left, top, left + width, top + height))
        difference = np.abs(ours - np.asarray(crop.resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
        worst = max(worst, int(difference.max()))
        means.append(difference.mean())
    mean = statistics.fmean(means)
    if worst > 1 or mean > 0.05:
        sys.exit(
            f"bench_data: pixels differ from PIL's by up to {worst} levels, "
            f"{mean:.3f} on average; nothing is timed"
        )
    return f"pixels differ from PIL's by at most {worst} level, {mean:.4f} on average"


def rounds(runs: dict[str, Callable[[], float]], count: int, title: str) -> dict[str, list[float]]:
    """Return images per second of each run in each round, after one warm-up round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in tqdm(range(count + 1), desc=title, leave=False):
        random.Random(number).shuffle(order)
        for name in order:
            rate = runs[name]()
            if number:
                rates[name].append(rate)
    return rates


def table(title: str, rates: dict[str, list[float]], base: str) -> str:
    lines = [
        f"\n{title}",
        f"| {'pipeline':26} | images/s | ratio to {base:24} | lowest | highest |",
        "|---|---|---|---|---|",
    ]
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates[base], strict=True)]
        lines.append(
            f"| {name:26} | {statistics.median(values):8.0f} | {statistics.median(ratios):33.2f} "
            f"| {min(ratios):6.2f} | {max(ratios):7.2f} |"
        )
    return "\n".join(lines)


def on_one_core(root: Path, paths: list[str], jitter: float, count: int) -> dict[str, list[float]]:
    ours = ours_of(root, jitter)
    batches = [
        range(first, min(first + BATCH, len(paths))) for first in range(0, len(paths), BATCH)
    ]

    def timed(load: Load) -> Callable[[], float]:
        def run() -> float:
            started = time.process_time()
            for batch in batches:
                load(batch)
            return len(paths) / (time.process_time() - started)

        return run

    def usual(dataset: Dataset, collate: Callable) -> Load:
        return lambda batch: collate([dataset[index] for index in batch])

    def without_simplejpeg(batch: Sequence[int]) -> None:
        with mock.patch("dkcls.data.decode.simplejpeg", None):
            ours.load(np.array(batch))

    runs = {
        "ours": timed(lambda batch: ours.load(np.array(batch))),
        "ours without simplejpeg": timed(without_simplejpeg),
    }
    runs.update({name: timed(usual(*peer)) for name, peer in peers(paths, jitter).items()})
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        return rounds(runs, count, "one core")
    finally:
        os.sched_setaffinity(0, cores)


def end_to_end(
    root: Path, paths: list[str], jitter: float, workers: int, count: int
) -> dict[str, list[float]]:
    """Measure wall-clock time with workers that are already running, over four passes a round."""
    order = [
        list(range(first, min(first + BATCH, len(paths)))) for first in range(0, len(paths), BATCH)
    ] * 4
    loaders: dict[str, Any] = {
        name: DataLoader(
            dataset,
            batch_sampler=order,
            collate_fn=collate,
            **worker_options(workers, make_places(workers)),
        )
        for name, (dataset, collate) in peers(paths, jitter).items()
    }
    loaders["ours"] = create_loader(ours_of(root, jitter), BATCH, training=True, workers=workers)

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            started, images = time.perf_counter(), 0
            for _ in range(4 if name == "ours" else 1):
                images += sum(len(batch[1]) for batch in loaders[name])
            return images / (time.perf_counter() - started)

        return run

    return rounds({name: timed(name) for name in loaders}, count, f"{workers} workers")


def private_megabytes(pid: int) -> float:
    """Return the memory that a process shares with no other, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def start_up(root: Path, names: int, workers: int) -> str:
    """Measure the time from nothing to the first batch, listed anew and then from the cache.

    The data is one photograph under many names in 1000 folders.
    """
    make_photographs(root, 1)
    (photograph,) = root.rglob("*.jpg")
    for label in tqdm(range(1000), desc="names", leave=False):
        folder = root / "train" / f"n{label:08d}"
        folder.mkdir()
        first = folder / f"n{label:08d}_0.JPEG"
        first.write_bytes(photograph.read_bytes())
        for number in range(1, names // 1000):
            os.link(first, folder / f"n{label:08d}_{number}.JPEG")
    lines = []
    for kind in ("listed", "listed before"):
        started = time.perf_counter()
        dataset = ours_of(root)
        constructed = time.perf_counter() - started
        lines.append(f"{len(dataset)} names, {kind}: data set after {constructed:.2f} s")
    loader = create_loader(dataset, 64, training=True, workers=workers)
    batches = iter(loader)
    next(batches)
    lines[-1] += (
        f", first batch of 64 with {workers} workers after {time.perf_counter() - started:.2f} s"
    )
    for _ in range(2 * workers):
        next(batches)
    own = [
        private_megabytes(worker.pid)
        for worker in loader._loader._iterator._workers  # type: ignore[union-attr]
    ]
    return "\n".join([*lines, f"memory that a worker shares with nobody: {max(own):.0f} MB"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="take JPEGs from below this folder")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2, help="of the DataLoader; 0 leaves it out")
    parser.add_argument(
        "--names", type=int, help="measure the start-up with that many file names instead"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if arguments.names:
            print(start_up(root, arguments.names, arguments.workers))
            return
        if arguments.root:
            link_photographs(root, arguments.root, arguments.images)
        else:
            make_photographs(root, arguments.images)
        paths = sorted(str(path) for path in root.rglob("*.jpg"))
        kilobytes = statistics.fmean(os.path.getsize(path) for path in paths) / 1e3
        print(f"{len(paths)} JPEGs of {kilobytes:.0f} kB on average; {check_pixels(paths)}")
        for jitter in (0.0, 0.4):
            kind = "with colour jitter" if jitter else "without colour jitter"
            rates = on_one_core(root, paths, jitter, arguments.rounds)
            print(table(f"Images per CPU-second on one core, {kind}", rates, "timm"))
        for jitter in (0.0, 0.4) if arguments.workers else ():
            kind = "with colour jitter" if jitter else "without colour jitter"
            rates = end_to_end(root, paths, jitter, arguments.workers, arguments.rounds)
            print(
                table(
                    f"Images per second, DataLoader with {arguments.workers} workers, {kind}",
                    rates,
                    "torchvision, decode_jpeg",
                )
            )


if __name__ == "__main__":
    main()
