"""Whether a checkpoint's state is one that this run could have written.

A hash tells damage. It does not tell a state that somebody, or another program, made up.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dkcls.config.checks import PRECISIONS, check, check_choice, is_number, short

if TYPE_CHECKING:
    from dkcls.engine.trainer import Trainer


KEYS = (
    *("step", "evaluation_due", "precision", "bad_steps", "skipped", "result", "best", "sums"),
    "bad_files",
)


def check_state(state: Mapping[str, Any], trainer: "Trainer") -> None:
    """Raise ValueError, with the key, for the first thing that the trainer would not write."""
    own = trainer.learned()
    if missing := [key for key in (*KEYS, *own) if key not in state]:
        raise ValueError(f"{missing[0]} is missing")
    step, total = state["step"], trainer.total_steps
    _check_whole("step", step, total)
    for key in ("bad_steps", "skipped"):
        _check_whole(key, state[key], step)
    due = state["evaluation_due"]
    check("evaluation_due", due, type(due) is bool and (step > 0 or not due), "true or false")
    check_choice("precision", state["precision"], PRECISIONS)
    for key in ("result", "best"):
        values = state[key]
        good = isinstance(values, dict) and all(type(v) in (int, float) for v in values.values())
        check(key, values, good and all(type(k) is str for k in values), "metrics by their names")
        needed = {trainer.task.best, *(("step", "epoch") if key == "best" else ())}
        evaluated = values or (step == total and not due)
        good = not evaluated or needed <= values.keys()
        check(key, values, good, f"what an evaluation found, {', '.join(sorted(needed))} among it")
    sums = state["sums"]
    good = _is_list(sums) and all(
        _is_list(row) and len(row) == len(trainer.sums) and all(map(is_number, row)) for row in sums
    )
    check("sums", sums, good and len(sums) > 0, f"rows of {len(trainer.sums)} numbers")
    _check_bad_files(state["bad_files"], len(trainer.loaders))
    check_tensors("model", state["model"], own["model"])
    check(
        "ema", type(state["ema"]), (state["ema"] is None) == (own["ema"] is None), "as configured"
    )
    if own["ema"] is not None:
        check_tensors("ema", state["ema"], own["ema"])
    _check_optimizer(state["optimizer"], own["optimizer"], _trained(trainer))
    scaler = state["scaler"]
    good = isinstance(scaler, dict) and own["scaler"].keys() <= scaler.keys()
    good = good and all(is_number(value) and value >= 0 for value in scaler.values())
    check("scaler", scaler, good, f"numbers of {', '.join(own['scaler']) or 'a scaler'}")


def check_tensors(key: str, found: Any, own: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors have the names, shapes and types of the network's own.

    None may be NaN, and none but a mask infinite.
    """
    check(key, type(found), isinstance(found, dict), "a dictionary of tensors")
    if other := sorted(map(str, found.keys() ^ own.keys())):
        raise ValueError(f"{key} must have the network's tensors, it differs in {short(other[0])}")
    for name, tensor in own.items():
        _check_tensor(f"{key}.{name}", found[name], tensor)


def _check_tensor(key: str, found: Any, own: Tensor) -> None:
    good = isinstance(found, Tensor) and (found.shape, found.dtype) == (own.shape, own.dtype)
    got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found)
    check(key, got, good, f"{own.dtype} {list(own.shape)}")
    finite = not found.is_floating_point() or bool(found.isfinite().all())
    masked = not finite and bool(own.isinf().any() and not found.isnan().any())
    check(key, "NaN or infinity", finite or masked, "finite")


def _check_whole(key: str, value: Any, most: int) -> None:
    good = type(value) is int and 0 <= value <= most
    check(key, value, good, f"a whole number from 0 to {most}")


def _check_bad_files(found: Any, loaders: int) -> None:
    good = _is_list(found) and all(
        _is_list(rank) and len(rank) == loaders and all(map(_is_bad_files, rank)) for rank in found
    )
    check("bad_files", found, good, "a list per rank, of what its loaders found")


def _is_bad_files(state: Any) -> bool:
    if not isinstance(state, dict) or state.keys() != {"messages", "in_epoch", "most"}:
        return False
    messages, in_epoch = state["messages"], state["in_epoch"]
    good = isinstance(messages, dict) and all(type(text) is str for text in messages.values())
    good = good and _is_list(in_epoch) and type(state["most"]) is int and state["most"] >= 0
    return good and all(type(index) is int for index in (*messages, *in_epoch))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _trained(trainer: "Trainer") -> list[Tensor]:
    return [p for group in trainer.optimizer.param_groups for p in group["params"]]


def _check_optimizer(found: Any, own: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Check the groups, which but for the rate are the config's, and what each weight has."""
    good = isinstance(found, dict) and found.keys() == own.keys()
    good = good and isinstance(found["state"], dict) and _is_list(found["param_groups"])
    check("optimizer", type(found), good, "a state and parameter groups")
    groups = found["param_groups"]
    check("optimizer", len(groups), len(groups) == len(own["param_groups"]), "groups as configured")
    for group, ours in zip(groups, own["param_groups"], strict=True):
        good = isinstance(group, dict) and group.keys() == ours.keys()
        check("optimizer.param_groups", group, good, "a group as configured")
        for key, value in ours.items():
            name = f"optimizer.{ours['name']}.{key}"
            if key == "lr":
                check(name, group[key], is_number(group[key]) and group[key] >= 0, "a number")
            else:
                check(name, group[key], group[key] == value, f"{value!r}, as configured")
    for index, values in found["state"].items():
        good = type(index) is int and 0 <= index < len(parameters) and isinstance(values, dict)
        check("optimizer.state", index, good, f"of one of {len(parameters)} weights")
        for key, value in values.items():
            name = f"optimizer.state.{index}.{short(key)}"
            if key == "step":
                number = value.item() if isinstance(value, Tensor) and not value.dim() else value
                check(name, number, is_number(number), "a number")
            elif value is not None:
                _check_tensor(name, value, parameters[index])
