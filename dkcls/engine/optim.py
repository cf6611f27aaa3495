"""The optimiser's parameter groups and the learning rate of every step."""

from collections.abc import Sequence
from typing import Any

from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from dkcls.config import Config, OptimConfig, ScheduleConfig
from dkcls.errors import UserError
from dkcls.layers import offset_generators

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


STEM_STRIDE = 4  # of the first stage's feature map


def freeze_(model: nn.Module, names: str | Sequence[str] | None) -> None:
    """Keep what is under these names as it is.

    The normalisation there does not gather statistics either: `Trainer.set_train_mode`.
    `names`: "stem" with the first stage, "backbone" for all but the classifier, or a list of these
    and of the names of modules or parameters.
    """
    for name in [names] if isinstance(names, str) else names or []:
        if name == "stem":
            found = stem_parameters(model)
        elif name == "backbone":
            head = _ids(_classifier(model))
            found = [p for p in model.parameters() if id(p) not in head]
        else:
            found = [p for key, p in model.named_parameters() if f"{key}.".startswith(f"{name}.")]
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            raise UserError(
                f"model.freeze: there is nothing to train under {name!r}; "
                f"the network has {children}"
            )
        for p in found:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model.freeze={names} leaves nothing to train")


def stem_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters up to the end of the first stage, of a network or a detector's body.

    timm says where that is: the first feature map with a stride of 4 or more.
    """
    body = getattr(model, "body", model)
    info = getattr(body, "feature_info", None)
    maps = getattr(info, "info", info)  # a list, or timm's object around one
    if not maps:
        raise UserError("model.freeze=stem needs a network that tells timm of its feature maps")
    first = next((each for each in maps if each["reduction"] >= STEM_STRIDE), maps[-1])
    modules = dict(getattr(body, "model", body).named_modules())
    stage = modules.get(first["module"]) or modules[first["module"].replace(".", "_")]
    inside, parameters = _ids(stage), list(body.parameters())
    last = max(i for i, p in enumerate(parameters) if id(p) in inside)
    return parameters[: last + 1]


def parameter_groups(model: nn.Module, config: OptimConfig, lr: float) -> list[dict]:
    """Return the groups: weights, scale and shift of normalisation, offset generators.

    Normalisation has no weight decay, offset generators have a learning rate of their own. With a
    `backbone_lr` all of them are multiplied by it, and the classifier is a group of its own.
    """
    generators = {
        id(p) for _, generator in offset_generators(model) for p in generator.parameters()
    }
    norms = {
        id(p)
        for module in model.modules()
        if isinstance(module, NORMS)
        for p in module.parameters(recurse=False)
    }
    head = _ids(_classifier(model)) if config.backbone_lr != 1 else set()
    named: dict[str, list[nn.Parameter]] = {
        "weights": [],
        "norms": [],
        "generators": [],
        "classifier": [],
    }
    for p in model.parameters():
        kind = "generators" if id(p) in generators else "norms" if id(p) in norms else "weights"
        kind = "classifier" if id(p) in head else kind
        if p.requires_grad:
            named[kind].append(p)
    rate = lr * config.backbone_lr
    options = {
        "weights": {"lr": rate, "weight_decay": config.weight_decay},
        "norms": {"lr": rate, "weight_decay": config.weight_decay if config.decay_norm else 0.0},
        "generators": {"lr": rate * config.generator_lr, "weight_decay": config.weight_decay},
        "classifier": {"lr": lr, "weight_decay": config.weight_decay},
    }
    return [
        {"name": name, "params": params, **options[name]}
        for name, params in named.items()
        if params
    ]


def make_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> SGD:
    return SGD(
        parameter_groups(model, config, lr),
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
    )


def make_schedule(optimizer: Optimizer, config: ScheduleConfig, steps_per_epoch: int) -> Scheduler:
    """Return the schedule, whose `step_update(t)` sets the learning rate of step t.

    That is lr*t/w in the w warm-up steps, then lr/2*(1 + cos(pi*(t-w)/(T-w))) with T steps in all;
    or lr, and after each drop `gamma` times what it was.
    """
    (total, warmup), drops = config.steps(steps_per_epoch), config.drops(steps_per_epoch)
    common: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": 0.0, "t_in_epochs": False}
    if drops is None:
        return CosineLRScheduler(
            optimizer, t_initial=total - warmup, lr_min=0.0, warmup_prefix=True, **common
        )
    shifted = [step + 1 for step in drops]  # timm's come one step early
    return MultiStepLRScheduler(optimizer, shifted, config.gamma, warmup_prefix=False, **common)


def milestones(
    schedule: Scheduler, config: Config, steps_per_epoch: int
) -> list[tuple[str, int, float]]:
    """Return (what, step, learning rate) along the schedule, as the schedule itself sets it."""
    total, warmup = config.schedule.steps(steps_per_epoch)
    drops = config.schedule.drops(steps_per_epoch)
    steps = [("start", 0), ("end of warm-up", warmup)]
    steps += [("half", (total + warmup) // 2)] if drops is None else []
    steps += [("drop", step) for step in drops or []] + [("end", total)]
    return [(what, step, config.learning_rate * _share(schedule, step)) for what, step in steps]


def _share(schedule: Scheduler, step: int) -> float:
    """Return the learning rate of a step over the peak."""
    schedule.step_update(step)
    group = max(schedule.optimizer.param_groups, key=lambda group: group["initial_lr"])
    return group["lr"] / group["initial_lr"]


def _classifier(model: nn.Module) -> nn.Module:
    return model.get_classifier()  # type: ignore[operator]


def _ids(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}
