"""Checkpoints that are damaged or malicious, and disks that are full."""

import hashlib
import os
import pickle
import resource
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from dkcls.engine.checkpoint import Checkpoints, read
from dkcls.engine.network import read_weights
from dkcls.errors import UserError
from dkcls.files import DamagedFile, hash_path

from .lab import (
    BOARD,
    SHORT,
    Lab,
    Process,
    Row,
    copied,
    differences,
    finish,
    run_of,
    sentence,
    start,
    start_imported,
    wait_for_step,
)


def stopped_run(lab: Lab, *overrides: str) -> Path:
    """Return the folder of a run, stopped by a signal after some steps, with three checkpoints."""
    folder = lab.folder / "stopped"
    process = start_imported(folder, *SHORT, "train.keep=3", *overrides)
    wait_for_step(folder, process, 9)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 75, process.said()
    return folder


def flip(path: Path, random: Random, first: int = 0, last: int | None = None) -> None:
    """Flip a random bit of the file, in the bytes from `first` to `last`."""
    data = bytearray(path.read_bytes())
    at = random.choice(range(len(data))[first:last])
    data[at] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def flip_all(folder: Path, random: Random) -> None:
    for path in sorted(folder.glob("*.pt")):
        flip(path, random)


def damage(lab: Lab) -> Row:
    """Damage the newest checkpoint of a run, which then resumes from the one before it."""
    row = Row("truncated or empty checkpoint; a flipped bit in it or in its hash; no hash")
    source, expected = stopped_run(lab), lab.expected(*SHORT)
    kinds: dict[str, Callable[[Path], Any]] = {
        "a flipped bit": lambda path: flip(path, lab.random),
        "truncated": lambda path: os.truncate(path, lab.random.randrange(1, path.stat().st_size)),
        "no hash": lambda path: hash_path(path).unlink(),
        "empty": lambda path: os.truncate(path, 0),
        "empty hash": lambda path: os.truncate(hash_path(path), 0),
        "a hash of other bytes": lambda path: hash_path(path).write_bytes(b"\xff\xfe\x00" * 20),
        "a flipped bit in the header": lambda path: flip(path, lab.random, 0, 4),
        "all of them": lambda path: flip_all(path.parent, lab.random),
    }
    for kind, act in list(kinds.items())[: lab.many(len(kinds), 1)]:
        with copied(source, lab.folder / "damaged") as folder:
            newest = Checkpoints(run_of(folder), 3).newest_first()[0]
            act(newest)
            process = start_imported(folder, *SHORT, "train.keep=3")
            problems = sentence(process, 0, newest.name, "going back to the checkpoint before it")
            if kind != "all of them" and f"resuming from {newest.name}" in process.said():
                problems.append("the damaged one was loaded")
            row.check(problems + differences(folder, expected), kind)
    _flip_everywhere(lab, row, source)
    return row


def _flip_everywhere(lab: Lab, row: Row, source: Path) -> None:
    """Flip one bit at a time and load the file, without a run for each bit.

    Bits are those of the whole file, its beginning, its end, and the hash's digits.
    """
    good = Checkpoints(run_of(source), 3).newest_first()[0]
    path = lab.folder / good.name
    for number in range(lab.many(1000, 60)):
        shutil.copy(good, path)
        shutil.copy(hash_path(good), hash_path(path))
        damaged = hash_path(path) if number % 4 == 3 else path
        flip(damaged, lab.random, *((0, None), (0, 512), (-512, None), (0, 64))[number % 4])
        try:
            read(path)
            row.check(["a flipped bit was not seen"], f"number {number}")
        except DamagedFile:
            row.check([])


class Evil:
    """An object in a malicious pickle: loading it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def evil_files(folder: Path, evil: Evil) -> list[Path]:
    """Write a pickle with code into every kind of file that torch or dkcls might load."""
    paths = [
        folder / name
        for name in ("zip.pt", "legacy.pt", "plain.pt", "step.pt", "named.safetensors")
    ]
    torch.save({"format": 1, "step": 1, "model": {"weight": evil}}, paths[0])
    torch.save({"state_dict": evil}, paths[1], _use_new_zipfile_serialization=False)
    paths[2].write_bytes(pickle.dumps(evil, 2))
    torch.save({"format": 1, "step": 1}, paths[3])
    with zipfile.ZipFile(paths[3]) as good:
        parts = {name: good.read(name) for name in good.namelist()}
    with zipfile.ZipFile(paths[3], "w") as bad:
        for name, data in parts.items():
            bad.writestr(name, pickle.dumps(evil, 2) if name.endswith("data.pkl") else data)
    paths[4].write_bytes(pickle.dumps(evil, 2))
    return paths


def malice(lab: Lab) -> Row:
    """Load pickles with code as checkpoint, as weights and through timm; run configs with code."""
    row = Row(
        "malicious pickle as checkpoint or weights; a config that names code", outcome="refused"
    )
    mark = lab.folder / "evil"

    def check(problems: list[str], what: str) -> None:
        row.check(problems + (["its code ran"] if mark.exists() else []), what)
        mark.unlink(missing_ok=True)

    files = evil_files(lab.folder, Evil(mark))
    for path in files:
        for name, load in (
            ("read", partial(read, need_hash=False)),
            ("read_weights", read_weights),
        ):
            try:
                load(path)
                check(["it was loaded"], f"{name} of {path.name}")
            except (DamagedFile, UserError):
                check([], f"{name} of {path.name}")
    source, expected = stopped_run(lab), lab.expected(*SHORT)
    with copied(source, lab.folder / "resumed") as folder:
        newest = Checkpoints(run_of(folder), 3).newest_first()[0]
        shutil.copy(files[0], newest)
        hash_path(newest).write_text(
            f"{hashlib.sha256(newest.read_bytes()).hexdigest()}  {newest.name}\n"
        )
        process = start_imported(folder, *SHORT, "train.keep=3")
        check(
            sentence(process, 0, "not a checkpoint that is safe to load")
            + differences(folder, expected),
            "resume",
        )
    named = ("logging.FileHandler", f"filename={mark}")  # which makes a file
    cases = {
        "a callback": (f"+hydra.callbacks.x._target_={named[0]}", f"+hydra.callbacks.x.{named[1]}"),
        "a log handler": (
            f"+hydra.job_logging.handlers.x.class={named[0]}",
            f"+hydra.job_logging.handlers.x.{named[1]}",
        ),
        "a launcher": (
            f"hydra.launcher._target_={named[0]}",
            f"+hydra.launcher.{named[1]}",
            "hydra.mode=MULTIRUN",
        ),
        "model.pretrained": (f"model.pretrained={files[0]}",),
        "timm's checkpoint_path": (f"model.kwargs.checkpoint_path={files[0]}",),
    }
    for what, overrides in list(cases.items())[: lab.many(len(cases), 1)]:
        words = ("a config may not name code to run",) if "hydra" in overrides[0] else ()
        check(sentence(start_imported(lab.folder / "refused", *SHORT, *overrides), 1, *words), what)
    return row


def disk_full(lab: Lab) -> Row:
    """Fill the disk in the middle of a run, and limit the size of files.

    The disk is free again later in the run, or only at its end.
    """
    row = Row("disk full while saving, or while metrics are written")
    expected = lab.expected(*SHORT)
    for reaction in ("continue", "stop")[: lab.many(2, 1)]:
        overrides = (*BOARD, f"train.on_save_error={reaction}")
        if _can_mount():
            folder = lab.folder / f"full_{reaction}"
            process = start_on_small_disk(folder, *overrides)
            end = "the last good one is" if reaction == "stop" else "training goes on"
            problems = sentence(
                process, int(reaction == "stop"), f"could not be written (the disk is full); {end}"
            )
            row.check(problems or finish(folder, expected, *overrides), f"small disk, {reaction}")
        if lab.short and row.tried:
            continue
        folder = lab.folder / f"limit_{reaction}"
        limit = lambda: resource.setrlimit(  # noqa: E731
            resource.RLIMIT_FSIZE,
            (1_000_000, 1_000_000),
        )
        process = start(folder, *overrides, preexec_fn=limit)
        problems = sentence(
            process, int(reaction == "stop"), "could not be written (File too large)"
        )
        if reaction == "stop":  # else it has come to its end, with no checkpoint
            problems = problems or finish(folder, expected, *overrides)
        row.check(problems, f"limited files, {reaction}")
    return row


def _can_mount() -> bool:
    try:
        return (
            subprocess.run(
                ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
            ).returncode
            == 0
        )
    except OSError:
        return False


def start_on_small_disk(folder: Path, *overrides: str) -> Process:
    """Start a run on a file system of 8 MB that is full from step 8 on.

    It is free again after three failed saves, or at the end.
    """
    script = """
    mkdir -p disk && mount -t tmpfs -o size=8m tmpfs disk && cd disk
    (until [ -e runs/run/checkpoints/step-00000008.pt ]; do sleep 0.01; done
     cat /dev/zero > filler 2>/dev/null
     until [ $(grep -c "training goes on" /proc/$$/fd/1) -ge 3 ]; do sleep 0.05; done; rm filler) &
    "$@"; code=$?
    kill $! 2>/dev/null; rm -f filler; cp -a . ..; exit $code
    """
    return start(folder, *overrides, wrap=("unshare", "-rm", "sh", "-c", script, "sh"))
