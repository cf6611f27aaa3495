"""Run train.py with a fault in it: `python faults.py FAULT overrides...`.

`run` does the same in a process that has imported everything.

save:NUMBER:MOMENT:SHARE is SIGKILL in the NUMBER-th save, or in the first of a new best checkpoint
if NUMBER is best. It comes at MOMENT (hash, file, link, prune), with a SHARE of the file written.

poison:VALUE:RANK:STEPS makes the loss of these steps, such as 3+4+9, VALUE (nan, inf) on that rank.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(arguments: list[str], fault: str = "") -> None:
    """Run train.py, and end as it does."""
    if fault:
        kind, _, words = fault.partition(":")
        {"save": kill_in_save, "poison": poison}[kind](*words.split(":"))
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def kill_in_save(number: str, moment: str, share: str) -> None:
    from dkcls import files
    from dkcls.engine import checkpoint

    write_atomically, save, link, prune = (
        files.write_atomically,
        checkpoint.Checkpoints.save,
        checkpoint.Checkpoints._link,
        checkpoint.Checkpoints._prune,
    )
    saves, this_one = 0, False

    def die(at: str) -> None:
        if at == moment and this_one:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_write(path: Path, data: bytes | memoryview) -> None:
        at = "hash" if path.suffix == ".sha256" else "file"
        if at == moment and this_one:
            path.with_name(f".{path.name}.tmp").write_bytes(
                bytes(data)[: int(float(share) * len(data))]
            )
        die(at)
        write_atomically(path, data)

    def dying_link(self: Any, name: str, path: Path) -> None:
        link(self, name, path)
        die("link")

    def dying_prune(self: Any) -> None:
        die("prune")
        prune(self)

    def counting_save(self: Any, state: dict[str, Any], **options: Any) -> Path:
        nonlocal saves, this_one
        saves += 1
        this_one = options["best"] if number == "best" else saves == int(number)
        return save(self, state, **options)

    setattr(files, "write_atomically", dying_write)  # noqa: B010
    for name, method in (("save", counting_save), ("_link", dying_link), ("_prune", dying_prune)):
        setattr(checkpoint.Checkpoints, name, method)


def poison(value: str, rank: str, steps: str) -> None:
    """Make the loss of some steps `value`. Each rank prints in the end which weights it has."""
    from dkcls.engine.trainer import Trainer

    fit, train_step = Trainer.fit, Trainer.train_step
    poisoned = {int(step) for step in steps.split("+")}

    def poisoned_step(self: Any, batches: Any) -> None:
        loss = self.task.loss
        if self.step in poisoned and self.world.rank == int(rank):
            self.task.loss = lambda *inputs: tuple(
                result * float(value) for result in loss(*inputs)
            )
        try:
            train_step(self, batches)
        finally:
            self.task.loss = loss

    def telling_fit(self: Any, *arguments: Any) -> Any:
        result = fit(self, *arguments)
        total = sum(parameter.double().abs().sum().item() for parameter in self.model.parameters())
        print(f"rank {self.world.rank} ends with weights {total!r}", flush=True)
        return result

    setattr(Trainer, "train_step", poisoned_step)  # noqa: B010
    setattr(Trainer, "fit", telling_fit)  # noqa: B010


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run(sys.argv[2:], sys.argv[1])
