"""Commands: from a command line to an exit code.

0; 1 for an error, which is told in one sentence; 75 if asked to stop, so that it can be resumed;
130 for a second Ctrl-C.
"""

import atexit
import gc
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from dkcls.cli import help
from dkcls.cli.command_line import check_words, take_plugins
from dkcls.config import Config, unknown_key
from dkcls.errors import INTERRUPTED, DataError, Interrupted, RankError, UserError
from dkcls.words import near

T = TypeVar("T")
EXTRAS = {  # package -> the extra of pyproject.toml that installs it
    **dict.fromkeys(("matplotlib", "sklearn", "scipy"), "analysis"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "pycocotools": "detect",
}
CONFIG_LIBRARIES = ("hydra", "omegaconf", "yaml")


COMMANDS = {
    "train": "train a network, or resume its training",
    "eval": "evaluate checkpoints and exports",
    "predict": "name what is in images, or draw what a detector finds",
    "export": "write a network as safetensors, ONNX, torch.export or AOTInductor",
    "report": "write a page or a table about finished runs",
    "erf": "draw effective receptive fields over images",
    "check-data": "decode every image of a data set, and name bad files",
    "pack": "pack a folder of images into tar shards",
    "bench": "time operators and networks on this machine, as ratios",
    "list": "print layers, data sets, tasks, loggers, models or experiments",
}
ABOUT = """Image classification with deformable kernels.

  dkcls COMMAND KEY=VALUE ...
  dkcls COMMAND --help
  dkcls --plugin MODULE COMMAND ...    with layers, data sets, tasks and loggers of your own
  dkcls --version                      what a bug report needs
"""


def main() -> int:
    """Run `dkcls COMMAND ...`, whose words are in sys.argv; return the exit code."""
    with errors():
        words = take_plugins(sys.argv[1:])
        command = words[0] if words else "--help"
        if command in ("-h", "--help"):
            print("\n".join([ABOUT, *help.rows(COMMANDS.items())]))
            return 0
        if command == "--version":
            from dkcls.cli.version import version_lines  # here, because it asks torch for devices

            print("\n".join(version_lines()))
            return 0
        if command not in COMMANDS:
            raise UserError(
                f"there is no command {command!r}{near(command, COMMANDS)}; dkcls --help lists them"
            )
        sys.argv[1:] = words[1:]
        with importing_torch():
            # A module `list` would stand in the way of Python's.
            name = {"list": "names"}.get(command, command.replace("-", "_"))
            module = import_module(f"dkcls.cli.{name}")
        return module.main()
    return 0


def run(main: Callable[[], object], kind: type = Config) -> int:
    """Run a command and return the exit code; `kind` has the keys that it takes."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints and exits itself
    log_to_stderr()
    with errors(kind):
        main()
        sys.stdout.flush()
    return 0


def log_to_stderr() -> None:
    """Print the log's lines with the time of day."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def script(kind: type[T], main: Callable[[T], int | None], about: str | None) -> int:
    """Run a script and return the exit code: what `main` returns, else 0; 1 for an error.

    Its arguments are KEY=VALUE in Hydra's grammar, the fields of the dataclass `kind`, lists as
    [a,b]; and --plugin MODULE. `about` is the script's docstring, for --help.
    """
    log_to_stderr()
    with errors(kind):
        words = take_plugins(sys.argv[1:])
        if {"--help", "-h"} & set(words):
            print("\n".join([(about or "").strip(), "\nKeys: KEY=VALUE", *help.key_lines(kind)]))
            return 0
        for word in words:
            if "=" not in word or not word[0].isalpha():
                raise UserError(f"arguments are KEY=VALUE, got {word!r}; --help lists the keys")
        check_words(words, kind)
        return main(parse(words, kind)) or 0
    return 0


def parse(words: Sequence[str], kind: type[T]) -> T:
    """Return the dataclass with the values that KEY=VALUE words give its fields."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf  # here, because --help needs none of it

    from dkcls.config.convert import to_config

    config = OmegaConf.structured(kind)
    for word in words:
        try:
            [override] = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{word} cannot be read: {reason}") from error
        if override.is_sweep_override():
            raise UserError(f"a list is written [a,b], got {override.input_line}")
        OmegaConf.update(config, override.key_or_group, override.value())
    for name in OmegaConf.missing_keys(config):
        raise UserError(f"{name}=... is needed; --help lists the keys")
    return to_config(config)


@contextmanager
def errors(kind: type = Config) -> Iterator[None]:
    """Print what went wrong as one sentence, and exit. `kind` has the valid keys.

    Inside a Hydra job too: Hydra would add to the errors that it sees.
    """
    try:
        yield
    except Interrupted as stop:
        if is_main_rank():
            print(f"{stop}; the same command resumes it from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the output has read enough
        with suppress(OSError, ValueError):  # or Python would complain of it once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (RankError, DataError) as error:
        sys.exit(_fail(str(error), of_one_rank=True))
    except Exception as error:
        if type(error).__module__.split(".")[0] in CONFIG_LIBRARIES:
            sys.exit(_fail(explain(error, kind)))
        if isinstance(error, ModuleNotFoundError) and (sentence := missing_extra(error)):
            sys.exit(_fail(sentence))
        if isinstance(error, (UserError, ValueError, OSError)):
            sys.exit(_fail(one_line(str(error))))
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch and what comes with it, in two thirds of the time: without garbage collections.

    Imports make hundreds of thousands of objects and hardly any garbage, but every collection looks
    at all that are there by then. They stay, so later collections leave them out.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton's bindings report what is there as leaks
        gc.enable()


def _fail(sentence: str, of_one_rank: bool = False) -> int:
    """Print an error: once where all ranks know it, else with the rank."""
    if of_one_rank and launched_by_torchrun():
        print(f"error: rank {os.environ['RANK']}: {sentence}", file=sys.stderr)
    elif is_main_rank():
        print(f"error: {sentence}", file=sys.stderr)
    return 1


def missing_extra(error: ModuleNotFoundError) -> str:
    """Return which extra has the package that is missing; "" if none of ours has."""
    package = (error.name or "").split(".")[0]
    extra = EXTRAS.get(package)
    return f"this needs {package}: pip install 'dkcls[{extra}]'" if extra else ""


def program(command: str) -> str:
    """Return how a command is called where this one was: by its script in a clone, or by dkcls."""
    in_clone = Path(sys.argv[0]).name in ("train.py", "eval.py")
    return f"python {command}.py" if in_clone else f"dkcls {command}"


def is_main_rank() -> bool:
    """Return whether this process is torchrun's first, or was not started by it."""
    return os.environ.get("RANK", "0") == "0"


def launched_by_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def explain(error: BaseException, kind: type) -> str:
    """Return an error of Hydra's or omegaconf's as one sentence, with the nearest valid name."""
    message = str(error) or type(error).__name__
    if missing := re.match(r"Could not override '([\w.]+)'", message):
        return unknown_key(missing[1], kind)
    if missing := re.search(r"Could not find '(\w+)/(\w+)'", message):
        options = re.findall(r"^\t(\S+)$", message, re.MULTILINE)
        near = get_close_matches(missing[2], options, 3, 0.3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        return f"there is no {missing[1]} {missing[2]!r}{hint}"
    return one_line(f"{message}\n{error.__cause__ or ''}")


def one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
