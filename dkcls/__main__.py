"""`python -m dkcls COMMAND ...`, for torchrun: the same as `dkcls COMMAND ...`."""

import sys

from dkcls.cli import main

if __name__ == "__main__":
    sys.exit(main())
