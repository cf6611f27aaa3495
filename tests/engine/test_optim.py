"""The paper's schedule, step by step, and who is in which parameter group."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import dkcls.models  # noqa: F401
from dkcls.config import OptimConfig, ScheduleConfig
from dkcls.engine.optim import freeze_, make_optimizer, make_schedule, parameter_groups
from dkcls.errors import UserError
from dkcls.layers import CondConv2d, offset_generators

IMAGENET = 1_281_167


def test_learning_rate_of_every_step_of_the_90_epochs():
    """Check lr*t/w, then lr/2*(1 + cos(pi*(t-w)/(T-w))).

    This holds at full rate and at the generators' multiplier.
    """
    per_epoch = IMAGENET // 256
    total, warmup = 90 * per_epoch, 5 * per_epoch
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    groups = [
        {"params": model["a"].parameters(), "lr": 0.1},
        {"params": model["b"].parameters(), "lr": 0.001},
    ]
    optimizer = torch.optim.SGD(groups)
    schedule = make_schedule(optimizer, ScheduleConfig(epochs=90, warmup_epochs=5.0), per_epoch)
    assert total == 450_360
    got = np.empty((total, 2))
    for t in range(total):
        schedule.step_update(t)
        got[t] = [group["lr"] for group in optimizer.param_groups]
    t = np.arange(total)
    share = np.where(
        t < warmup, t / warmup, (1 + np.cos(np.pi * (t - warmup) / (total - warmup))) / 2
    )
    np.testing.assert_allclose(got, share[:, None] * [0.1, 0.001], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("spatial", ["rigid", "local_dk", "global_dk", "dcn_local_dk", "cond"])
@pytest.mark.parametrize("decay_norm", [False, True])
def test_groups(spatial, decay_norm):
    model = timm.create_model("mobilenetv2_nano", spatial=spatial, pointwise="cond")
    config = OptimConfig(generator_lr=0.01, decay_norm=decay_norm)
    groups = {group["name"]: group for group in parameter_groups(model, config, lr=0.2)}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    assert ("generators" in groups) == (spatial not in ("rigid", "cond"))
    assert groups["norms"]["weight_decay"] == (4e-5 if decay_norm else 0)
    assert {p.dim() for p in groups["norms"]["params"]} == {1}
    assert groups["weights"]["weight_decay"] == 4e-5
    assert groups["weights"]["lr"] == 0.2
    if "generators" in groups:
        assert groups["generators"]["lr"] == pytest.approx(0.002)
        expected = {
            id(p) for _, generator in offset_generators(model) for p in generator.parameters()
        }
        assert {id(p) for p in groups["generators"]["params"]} == expected
    routing = [
        p for m in model.modules() if isinstance(m, CondConv2d) for p in m.routing.parameters()
    ]
    assert {id(p) for p in routing} <= {id(p) for p in groups["weights"]["params"]}


def test_schedule_without_warmup():
    optimizer = make_optimizer(nn.Linear(2, 2), OptimConfig(), 0.1)
    schedule = make_schedule(optimizer, ScheduleConfig(epochs=10, warmup_epochs=0.0), 1)
    schedule.step_update(0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_learning_rate_with_drops():
    """Check the standard schedule of detection, to the step.

    After 500 steps of warm-up, the rate drops to a tenth after epochs 8 and 11 of 12.
    """
    optimizer = make_optimizer(nn.Linear(2, 2), OptimConfig(), 0.02)
    config = ScheduleConfig("drops", 12, warmup_steps=500, drop_epochs=[8, 11])
    schedule = make_schedule(optimizer, config, 1000)
    rates = {
        0: 0.0,
        250: 0.01,
        500: 0.02,
        7999: 0.02,
        8000: 0.002,
        10999: 0.002,
        11000: 0.0002,
        11999: 0.0002,
    }
    for step, rate in rates.items():
        schedule.step_update(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate), step


def test_backbone_lr_is_of_all_but_the_classifier():
    model = timm.create_model("mobilenetv2_nano", spatial="local_dk")
    config = OptimConfig(generator_lr=0.01, backbone_lr=0.1, weight_decay=0.5)
    groups = {group["name"]: group for group in parameter_groups(model, config, lr=0.2)}
    rates = {"weights": 0.02, "norms": 0.02, "generators": 0.0002, "classifier": 0.2}
    assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(rates)
    decays = {"weights": 0.5, "norms": 0, "generators": 0.5, "classifier": 0.5}
    assert {name: group["weight_decay"] for name, group in groups.items()} == decays
    assert {id(p) for p in groups["classifier"]["params"]} == {
        id(p) for p in model.classifier.parameters()
    }


@pytest.mark.parametrize(("nesterov", "expected"), [(False, [0.9, 0.75]), (True, [0.85, 0.675])])
def test_steps_on_paper(nesterov, expected):
    """Check steps with lr 0.1, momentum 0.5 and a gradient of 1.

    The velocity is 1, then 1.5; Nesterov's step is 1 + half of it.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = make_optimizer(
        model, OptimConfig(momentum=0.5, nesterov=nesterov, weight_decay=0.0), 0.1
    )
    for weight in expected:
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert model.weight.item() == pytest.approx(weight)


class Blocks(nn.Module):
    """Eleven blocks, and a classifier."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1, 1) for _ in range(11)))
        self.classifier = nn.Linear(1, 1)

    def get_classifier(self):
        return self.classifier


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (None, set()),
        (["blocks.1"], {"blocks.1.weight", "blocks.1.bias"}),
        (
            ["blocks.1.weight", "classifier"],
            {"blocks.1.weight", "classifier.weight", "classifier.bias"},
        ),
        ("backbone", {f"blocks.{i}.{kind}" for i in range(11) for kind in ("weight", "bias")}),
    ],
    ids=["nothing", "block", "parameters", "backbone"],
)
def test_frozen_is_what_is_named(names, frozen):
    model = Blocks()
    freeze_(model, names)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["block"], "nothing to train under 'block'; the network has blocks, classifier"),
        (["blocks", "classifier"], "leaves nothing"),
    ],
)
def test_freezing_that_cannot_be(names, sentence):
    with pytest.raises(UserError, match=sentence):
        freeze_(Blocks(), names)
