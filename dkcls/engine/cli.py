"""What the commands share: errors as one sentence, exit codes, and log lines."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, TypeVar

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dkcls.config import Config, flat, to_config, unknown_key, valid_keys
from dkcls.engine.distributed import launched_by_torchrun
from dkcls.errors import INTERRUPTED, DataError, Interrupted, RankError, UserError

T = TypeVar("T")
LOG_PARTS = ("handlers", "formatters", "filters", "loggers")


def run(main: Callable[[], object], kind: type = Config) -> int:
    """Run a Hydra main and return the exit code.

    0; 1 for an error; 75 if asked to stop, so that it can be resumed; 130 for a second Ctrl-C.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints and exits itself
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    with errors(kind), hydra_runs_no_code():
        if launched_by_torchrun() and {"-m", "--multirun"} & set(sys.argv[1:]):
            raise UserError(
                "a sweep (-m) does not run under torchrun; start torchrun once for each value: "
                "for s in 3 4 5 9; do torchrun ... train.py model.scope=$s; done"
            )
        try:
            main()
        except (UserError, HydraException, OmegaConfBaseException):
            raise
        # Not from the run, which has `errors` of its own: from the config's files and overrides.
        except Exception as error:
            raise UserError(f"the config cannot be composed: {explain(error, kind)}") from error
    return 0


def script(kind: type[T], main: Callable[[T], int | None], about: str | None) -> int:
    """Run a script and return the exit code: what `main` returns, else 0; 1 for an error.

    Its arguments are KEY=VALUE or --KEY=VALUE, the fields of the dataclass `kind`, lists as [a,b].
    `about` is the script's docstring, for --help.
    """
    words = [word.removeprefix("--") for word in sys.argv[1:]]
    if {"help", "-h"} & set(words):
        print(f"{(about or '').strip()}\n\nKeys:\n  " + "\n  ".join(_describe(kind)))
        return 0
    with errors(kind):
        for word in words:
            if "=" not in word:
                raise UserError(f"arguments are KEY=VALUE, got {word!r}; --help lists the keys")
            if (key := word.split("=")[0]) not in valid_keys(kind):
                raise UserError(unknown_key(key, kind))
        config = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(words))
        for name in OmegaConf.missing_keys(config):
            raise UserError(f"{name}=... is needed; --help lists the keys")
        return main(to_config(config)) or 0  # type: ignore[arg-type]


def _describe(kind: type) -> Iterator[str]:
    """The keys with their defaults."""
    for name, value in flat(asdict(kind())):
        yield f"{name}=" + ("..." if value == MISSING else "" if value is None else str(value))


@contextmanager
def errors(kind: type = Config) -> Iterator[None]:
    """Print what went wrong as one sentence, and exit. `kind` has the valid keys.

    Inside a Hydra job too: Hydra would add to the errors that it sees.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_fail(explain(error, kind)))
    except (UserError, ValueError, OSError, yaml.YAMLError) as error:
        sys.exit(_fail(one_line(str(error))))
    except (RankError, DataError) as error:
        sys.exit(_fail(str(error), of_one_rank=True))
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"{stop}; the same command goes on from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _fail(sentence: str, of_one_rank: bool = False) -> int:
    """What all ranks know, rank 0 says."""
    rank = os.environ.get("RANK", "0")
    if of_one_rank and launched_by_torchrun():
        print(f"error: rank {rank}: {sentence}", file=sys.stderr)
    elif rank == "0":
        print(f"error: {sentence}", file=sys.stderr)
    return 1


def explain(error: BaseException, kind: type) -> str:
    """Return an error of Hydra's or omegaconf's as one sentence, with the nearest valid name."""
    message = str(error) or type(error).__name__
    if missing := re.match(r"Could not override '([\w.]+)'", message):
        return unknown_key(missing[1], kind)
    if missing := re.search(r"Could not find '(\w+)/(\w+)'", message):
        options = re.findall(r"^\t(\S+)$", message, re.MULTILINE)
        near = get_close_matches(missing[2], options, 3, 0.3)
        return f"there is no {missing[1]} {missing[2]!r}" + (
            f"; near it: {', '.join(near)}" if near else ""
        )
    return one_line(f"{message}\n{error.__cause__ or ''}")


def one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


@contextmanager
def hydra_runs_no_code() -> Iterator[None]:
    """Let a config name nothing for Hydra to call but Hydra's own launchers and sweepers."""
    load = ConfigLoaderImpl.load_configuration

    def load_checked(*args: Any, **kwargs: Any) -> DictConfig:
        config = load(*args, **kwargs)
        refuse_code(OmegaConf.to_container(config.hydra, resolve=False))  # type: ignore[arg-type]
        return config

    setattr(ConfigLoaderImpl, "load_configuration", load_checked)  # noqa: B010
    try:
        yield
    finally:
        setattr(ConfigLoaderImpl, "load_configuration", load)  # noqa: B010


def refuse_code(hydra: dict[str, Any]) -> None:
    """Of Hydra's own config."""
    for key in ("launcher", "sweeper"):
        part = dict(hydra[key])
        target = str(part.pop("_target_", ""))
        if not target.startswith(
            ("hydra._internal.core_plugins.", "hydra_plugins.")
        ) or "_target_" in str(part):
            raise UserError(
                f"hydra.{key} must be one of Hydra's own: a config may not name code to run"
            )
    if hydra.get("callbacks") or any(
        hydra[key].get(part) for key in ("job_logging", "hydra_logging") for part in LOG_PARTS
    ):
        raise UserError(
            "hydra.callbacks and Hydra's logging must be left alone: "
            "a config may not name code to run"
        )
