"""Order of the images: counts over ranks, and an order that no rank or worker changes."""

import numpy as np
import pytest

from dkcls.data.sampler import EvalSampler, TrainSampler


def indices(sampler):
    return [request.indices.tolist() for request in sampler]


@pytest.mark.parametrize("length", [60, 61, 100, 119])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_takes_each_image_at_most_once_and_drops_the_rest(
    length, world_size, accumulation
):
    ranks = [
        indices(TrainSampler(length, 5, accumulation, rank, world_size, seed=1))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {
        length // (5 * accumulation * world_size) * accumulation
    }
    assert all(len(batch) == 5 for batches in ranks for batch in batches)
    seen = [index for batches in ranks for batch in batches for index in batch]
    assert (
        len(seen)
        == len(set(seen))
        == length // (5 * accumulation * world_size) * 5 * accumulation * world_size
    )
    assert set(seen) <= set(range(length))


@pytest.mark.parametrize("length", [1, 2, 12, 13, 14, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_takes_each_image_exactly_once(length, world_size):
    samplers = [EvalSampler(length, 5, rank, world_size) for rank in range(world_size)]
    seen = [index for sampler in samplers for batch in indices(sampler) for index in batch]
    assert sorted(seen) == list(range(length))
    assert all(len(sampler) == len(indices(sampler)) for sampler in samplers)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "world_size"),
    [(12, 1, 1), (4, 3, 1), (6, 1, 2), (2, 2, 3), (4, 1, 3)],
)
def test_a_global_batch_is_the_same_however_it_is_made_up(batch_size, accumulation, world_size):
    order = np.concatenate(indices(TrainSampler(40, 12, 1, 0, 1, seed=3)))
    ranks = [
        indices(TrainSampler(40, batch_size, accumulation, rank, world_size, seed=3))
        for rank in range(world_size)
    ]
    for step in range(3):
        parts = [
            np.concatenate(batches[step * accumulation : (step + 1) * accumulation])
            for batches in ranks
        ]
        assert np.concatenate(parts).tolist() == order[step * 12 : (step + 1) * 12].tolist()


def test_the_order_is_another_in_every_epoch_and_for_every_seed_and_the_same_again():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sampler = TrainSampler(100, 10, 1, 0, 1, seed)
        sampler.epoch = epoch
        assert all(request.epoch == epoch for request in sampler)
        assert indices(sampler) == indices(sampler)
        orders.append(str(indices(sampler)))
    assert len(set(orders)) == 4


def test_a_position_skips_whole_steps():
    sampler = TrainSampler(100, 5, 2, 1, 2, seed=0)
    whole = indices(sampler)
    sampler.position = 3
    assert indices(sampler) == whole[6:]


GROUPS = (np.arange(61) % 5 == 0).astype(np.int8)  # 13 of one kind, 48 of the other


def grouped(batch_size, accumulation=1, rank=0, world_size=1, seed=1, epoch=0):
    sampler = TrainSampler(len(GROUPS), batch_size, accumulation, rank, world_size, seed, GROUPS)
    sampler.epoch = epoch
    return sampler


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "world_size"),
    [(5, 1, 1), (4, 2, 1), (3, 1, 2), (2, 2, 3), (10, 1, 2)],
)
def test_groups_have_batches_of_their_own_and_share_the_rests(batch_size, accumulation, world_size):
    ranks = [
        indices(grouped(batch_size, accumulation, rank, world_size)) for rank in range(world_size)
    ]
    plain = [
        indices(TrainSampler(61, batch_size, accumulation, rank, world_size, seed=1))
        for rank in range(world_size)
    ]
    assert np.array(ranks).shape == np.array(plain).shape
    assert sorted(np.ravel(ranks)) == sorted(np.ravel(plain))
    batches = [batch for batches in ranks for batch in batches]
    mixed = [batch for batch in batches if len(set(GROUPS[batch])) > 1]
    # The rest of each group is smaller than a batch.
    assert len(mixed) * batch_size <= 2 * (batch_size - 1)


def test_grouped_batches_come_in_another_order_in_every_epoch_and_no_image_is_left_out_for_ever():
    epochs = [indices(grouped(8, epoch=epoch)) for epoch in range(20)]
    assert epochs[3] == indices(grouped(8, epoch=3))
    assert epochs[0] != epochs[1] != indices(grouped(8, epoch=1, seed=2))
    times = np.bincount(
        np.concatenate([index for batches in epochs for index in batches]), minlength=61
    )
    assert times.min() > 12
    assert len({tuple(GROUPS[batch[0]] for batch in batches) for batches in epochs}) > 4


def test_grouped_batches_keep_the_order_of_the_epoch_not_of_the_files():
    order = np.concatenate(indices(TrainSampler(61, 4, 1, 0, 1, seed=1))).tolist()
    of_group = [[index for index in order if GROUPS[index] == group] for group in (0, 1)]
    whole = [members[: len(members) // 4 * 4] for members in of_group]
    rests = [members[len(members) // 4 * 4 :] for members in of_group]
    expected = np.reshape([*whole[0], *whole[1], *rests[0], *rests[1]], (-1, 4)).tolist()
    assert sorted(indices(grouped(4))) == sorted(expected)
    assert indices(grouped(4)) != expected


def test_a_position_skips_batches_of_an_evaluation():
    sampler = EvalSampler(23, 5, 1, 2)
    sampler.position = 1
    assert indices(sampler) == [[16, 17, 18, 19, 20], [21, 22]]


def test_a_position_skips_whole_steps_of_groups():
    sampler = grouped(3, accumulation=2, rank=1, world_size=2, epoch=4)
    whole = indices(sampler)
    sampler.position = 2
    assert indices(sampler) == whole[4:]
    assert len(whole) == 10


def test_groups_must_be_one_per_image():
    with pytest.raises(ValueError, match=r"groups must be one per image, \[60\], got \[61\]"):
        TrainSampler(60, 4, 1, 0, 1, 0, GROUPS)


def test_the_order_without_groups():
    """Check the order against that of all runs so far."""
    assert indices(TrainSampler(9, 3, 1, 0, 1, seed=2)) == [[1, 6, 8], [3, 5, 4], [2, 7, 0]]


def test_a_global_batch_larger_than_the_set_is_refused():
    with pytest.raises(
        ValueError, match="global batch 16 x 2 x 4 must not exceed the 100 training images"
    ):
        TrainSampler(100, 16, 2, 0, 4, seed=0)
