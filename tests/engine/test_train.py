"""train.py as people start it: what it leaves behind, what it says, what it refuses."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch

from tests.engine.common import last_state, metric_lines, run_here

pytestmark = pytest.mark.xdist_group("test_train")  # its runs are made once


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("finished"), io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(said):
        assert run_here(monkeypatch, folder, "log.to=[tensorboard]", "train.keep=1") == 0
    return folder, said.getvalue()


def test_what_a_run_leaves(finished):
    folder, said = finished
    run = folder / "runs/small"
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "best.pt",
        "last.pt",
        "checkpoints",
        "config.yaml",
        "curves.png",
        "metrics.jsonl",
        "result.json",
        "tensorboard",
        "versions.json",
    }
    kinds = [(line["kind"], line["step"]) for line in metric_lines(folder)]
    assert kinds == [
        ("train", 2),
        ("train", 4),
        ("train", 6),
        ("val", 6),
        ("train", 8),
        ("train", 10),
        ("train", 12),
        ("val", 12),
    ]
    assert [line["epoch"] for line in metric_lines(folder)] == [1] * 4 + [2] * 4
    result = json.loads((run / "result.json").read_text())
    assert result["images"] == 52
    assert "eval.py checkpoint=runs/small/best.pt" in said
    state = last_state(folder)
    assert state["step"] == 12
    assert len(state["classes"]) == 10
    assert [path.name for path in folder.iterdir()] == ["runs"]


def test_a_finished_run_is_not_started_again(finished, monkeypatch, caplog):
    folder, _ = finished
    before = (folder / "runs/small/last.pt").resolve().read_bytes()
    assert run_here(monkeypatch, folder, "log.to=[tensorboard]", "train.keep=1") == 0
    assert "is finished" in caplog.text
    assert (folder / "runs/small/last.pt").resolve().read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("seed=1",), "another config (seed: 0 -> 1)"),
        (("resume=never",), "holds a run already"),
        (("optim.lrr=1", "name=x"), "there is no key 'optim.lrr'; did you mean 'optim.lr'?"),
        (("+optim.lrr=1", "name=x"), "there is no key 'optim.lrr'; did you mean 'optim.lr'?"),
        (("optim.lr=abc", "name=x"), "could not be converted to Float"),
        (("optim.lr=-1", "name=x"), "optim.lr must be above 0, got -1.0"),
        (
            (
                "name=x",
                "data=imagenet",
                "data.options.length=null",
                "data.options.num_classes=null",
                "data.root=nowhere",
            ),
            "nowhere",
        ),
        (("name=x", "train.batch_size=9", "train.accumulation=2"), "9 does not divide by 1 x 2"),
        (("name=x", "model.name=mobilenetv2_nanno"), "mobilenetv2_nano"),
        (("name=x", "model.spatial=locl_dk"), "local_dk"),
        (("name=x", "model.name=resnet50"), "spatial"),
        (("name=x", "experiment=resnet50_dw_local44"), "resnet50_dw_local4"),
        (("name=x", "out=/proc/nowhere"), "cannot be written"),
        (("name=x", "+hydra.callbacks.x._target_=os.getcwd"), "a config may not name code to run"),
        (("name=x", "hydra.sweeper._target_=os.getcwd"), "a config may not name code to run"),
        (
            ("name=x", "+hydra.job_logging.handlers.x.class=os.getcwd"),
            "a config may not name code to run",
        ),
        pytest.param(
            ("name=x", "train.device=cuda"),
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_is_the_users_to_put_right(finished, monkeypatch, capsys, overrides, sentence):
    folder, _ = finished
    assert run_here(monkeypatch, folder, *overrides) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said
    assert not (folder / "runs/x").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", b"a: [\xff"),
        ("config.yaml", b"a: ["),
        ("config.yaml", b"- 1"),
        ("result.json", b"{"),
        ("result.json", b"[1]"),
    ],
)
def test_a_damaged_file_of_the_run_is_named(monkeypatch, tmp_path, capsys, file, content):
    run = tmp_path / "runs/small"
    run.mkdir(parents=True)
    (run / file).write_bytes(content)
    assert run_here(monkeypatch, tmp_path) == 1
    assert f"runs/small/{file} is damaged" in capsys.readouterr().err


def test_a_config_file_that_is_none(monkeypatch, tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/x.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    assert run_here(monkeypatch, tmp_path, "experiment=x", f"--config-dir={tmp_path}") == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "error: the config cannot be composed: could not determine a constructor"
    )
    assert said.count("\n") == 1


def test_sweep_under_torchrun_is_refused(tmp_path, monkeypatch, capsys):
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
    ):  # as torchrun sets them
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, tmp_path, "seed=0,1", "-m") == 1
    assert "does not run under torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sweep_skips_what_is_finished(tmp_path, monkeypatch, caplog, capsys):
    overrides = (
        "name=null",
        "schedule.epochs=1",
        "data.options.length=16",
        "data.workers=0",
        "seed=0,1",
        "-m",
    )
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    said = capsys.readouterr().out
    assert said.endswith("written: runs/sweep.md\n")  # the table of both seeds
    table = (tmp_path / "runs/sweep.md").read_text()
    assert table in said
    assert "| 0 1 |" in table
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    runs = [name for name in runs if name != "sweep"]
    assert len(runs) == 2
    assert all("=" not in name for name in runs)
    assert "is finished" not in caplog.text
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    assert caplog.text.count("is finished") == 2
