"""The ERF over a user's own image."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.engine.common import call, run_here


@pytest.fixture
def photo(tmp_path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(256, size=(60, 90, 3), dtype=np.uint8)).save(
        tmp_path / "photo.png"
    )
    return tmp_path / "photo.png"


def test_the_field_over_an_own_image(monkeypatch, tmp_path, capsys, checkpoints, photo):
    shutil.copy(checkpoints["local_dk"], tmp_path / "a.pt")
    arguments = ("checkpoint=a.pt", f"images={photo}", "point=[45,10]", "projections=4")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = ("checkpoint=../a.pt", *arguments[1:])
    assert call(monkeypatch, "erf", *arguments) == 0
    # 60 x 90 pixels become 32 x 48, and (45, 10) becomes (23.8, 5.1).
    # Positions look at 0, 8, 16, ...
    assert "position (1, 3) looks at (24, 8) of 48 x 32 pixels" in capsys.readouterr().out
    assert Image.open(tmp_path / "erf.png").width > 500  # beside the checkpoint
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_row_for_each_image(monkeypatch, tmp_path, capsys, checkpoints):
    words = (f"checkpoint={checkpoints['rigid']}", "projections=1", "images=embedded:3")
    assert run_here(monkeypatch, tmp_path, *words, "output=rows.png", script="erf") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said] == [
        "embedded:0:",
        "embedded:1:",
        "embedded:2:",
        "rows.png",
    ]
    with Image.open(tmp_path / "rows.png") as picture:
        assert picture.height > 1.3 * picture.width  # three rows of two squares


def test_the_field_of_a_network_of_timms(monkeypatch, tmp_path, capsys, photo):
    arguments = (
        "model.name=resnet18",
        f"images={photo}",
        "module=layer1",
        "projections=1",
        "output=r18.png",
    )
    assert run_here(monkeypatch, tmp_path, *arguments, script="erf") == 0
    assert "of 336 x 224 pixels" in capsys.readouterr().out
    assert (tmp_path / "r18.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "checkpoint=FILE is needed, or model.name=NAME for random weights"),
        (["model.name=resnt18"], "near it: resnet18"),
        (
            ["checkpoint=LOCAL", "point=[100,1]"],
            "point must be [x,y] inside the image of 90 x 60, got [100.0, 1.0]",
        ),
        (["checkpoint=LOCAL", "module=blocks.7"], "the network has no module 'blocks.7'"),
        (["checkpoint=LOCAL", "images=LOCAL"], "cannot be read: not an image"),
        (["checkpoint=LOCAL", "images=none.png"], "No such file"),
        (["model.name=vit_tiny_patch16_224"], "the network does not take images of 336 x 224"),
    ],
)
def test_fields_that_cannot_be_drawn(
    monkeypatch, tmp_path, capsys, checkpoints, photo, arguments, message
):
    given = [
        f"images={photo}",
        *(argument.replace("LOCAL", str(checkpoints["local_dk"])) for argument in arguments),
    ]
    assert run_here(monkeypatch, tmp_path, *given, script="erf") == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [photo]
