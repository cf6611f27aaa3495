"""Training options, on the CPU: their effects, their records, and steps that are not finite."""

import json
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dkcls.tasks.classification import Classification
from dkcls.tasks.classification.metrics import Details, Totals
from tests.engine.common import last_state, metric_lines, run_here, small_trainer

FEW = (
    "data.options.length=20",
    "data.workers=0",
    "log.every=1",
    "schedule.warmup_epochs=0",
)  # 2 epochs of 2 steps


@pytest.fixture
def seen(monkeypatch):
    """What the network was given and gave: "loss" in training, "measure" in evaluations."""
    calls = {"loss": [], "measure": []}
    watched_methods = {"loss": (Classification, "loss"), "measure": (Totals, "add")}
    watched_methods["details"] = (Details, "add")
    for kind, (owner, name) in watched_methods.items():
        method = getattr(owner, name)
        kept = calls["loss" if kind == "loss" else "measure"]

        def watched(self, model, batch, method=method, kept=kept):
            task = getattr(self, "task", self)

            def network(images):
                logits = model(images)
                deterministic = torch.are_deterministic_algorithms_enabled()
                plain = torch.equal(images, task.images(batch))
                kept.append(
                    SimpleNamespace(
                        images=images,
                        logits=logits.detach(),
                        plain=plain,
                        deterministic=deterministic,
                    )
                )
                return logits

            return method(self, network, batch)

        monkeypatch.setattr(owner, name, watched)
    return calls


def evaluated(monkeypatch, folder, *arguments):
    """By eval.py."""
    arguments = (
        "checkpoint=runs/small/last.pt",
        "output=figures.json",
        "batch_size=8",
        "data.workers=0",
        *arguments,
    )
    assert run_here(monkeypatch, folder, *arguments, script="eval.py") == 0
    [figures] = json.loads((folder / "figures.json").read_text())
    return figures["loss"]


def check_bf16_and_ema(seen, lines, monkeypatch, folder):
    assert {call.logits.dtype for calls in seen.values() for call in calls} == {torch.bfloat16}
    loss = lines[-1]["loss"]
    assert evaluated(monkeypatch, folder, "precision=bf16") == pytest.approx(loss, rel=1e-6)
    assert evaluated(monkeypatch, folder, "precision=bf16", "weights=model") != pytest.approx(
        loss, rel=1e-4
    )


def check_fp16(seen, lines, monkeypatch, folder):
    assert {call.logits.dtype for calls in seen.values() for call in calls} == {torch.float16}
    for line in lines:
        if line["kind"] == "train":
            assert line["loss_scale"] == 65536 / 2 ** line["skipped"]
    assert last_state(folder)["skipped"] < 4


def check_accumulation(seen, lines, monkeypatch, folder):
    assert [len(call.images) for call in seen["loss"]] == [4] * 8
    assert all("loss_scale" not in line for line in lines)


def check_mixup(seen, lines, monkeypatch, folder):
    assert not any(call.plain for call in seen["loss"])
    assert all(call.plain for call in seen["measure"])


def check_layout(seen, lines, monkeypatch, folder):
    assert all(
        call.images.is_contiguous() and call.deterministic
        for calls in seen.values()
        for call in calls
    )
    assert [len(call.images) for call in seen["measure"]] == [18, 2] * 2


def check_compiled(seen, lines, monkeypatch, folder):
    assert torch.compile.keywords["backend"].graphs > 0


class Compiler:
    """A minute faster than inductor."""

    graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


MIXED = (
    "augment.mixup=0.2",
    "augment.cutmix=1.0",
    "task.label_smoothing=0.1",
    "model.drop_path_rate=0.1",
    "model.drop_rate=0.1",
)


@pytest.mark.parametrize(
    ("overrides", "check"),
    [
        pytest.param(overrides, check, id=overrides[0])
        for overrides, check in (
            (("train.precision=bf16", "train.ema_decay=0.9"), check_bf16_and_ema),
            (("train.precision=fp16",), check_fp16),
            (
                ("train.accumulation=2", "optim.clip_grad=0.1", "optim.nesterov=true"),
                check_accumulation,
            ),
            (MIXED, check_mixup),
            (
                (
                    "train.channels_last=false",
                    "train.deterministic=true",
                    "train.eval_batch_size=18",
                ),
                check_layout,
            ),
            (("train.compile=true", "schedule.epochs=1"), check_compiled),
        )
    ],
)
def test_options(overrides, check, seen, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=Compiler()))
    try:
        assert run_here(monkeypatch, tmp_path, *FEW, *overrides) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    lines = metric_lines(tmp_path)
    assert all(line["loss"] < 20 for line in lines)
    assert lines[-1]["images"] == 20
    assert all(value.isfinite().all() for value in last_state(tmp_path)["model"].values())
    assert not [
        name
        for name in last_state(tmp_path)["model"]
        if "_orig_mod" in name or name.startswith("module.")
    ]
    check(seen, lines, monkeypatch, tmp_path)


# The rate is the same in every step.
STEADY = (
    "data.options.length=32",
    "schedule.warmup_epochs=0",
    "schedule.name=drops",
    "schedule.drop_epochs=[]",
    "optim.lr=0.1",
)


def on_paper(
    model,
    batches,
    mean,
    std,
    *,
    clip=None,
    nesterov=False,
    smoothing=0.0,
    decay=4e-5,
    decay_norm=False,
    momentum=0.9,
):
    """Return the weights after steps of SGD, with all but the gradient computed by hand.

    Each list in `batches` has the batches of one step.
    """
    velocity = {}
    for step in batches:
        model.zero_grad()
        for batch in step:
            images = (batch.images / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(
                std
            ).view(-1, 1, 1)
            logits = model(images)
            log_p = logits - logits.exp().sum(1, keepdim=True).log()
            right = log_p[torch.arange(len(logits)), batch.targets]
            loss = -((1 - smoothing) * right + smoothing * log_p.mean(1)).mean()
            (loss / len(step)).backward()
        norm = sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5
        share = min(1, clip / norm.item()) if clip else 1
        for name, p in model.named_parameters():
            decayed = decay * (p.dim() > 1 or decay_norm or name == "classifier.bias")
            gradient = p.grad * share + decayed * p.detach()
            velocity[name] = momentum * velocity.get(name, 0) + gradient
            p.data -= 0.1 * (gradient + momentum * velocity[name] if nesterov else velocity[name])
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        ((), {}),
        (("optim.clip_grad=0.2",), {"clip": 0.2}),
        (("optim.nesterov=true",), {"nesterov": True}),
        (("optim.momentum=0.5",), {"momentum": 0.5}),
        (("optim.weight_decay=0.5",), {"decay": 0.5}),
        (("optim.weight_decay=0.5", "optim.decay_norm=true"), {"decay": 0.5, "decay_norm": True}),
        (("task.label_smoothing=0.3",), {"smoothing": 0.3}),
        (("train.accumulation=2",), {}),
        (("train.accumulation=2", "optim.clip_grad=0.2"), {"clip": 0.2}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_weights_after_two_steps_are_those_on_paper(overrides, how):
    trainer = small_trainer(*STEADY, *overrides)
    trainer.set_train_mode()
    model, data, accumulation = (
        deepcopy(trainer.model),
        trainer.train_loader.dataset,
        trainer.config.train.accumulation,
    )
    batches = list(trainer.train_loader)[: 2 * accumulation]
    left = iter(batches)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(2):
        trainer.train_step(left)
    steps = [batches[:accumulation], batches[accumulation:]]
    for name, expected in on_paper(model, steps, data.mean, data.std, **how).items():
        got, moved = trainer.model.get_parameter(name).detach(), (expected - start[name]).norm()
        assert (got - expected).norm() <= 1e-3 * moved + 1e-6, name


def test_gradients_of_fp16_are_clipped_at_their_own_size():
    """Not at that of the scaled loss, which is 256 times as large."""
    norms, moves = [], []
    for overrides in (
        (),
        ("train.precision=fp16",),
        ("train.precision=fp16", "optim.clip_grad=0.2"),
    ):
        trainer = small_trainer(*STEADY, "optim.weight_decay=0", "optim.momentum=0", *overrides)
        trainer.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, enabled=trainer.scaler.is_enabled()
        )
        trainer.set_train_mode()
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train_step(iter(trainer.train_loader))
        norms.append(trainer.gradient_norm.item())
        moves.append(
            sum(
                (p - q).square().sum()
                for p, q in zip(trainer.model.parameters(), start, strict=True)
            ).item()
            ** 0.5
        )
    assert norms == pytest.approx([norms[0]] * 3, rel=0.05)
    assert moves == pytest.approx([0.1 * norms[0], 0.1 * norms[0], 0.1 * 0.2], rel=0.05)


def test_the_moving_average_is_that_of_the_weights():
    """From the second step on: the initial weights have no part in it."""
    trainer = small_trainer(*STEADY, "train.ema_decay=0.75")
    trainer.set_train_mode()
    expected, batches = None, iter(trainer.train_loader)
    for step in range(4):
        trainer.train_step(batches)
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        expected = (
            weights
            if step < 2
            else [0.75 * a + 0.25 * w for a, w in zip(expected, weights, strict=True)]
        )
    for got, value, weight in zip(trainer.ema.module.parameters(), expected, weights, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
        assert weight.dim() < 2 or not torch.equal(got, weight)


@pytest.mark.parametrize("key", ["drop_rate", "drop_path_rate"])
def test_what_is_dropped_is_dropped_in_training_alone(key):
    for rate in (0, 0.5):
        model = small_trainer(f"model.{key}={rate}").model
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for module in model.modules():  # timm's last ones in a block start at zero
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.ones_(module.weight)
        for training in (True, False):
            model.train(training)
            assert torch.equal(model(images), model(images)) == (not (rate and training))


def spoil(monkeypatch, steps):
    """The loss of these steps is NaN, and so is all that the network saw."""
    loss, count = Classification.loss, 0

    def spoilt(self, model, batch):
        nonlocal count
        normalize = self.normalize
        if count in steps:
            self.normalize = lambda images: normalize(images) * float("nan")
        result = loss(self, model, batch)
        self.normalize = normalize
        count += 1
        return result

    monkeypatch.setattr(Classification, "loss", spoilt)


def test_a_step_that_is_not_finite_is_skipped(monkeypatch, tmp_path, caplog):
    spoil(monkeypatch, {3, 4, 9})
    assert run_here(monkeypatch, tmp_path, "train.max_bad_steps=2", "data.workers=0") == 0
    state = last_state(tmp_path)
    assert state["skipped"] == 3
    assert state["bad_steps"] == 0
    assert all(value.isfinite().all() for value in state["model"].values())
    assert (
        "step 4: loss or gradient is not finite, step skipped (2 in a row, 2 allowed)"
        in caplog.text
    )
    assert all(line["loss"] == line["loss"] for line in metric_lines(tmp_path))


def test_too_many_of_them_stop_the_run(monkeypatch, tmp_path, capsys):
    spoil(monkeypatch, set(range(8, 100)))
    assert run_here(monkeypatch, tmp_path, "train.max_bad_steps=2", "data.workers=0") == 1
    said = capsys.readouterr().err
    assert "not finite in 3 steps in a row, up to step 10" in said
    assert "step-00000006.pt" in said


@pytest.mark.parametrize("reaction", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written(monkeypatch, tmp_path, capsys, caplog, reaction):
    from dkcls.engine import checkpoint

    write = checkpoint.write

    def full(path, state):
        if state["step"] == 6:
            raise OSError(28, "No space left on device")
        write(path, state)

    monkeypatch.setattr(checkpoint, "write", full)
    overrides = ("data.workers=0", "train.checkpoint_every=5", f"train.on_save_error={reaction}")
    code = run_here(monkeypatch, tmp_path, *overrides)
    if reaction == "stop":
        assert code == 1
        assert "step 6 could not be written (the disk is full)" in capsys.readouterr().err
        assert last_state(tmp_path)["step"] == 5
    else:
        assert code == 0
        assert "training goes on" in caplog.text
        assert last_state(tmp_path)["step"] == 12


def test_pretrained_weights(monkeypatch, tmp_path, capsys):
    """Load a checkpoint into the same network and a rigid one into DK, but none into another."""
    assert (
        run_here(
            monkeypatch, tmp_path, *FEW, "name=rigid", "model.spatial=rigid", "schedule.epochs=1"
        )
        == 0
    )
    weights = "model.pretrained=runs/rigid/last.pt"
    assert (
        run_here(
            monkeypatch, tmp_path, *FEW, "name=dk", weights, "schedule.epochs=1", "optim.lr=1e-9"
        )
        == 0
    )
    rigid, dk = (metric_lines(tmp_path, name)[-1] for name in ("rigid", "dk"))
    assert dk["loss"] != rigid["loss"]  # BN's running averages have moved on
    assert (
        run_here(
            monkeypatch,
            tmp_path,
            *FEW,
            "name=again",
            "model.pretrained=runs/dk/best.pt",
            "data.options.num_classes=5",
        )
        == 0
    )
    capsys.readouterr()
    assert (
        run_here(monkeypatch, tmp_path, *FEW, "name=other", "model.name=mobilenetv2_dw", weights)
        == 1
    )
    assert "model.pretrained=runs/rigid/last.pt: " in capsys.readouterr().err
