"""Costs of the networks: parameters, multiply-adds as the paper counts, and the script for both."""

import csv
import importlib.util
import io
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from dkcls.layers import CondConv2d, GlobalDeformKernel2d, LocalDeformKernel2d, StaticScope2d
from dkcls.models import PAPER, count_activations, count_macs, count_parameters
from dkcls.models.zoo import PAPER_DETECTION
from tests.models.common import VARIANTS, create

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "models.py"


def on_meta(name: str, **arguments) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


# Tables 1 and 2 of the paper: top-1 and GFLOPs. Tables 3 and 4: AP, and AP of small, medium and
# large objects.
PRINTED = """
    resnet50 76.7 3.86
    resnet50_dw 76.3 3.82 / 36.6 22.1 39.9 46.6
    resnet50_dw_local3 77.4 4.32
    resnet50_dw_local4 78.1 4.32 / 37.8 23.4 41.6 48.2
    resnet50_dw_local5 77.8 4.32
    resnet50_dw_local9 77.4 4.32
    resnet50_dw_global4 77.6 3.82 / 36.7 22.6 40.2 46.9
    resnet50_dw_point2_global4 77.9 4.09 / 37.1 23.1 40.6 46.6
    resnet50_dw_point2_local4 78.5 4.60 / 38.4 23.4 42.0 49.4
    resnet50_dw_cond 77.6 7.13 / 36.3 22.1 39.3 47.0
    resnet50_dw_cond_local4 78.9 7.61 / 38.0 23.4 41.9 48.4
    resnet50_dw_dcn 78.0 4.10 / 39.9 24.0 43.4 52.6
    resnet50_dw_dcn_local4 79.0 4.60 / 40.6 24.6 43.9 53.3
    mobilenetv2_100 71.9 0.31 / 31.3 18.6 33.7 40.4
    mobilenetv2_100_global4 73.6 0.31 / 32.5 19.6 35.8 41.9
    mobilenetv2_100_point2_global4 74.5 0.34 / 32.9 19.4 35.5 42.8
    mobilenetv2_100_local4 74.1 0.73 / 32.9 19.5 36.0 42.5
    mobilenetv2_100_point2_local4 74.8 0.76 / 33.7 20.2 36.7 44.0
    mobilenetv2_100_cond 74.3 2.19 / 33.2 20.5 35.6 43.3
    mobilenetv2_100_cond_local4 75.5 2.48 / 34.3 20.2 37.3 44.7
    mobilenetv2_100_dcn 73.2 0.52 / 34.4 20.5 37.0 44.7
    mobilenetv2_100_dcn_local4 74.4 0.93 / 35.6 20.6 38.5 47.3
"""


def test_the_papers_figures_are_as_printed():
    rows = [line.split() for line in PRINTED.strip().splitlines()]
    classification = {row[0]: (float(row[1]), float(row[2])) for row in rows}
    assert {row.name: (row.top1, row.gflops_printed) for row in PAPER} == classification
    detection = {row[0]: tuple(map(float, row[4:])) for row in rows if len(row) > 3}
    assert {row.name: tuple(row[1:]) for row in PAPER_DETECTION} == detection


@pytest.mark.parametrize("row", PAPER, ids=lambda row: row.name)
def test_the_papers_networks_are_exact(row):
    model = on_meta(row.name)
    assert all(p.is_meta for p in model.parameters())
    assert count_parameters(model) == row.parameters
    assert round(row.parameters / 1e6, 1) == row.parameters_printed
    assert count_macs(model, (3, 224, 224)) == pytest.approx(row.macs, rel=1e-3)


@pytest.mark.parametrize("row", [row for row in PAPER if row.arguments], ids=lambda row: row.name)
def test_a_name_is_its_base_with_arguments(row):
    named, built = on_meta(row.name), on_meta(row.base, **row.arguments)
    assert repr(named) == repr(built)
    assert named.pretrained_cfg["architecture"] == row.name
    assert named.pretrained_cfg["input_size"] == (3, 224, 224)


def test_there_are_22_of_different_names():
    assert len({row.name for row in PAPER}) == 22
    assert {row.generator_lr_multiplier for row in PAPER if row.name.startswith("resnet")} == {0.01}
    assert {row.generator_lr_multiplier for row in PAPER if row.name.startswith("mobilenet")} == {
        0.1
    }


@pytest.mark.parametrize(
    ("layer", "macs", "activations"),
    [
        (nn.Conv2d(4, 4, 3, groups=4), 4 * 36 * 9, 4 * 36),
        (StaticScope2d(4, 4, 3, groups=4), 4 * 36 * 9, 4 * 36),
        (GlobalDeformKernel2d(4, 6, 1, scope=2), 6 * 64 * 4 + 4 * 2, 6 * 64 + 2),
        (GlobalDeformKernel2d(4, 4, 3, groups=4), 4 * 36 * 9 + 4 * 18, 4 * 36 + 18),
        (LocalDeformKernel2d(4, 4, 3, groups=4), 4 * 36 * 9 + 18 * 36 * 4 * 9, 4 * 36 + 18 * 36),
        (CondConv2d(4, 6, 3, experts=5), 5 * 6 * 36 * 4 * 9 + 4 * 5, 6 * 36 + 5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_layer_counts(layer, macs, activations):
    assert count_macs(layer, (4, 8, 8)) == macs
    assert count_activations(layer, (4, 8, 8)) == activations


@pytest.mark.parametrize("key", VARIANTS)
def test_counting_leaves_the_model_alone(key):
    model = create(**VARIANTS[key])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    macs = count_macs(model, (1, 32, 32))
    assert macs == count_macs(model.eval(), (1, 32, 32))
    assert model.train().training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.device.type == "cpu"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_input_size_is_checked():
    with pytest.raises(ValueError, match=r"input_size must be \[C, H, W\], got \[32, 32\]"):
        count_macs(create(), (32, 32))


def test_a_network_of_double_precision_counts_the_same():
    model = create(spatial="local_dk")
    for count in (count_macs, count_activations):
        expected = count(model, (1, 32, 32))
        assert count(model.double(), (1, 32, 32)) == expected
        model.float()


def test_a_count_that_fails_leaves_no_hooks():
    model = create()
    for count in (count_macs, count_activations):
        with pytest.raises(RuntimeError):
            count(model, (3, 32, 32))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", [SCRIPT.name, *arguments])
        return module.main()

    module.run = run
    return module


def test_summary_as_csv(script, capsys):
    assert (
        script.run(
            "--format", "csv", "--no-time", "--names", "mobilenetv2_100_local4", "mobilenetv2_100"
        )
        == 0
    )
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["network"] for row in rows] == ["mobilenetv2_100", "mobilenetv2_100_local4"]
    assert rows[1]["parameters"] == "4711162"
    assert rows[1]["exact"] == "yes"
    assert rows[1]["MACs / 1e9"] == "0.6737"


def test_summary_with_time_and_memory(script, capsys):
    options = ("--batch", "1", "--repeats", "1", "--memory")
    assert script.run("--names", "mobilenetv2_100_dcn", *options) == 0
    header, _, line = capsys.readouterr().out.strip().splitlines()
    values = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert float(values["ms per image"]) > 0
    assert float(values["train step, MiB at batch 1 |"].removesuffix("|")) > 20


def test_summary_fails_when_a_count_is_off(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "count_parameters", lambda model: 4_711_163)
    monkeypatch.setattr(script, "count_macs", lambda model, size: 675_000_000)
    assert script.run("--no-time", "--names", "mobilenetv2_100_local4") == 1
    out, err = capsys.readouterr()
    assert "| NO |" in out
    assert "mobilenetv2_100_local4 has 4,711,163 parameters, not 4,711,162." in err
    assert "mobilenetv2_100_local4 has 675,000,000 MACs, not 673,700,000." in err
