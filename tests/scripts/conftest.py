import sys
from pathlib import Path

import pytest

from tests.engine.checkpoints import write_checkpoint

# Python puts a script's own folder on the path; here scripts run in the tests' process. At the end,
# so that no script stands before a module of the same name.
sys.path.append(str(Path(__file__).parents[2] / "scripts"))

NETWORKS = ("rigid", "local_dk", "cond")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Return the checkpoint of an awake network, without training, for each of NETWORKS."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(folder / f"{name}.pt", spatial=name) for name in NETWORKS}
