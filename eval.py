"""Evaluate checkpoints: `python eval.py --help` lists what can be said."""

import sys

from dkcls.cli.eval import main

if __name__ == "__main__":
    sys.exit(main())
