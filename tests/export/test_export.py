"""Exports compute what the network does, for any number of images, and say what they are."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from dkcls import export as exporting
from dkcls.config import Config, ModelConfig
from dkcls.engine.checkpoint import write
from dkcls.engine.network import Network, load
from dkcls.engine.task import Input
from dkcls.errors import UserError
from dkcls.export import SUFFIXES, export, lower, metadata
from dkcls.models.mobilenet_v2 import Layout, MobileNetV2, Stage
from dkcls.models.variants import Variant
from dkcls.ops import per_image
from dkcls.ops.deform_kernel import library
from dkcls.ops.deform_kernel.standard import deform_kernel2d
from tests.engine.checkpoints import write_checkpoint
from tests.engine.common import ROOT, run_here
from tests.models.common import awake, images, stir

KINDS = {
    "rigid": {},
    "global": {"spatial": "global_dk", "pointwise": "global_dk"},
    "local": {"spatial": "local_dk", "grid": "spread"},
    "dcn_local": {"spatial": "dcn_local_dk", "scope": 5},
    "cond": {"spatial": "cond", "pointwise": "cond", "experts": 3},
}
TINY = Layout(8, (Stage(2, 12, 1, 2),), head=16, deformable_from=2, divisor=2, narrow_head=True)


def tiny(**variant) -> Network:
    """One block: all operators that a network of its kind has."""
    torch.manual_seed(0)
    model = stir(awake(MobileNetV2(TINY, Variant(**variant), num_classes=4, in_chans=1)), 0.2)
    taken = Input(1, 20, 1.0, "bilinear", [0.15], [0.25])
    return Network(
        "tiny.pt", model, 4, taken, Config(model=ModelConfig("tiny"), seed=7), list("abcd")
    )


@pytest.mark.slow
@pytest.mark.xdist_group("onnx")  # the first export of a process takes ten seconds
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind, tmp_path):
    """In operators of the standard alone; batches that were never seen when it was exported."""
    network, path = tiny(**KINDS[kind]), tmp_path / "tiny.onnx"
    assert export(network, "onnx", path)[0] < 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.onnx"]
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} == {""}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for n in (1, 7):
        x = images(1, (20, 20), n)
        with torch.no_grad():
            expected = network.model(x).numpy()
        (got,) = session.run(None, {"images": x.numpy()})
        assert np.abs(got - expected).max() < 1e-4
        assert np.ptp(expected) > 0.1
    assert load(str(path)).config.seed == 7
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["classes"]) == list("abcd")
    assert json.loads(said["input"])["mean"] == [0.15]


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("offsets", ["kernel", "image", "both", "none"])
def test_the_lowered_operator_is_the_operator(offsets, padding):
    """Check in float64, with taps beyond scope and image, and sizes that all differ."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    geometry = ((3, 2), (2, 1), padding, (1, 2), (1.0, 1.5), "hard")
    out = [
        (s + 2 * p - d * (k - 1) - 1) // st + 1
        for s, p, d, k, st in zip((9, 8), padding, (1, 2), (3, 2), (2, 1), strict=True)
    ]
    kernel, image = 2 * draw(2, 12, *out), 3 * draw(2, 12, *out)
    weight = draw(3, 1, 4, 5) if offsets in ("kernel", "both") else draw(2, 3, 1, 3, 2)
    arguments = (draw(2, 3, 9, 8), weight, kernel if offsets in ("kernel", "both") else None)
    arguments += (image if offsets in ("image", "both") else None, *geometry, "")
    torch.testing.assert_close(
        deform_kernel2d(*arguments), library.call(*arguments), rtol=1e-9, atol=1e-9
    )


def test_classes_without_names_are_numbers():
    network = replace(tiny(), classes=None)
    assert json.loads(metadata(network)["classes"]) == ["0", "1", "2", "3"]


def test_an_export_leaves_the_memory_of_kernels_bounded():
    network, before = tiny(**KINDS["cond"]), per_image.KERNEL_BYTES
    lower(network.model.eval(), images(1, (20, 20), 2))
    assert per_image.KERNEL_BYTES == before == 64 * 2**20


def test_a_torch_program(tmp_path):
    network, path = tiny(**KINDS["dcn_local"]), tmp_path / "tiny.pt2"
    assert export(network, "torch", path)[0] < 1e-4
    said = dict.fromkeys(["classes", "input"], "")
    program = torch.export.load(path, extra_files=said)
    assert not [node for node in program.graph.nodes if "dkcls" in str(node.target)]
    assert json.loads(said["classes"]) == list("abcd")


def test_safetensors_come_back_as_they_were(tmp_path, monkeypatch, capsys):
    """By the command; then eval.py and model.pretrained take them."""
    checkpoint = write_checkpoint(tmp_path / "a.pt", spatial="local_dk", scope=5)
    assert (
        run_here(
            monkeypatch,
            tmp_path,
            "checkpoint=a.pt",
            "format=safetensors",
            script="export",
        )
        == 0
    )
    assert "a.safetensors: 0.4" in capsys.readouterr().out
    before, after = (load(str(path)) for path in (checkpoint, tmp_path / "a.safetensors"))
    assert (before.classes, before.input, before.config) == (
        after.classes,
        after.input,
        after.config,
    )
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, after.model.state_dict()[name])


PRIVATE = {"out": "/homes/me/out", "data": "/homes/me/photos", "model": "/homes/me/weights.pt"}


@pytest.mark.parametrize("kind", ["safetensors", "onnx", "torch"])
def test_an_export_tells_nothing_of_this_machine(kind, tmp_path):
    """Neither the run's folders nor where the code is; the rest of its config is there."""
    state = torch.load(write_checkpoint(tmp_path / "a.pt"), weights_only=True)
    config = state["config"]
    config["out"], config["data"]["root"], config["model"]["pretrained"] = PRIVATE.values()
    write(tmp_path / "a.pt", state)
    network = load(str(tmp_path / "a.pt"))
    path = tmp_path / f"b{SUFFIXES[kind]}"
    export(network, kind, path)
    content = path.read_bytes()
    code = [str(ROOT), str(Path(torch.__file__).parents[1])]
    assert [folder for folder in ["/homes/me", *code] if folder.encode() in content] == []
    assert b"deformed_fashion" in content
    assert json.loads(metadata(network)["config"])["name"] is None


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_an_export_has_the_mode_of_any_new_file(mask, tmp_path):
    network = load(str(write_checkpoint(tmp_path / "a.pt")))
    before = os.umask(mask)
    try:
        export(network, "safetensors", tmp_path / "b.safetensors")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode for name in ("b.safetensors", "plain")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("offset", [1.0, math.nan])
def test_a_file_that_differs_is_not_kept(offset, tmp_path, monkeypatch):
    monkeypatch.setitem(
        exporting.WRITERS, "onnx", lambda network, model, images, file: lambda x: model(x) + offset
    )
    with pytest.raises(
        UserError, match=f"the onnx file's logits differ from the network's by {offset:.3g}"
    ):
        export(tiny(), "onnx", tmp_path / "tiny.onnx")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "a.pt")
    (tmp_path / "b.onnx").write_bytes(b"nonsense")
    for arguments, sentence in (
        (("checkpoint=a.pt",), "format=... is needed"),
        (
            ("checkpoint=a.pt", "format=tflite"),
            "format must be one of safetensors, onnx, torch, aoti, got 'tflite'",
        ),
        (("checkpoint=a.pt", "format=onnx", "output=x.pt"), "output must end in .onnx, got x.pt"),
        (("format=onnx",), "checkpoint=... is needed"),
        (("checkpoint=b.onnx", "format=onnx"), "b.onnx is not an ONNX file that onnxruntime takes"),
    ):
        assert run_here(monkeypatch, tmp_path, *arguments, script="export") == 1
        assert sentence in capsys.readouterr().err


def test_without_the_packages_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"format=onnx needs onnx: pip install -e '\.\[onnx\]'"):
        export(tiny(), "onnx", tmp_path / "tiny.onnx")
