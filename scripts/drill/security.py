"""Files and configs of strangers: what they would read, fetch, write or run, and what they hold."""

import contextlib
import io
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from dkcls import cli
from dkcls.config import Config, DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from dkcls.engine import checkpoint, run
from dkcls.engine.network import load
from dkcls.errors import UserError

from .lab import ROOT, Lab, Row, fork_server

SECONDS = 60  # for one try
SECRET = "a-word-that-nobody-may-hear"
GIB = 2**20  # in the KiB of getrusage
STEPS = 4  # of the run whose states are changed


def security(lab: Lab) -> Row:
    """Send hostile checkpoints, exports and configs through the commands."""
    what = "hostile checkpoints and exports for eval, predict, export, fine-tuning; Hydra's section"
    return _elsewhere(lab, Row(what, outcome="refused"), partial(_security, lab.short))


def contents(lab: Lab) -> Row:
    """Write checkpoints of random content, each with its hash, and load and resume from them."""
    row = Row("random contents in checkpoints with a good hash", outcome="taken or refused")
    return _elsewhere(lab, row, partial(_contents, lab.random.random(), lab.many(1000, 8)))


def _elsewhere(lab: Lab, row: Row, work: Callable[[Path], list[tuple[str, list[str]]]]) -> Row:
    """Fill a row with what `work` finds in another process, which may die."""
    found = lab.folder / "found.json"
    process = fork_server().Process(target=_write, args=(work, lab.folder, found))
    process.start()
    process.join()
    tries = json.loads(found.read_text()) if found.exists() else [("the process", ["it died"])]
    for what, problems in tries:
        row.check(problems, what)
    return row


def _write(work: Callable[[Path], Any], folder: Path, found: Path) -> None:
    os.chdir(folder)
    found.write_text(json.dumps(work(folder)))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer after {SECONDS} s")


@contextlib.contextmanager
def _in_time() -> Any:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def call(words: list[str]) -> tuple[Any, str]:
    """Run a command of dkcls in this process; return its exit code and what it said."""
    said, argv = io.StringIO(), sys.argv
    sys.argv = ["dkcls", *words]
    try:
        with _in_time(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code: Any = cli.main() if words[0] != "train" else _train(words[1:])
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException as error:
        return -1, f"Traceback of {type(error).__name__}: {error}"
    finally:
        sys.argv = argv
    return code, said.getvalue()


def _train(words: list[str]) -> int:
    sys.argv = [str(ROOT / "train.py"), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def small_config(folder: Path, **train: Any) -> Config:
    """Return a run of two epochs of two steps on images that are made up."""
    return Config(
        name="run",
        out=str(folder),
        model=ModelConfig(name="mobilenetv2_nano", spatial="local_dk"),
        data=DataConfig(
            name="synthetic",
            image_size=32,
            workers=0,
            options={"length": 16, "num_classes": 10},
        ),
        schedule=ScheduleConfig(epochs=STEPS // 2, warmup_epochs=0.5),
        train=TrainConfig(batch_size=8, ema_decay=0.9, checkpoint_every=1, keep=9, **train),
    )


def _small_run(folder: Path) -> dict[str, Any]:
    """Return the state before the last step of a run."""
    torch.set_num_threads(1)
    run.train(small_config(folder))
    return checkpoint.read(folder / f"run/checkpoints/step-{STEPS - 1:08d}.pt")


@contextlib.contextmanager
def _site() -> Any:
    """Give the address of a site on this machine, and the list of what is asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def _security(short: bool, folder: Path) -> list[tuple[str, list[str]]]:
    os.environ["SECRET"] = SECRET
    state = _small_run(folder / "source")
    place = folder / "here"
    place.mkdir()
    os.chdir(place)
    tries = []
    with _site() as (address, asked):
        evil = folder / "evil"  # nobody may make it
        for words, what in chain(
            _files(folder, state, address, evil, short), _configs(folder, evil)
        ):
            code, said = call(words)
            problems = [] if code == 1 else [f"exit code {code}: {said[-500:]}"]
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            if len(errors) != 1 or "Traceback" in said:
                problems.append(f"not one sentence: {said[-1500:]}")
            problems += [f"it asked for {asked.pop()}"] if asked else []
            problems += ["it told a secret"] if SECRET in said else []
            problems += ["BROWSER is set"] if "BROWSER" in os.environ else []
            left = [path for path in (evil, *place.iterdir()) if path.exists()]
            left = [path for path in left if path.name != "runs" or any(path.iterdir())]
            problems += [f"it wrote {path.name}" for path in left]
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            tries.append((what, problems))
    return tries


def _files(folder: Path, state: dict[str, Any], address: str, evil: Path, short: bool) -> Any:
    """Yield commands with hostile checkpoints and exports."""
    url = {"url": f"{address}/${{oc.env:SECRET}}", "file": ""}
    changes: dict[str, dict[str, Any]] = {
        "an address": {"kwargs": {"pretrained": True, "pretrained_cfg": url}},
        "a cache": {"kwargs": {"cache_dir": str(evil)}},
        "a file": {"kwargs": {"checkpoint_path": str(folder / "source/run/last.pt")}},
        "a name": {"name": "${oc.env:SECRET}"},
        "a hub": {"name": "hf-hub:timm/resnet18"},
        "a device": {"kwargs": {"device": "cuda"}},
        "a scope": {"scope": 60_000},
        "a depth": {"name": "vit_tiny_patch16_224", "kwargs": {"depth": 60_000}},
        "a width": {"name": "vit_tiny_patch16_224", "kwargs": {"embed_dim": 60_000}},
    }
    commands = {
        "eval": ("eval", "checkpoint={}"),
        "predict": ("predict", "checkpoint={}", "images=embedded:2", "workers=0"),
        "export": ("export", "checkpoint={}", "format=safetensors", "output=out.safetensors"),
        "train": ("train", "experiment=finetune", "name=x", "model.pretrained={}"),
    }
    for name, change in list(changes.items())[: 1 if short else None]:
        content = {**state, "config": {**state["config"]}}
        content["config"]["model"] = {**content["config"]["model"], **change}
        for suffix in (".pt", ".safetensors"):
            path = folder / f"hostile{suffix}"
            if suffix == ".pt":
                torch.save({"format": checkpoint.FORMAT, **content}, path)
            else:
                card = {key: json.dumps(content[key]) for key in ("config", "classes", "input")}
                save_file(
                    {k: v.contiguous() for k, v in content["model"].items()},
                    path,
                    {"dkcls": "1", **card},
                )
            for command, words in commands.items():
                yield [word.format(path) for word in words], f"{name}, {suffix}, {command}"
    torch.save({"format": checkpoint.FORMAT, **state}, folder / "good.pt")
    bomb = folder / "bomb.pt"
    with (
        zipfile.ZipFile(folder / "good.pt") as good,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as bad,
    ):
        for part in good.namelist():
            bad.writestr(part, bytes(2**28) if part.endswith("data/0") else good.read(part))
    for command, words in commands.items():
        yield [word.format(bomb) for word in words], f"a zip bomb, {command}"


def _configs(folder: Path, evil: Path) -> Any:
    """Yield commands with Hydra's own section in a file, on the command line, and as a folder."""
    module = folder / "their_module"
    module.mkdir()
    (module / "__init__.py").write_text(f"open({str(evil)!r}, 'w')")
    sys.path.append(str(folder))
    slurm: dict[str, Any] = {"defaults": [{"override /hydra/launcher": "submitit_slurm"}]}
    call_it = {"_target_": "os.mkdir", "path": str(evil)}
    sections: tuple[dict[str, Any], ...] = (
        {"hydra": {"job": {"env_set": {"BROWSER": f"touch {evil}"}}}},
        {"hydra": {"job": {"env_copy": ["SECRET"]}}},
        {"hydra": {"job": {"chdir": True}}},
        {"hydra": {"callbacks": {"x": call_it}}},
        {"hydra": {"job_logging": {"handlers": {"x": {"class": "logging.FileHandler"}}}}},
        {"hydra": {"hydra_logging": {"formatters": {"x": {"()": "os.getcwd"}}}}},
        {"hydra": {"launcher": call_it}},
        {"hydra": {"sweeper": {"params": "${model.kwargs.evil}"}}, "model": {"kwargs": call_it}},
        {**slurm, "hydra": {"launcher": {"setup": [f"touch {evil}"]}}},
        {**slurm, "hydra": {"launcher": {"additional_parameters": {"wrap": f"touch {evil}"}}}},
        {**slurm, "hydra": {"launcher": {"comment": f"x\ntouch {evil}"}}},
    )
    (folder / "theirs/experiment").mkdir(parents=True)
    for number, section in enumerate(sections):
        text = "# @package _global_\n" + yaml.safe_dump(section)
        (folder / f"theirs/experiment/x{number}.yaml").write_text(text)
        words = ["train", f"--config-dir={folder}/theirs", f"experiment=x{number}", "name=x"]
        yield words, yaml.safe_dump(section)
    for words in (
        ["+hydra.job.env_set.BROWSER=x"],
        ["hydra.sweeper.params=${model.kwargs}", "model.kwargs._target_=os.getcwd"],
        [f"hydra.searchpath=[pkg://{module.name}]"],
        [f"hydra.searchpath=['{folder}','pkg://{module.name}']"],
    ):
        yield ["train", "experiment=quickstart", "name=x", *words], str(words)


def _contents(seed: float, count: int, folder: Path) -> list[tuple[str, list[str]]]:
    state = _small_run(folder / "source")
    tries = []
    for number in range(count):
        random = Random(f"{seed}:{number}")
        changed = _copied(state)
        changes = [_change(changed, random) for _ in range(random.choice((1, 1, 2, 5)))]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        act = _resume if number % 2 else _load
        try:
            with _in_time(), contextlib.redirect_stderr(io.StringIO()):
                problems = act(folder / "try", changed)
        except BaseException as error:
            problems = [f"{type(error).__name__}: {error}"]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        problems += [f"{grown / GIB:.1f} GB more memory"] if grown > GIB else []
        tries.append((f"try {number}, {act.__name__}, {'; '.join(changes)}", problems))
        shutil.rmtree(folder / "try", ignore_errors=True)
    return tries


def _sentence(error: UserError) -> list[str]:
    return [f"several lines: {error}"] if "\n" in str(error) else []


def _load(folder: Path, state: dict[str, Any]) -> list[str]:
    """Load the network as eval, predict and export do, and show it an image."""
    checkpoint.write(folder / "x.pt", state)
    try:
        network = load(str(folder / "x.pt"))
    except UserError as error:
        return _sentence(error)
    side = min(network.input.image_size, 64)
    with torch.inference_mode():
        outputs = network.model.eval()(torch.zeros(1, network.input.channels, side, side))
    good = outputs.shape[1] == len(network.class_names())
    return [] if good else [f"{outputs.shape} for {len(network.class_names())} classes"]


def _resume(folder: Path, state: dict[str, Any]) -> list[str]:
    """Resume the run: it ends in a sentence, or makes its last step and an evaluation."""
    checkpoint.write(folder / f"run/checkpoints/step-{STEPS - 1:08d}.pt", state)
    try:
        result = run.train(small_config(folder))
    except UserError as error:
        left = (folder / "run/result.json").exists()
        return [*_sentence(error), *(["it says that it is finished"] if left else [])]
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    last = torch.load(folder / "run/last.pt", weights_only=True)
    made = any(line["kind"] == "val" and line["step"] == STEPS for line in lines)
    finite = all(value.isfinite().all() for value in last["model"].values())
    good = result is not None and result["images"] == 16 and last["step"] == STEPS
    return [] if good and made and finite else ["it says that it is finished, and is not"]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _change(state: dict[str, Any], random: Random) -> str:
    """Change a random thing of a state, whichever depth it is at; return what was done."""
    inside: Any = state
    path: list[str] = []
    while True:
        keys: list[Any] = list(inside if isinstance(inside, dict) else range(len(inside)))
        key = random.choice(keys)
        path.append(str(key))
        deeper = inside[key]
        if isinstance(deeper, (dict, list)) and deeper and random.random() < 0.85:
            inside = deeper
            continue
        break
    kind = random.randrange(5)
    if kind == 0:
        del inside[key]
        return f"{'.'.join(path)} removed"
    if kind == 1 and isinstance(inside, dict):
        name = random.choice(("x", 7, "", "pretrained_cfg", "${x}", "_target_", "a.b", "features"))
        inside[name] = _anything(random, 3)
        return f"{'.'.join(path[:-1])}.{name} added"
    inside[key] = random.choice(list(state.values())) if kind == 2 else _anything(random, 3)
    return f"{'.'.join(path)} = {str(inside[key])[:80]}"


NUMBERS = (0, 1, -1, 2, 3, 7, 60_000, 2**31, 2**62, 2**70, -(2**40), 0.5, 1e30, 1e400, float("nan"))
WORDS = ("", "x", "${oc.env:HOME}", "${", "???", "nan", "\n", "a\nb", "é", "\ud800", "x" * 1000)


def _anything(random: Random, depth: int) -> Any:
    """Return a number, a word, a tensor, or lists and dictionaries of such, in one another."""
    kind = random.randrange(8 if depth else 5)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(WORDS)
    if kind == 3:
        return random.choice((None, True, False, (), (1, 2), b"x", {1, 2}, 1j))
    if kind == 4:
        return _tensor(random)
    some = range(random.choice((0, 1, 3, 50)) if depth > 1 else 2)
    if kind < 7:
        return {
            random.choice((*WORDS, 1, None, "step")): _anything(random, depth - 1) for _ in some
        }
    return [_anything(random, depth - 1) for _ in some]


def _tensor(random: Random) -> torch.Tensor:
    shape = [random.choice((0, 1, 2, 10, 24)) for _ in range(random.randrange(5))]
    kinds = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8)
    tensor = torch.full(shape, random.choice((0, 1, 3)), dtype=random.choice(kinds))
    many = (
        lambda: tensor,
        lambda: torch.full(shape, float("nan")),
        lambda: torch.zeros(1).expand(2 ** random.randrange(10, 45)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(2**40, device="meta"),
        lambda: torch.nn.Parameter(torch.zeros(shape)),
    )
    return random.choice(many)()
