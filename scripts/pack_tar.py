"""Packs an image folder, <root>/<split>/<class>/..., into tar shards with an index, which `data.name=tar` reads.

    python scripts/pack_tar.py root=/data/imagenet output=/data/imagenet-tar
    python scripts/pack_tar.py root=/data/imagenet output=/data/imagenet-tar splits=val shard=5000

Each shard is read back and compared before it gets its name. A run that was interrupted goes on where it stopped.
"""

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm

from dkcls.data.base import SPLITS
from dkcls.data.image_folder import ImageFolder
from dkcls.data.pack import pack_split
from dkcls.data.transforms import EvalTransform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="holds train/ and val/, with one folder per class")
    parser.add_argument("--output", type=Path, required=True, help="where the shards go")
    parser.add_argument("--splits", help="separated by commas; those that there are if not given")
    parser.add_argument("--shard", type=int, default=10_000, help="images per shard (10000)")
    # root=... is as good as --root=...
    arguments = parser.parse_args([re.sub(r"^(\w+=)", r"--\1", word) for word in sys.argv[1:]])
    splits = arguments.splits.split(",") if arguments.splits else [s for s in SPLITS if (arguments.root / s).is_dir()]
    if not splits:
        sys.exit(f"pack_tar: {arguments.root} must hold the folders train and val")
    for split in splits:
        try:
            source = ImageFolder(arguments.root, split, EvalTransform(224), 224)
            with tqdm(total=len(source), unit=" images", desc=split, smoothing=0.1) as bar:
                shards = pack_split(source, split, arguments.output, arguments.shard, bar.update)
        except (OSError, ValueError) as error:
            sys.exit(f"pack_tar: {error}")
        print(f"{split}: {len(source)} images in {shards} shards, read back and compared")


if __name__ == "__main__":
    main()
