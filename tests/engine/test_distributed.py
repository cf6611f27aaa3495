"""Two ranks do what one does at the same global batch."""

import gc
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from dkcls.engine import distributed
from dkcls.engine.network import create_network
from dkcls.engine.run import build_trainer
from dkcls.engine.trainer import Trainer
from dkcls.errors import UserError
from tests.engine.checkpoints import write_images
from tests.engine.common import (
    ROOT,
    SMALL,
    last_state,
    metric_lines,
    on_ranks,
    run_here,
    run_ranks,
    same_bits,
    small_config,
    small_trainer,
)

pytestmark = pytest.mark.xdist_group("test_distributed")  # its runs are made once

# BN uses its own batch, of half the images: frozen, it is out of the way.
SAME = (
    "train.freeze_bn=true",
    "optim.lr=0.05",
    "optim.generator_lr=0.1",
    "data.workers=0",
    "log.every=1",
    "data.options.length=36",
    "train.batch_size=8",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0",
)
WAYS = {"two": (2, 1), "accumulated": (1, 4), "both": (2, 2)}  # ranks and accumulation


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {}
    for name, (ranks, accumulation) in {"one": (1, 1), **WAYS}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        overrides = (*SAME, f"train.accumulation={accumulation}")
        if ranks > 1:
            run_ranks(folders[name], *overrides, ranks=ranks)
        else:
            with pytest.MonkeyPatch.context() as monkeypatch:
                assert run_here(monkeypatch, folders[name], *overrides) == 0
    return folders


@pytest.mark.parametrize("other", WAYS)
def test_losses_and_evaluations_are_those_of_one_rank(runs, other):
    ones, others = (metric_lines(runs[name]) for name in ("one", other))
    assert len(ones) == len(others) == 8 + 2
    for one, two in zip(ones, others, strict=True):
        assert (one["kind"], one["step"]) == (two["kind"], two["step"])
        assert one["loss"] == pytest.approx(
            two["loss"], abs=1e-5 if one["kind"] == "train" else 1e-6
        )
        if one["kind"] == "train":
            assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-3)
        else:
            assert (one["top1"], one["top5"], one["images"]) == (
                two["top1"],
                two["top5"],
                two["images"],
            )


@pytest.mark.long
def test_two_hosts_are_two_ranks(runs, tmp_path):
    """Two torchrun agents that meet over TCP, with a rank each, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--master_addr=127.0.0.1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    agents = []
    for host in (0, 1):
        command = [
            *launch,
            f"--master_port={port}",
            f"--node_rank={host}",
            str(ROOT / "train.py"),
            *SMALL,
            *SAME,
        ]
        with (tmp_path / f"host{host}.txt").open("w") as file:
            agents.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            )
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], (
        tmp_path / "host0.txt"
    ).read_text()
    assert same_bits(last_state(tmp_path)["model"], last_state(runs["two"])["model"])


@pytest.mark.parametrize("other", WAYS)
def test_weights_are_those_of_one_rank(runs, other):
    """They differ by far less than they moved: a gradient of another size would show."""
    one, two = (last_state(runs[name]) for name in ("one", other))
    start = create_network(
        small_config(*(f"model.{k}={v}" for k, v in one["config"]["model"].items() if v)).model,
        10,
        3,
    )
    for name, value in start.named_parameters():
        moved = (one["model"][name] - value.detach()).double().norm()
        assert (one["model"][name] - two["model"][name]).double().norm() <= 1e-3 * moved + 1e-7, (
            name
        )
    assert (one["model"]["classifier.bias"] - start.classifier.bias.detach()).norm() > 0.01


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 1)])
def test_models_end_before_the_process_group(tmp_path, broken, code):
    """One that outlives it waits, now and then, for threads that wait for it."""
    destroy = dist.destroy_process_group

    def note_and_destroy():
        alive = [type(o) for o in gc.get_objects() if isinstance(o, DistributedDataParallel)]
        Path(f"models{os.environ['RANK']}.txt").write_text(str(alive))
        destroy()

    def fail(trainer, batches):
        raise RuntimeError("in a step")

    def work():
        patch = pytest.MonkeyPatch()
        patch.setattr(dist, "destroy_process_group", note_and_destroy)
        if broken:
            patch.setattr(Trainer, "train_step", fail)
        return run_here(patch, tmp_path, "schedule.epochs=1", "data.workers=0")

    assert on_ranks(tmp_path, work) == [code] * 2
    for rank in range(2):
        assert (tmp_path / f"models{rank}.txt").read_text() == "[]"


def test_what_is_evaluated_is_what_is_saved(tmp_path, monkeypatch):
    """With statistics of batch norm that each rank gathers on its own: rank 0's are saved."""
    run_ranks(
        tmp_path,
        "data.workers=0",
        "data.options.length=36",
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
    )
    arguments = ("checkpoint=runs/small/last.pt", "output=figures.json", "data.workers=0")
    assert run_here(monkeypatch, tmp_path, *arguments, script="eval.py") == 0
    [figures] = json.loads((tmp_path / "figures.json").read_text())
    line = metric_lines(tmp_path)[-1]
    assert line["kind"] == "val"
    assert line["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    assert (line["top1"], line["images"]) == (figures["top1"], 36)


def told(world):
    """What each rank says when one of them fails."""
    sentences = []
    for failing in (0, 1):
        try:
            with world.together():
                if world.rank == failing:
                    raise UserError(f"rank {failing} has no disk")
        except UserError as error:
            sentences.append(str(error))
    return sentences


def data_on_one(world, folder):
    """What each rank says when rank 0 alone has the images."""
    root = folder if world.is_main else folder / "nowhere"
    overrides = (
        "data.name=folder",
        f"data.root={root}",
        "data.options.length=null",
        "data.options.num_classes=null",
    )
    try:
        build_trainer(small_config(*overrides), world)
    except UserError as error:
        return str(error)
    return "nothing"


def trained(world, *overrides, bad=None):
    """Return the weights after three steps, and the number of skipped steps.

    On the rank and step of `bad`, the sums are not finite, but the gradients are.
    """
    trainer = small_trainer("schedule.warmup_epochs=0", *overrides, world=world)
    loss = trainer.task.loss

    def spoilt(model, batch):
        value, counts = loss(model, batch)
        return value, counts * (math.inf if (world.rank, trainer.step) == bad else 1)

    trainer.task.loss = spoilt
    trainer.set_train_mode()
    batches = iter(trainer.train_loader)
    for _ in range(3):
        trainer.train_step(batches)
    return {"skipped": trainer.skipped, "weights": [p.detach() for p in trainer.model.parameters()]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks got."""
    folder = tmp_path_factory.mktemp("ranks")
    for split in ("train", "val"):
        write_images(folder / "images", 40, split=split)

    def work():
        with distributed.start("cpu", 20) as world:
            return {
                "rank": world.rank,
                "told": told(world),
                "data": data_on_one(world, folder / "images"),
                "accumulated": trained(world, "train.accumulation=2"),
                "bad": trained(world, bad=(1, 1)),
                "good": trained(world),
                "flags": world.any(world.rank == 1, False, True),
                "from_main": world.from_main(f"of {world.rank}"),
                "gathered": world.gather(world.rank),
                "sum": world.sum_(torch.tensor([1.0, world.rank])),
            }

    return on_ranks(folder, work)


def test_an_error_of_one_rank_is_that_of_all(ranks):
    assert [rank["told"] for rank in ranks] == [["rank 0 has no disk", "rank 1 has no disk"]] * 2
    assert "nowhere" in ranks[0]["data"]
    assert ranks[0]["data"] == ranks[1]["data"]


@pytest.mark.parametrize("way", ["accumulated", "bad", "good"])
def test_ranks_have_the_same_weights(ranks, way):
    first, second = (rank[way] for rank in ranks)
    assert same_bits(first["weights"], second["weights"])
    assert first["skipped"] == second["skipped"] == (way == "bad")


def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(ranks):
    assert not same_bits(ranks[0]["bad"]["weights"], ranks[0]["good"]["weights"])


def test_how_ranks_agree(ranks):
    for number, rank in enumerate(ranks):
        assert rank["rank"] == number
        assert rank["flags"] == [True, False, True]
        assert rank["from_main"] == "of 0"
        assert rank["gathered"] == [0, 1]
        assert rank["sum"].tolist() == [2, 1]


def test_a_restart_meets_in_a_store_of_its_own(monkeypatch):
    """torchrun keeps its store, and in it the addresses of processes that are gone."""
    whole = HashStore()
    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(whole, 0, 1)]))
    stores = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(distributed._store(distributed.timedelta(seconds=1)))
        stores[-1].add("who is there", 1)
    assert [store.add("who is there", 0) for store in stores] == [1, 1]


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(UserError, match="started 2 processes here, but there are 1 GPUs"),
        distributed.start("cuda", 1),
    ):
        pass
