"""Pack an image folder into tar shards with an index, which `data.name=tar` reads.

    python scripts/pack_tar.py root=/data/imagenet output=/data/imagenet-tar
    python scripts/pack_tar.py root=/data/imagenet output=/data/imagenet-tar splits=[val] shard=5000

The folder is <root>/<split>/<class>/.... Each shard is read back and compared before it gets its
name. Running the same command again resumes an interrupted run.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING
from tqdm import tqdm

from dkcls import cli
from dkcls.data.dataset import SPLITS
from dkcls.data.sets.folder import ImageFolder
from dkcls.data.sets.tar import pack_split
from dkcls.data.transforms import EvalTransform
from dkcls.errors import UserError


@dataclass
class Arguments:
    root: Path = MISSING  # holds train/ and val/, with one folder per class
    output: Path = MISSING  # where the shards go
    splits: list[str] = field(default_factory=list)  # none: those that there are
    shard: int = 10_000  # images per shard


def main(arguments: Arguments) -> None:
    splits = arguments.splits or [split for split in SPLITS if (arguments.root / split).is_dir()]
    if not splits:
        raise UserError(f"{arguments.root} must hold the folders train and val")
    for split in splits:
        source = ImageFolder(arguments.root, split, EvalTransform(224), 224)
        with tqdm(total=len(source), unit=" images", desc=split, smoothing=0.1) as bar:
            shards = pack_split(source, split, arguments.output, arguments.shard, bar.update)
        print(f"{split}: {len(source)} images in {shards} shards, read back and compared")


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
