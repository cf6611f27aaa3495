"""Runs of a sweep, summarised."""

import csv
import json

from PIL import Image

from tests.engine.common import SMALL, run_here


def test_a_sweep_becomes_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    sweep = [override for override in SMALL if not override.startswith("name=")]
    for scope in (3, 4):
        assert (
            run_here(
                monkeypatch,
                tmp_path,
                *sweep,
                f"model.scope={scope}",
                f"name=s{scope}",
                "model.spatial=local_dk",
            )
            == 0
        )
    capsys.readouterr()
    assert (
        run_here(monkeypatch, tmp_path, "runs=runs", "output=t/summary.csv", script="report") == 0
    )
    assert capsys.readouterr().out.startswith(
        "| model.scope | seeds | parameters | macs | top1 | top5 | loss | seconds |"
    )
    rows = list(csv.DictReader((tmp_path / "t/summary.csv").open()))
    assert [row["model.scope"] for row in rows] == ["3", "4"]
    result = json.loads((tmp_path / "runs/s4/result.json").read_text())
    assert float(rows[1]["top1"]) == result["top1"]
    assert int(rows[1]["macs"]) == result["macs"] > 1e6
    with Image.open(
        tmp_path / "t/summary.png"
    ) as plot:  # two points and their axes, not an empty canvas
        assert len(plot.convert("RGB").getcolors(plot.width * plot.height)) > 50
