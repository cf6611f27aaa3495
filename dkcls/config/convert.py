"""Typed configs from dictionaries and from what Hydra composed."""

from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dkcls.config.keys import flat, unknown_key, valid_keys
from dkcls.config.run import Config
from dkcls.config.task import task_config

T = TypeVar("T")


def to_config(composed: DictConfig) -> Any:
    """Return typed objects. ValueError says which key is wrong."""
    kind = OmegaConf.get_type(composed) or Config
    check_keys(OmegaConf.to_container(composed), kind)  # type: ignore[arg-type]
    return OmegaConf.to_object(composed)


def check_keys(values: Mapping[str, Any], kind: type) -> None:
    """Raise ValueError for a key that a config of this kind does not have."""
    valid = set(valid_keys(kind))
    for key, _ in flat(values):
        if key not in valid and key not in getattr(kind, "PARTIAL", {}):
            raise ValueError(unknown_key(key, kind))


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the config that `Config.to_dict` came from, as in a checkpoint."""
    if not isinstance(values, Mapping):
        raise ValueError(f"config must be a dictionary, got {values!r}")
    task = values.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    return merged(Config(task=task_config(str(name))()), values)


def _check_literal(value: Any, key: str) -> None:
    """Raise ValueError for what omegaconf would resolve, such as a variable of the environment."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            _check_literal(each, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_literal(each, key)
    elif isinstance(value, str) and "${" in value:
        raise ValueError(f"{key} must not hold ${{, got {value!r}")


def merged(config: T, values: Mapping[str, Any]) -> T:
    """Return a config with other values for some of its keys. ValueError if they are wrong.

    The values come from a file as well, so they are taken word for word: nothing is resolved.
    """
    check_keys(values, type(config))
    _check_literal(values, "config")
    try:
        schema = OmegaConf.structured(config)
        return OmegaConf.to_object(OmegaConf.merge(schema, dict(values)))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{key}{str(error).splitlines()[0]}") from error
