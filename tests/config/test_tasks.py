"""Keys of tasks, and sentences for keys that are elsewhere."""

import pytest

from dkcls.config import (
    Config,
    DetectionConfig,
    ScheduleConfig,
    TaskConfig,
    keys,
    unknown_key,
)


def test_the_name_of_the_task_has_the_default_that_a_config_has():
    (name,) = (key for key in keys() if key.name == "task.name")
    assert name.default == Config().task.name == "classification"
    assert name.help.startswith("classification, detection")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("task.min_size", "task.min_size is a key of task=detection"),
        ("data.scale", "there is no key 'data.scale'; did you mean 'augment.scale'?"),
        ("train.epochs", "there is no key 'train.epochs'; did you mean 'schedule.epochs'?"),
        ("data.rot", "there is no key 'data.rot'; did you mean 'data.root'?"),
    ],
)
def test_a_key_of_another_group_or_task_is_found(key, sentence):
    assert unknown_key(key) == sentence


@pytest.mark.parametrize(
    "task",
    [TaskConfig("detection"), TaskConfig("classification"), DetectionConfig("classification")],
)
def test_a_task_has_its_own_dataclass(task):
    with pytest.raises(ValueError, match=f"task.name={task.name} needs a .*Config, got a "):
        Config(task=task)


def test_a_schedule_with_steps_of_warmup_may_be_short():
    assert ScheduleConfig(epochs=1, warmup_steps=3).steps(10) == (10, 3)
    with pytest.raises(ValueError, match=r"warmup_epochs must be from 0 to below epochs, got 5\.0"):
        ScheduleConfig(epochs=1)
