import multiprocessing
import signal
from multiprocessing import forkserver

import pytest

from tests.data.common import make_folder


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Started before the first loader starts it, with timm too, which each worker that erases would import by itself."""
    # A shell has what runs in the background ignore Ctrl-C, and workers would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(["dkcls.data", "timm.data.random_erasing"])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "dkcls"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """22 training and 7 validation images in 3 classes; not to be changed."""
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture
def folder(tmp_path):
    """The same, to be changed."""
    return make_folder(tmp_path / "images")
