import pytest

from tests.data.common import make_folder


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
