"""Pack an image folder into tar shards with an index, which `data=tar` reads.

  dkcls pack root=/data/imagenet output=/data/imagenet-tar
  dkcls pack root=/data/imagenet output=/data/imagenet-tar splits=[val] shard=5000

The folder is <root>/<split>/<class>/.... Each shard is read back and compared before it gets its
name. Running the same command again writes the shards that are missing or whose files have changed.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from dkcls import cli
from dkcls.cli.arguments import REQUIRED
from dkcls.config import DataConfig
from dkcls.config.checks import check_least
from dkcls.errors import UserError


@dataclass
class Arguments:
    """A folder, and where its shards go."""

    root: Path = REQUIRED  # the folder with train/ and val/, with one folder per class
    output: Path = REQUIRED  # the folder for the shards
    splits: list[str] = field(default_factory=list)  # none: those that there are
    shard: int = 10_000  # images per shard
    max_pixels: int = DataConfig.max_pixels  # a file that is larger than such an image is refused

    def __post_init__(self) -> None:
        check_least("shard", self.shard, 1)
        check_least("max_pixels", self.max_pixels, 1)


def main() -> int:
    return cli.script(Arguments, pack, __doc__)


def pack(arguments: Arguments) -> None:
    with cli.importing_torch():
        from dkcls.data.dataset import SPLITS
        from dkcls.data.sets.folder import ImageFolder
        from dkcls.data.sets.tar import pack_split
        from dkcls.data.transforms import EvalTransform
    splits = arguments.splits or [split for split in SPLITS if (arguments.root / split).is_dir()]
    if not splits:
        raise UserError(f"{arguments.root} must hold the folders train and val")
    for split in splits:
        source = ImageFolder(arguments.root, split, EvalTransform(224), 224)
        source.max_pixels = arguments.max_pixels
        with tqdm(total=len(source), unit=" images", desc=split, smoothing=0.1) as bar:
            done = pack_split(source, split, arguments.output, arguments.shard, bar.update)
        print(
            f"{split}: {len(source)} images in {done.shards} shards; {done.written} written, read "
            f"back and compared, {done.shards - done.written} there already with the same files"
        )
