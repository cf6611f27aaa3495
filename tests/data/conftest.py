import multiprocessing
import signal
from multiprocessing import forkserver

import pytest

from tests.data.common import make_folder


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Start the fork server before the first loader does.

    The server imports timm too, which each worker that erases would otherwise import by itself.
    """
    # A shell has what runs in the background ignore Ctrl-C, and workers would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(["dkcls.data", "timm.data.random_erasing"])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Give the test a cache folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "dkcls"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Return a folder of 22 training and 7 validation images in 3 classes; not to be changed."""
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture
def folder(tmp_path):
    """Return a folder as `shared_folder`, to be changed."""
    return make_folder(tmp_path / "images")
