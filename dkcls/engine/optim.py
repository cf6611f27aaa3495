"""The optimiser's parameter groups and the learning rate of every step."""

from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from dkcls.config import OptimConfig
from dkcls.layers import offset_generators

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


def parameter_groups(model: nn.Module, config: OptimConfig, lr: float) -> list[dict]:
    """Weights; scale and shift of normalisation, without decay; offset generators, at their own learning rate."""
    generators = {id(p) for _, generator in offset_generators(model) for p in generator.parameters()}
    norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters(recurse=False)}
    named: dict[str, list[nn.Parameter]] = {"weights": [], "norms": [], "generators": []}
    for p in model.parameters():
        kind = "generators" if id(p) in generators else "norms" if id(p) in norms else "weights"
        if p.requires_grad:
            named[kind].append(p)
    options = {
        "weights": {"lr": lr, "weight_decay": config.weight_decay},
        "norms": {"lr": lr, "weight_decay": config.weight_decay if config.decay_norm else 0.0},
        "generators": {"lr": lr * config.generator_lr, "weight_decay": config.weight_decay},
    }
    return [{"name": name, "params": params, **options[name]} for name, params in named.items() if params]


def make_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> SGD:
    return SGD(parameter_groups(model, config, lr), lr=lr, momentum=config.momentum, nesterov=config.nesterov)


def make_schedule(optimizer: Optimizer, steps: int, warmup_steps: int) -> CosineLRScheduler:
    """`step_update(t)` sets lr*t/w in the w warm-up steps, then lr/2*(1 + cos(pi*(t-w)/(T-w))), T = `steps`."""
    return CosineLRScheduler(
        optimizer,
        t_initial=steps - warmup_steps,
        lr_min=0.0,
        warmup_t=warmup_steps,
        warmup_lr_init=0.0,
        warmup_prefix=True,
        t_in_epochs=False,
    )
