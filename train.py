"""Train a network: `python train.py --help` lists what can be said."""

import sys

from dkcls.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
