"""The pictures of docs/analysis.md, drawn from small networks."""

import numpy as np
import pytest
from PIL import Image

from tests.engine.common import run_here


@pytest.mark.slow
def test_all_figures(monkeypatch, tmp_path, capsys, checkpoints):
    given = f"checkpoint=[{','.join(map(str, checkpoints.values()))}]"
    assert (
        run_here(
            monkeypatch,
            tmp_path,
            given,
            "output=figures",
            "images=16",
            script="scripts/figures/analysis.py",
        )
        == 0
    )
    pictures = {path.name: Image.open(path) for path in (tmp_path / "figures").iterdir()}
    assert sorted(pictures) == [
        "deformations.png",
        "dynamics.png",
        "radius.png",
        "sizes.png",
        "taps.png",
    ]
    for picture in pictures.values():
        assert np.array(picture.convert("L")).std() > 5
    printed = capsys.readouterr().out
    assert (
        printed.count("| local DK |") == 3 + 1 + 2 + 6
    )  # rows of sizes, deformations, radius and dynamics
    assert "nan" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["figure=radii"],
            "figure must be all, sizes, deformations, taps, radius, dynamics, got 'radii'",
        ),
        (["checkpoint=[RIGID,RIGID]"], "are both rigid; give one of them"),
        (["checkpoint=[]"], "must name one checkpoint at least"),
        (["checkpoint=[RIGID]", "figure=taps"], "needs a checkpoint with local deformable kernels"),
        (["checkpoint=[none.pt]"], "none.pt"),
    ],
)
def test_figures_that_cannot_be_drawn(
    monkeypatch, tmp_path, capsys, checkpoints, arguments, message
):
    given = [argument.replace("RIGID", str(checkpoints["rigid"])) for argument in arguments]
    given += [] if "checkpoint" in arguments[0] else [f"checkpoint=[{checkpoints['rigid']}]"]
    assert run_here(monkeypatch, tmp_path, *given, script="scripts/figures/analysis.py") == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
