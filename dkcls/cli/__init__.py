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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import TypeVar

from dkcls.cli.command_line import check_words, take_plugins
from dkcls.cli.help import key_lines
from dkcls.config import Config, unknown_key
from dkcls.errors import INTERRUPTED, DataError, Interrupted, RankError, UserError

T = TypeVar("T")
CONFIG_LIBRARIES = ("hydra", "omegaconf", "yaml")


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

    Its arguments are KEY=VALUE or --KEY=VALUE, the fields of the dataclass `kind`, lists as [a,b];
    and --plugin MODULE. `about` is the script's docstring, for --help.
    """
    with errors(kind):
        words = take_plugins(sys.argv[1:])
        words = [word.removeprefix("--") for word in words]
        if {"help", "-h"} & set(words):
            print("\n".join([(about or "").strip(), "\nKeys:", *key_lines(kind)]))
            return 0
        for word in words:
            if "=" not in word:
                raise UserError(f"arguments are KEY=VALUE, got {word!r}; --help lists the keys")
        check_words(words, kind)
        from omegaconf import OmegaConf  # here, because --help needs none of it

        from dkcls.config.convert import to_config

        config = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(words))
        for name in OmegaConf.missing_keys(config):
            raise UserError(f"{name}=... is needed; --help lists the keys")
        return main(to_config(config)) or 0  # type: ignore[arg-type]
    return 0


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
