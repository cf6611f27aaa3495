"""What the commands share: errors as one sentence, exit codes, and log lines."""

import logging
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dkcls.config import valid_keys
from dkcls.engine.distributed import launched_by_torchrun
from dkcls.engine.errors import INTERRUPTED, Interrupted, UserError


def run(main: Callable[[], object]) -> int:
    """Runs a Hydra main. Returns 0; 1 for an error; 75 if asked to stop, so that it can go on; 130 for a second Ctrl-C."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints and exits itself
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        if launched_by_torchrun() and {"-m", "--multirun"} & set(sys.argv[1:]):
            raise UserError(
                "a sweep (-m) does not run under torchrun; start torchrun once for each value: "
                "for s in 3 4 5 9; do torchrun ... train.py model.scope=$s; done"
            )
        main()
    except (UserError, ValueError) as error:
        return _fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(str(error)))
    except Interrupted as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(sentence: str) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {sentence}", file=sys.stderr)
    return 1


def explain(message: str) -> str:
    """Hydra's and omegaconf's messages as one sentence, with the nearest valid key to one that there is not."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    key = re.search(r"(?:override|value for key|interpolation key) '([\w.]+)'", message)
    if key is None or "not in" not in message:
        return "; ".join(lines)
    near = get_close_matches(key[1], valid_keys(), 1, 0.5) or get_close_matches(key[1].split(".")[-1], valid_keys(), 1, 0.3)
    return f"there is no key {key[1]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
