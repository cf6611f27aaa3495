"""Whatever is loaded, code that a file contains does not run."""

import os
import pickle

import pytest
import torch

from tests.engine.common import run_here


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def pickled(path):
    path.write_bytes(pickle.dumps({"model": Evil()}, 2))


def saved(path):
    torch.save({"format": 1, "model": {}, "ema": None, "config": Evil()}, path)


@pytest.mark.parametrize("save", [pickled, saved])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".onnx"])
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("eval.py", ("checkpoint=FILE",)),
        ("eval.py", ("model.name=resnet18", "model.pretrained=FILE")),
        ("train.py", ("model.pretrained=FILE",)),
        ("predict", ("checkpoint=FILE", "images=x.png")),
        ("export", ("checkpoint=FILE", "format=torch")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_in_a_file_runs(save, suffix, script, arguments, tmp_path, monkeypatch, capsys):
    save(tmp_path / f"evil{suffix}")
    arguments = [word.replace("FILE", f"evil{suffix}") for word in arguments]
    assert run_here(monkeypatch, tmp_path, *arguments, script=script) == 1
    assert f"evil{suffix} is not a" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


def test_it_would_run_if_it_were_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "evil").exists()
