"""Losses and files that go bad on one rank.

All ranks must agree, bad files must be named, and counts must be exact.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from PIL import Image

from dkcls.config import DataConfig
from dkcls.data import create_dataset

from .lab import (
    SHORT,
    Lab,
    Process,
    Row,
    children,
    differences,
    finish,
    metrics,
    run_of,
    sentence,
    start,
    start_imported,
    start_ranks,
    state_of,
    wait_for_step,
)

TRAIN, VAL, BATCH = 400, 100, 20
FOLDER = (
    "data=imagenet",
    f"train.batch_size={BATCH}",
    "train.eval_batch_size=50",
    "schedule.epochs=2",
    "log.to=[]",
    "data.image_size=16",
    "data.workers=2",
)


def not_finite(lab: Lab) -> Row:
    """Inject NaN or inf on rank 1 alone."""
    row = Row("NaN or inf on one of two ranks")
    for value in ("nan", "inf")[: lab.many(2, 1)]:
        folder = lab.folder / value
        process = start_ranks(
            folder, *SHORT, "train.max_bad_steps=2", ranks=2, fault=f"poison:{value}:1:3+4+9"
        )
        problems = sentence(
            process,
            0,
            "step 4: loss or gradient is not finite, step skipped (2 in a row, 2 allowed)",
        )
        ends = {
            line.split()[-1] for line in process.said().splitlines() if "ends with weights" in line
        }
        problems += [f"ranks end with other weights: {ends}"] if len(ends) != 1 else []
        if not problems:
            state = state_of(folder)
            finite = all(
                weight.isfinite().all()
                for weight in (*state["model"].values(), *state["ema"].values())
            )
            problems += (
                []
                if finite and state["skipped"] == 3
                else [f"{state['skipped']} skipped, finite: {finite}"]
            )
        row.check(problems, value)
    if not lab.short:
        process = start(
            lab.folder / "stop",
            *SHORT,
            "train.max_bad_steps=2",
            ranks=2,
            fault="poison:nan:1:3+4+5",
        )
        row.check(
            _torchrun_sentence(
                process, "not finite in 3 steps in a row, up to step 5", "step-00000004.pt"
            ),
            "too many",
        )
    return row


def _torchrun_sentence(process: Process, *words: str) -> list[str]:
    """Check for one sentence of train.py's, before torchrun's own report of what failed."""
    code, said = process.wait(), process.said().partition("torch/distributed/elastic")[0]
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    problems = (
        []
        if code == 1 and len(lines) == 1 and "Traceback" not in said
        else [f"exit code {code}: {said[-1500:]}"]
    )
    return problems + [
        f"does not say {word!r}: {said[-500:]}" for word in words if word not in said
    ]


def make_folder(root: Path) -> list[Path]:
    """Write image files of the embedded set, and return those of the training split."""
    for split, count in (("train", TRAIN), ("val", VAL)):
        images, targets, _ = (
            create_dataset(DataConfig(name="deformed_fashion"), split)
            .load(range(count))  # type: ignore[arg-type]
            .batch
        )
        for number, (image, target) in enumerate(zip(images, targets.tolist(), strict=True)):
            path = root / split / f"class{target}" / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(path, quality=90)
    return sorted((root / "train").rglob("*.jpg"))


def workers_and_files(lab: Lab) -> Row:
    """Kill a loading process, delete files within an epoch, and corrupt one file in a hundred."""
    row = Row("a DataLoader worker is killed; files vanish mid-epoch; 1 % of the files are corrupt")
    images = lab.folder / "images0"
    files = make_folder(images)
    overrides = (*FOLDER, f"data.root={images}", "data.bad_limit=0.02")
    cache = own_cache(lab)
    expected = lab.expected(*overrides, **cache)
    for restarts in (3, 0)[: lab.many(2, 1)]:
        folder = lab.folder / f"worker{restarts}"
        begin = start_imported if lab.short else start
        process = begin(folder, *overrides, f"data.worker_restarts={restarts}", **cache)
        wait_for_step(folder, process, 6)
        os.kill(lab.random.choice(_loaders_of(process)), signal.SIGKILL)
        words = (
            "a process that loads data died (pid ",
            "started again" if restarts else "use fewer workers",
        )
        problems = sentence(process, 0 if restarts else 1, *words)
        problems = problems or (
            differences(folder, expected)
            if restarts
            else finish(folder, expected, *overrides, **cache)
        )
        row.check(problems, f"killed worker, {restarts} restarts")
    ranks = (1,) if lab.short else (1, 2)
    for number in ranks:
        if not lab.short:
            row.check(_vanish(lab, images, files, number), f"files vanish, {number} ranks")
        row.check(_corrupt(lab, images, files, number), f"corrupt files, {number} ranks")
    if not lab.short:
        own = f"data.root={images}".removesuffix("0") + "${oc.env:RANK}"
        process = start(lab.folder / "one_rank", *FOLDER, own, ranks=2, **cache)
        row.check(
            _torchrun_sentence(process, "must hold the folders train and val"),
            "data on one rank alone",
        )
    strict = (f"data.root={lab.folder / 'corrupt1'}", "data.bad_limit=0.005")
    process = start_imported(lab.folder / "strict", *overrides, *strict, **cache)
    row.check(
        sentence(
            process,
            1,
            "more than 0.50% of the training files are bad (data.bad_limit)",
            "bad_files.txt",
        ),
        "limit",
    )
    return row


def own_cache(lab: Lab) -> dict[str, Any]:
    """Keep the lists of files out of the user's cache."""
    return {"environment": {"XDG_CACHE_HOME": str(lab.folder / "cache")}}


def _loaders_of(process: Process) -> list[int]:
    """Return the pids of the loading processes: children of the run's fork server."""
    return [pid for child in children(process.pid) for pid in children(child)]


def _vanish(lab: Lab, images: Path, files: list[Path], ranks: int) -> list[str]:
    """Delete four files while the first epoch is read.

    By the end of the second epoch these four must be named, and nothing else.
    """
    root, folder = lab.folder / f"vanish{ranks}", lab.folder / f"vanished{ranks}"
    shutil.copytree(images, root)
    overrides = (*FOLDER, f"data.root={root}", "data.bad_limit=0.05")
    process = start_ranks(folder, *overrides, ranks=ranks, **own_cache(lab))
    wait_for_step(folder, process, 4)
    gone = [root / path.relative_to(images) for path in lab.random.sample(files, 4)]
    for path in gone:
        path.unlink()
    return sentence(process, 0) + named(
        run_of(folder) / "bad_files.txt", {f"{path}: No such file or directory" for path in gone}
    )


def _corrupt(lab: Lab, images: Path, files: list[Path], ranks: int) -> list[str]:
    """Corrupt one per cent of the training files, in four ways, and one validation image.

    The metrics must leave out the validation image.
    """
    root, folder = lab.folder / f"corrupt{ranks}", lab.folder / f"corrupted{ranks}"
    shutil.copytree(images, root)
    bad = [root / path.relative_to(images) for path in lab.random.sample(files, 4)] + sorted(
        (root / "val").rglob("*.jpg")
    )[:1]
    contents = (b"", b"not an image", bad[2].read_bytes()[:100], bad[3].read_bytes()[:-200], b"x")
    for path, content in zip(bad, contents, strict=True):
        path.write_bytes(content)
    overrides = (*FOLDER, f"data.root={root}", "data.bad_limit=0.05")
    process = start_ranks(folder, *overrides, ranks=ranks, **own_cache(lab))
    expected = {str(path) for path in bad}
    problems = sentence(process, 0) + named(run_of(folder) / "bad_files.txt", expected)
    images_counted = metrics(folder)[-1]["images"]
    return problems + (
        [f"{images_counted} validation images instead of {VAL - 1}"]
        if images_counted != VAL - 1
        else []
    )


def named(file: Path, expected: set[str]) -> list[str]:
    """Check that each line of the file begins with an expected text, and none is missing."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        return [f"bad files are not named: {error}"]
    named = {text for text in expected for line in lines if line.startswith(text)}
    return (
        []
        if named == expected and len(lines) == len(expected)
        else [f"{lines} are named instead of {sorted(expected)}"]
    )
