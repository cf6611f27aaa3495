"""train.py, killed with SIGKILL: `python killed.py WHERE COUNT overrides...`.

WHERE is "after" or "during": after the COUNT-th checkpoint is in place, or while it is being written.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from dkcls.engine import checkpoint  # noqa: E402

where, count = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
saves = 0
write_atomically, save = checkpoint.write_atomically, checkpoint.Checkpoints.save


def dying_write(path, data):
    if where == "during" and path.suffix == ".pt" and saves + 1 == count:
        path.with_name(f".{path.name}.tmp").write_bytes(bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write_atomically(path, data)


def dying_save(self, state, **options):
    global saves
    path = save(self, state, **options)
    saves += 1
    if where == "after" and saves == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return path


setattr(checkpoint, "write_atomically", dying_write)  # noqa: B010
setattr(checkpoint.Checkpoints, "save", dying_save)  # noqa: B010
sys.argv[0] = str(ROOT / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
