"""Data that changes between two lives of a run, and lists of files that are damaged."""

import json
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from dkcls.data.sets.folder import ImageFolder, index_folder
from dkcls.data.sets.tar import TarImages, pack_split
from dkcls.data.transforms import EvalTransform

from .data import FOLDER, make_folder, own_cache
from .lab import (
    Lab,
    Process,
    Row,
    copied,
    differences,
    finish,
    fork_server,
    sentence,
    start_imported,
    start_ranks,
    state_of,
    wait_for_step,
)

EVERY = (*FOLDER, "train.checkpoint_every=2", "train.keep=3")
SECONDS = 20  # for one list
MOST = 2**30  # bytes by which the memory may grow
OLD = (1e9, 1e9)  # the times of a folder in an archive


def identity(lab: Lab) -> Row:
    """Change the data between two lives of a run, which must be seen, and put it back."""
    row = Row(
        "classes or images that change between two lives of a run, or under the same times; the "
        "list of files is removed within a run",
        outcome="refused or recovered",
    )
    images, cache = lab.folder / "images", own_cache(lab)
    make_folder(images)
    source = _stopped(lab, images, cache)
    expected = None if lab.short else lab.expected(*EVERY, f"data.root={images}", **cache)
    for what, (change, words) in list(CHANGES.items())[: lab.many(len(CHANGES), 1)]:
        for ranks in (1, 2)[: lab.many(2 if what == "a class is renamed" else 1, 1)]:
            with _life(lab, source, images) as (folder, root):
                change(root, lab.random)
                process = start_ranks(folder, *EVERY, f"data.root={root}", ranks=ranks, **cache)
                problems = sentence(process, 1, "was trained on other data", *words)
                if expected is not None and ranks == 1:
                    shutil.rmtree(root)
                    shutil.copytree(images, root)
                    problems += finish(folder, expected, *EVERY, f"data.root={root}", **cache)
                row.check(problems, f"{what}, {ranks} ranks")
    if expected is not None:
        row.check(_allowed(lab, source, images, cache), "resume=changed_data")
        row.check(_checkpoint_alone(lab, source, images, cache), "nothing but a checkpoint is left")
        row.check(_list_removed(lab, images, cache, expected), "the list is removed within a run")
    _in_a_process(lab, row, _same_times, lab.many(100, 5))
    _in_a_process(lab, row, _packed_again, lab.many(20, 1))
    return row


def _rename(root: Path, random: Random) -> None:
    for split in ("train", "val"):
        (root / split / "class3").rename(root / split / "trousers")


def _add(root: Path, random: Random) -> None:
    shutil.copytree(root / "train/class3", root / "train/another")


def _remove(root: Path, random: Random) -> None:
    for split in ("train", "val"):
        shutil.rmtree(root / split / "class3")


def _fewer(split: str, count: int) -> Callable[[Path, Random], None]:
    def act(root: Path, random: Random) -> None:
        for path in random.sample(sorted((root / split).rglob("*.jpg")), count):
            path.unlink()

    return act


def _more(root: Path, random: Random) -> None:
    shutil.copy(next((root / "train/class3").iterdir()), root / "train/class3/new.jpg")


CHANGES: dict[str, tuple[Callable[[Path, Random], None], tuple[str, ...]]] = {
    "a class is renamed": (_rename, ("classes gone: class3; new: trousers",)),
    "a class is added": (_add, ("classes new: another",)),
    "a class is removed": (_remove, ("classes gone: class3",)),
    "images are removed": (_fewer("train", 50), ("train images: 400, now 350",)),
    "one image is removed": (_fewer("train", 1), ("train images: 400, now 399",)),
    "validation images are removed": (_fewer("val", 7), ("val images: 100, now 93",)),
    "an image is added": (_more, ("train images: 400, now 401",)),
}


def _stopped(lab: Lab, images: Path, cache: dict[str, Any]) -> Path:
    folder = lab.folder / "stopped"
    process = start_imported(folder, *EVERY, f"data.root={images}", **cache)
    wait_for_step(folder, process, 9)
    if problems := _stop(process):
        raise RuntimeError(problems[0])
    return folder


def _stop(process: Process) -> list[str]:
    if process.alive():
        os.kill(process.pid, signal.SIGTERM)
    return sentence(process, 75)


@contextmanager
def _life(lab: Lab, source: Path, images: Path) -> Iterator[tuple[Path, Path]]:
    """Copy the stopped run and its images."""
    with copied(source, lab.folder / "life") as folder, copied(images, lab.folder / "now") as root:
        yield folder, root


def _allowed(lab: Lab, source: Path, images: Path, cache: dict[str, Any]) -> list[str]:
    """Allow changed data once; a life later, without the word, the run must still go on."""
    with _life(lab, source, images) as (folder, root):
        _rename(root, lab.random)
        words = (*EVERY, f"data.root={root}")
        process = start_imported(folder, *words, "resume=changed_data", **cache)
        wait_for_step(folder, process, 20)
        problems = _stop(process)
        problems += sentence(start_imported(folder, *words, **cache), 0, "resuming from")
        classes = state_of(folder)["data"]["classes"]
        return problems + ([] if "trousers" in classes else [f"{classes} were written down"])


def _checkpoint_alone(lab: Lab, source: Path, images: Path, cache: dict[str, Any]) -> list[str]:
    with _life(lab, source, images) as (folder, root):
        for path in (folder / "runs/run").iterdir():
            if path.is_file():  # the links too
                path.unlink()
        _rename(root, lab.random)
        process = start_imported(folder, *EVERY, f"data.root={root}", **cache)
        return sentence(process, 1, "classes gone: class3; new: trousers")


def _list_removed(lab: Lab, images: Path, cache: dict[str, Any], expected: Path) -> list[str]:
    """Remove the folder of lists in the first epoch: later, processes start that read validation
    images.
    """
    folder = lab.folder / "removed"
    process = start_imported(folder, *EVERY, f"data.root={images}", **cache)
    wait_for_step(folder, process, 3)
    shutil.rmtree(cache["environment"]["XDG_CACHE_HOME"])
    return sentence(process, 0) + differences(folder, expected)


def list_caches(lab: Lab) -> Row:
    """Damage the kept list of a folder's files, which must then be made anew."""
    row = Row("random damage to the kept list of a folder's files", outcome="made anew")
    _in_a_process(lab, row, _damaged_lists, lab.many(1000, 40))
    return row


Tries = list[tuple[str, list[str]]]


def _in_a_process(
    lab: Lab, row: Row, work: Callable[[Path, int, int, Path], None], count: int
) -> None:
    """Add to the row what the tries of a process of its own came to, which might die of them."""
    name = work.__name__.strip("_")
    found = lab.folder / f"{name}.json"
    seed = lab.random.randrange(2**31)
    process = fork_server().Process(target=work, args=(lab.folder / name, seed, count, found))
    process.start()
    process.join()
    tries: Tries = [(name, [f"the process died with {process.exitcode}"])]
    for what, problems in json.loads(found.read_text()) if found.exists() else tries:
        row.check(problems, what)


def _files(folder: Path, random: Random) -> None:
    """Make empty files in classes, some deeper, some with names that are not UTF-8."""
    for number in range(60):
        name = f"{random.randrange(10**9)}.jpg".encode() + random.choice((b"", b"\xff.png"))
        deeper = random.choice((b"", b"", b"deeper/"))
        path = b"%s/class%d/%s%s" % (os.fsencode(folder), number % 5, deeper, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()


def _labels(folder: Path) -> list[tuple[bytes, int]]:
    """Return names and classes in their order, as the layout says it."""
    classes = sorted(path.name for path in folder.iterdir())
    root = os.fsencode(folder) + b"/"
    found = [
        os.path.join(place, name).removeprefix(root)
        for place, _, names in os.walk(root)
        for name in names
    ]
    by_class = sorted(found, key=lambda name: (name.split(b"/")[0], name))
    return [(name, classes.index(os.fsdecode(name.split(b"/")[0]))) for name in by_class]


def _listed(folder: Path) -> list[tuple[bytes, int]]:
    index = index_folder(folder)
    return [(index.name(i), int(index.targets[i])) for i in range(len(index))]


def _judged(folder: Path) -> list[str]:
    """Return what is wrong with how the folder is listed."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        return [] if _listed(folder) == _labels(folder) else ["other names or labels"]
    except BaseException as error:
        return [f"{type(error).__name__} came through: {error}"]
    finally:
        signal.alarm(0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer after {SECONDS} s")


def _same_times(place: Path, seed: int, count: int, found: Path) -> None:
    """Put another version of a folder in its place, with the same times."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    tries: Tries = []
    for number in range(count):
        random = Random(f"{seed} {number}")
        folder = place / f"images{number % 5}"
        shutil.rmtree(folder, ignore_errors=True)
        _files(folder, random)
        for path, _, _ in os.walk(folder):
            os.utime(path, OLD)
        tries.append((f"same times, try {number}", _judged(folder)))
    found.write_text(json.dumps(tries))


def _packed_again(place: Path, seed: int, count: int, found: Path) -> None:
    """Change a file's content, its class or its name, and pack again."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    folder = place / "train"
    _files(folder, Random(seed))
    tries: Tries = []
    for number in range(count):
        random = Random(f"{seed} {number}")
        path = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        change = random.choice(("content", "class", "name", "new class"))
        times = path.stat()
        if change == "content":
            path.write_bytes(random.randbytes(100))
        else:
            parent = path.parent if change == "name" else folder / f"class{random.randrange(9)}"
            parent.mkdir(exist_ok=True)
            path = path.rename(parent / f"{number}.jpg")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        transform = EvalTransform(16)
        pack_split(ImageFolder(place, "train", transform, 16), "train", place / "tar", 7)
        packed = TarImages(place / "tar", "train", transform, 16)
        got = [(packed.index.name(i), packed.target(i)) for i in range(len(packed))]
        problems = [] if got == _labels(folder) else ["other names or labels"]
        for i, (name, _) in enumerate(got):
            if packed.read(i) != (folder / os.fsdecode(name)).read_bytes():
                problems.append(f"old content of {name!r}")
        tries.append((f"packed again after another {change}, try {number}", problems))
    found.write_text(json.dumps(tries))


def _damaged_lists(place: Path, seed: int, count: int, found: Path) -> None:
    """Damage a list, read it, and see that it is as it was; one try after the other."""
    logging.disable(logging.WARNING)  # one for each try
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    lists = []
    for number, folder in enumerate((place / "images", place / "images", place / "other")):
        _files(folder, Random(f"{seed} files {number}"))  # the second time more files
        _listed(folder)
        lists.append(sorted((place / "cache/dkcls").iterdir(), key=os.path.getmtime)[-1])
        lists[-1] = lists[-1].rename(place / f"list{number}")
    _listed(place / "images")
    (kept,) = (place / "cache/dkcls").iterdir()
    earlier, whole, other = (path.read_bytes() for path in lists)
    tries: Tries = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        random = Random(f"{seed} {number}")
        kind = random.choice(list(DAMAGE))
        kept.write_bytes(DAMAGE[kind](whole, random, random.choice((earlier, other))))
        problems = _judged(place / "images")
        problems += [] if kept.read_bytes() == whole else ["the list is not made anew"]
        tries.append((f"a list with {kind}, try {number}", problems))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > MOST:
        tries.append(("memory", [f"it grew by {grown} bytes"]))
    found.write_text(json.dumps(tries))


def _changed(data: bytes, random: Random, first: int, last: int, flip: bool) -> bytes:
    """Change one to eight bytes between two places, by one bit each or to anything."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        at = random.randrange(first, last)
        changed[at] = changed[at] ^ 1 << random.randrange(8) if flip else random.randrange(256)
    return bytes(changed)


def _pieces(data: bytes, random: Random) -> tuple[bytes, bytes, bytes]:
    first, last = sorted((random.randrange(len(data)), random.randrange(len(data))))
    return data[:first], data[first:last], data[last:]


DAMAGE: dict[str, Callable[[bytes, Random, bytes], bytes]] = {
    "flipped bits": lambda data, random, _: _changed(data, random, 0, len(data), True),
    "other bytes": lambda data, random, _: _changed(data, random, 0, len(data), False),
    "flipped bits in its header": lambda data, random, _: _changed(data, random, 0, 2000, True),
    "other bytes in its header": lambda data, random, _: _changed(data, random, 0, 2000, False),
    "an end cut off": lambda data, random, _: data[: random.randrange(len(data))],
    "a piece cut out": lambda data, random, _: b"".join(_pieces(data, random)[::2]),
    "a piece twice": lambda data, random, _: b"".join(
        part * (1 + (i == 1)) for i, part in enumerate(_pieces(data, random))
    ),
    "a piece of zeros": lambda data, random, _: b"".join(
        bytes(len(part)) if i == 1 else part for i, part in enumerate(_pieces(data, random))
    ),
    "more at its end": lambda data, random, _: data + random.randbytes(random.randint(1, 99)),
    "half of another list": lambda data, random, other: (
        _pieces(data, random)[0] + _pieces(other, random)[2]
    ),
    "the list of other files in its place": lambda data, random, other: other,
    "nothing but noise": lambda data, random, _: random.randbytes(random.randint(0, 9999)),
}
