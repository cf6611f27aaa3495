"""What the trainer decides, counts and draws, without a command."""

import json
import signal
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dkcls.config import ScheduleConfig
from dkcls.engine import dry_run as dry_run_module
from dkcls.engine import trainer as trainer_module
from dkcls.engine.distributed import World
from dkcls.engine.dry_run import dry_run
from dkcls.engine.optim import make_schedule, milestones
from dkcls.engine.run import listen, train
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.trainer import StopRequest
from dkcls.errors import UserError
from tests.engine.common import CPU, same_bits, small_config, small_trainer

TWO_STEPS = ("data.options.length=16", "schedule.warmup_epochs=0")  # an epoch


class Lines:
    """A log that keeps its lines of metrics."""

    loggers = ()

    def __init__(self):
        self.steps, self.kept = 0, []

    def step(self):
        self.steps += 1

    def metrics(self, kind, step, epoch, values):
        self.kept.append({"kind": kind, "step": step, "epoch": epoch, **values})

    def sync(self):
        pass


def evaluations(monkeypatch, *figures):
    """The evaluations of a run have these top-1 figures; None is a failure."""
    left = list(figures)

    def evaluate(*_):
        top1 = left.pop(0)
        if top1 is None:
            raise UserError("the evaluation failed")
        return {"top1": top1, "loss": 1.0, "images": 1}

    monkeypatch.setattr(trainer_module, "measure", evaluate)


def best_step(folder):
    return torch.load(folder / "runs/small/best.pt", weights_only=True)["step"]


def test_best_is_the_highest_metric(monkeypatch, tmp_path):
    """Also after the run failed in the evaluation of a later checkpoint, and went on."""
    monkeypatch.chdir(tmp_path)
    config = small_config(*TWO_STEPS, "schedule.epochs=5")
    evaluations(monkeypatch, 10.0, 30.0, 20.0, None)
    with pytest.raises(UserError, match="the evaluation failed"):
        train(config)
    assert best_step(tmp_path) == 4
    evaluations(monkeypatch, 25.0, 30.0)
    result = train(config)
    assert best_step(tmp_path) == 4  # the first of two that are equal
    assert (result["top1"], result["best_top1"], result["best_step"], result["best_epoch"]) == (
        30,
        30,
        4,
        2,
    )
    assert json.loads((tmp_path / "runs/small/result.json").read_text())["best_step"] == 4


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [(3, 1, [2, 4, 6]), (3, 2, [4, 6]), (4, 2, [4, 8]), (2, 5, [4])],
)
def test_when_it_is_evaluated(monkeypatch, tmp_path, epochs, every, expected):
    """Every so many epochs, and at the end."""
    evaluations(monkeypatch, *[1.0] * len(expected))
    trainer = small_trainer(
        *TWO_STEPS, f"schedule.epochs={epochs}", f"train.eval_every={every}", "train.freeze_bn=true"
    )
    lines = Lines()
    trainer.fit(RunDirectory(tmp_path), lines, StopRequest())
    assert [line["step"] for line in lines.kept if line["kind"] == "val"] == expected
    assert lines.steps == 2 * epochs


def test_lines_of_metrics_are_of_the_steps_since_the_last(monkeypatch, tmp_path):
    """Check the times and the loss in the lines of metrics.

    A batch takes 1 s to load and 3 s to train on, an evaluation 1000 s. The loss of step s is 10*s.
    """
    now = 0.0

    def takes(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now))
    trainer = small_trainer(
        "data.options.length=32", "schedule.warmup_epochs=0", "log.every=3"
    )  # 8 steps
    loss, load = trainer.task.loss, trainer.train_loader.dataset.load

    def timed_loss(model, batch):
        takes(3)
        value, sums = loss(model, batch)
        sums[1] = 10 * trainer.step * sums[0]
        return value, sums

    def timed_load(*arguments):
        takes(1)
        return load(*arguments)

    def timed_evaluation(*_):
        takes(1000)
        return {"top1": 1.0}

    monkeypatch.setattr(trainer.task, "loss", timed_loss)
    monkeypatch.setattr(trainer.train_loader.dataset, "load", timed_load)
    monkeypatch.setattr(trainer_module, "measure", timed_evaluation)
    lines = Lines()
    trainer.fit(RunDirectory(tmp_path), lines, StopRequest())
    first, second = (line for line in lines.kept if line["kind"] == "train")
    assert (first["step"], first["epoch"], first["loss"]) == (3, 1, 10)  # of steps 0, 1, 2
    assert (second["step"], second["epoch"], second["loss"]) == (6, 2, 40)  # of steps 3, 4, 5
    for line in (first, second):
        assert line["images_per_s"] == pytest.approx(8 / 4)
        assert line["data_wait"] == pytest.approx(1 / 4)


def draws(seed, steps, rank):
    """Of torch's and numpy's generators, in each step."""
    trainer = small_trainer(*TWO_STEPS, f"seed={seed}", "schedule.epochs=9")
    trainer.world = World(CPU, rank)
    loss, drawn = trainer.task.loss, []

    def drawing(model, batch):
        drawn.append((torch.rand(()).item(), np.random.rand()))
        return loss(model, batch)

    trainer.task.loss = drawing
    batches = [batch for _ in range(2) for batch in trainer.train_loader]
    for _ in range(steps):
        trainer.train_step(iter(batches))
    return drawn


def test_what_is_random_is_a_function_of_seed_step_and_rank():
    drawn = {(seed, rank): draws(seed, 3, rank) for seed in (0, 1) for rank in (0, 1)}
    assert draws(1, 3, 1) == drawn[1, 1]
    every = [pair for pairs in drawn.values() for pair in pairs]
    for numbers in zip(*every, strict=True):
        assert len(set(numbers)) == 2 * 2 * 3


def test_a_seed_has_its_own_initial_weights():
    zero, one, again = (small_trainer(f"seed={seed}").model.state_dict() for seed in (0, 1, 1))
    assert same_bits(one, again)
    for name, value in zero.items():
        if name.endswith("weight") and value.dim() > 1:
            assert not torch.equal(value, one[name]), name


def kept(trainer):
    """A copy of what a step changes."""
    state = trainer.state()
    return deepcopy([state["model"], state["ema"], state["sums"], state["optimizer"]["state"]])


def test_a_bad_step_leaves_everything_as_it_was(tmp_path):
    """Leave weights, statistics, momentum and sums unchanged in a bad step.

    After one good step, bad ones are counted from 1 again.
    """
    trainer = small_trainer(
        *TWO_STEPS, "train.max_bad_steps=1", "train.ema_decay=0.9", "schedule.epochs=9"
    )
    loss, bad = trainer.task.loss, {1, 3, 5}

    def spoilt(model, batch):
        value, sums = loss(model, batch)
        return (value * float("nan") if trainer.step in bad else value), sums

    trainer.task.loss = spoilt
    trainer.set_train_mode()
    batches = list(trainer.train_loader)
    for step in range(6):
        before = kept(trainer)
        trainer.train_step(iter(batches))
        assert [same_bits(*pair) for pair in zip(before, kept(trainer), strict=True)] == [
            step in bad
        ] * 4
        assert trainer.bad_steps == (step in bad)
    assert trainer.skipped == 3
    bad |= {6}
    trainer.run = RunDirectory(tmp_path)
    with pytest.raises(
        UserError,
        match="not finite in 2 steps in a row, up to step 6; the last good checkpoint is none yet",
    ):
        trainer.train_step(iter(batches))


@pytest.mark.parametrize(
    ("saved", "size", "expected"),
    [
        ([[1.0, 2, 3, 4]], 1, [[1.0, 2, 3, 4]]),
        ([[1.0, 2, 3, 4]], 2, [[1.0, 2, 3, 4], [0, 0, 0, 0]]),
        ([[1.0, 2, 3, 4], [5, 6, 7, 8]], 2, [[1.0, 2, 3, 4], [5, 6, 7, 8]]),
        ([[1.0, 2, 3, 4], [5, 6, 7, 8]], 1, [[6.0, 8, 10, 12]]),
    ],
)
def test_what_was_counted_is_counted_once_on_any_number_of_ranks(saved, size, expected):
    trainer = small_trainer()
    state = {**trainer.state(), "sums": saved}
    for rank in range(size):
        trainer.world = World(CPU, rank, size)
        trainer.load_state(state)
        assert trainer.sums.tolist() == expected[rank]


def test_a_dry_run_tells_the_time_of_the_whole_run(monkeypatch, capsys):
    """90 epochs of 2 steps, two seconds each."""
    ticks = iter(range(0, 100, 2))
    monkeypatch.setattr(
        dry_run_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    dry_run(
        small_trainer(
            "data.options.length=16",
            "schedule.epochs=90",
            "schedule.warmup_epochs=5",
            "train.accumulation=2",
        )
    )
    rows = (
        line.strip().split("  ", 1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    )
    said = {name: text.strip() for name, text in rows}
    assert said["time"] == "2.000 s per step, 0.10 h for 180 steps, evaluations aside"
    assert said["batch"] == "8 = 1 ranks x 2 steps x 4"
    assert said["images"] == "16 to train, 16 to validate, 10 classes"
    assert said["learning rate, end of warm-up"] == "0.1 at step 10"


def test_milestones():
    """Ten steps in an epoch; generators, at another rate, come first."""

    def found(config):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.002, 0.2)]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        return milestones(make_schedule(optimizer, config.schedule, 10), config, 10)

    config = small_config("optim.lr=0.2", "schedule.epochs=12", "schedule.warmup_epochs=2")
    cosine = [("start", 0, 0.0), ("end of warm-up", 20, 0.2), ("half", 70, 0.1), ("end", 120, 0.0)]
    assert found(config) == [(what, step, pytest.approx(lr)) for what, step, lr in cosine]
    config.schedule = ScheduleConfig("drops", 12, warmup_steps=5, drop_epochs=[8, 11], gamma=0.5)
    drops = [
        ("start", 0, 0.0),
        ("end of warm-up", 5, 0.2),
        ("drop", 80, 0.1),
        ("drop", 110, 0.05),
        ("end", 120, 0.05),
    ]
    assert found(config) == [(what, step, pytest.approx(lr)) for what, step, lr in drops]


def test_signals_ask_to_stop_and_a_second_ctrl_c_stops_at_once():
    def own(number, frame):
        raise AssertionError

    before = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with listen() as stop:
            assert not stop
            signal.raise_signal(signal.SIGTERM)
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:  # which would end pytest
                pytest.fail("a second SIGTERM stops at once")
            assert (bool(stop), stop.signal) == (True, "SIGTERM")
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with listen() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == "SIGINT"
        assert [signal.getsignal(number) for number in before] == [own, own]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_is_saved_and_gone_on_from(monkeypatch, tmp_path):
    """After any step, with the same bits at the end as without it."""
    evaluations(monkeypatch, *[1.0] * 9)
    states = []
    for stops in ([], [1, 2, 3]):
        folder = tmp_path / f"{len(stops)}"
        folder.mkdir()
        run = RunDirectory(folder)
        for start, end in pairwise([0, *stops, None]):
            trainer, stop = small_trainer(*TWO_STEPS), StopRequest()
            if start:
                trainer.load_state(torch.load(folder / "last.pt", weights_only=True))
            assert trainer.step == start
            loss = trainer.task.loss

            def stopping(model, batch, loss=loss, trainer=trainer, stop=stop, end=end):
                stop.signal = "SIGTERM" if trainer.step + 1 == end else ""
                return loss(model, batch)

            trainer.task.loss = stopping
            if end is None:
                trainer.fit(run, None, stop)
            else:
                with pytest.raises(
                    trainer_module.Interrupted, match=f"stopped by SIGTERM after step {end}"
                ):
                    trainer.fit(run, None, stop)
        states.append(torch.load(folder / "last.pt", weights_only=True))
    assert states[0]["step"] == 4
    assert same_bits(*states)
