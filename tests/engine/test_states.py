"""A checkpoint with a good hash whose content no run wrote: one sentence, and never a result."""

import math

import pytest
import torch

from dkcls.engine import checkpoint
from dkcls.engine.checkpoint import Checkpoints
from dkcls.engine.run import train
from dkcls.errors import UserError
from tests.engine.common import same_bits, small_config, small_trainer

OPTIONS = (  # two epochs of two steps
    *("data.options.length=16", "schedule.warmup_epochs=0", "train.ema_decay=0.9"),
    *("model.name=mobilenetv2_nano", "train.checkpoint_every=1"),
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run's configuration, and its newest checkpoint, of step 3 of 4."""
    folder = tmp_path_factory.mktemp("stopped")
    config = small_config(*OPTIONS, f"out={folder}/runs", "train.keep=9")
    train(config)
    (path,) = (folder / "runs/small/checkpoints").glob("step-00000003.pt")
    return config, checkpoint.read(path)


def put(keys, value):
    def change(state):
        *groups, last = keys
        for key in groups:
            state = state[key]
        if value is KeyError:
            del state[last]
        else:
            state[last] = value(state[last]) if callable(value) else value

    return change


NAN = float("nan")
CASES = [
    *((("step",), value) for value in (NAN, 3.0, "3", -1, 5, 2**62, True, None, [], KeyError)),
    *((("evaluation_due",), value) for value in (1, "yes", None)),
    *((("bad_steps",), value) for value in (-1, 1.5, NAN)),
    *((("skipped",), value) for value in (-1, "x")),
    *((("precision",), value) for value in ("fp8", 16, None)),
    *((("result",), value) for value in (None, [], {"top1": "x"}, {1: 2})),
    *((("best",), value) for value in (3, {"top1": 1.0}, {"step": 2, "epoch": 1})),
    (("best", "top1"), "x"),
    *((("sums",), value) for value in ([], [[NAN] * 4], [[1.0]], "x", [["x"] * 4], None)),
    *((("bad_files",), value) for value in ("x", [[{}]], [[{"messages": 3}] * 2])),
    *((("model",), value) for value in ({}, None, [], KeyError)),
    (("model", "classifier.weight"), lambda t: t * NAN),
    (("model", "classifier.weight"), lambda t: t[:1]),
    (("model", "classifier.weight"), lambda t: t.long()),
    (("model", "classifier.weight"), lambda t: t.half()),
    (("model", "classifier.weight"), lambda t: 1.0),
    (("model", "classifier.weight"), KeyError),
    (("model", "bn1.running_var"), lambda t: t * NAN),
    *((("ema",), value) for value in (None, {}, KeyError)),
    (("ema", "classifier.weight"), lambda t: t / 0),
    *((("optimizer",), value) for value in ({}, None, {"state": {}, "param_groups": []})),
    (("optimizer", "state"), {10**6: {"momentum_buffer": torch.zeros(1)}}),
    (("optimizer", "state", 0, "momentum_buffer"), lambda t: t * NAN),
    (("optimizer", "state", 0, "momentum_buffer"), lambda t: t[:2]),
    *((("optimizer", "state", 0, "momentum_buffer"), value) for value in ("x", 0)),
    *(((key,), torch.ones(24, 24)) for key in ("step", "bad_steps", "best", "bad_files")),
    (("model", "\n"), 0.5),
    (("optimizer", "param_groups", 0, "lr"), NAN),
    (("optimizer", "param_groups", 0, "momentum"), "x"),
    (("optimizer", "param_groups", 0, "weight_decay"), 5.0),
    (("optimizer", "param_groups", 0, "params"), [0]),
    (("optimizer", "param_groups", 0, "params"), KeyError),
    (("scaler",), "x"),
]


@pytest.fixture(scope="module")
def trainer():
    return small_trainer(*OPTIONS)


@pytest.mark.parametrize(("keys", "value"), CASES)
def test_nonsense_is_refused_by_its_key(stopped, trainer, keys, value):
    state = torch_copy(stopped[1])
    put(keys, value)(state)
    before = torch_copy(trainer.state())
    with pytest.raises(ValueError, match=str(keys[0])) as error:
        trainer.load_state(state)
    assert "\n" not in str(error.value)
    assert same_bits(trainer.state(), before)


def test_nonsense_is_one_sentence_and_never_a_result(stopped, tmp_path):
    config, state = stopped
    config.out = f"{tmp_path}/runs"
    weights = {name: value * NAN for name, value in state["model"].items()}
    for change in ({"step": NAN}, {"step": 2**40}, {"model": weights}):
        checkpoint.write(tmp_path / "runs/small/checkpoints/step-00000003.pt", state | change)
        with pytest.raises(
            UserError, match=r"3\.pt is not a checkpoint of this run: .*; remove it"
        ):
            train(config)
        assert not (tmp_path / "runs/small/result.json").exists()


def test_a_checkpoint_under_another_steps_name_is_not_believed(stopped, tmp_path):
    config, state = stopped
    config.out = f"{tmp_path}/runs"
    checkpoint.write(tmp_path / "runs/small/checkpoints/step-00000002.pt", state)
    with pytest.raises(UserError, match="step must be 2, as its name says, got 3"):
        train(config)


def torch_copy(value):
    """Copy dictionaries and lists, and leave tensors."""
    if isinstance(value, dict):
        return {key: torch_copy(each) for key, each in value.items()}
    return [torch_copy(each) for each in value] if isinstance(value, list) else value


def test_a_finished_run_without_a_result_is_not_believed(stopped, tmp_path):
    config, state = stopped
    config.out = f"{tmp_path}/runs"
    for number, change in enumerate(({"result": {}}, {"best": {}})):
        config.name = f"small{number}"
        path = tmp_path / f"runs/{config.name}/checkpoints/step-00000004.pt"
        checkpoint.write(path, state | {"step": 4, "evaluation_due": False} | change)
        with pytest.raises(UserError, match="is not a checkpoint of this run"):
            train(config)
    config.name = "small"


def test_what_a_run_wrote_is_taken(stopped, tmp_path):
    """And so is it on another number of ranks: sums and bad files of each are there."""
    config, state = stopped
    config.out = f"{tmp_path}/runs"
    more = {"sums": state["sums"] * 2, "bad_files": state["bad_files"] * 2}
    for name, change in (("same", {}), ("ranks", more)):
        config.name = name
        Checkpoints(tmp_path / "runs" / name, 3).save(state | change)
        result = train(config)
        assert result["images"] == 16
        assert math.isfinite(result["best_loss"])
    config.name = "small"
