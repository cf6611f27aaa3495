"""The report on runs: what it says, and how a browser shows it."""

import json
from pathlib import Path

import pytest
import yaml

from dkcls.config import Config, DataConfig, ModelConfig
from dkcls.layers import LAYERS, LocalDeformKernel2d
from tests.engine.checkpoints import write_checkpoint
from tests.engine.common import run_here
from tests.scripts import browser


def write_run(
    folder: Path, top1: float, data: DataConfig | None = None, seed: int = 0, **model
) -> Path:
    """As train.py leaves it."""
    write_checkpoint(folder / "best.pt", data, **model)
    model = ModelConfig(name="mobilenetv2_nano", **model)
    config = Config(
        name=folder.name,
        seed=seed,
        model=model,
        data=data or DataConfig(name="deformed_fashion", workers=0),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    result = {
        "top1": top1,
        "top5": 97.0,
        "loss": 1.2,
        "name": folder.name,
        "parameters": 100_000,
        "seconds": 66.0,
    }
    (folder / "result.json").write_text(json.dumps(result))
    lines = [{"kind": "train", "step": step, "epoch": 0, "loss": 2 / step} for step in (1, 2, 3)]
    lines.append({"kind": "val", "step": 3, "epoch": 1, "loss": 1.2, "top1": top1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_run(folder / "rigid", 60.0, spatial="rigid")
    for scope, seed, top1 in [(3, 0, 61.0), (3, 1, 62.0), (4, 0, 64.0), (4, 1, 63.0)]:
        write_run(
            folder / f"local-{scope}-{seed}", top1, seed=seed, spatial="local_dk", scope=scope
        )
    return folder


@pytest.fixture(scope="module")
def report(sweep) -> str:
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(patch, sweep, f"runs={sweep}", script="report") == 0
    return (sweep / "report.html").read_text()


def test_what_the_report_says(report):
    for words in (
        "5 networks, in 3 settings,",
        "With the best setting, local DK, scope 4, 63.5 % of the validation images",
        "<td class=number>61.50 ± 0.71</td>",
        "Accuracy over the scope",
        "A large object",
        "taps in the scopes of local DK, scope 3",
        "model.name: mobilenetv2_nano",
    ):
        assert words in report, words
    assert report.count("<img ") == 1 + 1 + 3 * 4 + 2
    assert "http://" not in report
    assert "https://" not in report


@pytest.mark.skipif(
    browser.CHROMIUM is None,
    reason="there is no Chromium to show the page (Debian: apt-get install chromium)",
)
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize(
    "flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"]
)
def test_the_report_in_a_browser(report, tmp_path, width, flags):
    found = browser.visit(report, width, tmp_path, *flags)
    assert found["console"] == []
    assert found["images"] == report.count("<img ")
    assert found["missing"] == []
    assert found["outside"] == []
    assert found["needed"] <= found["width"] <= width
    assert found["dark"] == bool(flags)


@pytest.mark.skipif(
    browser.CHROMIUM is None,
    reason="there is no Chromium to show the page (Debian: apt-get install chromium)",
)
def test_a_page_that_is_wrong_is_noticed(tmp_path):
    page = (
        '<p style="width: 900px">wide</p><img src="data:image/png;base64,AAAA" alt="bad">'
        "<script>undefinedName()</script>"
    )
    found = browser.visit(page, 400, tmp_path)
    assert found["needed"] > found["width"]
    assert found["missing"] == ["bad"]
    assert "undefinedName is not defined" in found["console"][0]


def test_the_report_of_one_run_on_other_data(monkeypatch, tmp_path):
    options = {"length": 8, "num_classes": 10}
    data = DataConfig(name="synthetic", image_size=32, options=options, workers=0)
    write_run(tmp_path / "one", 10.0, data, spatial="global_dk")
    assert run_here(monkeypatch, tmp_path, "runs=one", "output=page.html", script="report") == 0
    page = (tmp_path / "page.html").read_text()
    assert "Training report: one" in page
    assert "Validation image 3" in page
    assert "What it follows" not in page  # nobody knows the scale of what is in there


def test_an_operator_without_a_label_is_shown_under_its_name(monkeypatch, tmp_path, capsys):
    """One that is added as docs/models.md says: a class and a line in the registry."""

    class DampedDeformKernel2d(LocalDeformKernel2d):
        pass

    monkeypatch.setattr(LAYERS, "_things", {name: LAYERS[name] for name in LAYERS})
    LAYERS.register("damped_dk")(DampedDeformKernel2d)
    write_run(tmp_path / "runs" / "rigid", 60.0, spatial="rigid")
    damped = write_run(tmp_path / "runs" / "damped", 61.0, spatial="damped_dk")
    assert run_here(monkeypatch, tmp_path, "runs=runs", "output=page.html", script="report") == 0
    page = (tmp_path / "page.html").read_text()
    assert "With the best setting, damped_dk, 61.0 % of the validation images" in page
    assert "taps in the scopes of damped_dk" in page
    checkpoint = f"checkpoint=[{damped}/best.pt]"
    arguments = checkpoint, "figure=radius", "output=figures", "images=10"
    assert run_here(monkeypatch, tmp_path, *arguments, script="scripts/figures/analysis.py") == 0
    assert "| damped_dk |" in capsys.readouterr().out


def test_a_report_without_networks_says_why(monkeypatch, tmp_path):
    run = write_run(tmp_path / "one", 10.0)
    (run / "best.pt").unlink()
    assert run_here(monkeypatch, tmp_path, "runs=one", script="report") == 0
    assert (
        "They could not be looked into: there is no file one/best.pt"
        in (run / "report.html").read_text()
    )


def test_no_run(monkeypatch, tmp_path, capsys):
    assert run_here(monkeypatch, tmp_path, f"runs={tmp_path}", script="report") == 1
    assert "there is no finished run (result.json)" in capsys.readouterr().err
