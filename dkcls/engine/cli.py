"""What the commands share: errors as one sentence, exit codes, and log lines."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dkcls.config import Config, unknown_key
from dkcls.engine.distributed import launched_by_torchrun
from dkcls.engine.errors import INTERRUPTED, Interrupted, UserError


def run(main: Callable[[], object], kind: type = Config) -> int:
    """Runs a Hydra main. Returns 0; 1 for an error; 75 if asked to stop, so that it can go on; 130 for a second Ctrl-C."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints and exits itself
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    with errors(kind):
        if launched_by_torchrun() and {"-m", "--multirun"} & set(sys.argv[1:]):
            raise UserError(
                "a sweep (-m) does not run under torchrun; start torchrun once for each value: "
                "for s in 3 4 5 9; do torchrun ... train.py model.scope=$s; done"
            )
        main()
    return 0


@contextmanager
def errors(kind: type = Config) -> Iterator[None]:
    """Says what went wrong, and exits. Inside a Hydra job too: Hydra would add to what it sees. `kind` has the valid keys."""
    try:
        yield
    except (UserError, ValueError) as error:
        sys.exit(_fail(str(error)))
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_fail(explain(error, kind)))
    except Interrupted as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {sentence}", file=sys.stderr)
    return 1


def explain(error: BaseException, kind: type) -> str:
    """What Hydra and omegaconf say, as one sentence, with what comes nearest to a name that there is not."""
    message = str(error)
    if missing := re.match(r"Could not override '([\w.]+)'", message):
        return unknown_key(missing[1], kind)
    if missing := re.search(r"Could not find '(\w+)/(\w+)'", message):
        options = re.findall(r"^\t(\S+)$", message, re.MULTILINE)
        return f"there is no {missing[1]} {missing[2]!r}; near it: {', '.join(get_close_matches(missing[2], options, 3, 0.3))}"
    parts = [message, str(error.__cause__ or "")]
    return "; ".join(line.strip() for part in parts for line in part.splitlines() if line.strip())
