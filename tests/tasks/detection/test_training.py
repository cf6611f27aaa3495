"""train.py and eval.py with task=detection: the same engine, so the same promises."""

import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from dkcls.tasks.detection.detector import Detector
from tests.engine.checkpoints import write_checkpoint
from tests.engine.common import (
    ROOT,
    SMALL,
    last_state,
    metric_lines,
    on_ranks,
    run_here,
    run_ranks,
    same_bits,
)
from tests.tasks.detection.common import TINY, write_coco

pytestmark = pytest.mark.xdist_group("test_detection")  # its runs are made once


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in every other process of these runs: how sums are cut depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detection")
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(patch, folder, *TINY) == 0
    return folder


def test_what_a_run_leaves(finished):
    result = json.loads((finished / "runs/tiny/result.json").read_text())
    assert result["images"] == 14
    assert {"ap", "ap50", "ap75", "best_ap", "parameters", "macs"} <= result.keys()
    lines = metric_lines(finished, "tiny")
    assert [(line["kind"], line["step"]) for line in lines if line["kind"] == "val"] == [
        ("val", 3),
        ("val", 6),
    ]
    losses = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
    for line in lines:
        if line["kind"] == "train":
            assert line["loss"] == pytest.approx(sum(line[name] for name in losses), rel=1e-5)
    assert (finished / "runs/tiny/curves.png").is_file()


# Saves as always, but the one after step 4 is the last thing that it does.
DYING = """
import os, runpy, signal, sys
from dkcls.engine.trainer import Trainer
save = Trainer._save
def dying(self, **how):
    save(self, **how)
    if self.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer._save = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(finished, monkeypatch, tmp_path):
    arguments = [str(ROOT / "train.py"), *SMALL, *TINY, "train.checkpoint_every=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    dead = subprocess.run(
        [sys.executable, "-c", DYING, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
    )
    assert dead.returncode == -9
    assert last_state(tmp_path, "tiny")["step"] == 4
    assert run_here(monkeypatch, tmp_path, *TINY, "train.checkpoint_every=1") == 0
    got, expected = last_state(tmp_path, "tiny"), last_state(finished, "tiny")
    for key in ("model", "optimizer", "result", "best", "sums", "step"):
        assert same_bits(got[key], expected[key]), key
    assert metric_lines(tmp_path, "tiny") == metric_lines(finished, "tiny")


def test_ranks_evaluate_as_one_process(finished, tmp_path):
    """14 images over 1 and 3 ranks."""
    figures = {}
    for ranks in (1, 3):
        file = finished / f"{ranks}.json"
        arguments = ("checkpoint=runs/tiny/best.pt", f"output={file}", "batch_size=2")

        def evaluate(arguments=arguments):
            with pytest.MonkeyPatch.context() as patch:
                return run_here(patch, finished, *arguments, script="eval.py")

        assert (on_ranks(tmp_path, evaluate, ranks) if ranks > 1 else [evaluate()]) == [0] * ranks
        (figures[ranks],) = json.loads(file.read_text())
        figures[ranks].pop("images_per_s")
    assert figures[1] == figures[3]
    assert figures[1]["images"] == 14
    result = json.loads((finished / "runs/tiny/result.json").read_text())
    assert figures[1]["ap"] == pytest.approx(result["best_ap"])


def test_a_detector_trains_in_half_precision(monkeypatch, tmp_path):
    """The COCO recipe asks for it where the device has it."""
    given = []
    forward = Detector.forward

    def watched(self, *arguments):
        self.backbone.fpn.register_forward_hook(
            lambda module, args, out: given.append(out["0"].dtype)
        )
        return forward(self, *arguments)

    monkeypatch.setattr(Detector, "forward", watched)
    assert (
        run_here(
            monkeypatch,
            tmp_path,
            *TINY,
            "train.precision=bf16",
            "schedule.epochs=1",
            "schedule.warmup_epochs=0",
        )
        == 0
    )
    assert set(given) == {torch.bfloat16}
    assert all(value.isfinite().all() for value in last_state(tmp_path, "tiny")["model"].values())


def test_two_ranks_train(tmp_path):
    run_ranks(tmp_path, *TINY, "schedule.epochs=1", ranks=2)
    assert metric_lines(tmp_path, "tiny")[-1]["images"] == 14


def test_fine_tuned_from_a_folder_in_cocos_layout(finished, monkeypatch, tmp_path):
    """Images of two shapes from files, and a classifier's weights."""
    classifier, root = (
        write_checkpoint(tmp_path / "classifier.pt", spatial="local_dk"),
        write_coco(tmp_path / "coco"),
    )
    overrides = [
        *TINY,
        "data=coco",
        f"data.root={root}",
        "data.options.length=null",
        "data.image_size=null",
    ]
    overrides += [
        "train.batch_size=2",
        "model.name=null",
        "model.depthwise_gain=null",
        f"model.pretrained={classifier}",
    ]
    overrides += [
        "data.options.object_scale=null",
        "data.workers=0",
        "task.max_size=80",
        "schedule.epochs=1",
        "train.freeze_bn=true",
        "optim.backbone_lr=0.1",
    ]
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    assert metric_lines(tmp_path, "tiny")[-1]["images"] == 5
    state = last_state(tmp_path, "tiny")
    assert state["config"]["model"]["spatial"] == "local_dk"
    assert len(state["classes"]) == 10


@pytest.mark.parametrize(
    ("script", "overrides", "sentence"),
    [
        ("eval.py", ("checkpoint=runs/tiny/best.pt", "flip=true"), "are for classification"),
        (
            "export",
            ("checkpoint=runs/tiny/best.pt", "format=onnx"),
            "must be a network for classification",
        ),
    ],
)
def test_what_detectors_are_not_for(finished, monkeypatch, capsys, script, overrides, sentence):
    assert run_here(monkeypatch, finished, *overrides, script=script) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_picture_of_detections(finished, monkeypatch):
    arguments = (
        "checkpoint=runs/tiny/best.pt",
        "images=embedded:3",
        "threshold=0.0",
        "output=found.png",
    )
    assert run_here(monkeypatch, finished, *arguments, script="predict") == 0
    with Image.open(finished / "found.png") as picture:
        colours = picture.convert("RGB").getcolors(picture.width * picture.height)
    assert (
        sum(
            1
            for _, (red, green, blue) in colours
            if max(red, green, blue) - min(red, green, blue) > 60
        )
        > 20
    )  # boxes on grey


@pytest.mark.long
def test_the_comparison_from_training_to_tables(monkeypatch, tmp_path, capsys):
    classifiers = tmp_path / "classifiers"
    for name, spatial in (("rigid", "rigid"), ("local4", "local_dk"), ("dcn", "dcn")):
        (classifiers / f"{name}-0").mkdir(parents=True)
        write_checkpoint(classifiers / f"{name}-0/last.pt", spatial=spatial)
    rows = ["rigid_scratch", "rigid_pretrained", "local4_pretrained", "dcn_pretrained"]
    small = [
        override
        for override in TINY
        if not override.startswith(("name=", "experiment=", "data=", "data.options.num_classes"))
    ]
    small = [
        "data.options.length=8" if override.startswith("data.options.length=") else override
        for override in small
    ]
    small += ["schedule.epochs=1", "schedule.warmup_epochs=0"]
    command = [
        f"classifiers={classifiers}",
        f"rows=[{','.join([*rows, 'tune_rigid_scratch_lr0.02'])}]",
        "seeds=[0]",
        "jobs=1",
    ]
    script = "scripts/reproduce/detection.py"
    assert (
        run_here(monkeypatch, tmp_path, *command, f"overrides={json.dumps(small)}", script=script)
        == 0
    )
    out = tmp_path / "runs/detection"
    labels = {"rigid": "rigid", "local4": "local 4", "dcn": "DCN"}
    test = {
        name: json.loads((out / f"{name}_pretrained-0/test.json").read_text()) for name in labels
    }
    table = (out / "report/questions.md").read_text()
    for name in ("local4", "dcn"):
        gain = test[name]["test_map"] - test["rigid"]["test_map"]
        assert (
            f"| {labels[name]}, from its classifier - rigid, from its classifier | {gain:+.2f}"
            in table
        )
    assert len((out / "report/detection.csv").read_text().splitlines()) == 5
    assert (
        "| rigid, from scratch, learning rate 0.02 | 1 |" in (out / "report/tuning.md").read_text()
    )
    assert not (out / "tune_rigid_scratch_lr0.02-0/test.json").exists()
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, *command, "studies=[tunning]", script=script) == 1
    assert capsys.readouterr().err == "error: there is no study 'tunning'; there are tuning, main\n"
