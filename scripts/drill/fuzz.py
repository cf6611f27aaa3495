"""Overrides and config files made at random: each is a config, or is refused in one sentence."""

import contextlib
import io
import json
import os
import runpy
import signal
import string
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import yaml

from dkcls.config import Config, valid_keys
from dkcls.engine import run

from .lab import ROOT, Lab, Row, fork_server

SECONDS = 60  # for one try
VALUES = (
    "1", "-1", "0", "1e400", "nan", "inf", "null", "true", "''", "[]", "{}", "[1,2,3]", "{a:1}",
    "abc", "${seed}", "${model}", "${nothing}", "${oc.env:NOTHING}", "${", "$", "'", '"', "[", "{",
    "\\", "9" * 50, "1,2", "a b", "é", "\x00", "\n", "=", "..", "~", "${oc.decode:'['}",
    "choice(1,2)", "range(1,3)", "glob(*)", "local_dk", "1.5", "0x10", "1_000", "\ud800", "-",
)  # fmt: skip
TAGS = (
    "!!python/object/apply:os.getcwd []",
    "!!python/name:os.system",
    "!!binary x",
    "!!set {a}",
    "&a [*a]",
    "*a",
    "<<: 1",
    "!x y",
)
PACKAGES = ("_global_", "_group_", "x.y", "?", "")
GROUPS = (
    *("experiment", "recipe", "data", "task", "optim"),  # with files
    *("model", "augment", "schedule", "train", "log"),  # of keys
    *("data.options", "model.options", "model.kwargs"),  # of anything
    *("data.options.noise", "data.options.x", "model.kwargs.x"),
    *("hydra/launcher", "hydra/job_logging"),
)


def fuzz(lab: Lab) -> Row:
    """Send random overrides and files through train.py and Hydra, without the training.

    This happens in a separate process, whose answers are checked.
    """
    found = lab.folder / "found.json"
    process = fork_server().Process(
        target=_fuzz, args=(lab.folder, lab.random, lab.many(2000, 60), found)
    )
    process.start()
    process.join()
    row = Row(
        "random bytes and structures as overrides and as config files",
        outcome="composed or refused",
    )
    for what, problems in (
        json.loads(found.read_text()) if found.exists() else [("the process", ["it died"])]
    ):
        row.check(problems, what)
    return row


def _fuzz(folder: Path, random: Random, count: int, found: Path) -> None:
    """Write what each try was and what is wrong with its answer."""
    (folder / "configs/experiment").mkdir(parents=True)
    valid = [key for key in valid_keys() if not key.startswith(("name", "out"))]
    os.chdir(folder)
    tries = []
    for number in range(count):
        words, content = overrides(random, valid), b""
        if number % 2:
            content = config_file(random, valid)
            (folder / "configs/experiment/x.yaml").write_bytes(content)
            words = [
                f"--config-dir={folder / 'configs'}",
                "experiment=x",
                *words[: number % 4 // 3],
            ]
        tries.append((f"try {number}, {words}, {content!r}", attempt(words)))
    found.write_text(json.dumps(tries))


def attempt(words: list[str]) -> list[str]:
    """Return what is wrong with how train.py takes this command line."""
    taken: list[Any] = []
    said = io.StringIO()
    argv, train, sys.argv = sys.argv, run.train, [str(ROOT / "train.py"), *words]
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    code: Any = 0
    try:
        setattr(run, "train", taken.append)  # noqa: B010
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException as error:
        return [f"{type(error).__name__} came through: {error}"]
    finally:
        signal.alarm(0)
        sys.argv = argv
        setattr(run, "train", train)  # noqa: B010
    text = "".join(
        line
        for line in said.getvalue().splitlines(keepends=True)
        if not line.startswith("quickstart: ")
    )
    if "Traceback" in text:
        return [f"a traceback: {text[-1500:]}"]
    if code == 0:
        return (
            []
            if taken and all(isinstance(config, Config) for config in taken)
            else ["neither a config nor an error"]
        )
    refused = text.startswith("error: ") and text.count("\n") == 1
    by_argparse = code == 2 and text.startswith("usage:")
    return [] if refused or by_argparse else [f"exit code {code}, said {text[-500:]!r}"]


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer after {SECONDS} s")


def overrides(random: Random, valid: list[str]) -> list[str]:
    return [override(random, valid) for _ in range(random.randint(1, 3))]


def override(random: Random, valid: list[str]) -> str:
    """Return a key and a value, either of which may be anything, or now and then only noise."""
    kind = random.randrange(6)
    if kind == 0:
        return noise(random)
    key = random.choice(
        (random.choice(valid), random.choice(GROUPS), misspell(random, random.choice(valid)))
    )
    value = random.choice(VALUES) if kind < 5 else noise(random)
    return (
        f"{random.choice(('', '', '', '+', '++', '~'))}{key}"
        f"{random.choice(('=', '=', '=', '', '@x='))}{value}"
    )


def noise(random: Random) -> str:
    """Return random text, but no flag of Hydra's, such as --multirun: Hydra would obey it."""
    text = "".join(
        random.choice(string.printable + "äß漢\udc80") for _ in range(random.randint(1, 30))
    )
    return text.replace("\x00", "").lstrip("-") or "x"


def misspell(random: Random, key: str) -> str:
    place = random.randrange(len(key))
    return key[:place] + random.choice(string.ascii_letters + "._-[]{}$/@:") + key[place + 1 :]


def config_file(random: Random, valid: list[str]) -> bytes:
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: random.randbytes(random.randint(0, 200)),
        lambda: mutated(random, random.choice(sorted((ROOT / "configs").glob("*/*.yaml")))),
        lambda: b"# @package _global_\n" + yaml.safe_dump(structure(random, valid, 4)).encode(),
        lambda: b"# @package _global_\n" + yaml.safe_dump(nested(random, valid)).encode(),
        lambda: (
            f"# @package {random.choice(PACKAGES)}\n{random.choice(valid)}: {random.choice(TAGS)}\n"
        ).encode(),
        lambda: b"[" * random.choice((10, 5000)),
        lambda: f"defaults: {random.choice(VALUES)}\n".encode("utf-8", "replace"),
        lambda: yaml.safe_dump({"defaults": structure(random, valid, 2)}).encode(),
    )
    return random.choice(makers)()


def mutated(random: Random, path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 8)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def structure(random: Random, valid: list[str], depth: int) -> Any:
    """Return lists and dictionaries of anything, in one another."""
    kind = random.randrange(4) if depth else 3
    if kind == 0:
        return [structure(random, valid, depth - 1) for _ in range(random.randint(0, 3))]
    if kind < 3:
        keys = (
            "model",
            "train",
            "optim",
            "task",
            "augment",
            "options",
            "hydra",
            "defaults",
            1,
            None,
            True,
            1.5,
            "a.b",
            "",
            random.choice(valid).split(".")[-1],
        )
        return {
            random.choice(keys): structure(random, valid, depth - 1)
            for _ in range(random.randint(0, 3))
        }
    text = random.choice(VALUES).encode("utf-8", "replace").decode()
    return random.choice((text, 1, 1.5, None, True, -(2**70), float("nan")))


def nested(random: Random, valid: list[str]) -> dict[str, Any]:
    """Return keys that exist, with values of any kind."""
    result: dict[str, Any] = {}
    for key in random.sample(valid, random.randint(1, 4)):
        group, _, name = key.rpartition(".")
        (result.setdefault(group, {}) if group else result)[name] = structure(random, valid, 2)
    return result
