"""Batches depend on (seed, epoch, position) and the rank alone.

Neither the workers nor earlier reads change a batch.
"""

import multiprocessing
import os
import select
import signal
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from dkcls.data import Normalize, create_loader, watch
from dkcls.data.dataset import BadFile, Batch, ImageDataset, Loaded
from dkcls.errors import DataError
from tests.data.common import assert_same_batches, batches_from, make_dataset


class Numbers(ImageDataset):
    """Images that are their index."""

    class_names, channels, image_size, mean, std = ["a"], 1, 1, (0.5,), (0.5,)

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def load(self, indices, epoch=0):
        index = torch.as_tensor(indices)
        return Loaded(Batch(index.byte().view(-1, 1, 1, 1), index * 0 + epoch, index), [])


def training_set(name, folder):
    options = {
        "deformed_fashion": {"length": 400},
        "folder": {"root": folder, "image_size": 20, "erase_prob": 0.5},
    }[name]
    return make_dataset(name, training=True, seed=5, **options)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", ["deformed_fashion", "folder"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_restart_within_an_epoch_is_exact_with_any_number_of_workers(
    name, workers, shared_folder
):
    options = {
        "batch_size": 2 if name == "folder" else 24,
        "accumulation": 2,
        "training": True,
        "seed": 3,
    }
    dataset = training_set(name, shared_folder)
    first = create_loader(dataset, **options)
    whole = {epoch: batches_from(first, epoch, 0) for epoch in (0, 1)}
    assert len(whole[0]) == len(first) == 2 * first.steps_per_epoch
    assert not torch.equal(whole[0][0].images, whole[1][0].images)
    resumed = create_loader(training_set(name, shared_folder), workers=workers, **options)
    assert_same_batches(batches_from(resumed, 1, 3), whole[1][6:])
    assert_same_batches(batches_from(resumed, 0, 0), whole[0])
    assert batches_from(resumed, 0, resumed.steps_per_epoch) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_left_within_an_epoch_starts_again_where_it_is_told(workers):
    loader = create_loader(Numbers(40), 4, training=True, workers=workers)
    whole = batches_from(loader, 2, 0)
    loader.set_state(2, 0)
    next(iter(loader))
    assert_same_batches(batches_from(loader, 2, 4), whole[4:])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_an_epoch(world_size):
    def over_ranks(training):
        loaders = [
            create_loader(Numbers(50), 4, training=training, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert all(len(loader) == len(list(loader)) for loader in loaders)
        return [index for loader in loaders for batch in loader for index in batch.indices.tolist()]

    trained = over_ranks(True)
    assert len(trained) == len(set(trained)) == 50 // (4 * world_size) * 4 * world_size
    assert sorted(over_ranks(False)) == list(range(50))


def test_sets_that_differ_in_seed_differ_in_pixels_not_in_order(shared_folder):
    loaders = [
        create_loader(
            make_dataset("folder", shared_folder, training=True, image_size=20, seed=seed),
            6,
            training=True,
        )
        for seed in (0, 1)
    ]
    one, other = (next(iter(loader)) for loader in loaders)
    assert torch.equal(one.indices, other.indices)
    assert not torch.equal(one.images, other.images)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generators_are_left_alone(workers, shared_folder):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    list(create_loader(training_set("folder", shared_folder), 6, training=True, workers=workers))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def impatient(monkeypatch):
    """Look after silent workers sooner than every 5 seconds."""
    monkeypatch.setattr(watch, "POLL", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("length", [10, 10_000])
def test_a_killed_worker_is_named(length):
    loader = create_loader(Numbers(length), 2, training=True, workers=1)
    batches = iter(loader)
    next(batches)
    pid = loader._loader._iterator._workers[0].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        DataError, match=rf"a process that loads data died \(pid {pid}, SIGKILL, .* memory"
    ):
        list(batches)


class Unreadable(Numbers):
    """Data set that no process but the first can have."""

    def __setstate__(self, state):
        raise FileNotFoundError("it is gone")


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_ends_by_itself_is_not_said_to_want_memory():
    loader = create_loader(Unreadable(10), 2, training=True, workers=1)
    with pytest.raises(DataError, match="exit code 1") as error:
        list(loader)
    assert "memory" not in str(error.value)
    assert "its own error is above" in str(error.value)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("restarts", [1, 2])
def test_killed_workers_are_started_again(restarts):
    options = {"batch_size": 2, "accumulation": 2, "training": True}
    expected = list(create_loader(Numbers(100), **options))
    loader = create_loader(Numbers(100), workers=2, worker_restarts=restarts, **options)
    assert_same_batches(batches_with_kills(loader, (5, 30)[:restarts]), expected)
    assert loader.worker_restarts == 0


def batches_with_kills(loader, after):
    """Return the loader's batches; kill the last worker after each number of batches in `after`."""
    found = []
    for batch in loader:
        found.append(batch)
        if len(found) in after:
            worker = loader._loader._iterator._workers[-1]
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
    return found


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("training", "position"), [(True, 20), (False, 0), (False, 20)])
def test_killed_workers_go_on_in_an_epoch_that_was_resumed_midway_and_in_an_evaluation(
    training, position
):
    options = {"batch_size": 2, "accumulation": 2 if training else 1, "training": training}
    whole = list(create_loader(Numbers(100), **options))
    loader = create_loader(Numbers(100), workers=1, worker_restarts=1, **options)
    loader.set_state(0, position)
    assert_same_batches(
        batches_with_kills(loader, (3,)), whole[position * options["accumulation"] :]
    )
    assert loader.worker_restarts == 0


class DiesWithTheLock(Numbers):
    """Data set of which a worker dies in the first epoch, while asking whether it is done."""

    def load(self, indices, epoch=0):
        if epoch == 0 and torch.utils.data.get_worker_info() is not None and not self.mark.exists():
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            done = frame.f_locals["done_event"]
            self.mark.touch()
            getattr(done, "_cond", nullcontext()).__enter__()
            os._exit(9)
        return super().load(indices)


def read_all(dataset, connection):
    watch.POLL = 0.2
    loader = create_loader(dataset, 2, training=True, workers=1, worker_restarts=1)
    connection.send([batch.indices.tolist() for batch in loader])


def test_a_worker_killed_within_its_event_locks_nobody_out(tmp_path):
    dataset = DiesWithTheLock(20)
    dataset.mark = tmp_path / "died"
    context = multiprocessing.get_context("forkserver")
    ours, its = context.Pipe()
    # In a process of its own, as otherwise a failure would be a test without an end.
    reader = context.Process(target=read_all, args=(dataset, its))
    reader.start()
    try:
        assert ours.poll(60)
        found = ours.recv()
    finally:
        reader.kill()
    assert found == [
        batch.indices.tolist() for batch in create_loader(Numbers(20), 2, training=True)
    ]
    assert dataset.mark.exists()


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_does_not_end_workers():
    expected = list(create_loader(Numbers(60), 2, training=True))
    loader = create_loader(Numbers(60), 2, training=True, workers=1)
    batches = iter(loader)
    found = [next(batches)]
    os.kill(loader._loader._iterator._workers[0].pid, signal.SIGINT)
    assert_same_batches([*found, *batches], expected)


def hold_a_worker(connection):
    """Act as a run: start a worker, send its process id, and stay."""
    loader = create_loader(Numbers(100), 2, training=True, workers=1)
    next(iter(loader))
    connection.send(loader._loader._iterator._workers[0].pid)
    connection.recv()


def test_workers_end_when_the_run_is_killed():
    context = multiprocessing.get_context("forkserver")
    ours, its = context.Pipe()
    run = context.Process(target=hold_a_worker, args=(its,))
    run.start()
    assert ours.poll(60)
    worker = ours.recv()
    end = os.pidfd_open(worker)
    try:
        assert select.select([end], [], [], 0)[0] == []
        run.kill()
        run.join()
        assert select.select([end], [], [], 5)[0] == [end]
    except AssertionError:
        signal.pidfd_send_signal(end, signal.SIGKILL)
        raise
    finally:
        os.close(end)


def test_the_order_is_that_of_the_seed():
    assert [
        batch.indices.tolist() for batch in create_loader(Numbers(9), 3, training=True, seed=2)
    ] == [
        [1, 6, 8],
        [3, 5, 4],
        [2, 7, 0],
    ]


class EveryFifthIsBad(Numbers):
    def load(self, indices, epoch=0):
        return (
            super()
            .load(indices)
            ._replace(bad=[BadFile(i, f"{i}: bad") for i in indices.tolist() if i % 5 == 0])
        )


@pytest.mark.parametrize(("training", "reads"), [(True, 48), (False, 50)])
def test_the_share_of_bad_files_is_of_what_the_rank_reads(training, reads):
    for rank in (0, 1):
        loader = create_loader(EveryFifthIsBad(100), 4, training=training, rank=rank, world_size=2)
        indices = torch.cat([batch.indices for batch in loader])
        assert len(indices) == reads
        assert loader.bad_files.share == (indices % 5 == 0).sum().item() / reads > 0.1


class Failing(Numbers):
    def load(self, indices, epoch=0):
        raise RuntimeError("out of order")


@pytest.mark.parametrize("workers", [0, 1])
def test_other_errors_come_through(workers):
    loader = create_loader(Failing(8), 2, training=True, workers=workers)
    with pytest.raises(RuntimeError, match="out of order"):
        list(loader)
    if workers:  # else the garbage collector does it, and waits for 5 seconds
        loader._loader._iterator._shutdown_workers()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 0},
            "batch_size, accumulation and prefetch must be positive .* got 0, 1, 2 and 0",
        ),
        ({"workers": -1}, "workers not negative"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"worker_restarts": -1}, "worker_restarts must not be negative, got -1"),
        ({"bad_limit": 3.0}, "bad_limit must be a share from 0 to 1, got 3.0"),
        ({"batch_size": 9}, "must not exceed the 8 training images"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_loader(Numbers(8), **{"batch_size": 2, "training": True, **options})


@pytest.mark.parametrize(("epoch", "position"), [(0, 5), (0, -1), (-1, 0)])
def test_a_state_outside_the_epoch_is_refused(epoch, position):
    with pytest.raises(ValueError, match=f"position be from 0 to 4, got {epoch} and {position}"):
        create_loader(Numbers(8), 2, training=True).set_state(epoch, position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_normalize(dtype, memory_format):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    images = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (2, 3, 5, 7), dtype=np.uint8)
    )
    result = Normalize(mean, std, dtype)(images.contiguous(memory_format=memory_format))
    expected = (images / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(
        result.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_normalize_wants_one_number_per_channel():
    with pytest.raises(ValueError, match="one number per channel"):
        Normalize((0.5, 0.5), (0.5,))
