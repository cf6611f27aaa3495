"""Two ranks do what one does at the same global batch."""

import os
import socket
import subprocess
import sys

import pytest

from tests.engine.common import ROOT, SMALL, last_state, metric_lines, run_train, same_bits

pytestmark = pytest.mark.xdist_group("test_distributed")  # its runs are made once

# BN uses its own batch, of half the images: frozen, it is out of the way. Without it a small rate keeps the losses tame.
SAME = (
    "train.freeze_bn=true", "optim.lr=0.0001", "optim.generator_lr=0.1", "data.workers=0", "log.every=1", "data.length=100",
    "train.batch_size=8", "schedule.epochs=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {}
    for name, ranks, overrides in (("one", 1, ()), ("two", 2, ()), ("accumulated", 1, ("train.accumulation=4",))):
        folders[name] = tmp_path_factory.mktemp(name)
        done = run_train(folders[name], *SAME, *overrides, ranks=ranks)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("other", ["two", "accumulated"])
def test_losses_and_evaluations_are_those_of_one_rank(runs, other):
    ones, others = (metric_lines(runs[name]) for name in ("one", other))
    assert len(ones) == len(others) == 24 + 2
    for one, two in zip(ones, others, strict=True):
        assert (one["kind"], one["step"]) == (two["kind"], two["step"])
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5 if one["kind"] == "train" else 1e-6)
        if one["kind"] == "val":
            assert (one["top1"], one["top5"], one["images"]) == (two["top1"], two["top5"], two["images"])


def test_two_hosts_are_two_ranks(runs, tmp_path):
    """Two torchrun agents that meet over TCP, with a rank each, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    agents = []
    for host in (0, 1):
        command = [*launch, f"--master_port={port}", f"--node_rank={host}", str(ROOT / "train.py"), *SMALL, *SAME]
        with (tmp_path / f"host{host}.txt").open("w") as file:
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT))
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], (tmp_path / "host0.txt").read_text()
    assert same_bits(last_state(tmp_path)["model"], last_state(runs["two"])["model"])


def test_weights_are_those_of_one_rank(runs):
    one, two = (last_state(runs[name])["model"] for name in ("one", "two"))
    for name, value in one.items():
        assert (value.double() - two[name].double()).abs().max() < 1e-4, name
