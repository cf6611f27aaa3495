"""Image folders in ImageNet's layout: root/train/<class>/... and root/val/<class>/...

The list of files is kept in the user's cache folder and is used again for as long as every folder
has the same modification time and the same names in it. Times alone do not tell: in images of
containers and in archives they may be the same for every version of a folder.
"""

import hashlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dkcls.data.dataset import DATASETS, split_names
from dkcls.data.decode import read_plain
from dkcls.data.encoded import EncodedImages
from dkcls.data.file_index import FileIndex
from dkcls.data.transforms import Transform
from dkcls.words import some

log = logging.getLogger(__name__)

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp")
_RULES = 3  # version of the rules for listing: with another number, earlier lists are not used
_THREADS = 8  # most of the time is the file system's


@DATASETS.register("folder")
class ImageFolder(EncodedImages):
    """Images of one split, one folder per class."""

    def __init__(
        self,
        root: str | Path,
        split: str,
        transform: Transform,
        image_size: int,
        *,
        training: bool = False,
        seed: int = 0,
    ):
        super().__init__(transform, image_size, training=training, seed=seed)
        self.folder = find_split(Path(root), split)
        self.index = index_folder(self.folder)
        own = self.index.facts["class_names"]
        train = self.folder.with_name("train")
        self.class_names = class_folders(train) if train.is_dir() else own
        unknown = sorted(set(own) - set(self.class_names))
        if unknown:
            raise ValueError(f"{self.folder} has classes that {train} lacks: {some(unknown)}")
        place = {name: i for i, name in enumerate(self.class_names)}
        self._to_target = [place[name] for name in own]
        self.notes = (*self.index.facts["notes"], *passed_over(self.folder, self.index))
        self._prefix = os.fsencode(self.folder) + b"/"

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        return read_plain(self._prefix + self.index.name(index), self.max_pixels)

    def name(self, index: int) -> str:
        return os.fsdecode(self._prefix + self.index.name(index))

    def target(self, index: int) -> int:
        return self._to_target[self.index.targets[index]]


def find_split(root: Path, split: str) -> Path:
    folders = [root / name for name in split_names(split)]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ValueError(
        f"{root} must hold the folders train and val, with one folder per class; "
        f"there is no {folders[-1]}"
    )


def class_folders(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if not entry.name.startswith(".") and entry.is_dir()
    )


def index_folder(folder: Path) -> FileIndex:
    """Return the folder's images, sorted by class and name.

    The list comes from the cache if nothing has changed since, else from a scan.
    """
    cache = cache_folder()
    key = hashlib.sha256(b"%d:%s" % (_RULES, os.fsencode(folder.resolve()))).hexdigest()[:24]
    path = cache / f"{key}.index" if cache else None
    if path is not None and path.is_file():
        try:
            index = FileIndex.open(path)
            if _unchanged(folder, index.facts["folders"]):
                return index
        except (OSError, ValueError) as error:
            log.warning("%s; the folder is listed anew", error)
    index = scan(folder)
    if path is not None:
        try:
            index.save(path)
        except OSError as error:
            log.info("the list of %s is not kept: %s", folder, error)
    return index


def cache_folder() -> Path | None:
    """Return the user's cache folder, or one for temporary files; None if neither can be written.

    The data's own folder may be read-only.
    """
    for folder in _cache_places():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A list that another user wrote is not to be trusted.
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
        except OSError:
            continue
    return None


def _cache_places() -> Iterator[Path]:
    if home := os.environ.get("XDG_CACHE_HOME"):
        yield Path(home) / "dkcls"
    else:
        with suppress(RuntimeError):  # a user without a home
            yield Path.home() / ".cache" / "dkcls"
    with suppress(FileNotFoundError):  # no folder for temporary files
        yield Path(tempfile.gettempdir()) / f"dkcls-{os.getuid()}"


def scan(folder: Path) -> FileIndex:
    """List the images below each class's folder."""
    log.info("listing the images in %s", folder)
    names, targets, notes = [], [], []
    endings: Counter[str] = Counter()
    folders = {"": _stamp(folder.stat(), os.listdir(os.fsencode(folder)))}
    classes = class_folders(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        for target, found in enumerate(pool.map(lambda name: _scan_class(folder, name), classes)):
            names += found.names
            targets += [target] * len(found.names)
            folders.update(found.folders)
            notes += found.notes
            endings += found.endings
    if not names:
        raise ValueError(f"{folder} holds no images: they are looked for in one folder per class")
    others = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    facts = {"class_names": classes, "folders": folders, "notes": notes, "other_endings": others}
    return FileIndex.build(names, targets, facts)


def passed_over(place: Path, index: FileIndex) -> list[str]:
    """Return a note on the files that are left out because of their endings, if there are any."""
    others = index.facts["other_endings"]
    count = sum(number for _, number in others)
    listed = some([f"{ending} {number}" for ending, number in others])
    return [f"{place}: files passed over for their endings ({count}): {listed}"] if count else []


class _Class(NamedTuple):
    names: list[bytes]  # relative to the split's folder
    folders: dict[str, list[int]]  # each folder's stamp
    notes: list[str]
    endings: Counter[str]  # of the files that are passed over


def _scan_class(folder: Path, name: str) -> _Class:
    found = _Class([], {}, [], Counter())
    root = os.fsencode(folder)
    visited = {_identity(path.stat()) for path in (folder, *folder.resolve().parents)}
    pending = [os.fsencode(name)]
    while pending:
        relative = pending.pop()
        status = os.stat(root + b"/" + relative)
        if _identity(status) in visited:
            found.notes.append(
                f"{folder / os.fsdecode(relative)}: "
                "a link to a folder above it or listed already, not followed"
            )
            continue
        visited.add(_identity(status))
        entries = list(os.scandir(root + b"/" + relative))
        stamp = _stamp(status, [entry.name for entry in entries])
        found.folders[os.fsdecode(relative)] = stamp
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            if _is_folder(entry):
                pending.append(relative + b"/" + entry.name)
            elif entry.name.lower().endswith(EXTENSIONS):
                found.names.append(relative + b"/" + entry.name)
            else:
                found.endings[os.path.splitext(os.fsdecode(entry.name))[1].lower() or "none"] += 1
    if not found.names:
        found.notes.append(f"{folder / name}: a class without images")
    found.names.sort()
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: a bad file, when it is read
        return False


def _stamp(status: os.stat_result, names: list[bytes]) -> list[int]:
    """Return a folder's modification time in nanoseconds, its number of entries and their hash."""
    digest = hashlib.sha256(b"/".join(sorted(names))).digest()
    return [status.st_mtime_ns, len(names), int.from_bytes(digest[:16])]


def _unchanged(folder: Path, folders: dict[str, list[int]]) -> bool:
    root = os.fsencode(folder) + b"/"
    stamps = [(root + os.fsencode(name), stamp) for name, stamp in folders.items()]

    def same(pair: tuple[bytes, list[int]]) -> bool:
        return _stamp(os.stat(pair[0]), os.listdir(pair[0])) == pair[1]

    try:
        # Times first: they are soon compared.
        if any(os.stat(path).st_mtime_ns != stamp[0] for path, stamp in stamps):
            return False
        with ThreadPoolExecutor(_THREADS) as pool:
            return all(pool.map(same, stamps))
    except OSError:
        return False
