"""The examples of docs/extend.md, extracted into a folder outside the clone and run."""

import csv
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore
from PIL import Image

import dkcls
from dkcls.cli import command_line
from dkcls.config import TASK_CONFIGS
from dkcls.data import DATASETS
from dkcls.engine.checkpoint import read
from dkcls.engine.log import LOGGERS
from dkcls.engine.task import TASKS
from dkcls.errors import UserError
from dkcls.layers import LAYERS
from tests.engine.common import call

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text()
FILES = dict(re.findall(r"^`([\w/.]+)`:\n\n```(?:python|yaml)\n(.*?)^```$", PAGE, re.M | re.S))
PLUGINS = [Path(name).stem for name in FILES if name.startswith("my_") and name.endswith(".py")]
# One epoch of few steps. The run's name is out/NAME.
TINY = ("recipe=quick", "model.name=mobilenetv2_nano", "schedule.epochs=1", "log.to=[]")
TINY += ("schedule.warmup_epochs=0.1", "train.batch_size=16")
FASHION = ("data=deformed_fashion", "data.options.length=64")
ARRAYS = ("data=arrays", "data.root=images", "data.workers=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's files and images: the class, 0 to 3, is the brightness.

    A picture is darker towards its lower edge, so that one sees which way up it is.
    """
    folder = tmp_path_factory.mktemp("outside")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "images").mkdir()
    slope = np.linspace(90, 0, 32)[:, None]
    for split, count in (("train", 96), ("val", 32)):
        labels = np.arange(count) % 4
        noise = np.random.default_rng(count).normal(0, 5, (count, 3, 32, 32))
        images = (40 * labels[:, None, None, None] + 20 + slope + noise).clip(0, 255).astype("u1")
        np.savez(folder / "images" / f"{split}.npz", images=images, labels=labels)
        with (folder / "images" / f"{split}.csv").open("w") as file:
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                name = f"{split}{i}.png"
                Image.fromarray(image.transpose(1, 2, 0)).save(folder / "images" / name)
                csv.writer(file).writerow([name, f"kind {label}"])
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """A function that runs a script in the folder; it returns exit code, output and errors.

    Whatever plug-ins leave in this process is removed at the end.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "imported", [])

    def run(script, *words):
        code = call(monkeypatch, script, *words)
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    forget_plugins()


def forget_plugins():
    configs = ConfigStore.instance().repo
    for registry in (LAYERS, DATASETS, TASKS, LOGGERS):
        for name, thing in list(registry._things.items()):
            if thing.__module__ in PLUGINS:
                del registry._things[name], registry._labels[name]
                TASK_CONFIGS.pop(name, None)
                for group in ("data", "task"):
                    configs.get(group, {}).pop(f"{name}.yaml", None)
    for module in PLUGINS:
        sys.modules.pop(module, None)
    command_line.imported.clear()


def ok(result):
    code, out, err = result
    assert code == 0, err
    return out


def lines(run_folder):
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def rows(table):
    """Return the rows of a Markdown table as dictionaries."""
    head, _, *body = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    return [dict(zip(head, row, strict=True)) for row in body]


def percent(row):
    """Return what is printed with two decimals."""
    return float(row["top-1"].removesuffix(" %"))


def test_the_page_has_an_example_of_everything():
    assert PLUGINS == ["my_layers", "my_data", "my_files", "my_loggers", "my_losses", "my_tasks"]
    assert len(FILES) == len(PLUGINS) + 3


@pytest.mark.slow
@pytest.mark.xdist_group("onnx")  # the first export of a process takes ten seconds
def test_a_layer_is_trained_reported_exported_evaluated_and_drawn(folder, run):
    plugin, common = ("--plugin", "my_layers"), (*TINY, *FASHION, "out=runs/layers")
    options = ("model.spatial=mixed", "model.options.share=0.25", "model.scope=5")
    assert "TensorBoard" not in ok(run("train.py", *common, "name=rigid", "model.spatial=rigid"))
    ok(run("train.py", *plugin, *common, "name=mixed", *options))
    network = dkcls.load("runs/layers/mixed/best.pt")
    layers = [m for m in network.model.modules() if type(m).__name__ == "MixedConv2d"]
    assert {(layer.share, layer.deformable.scope) for layer in layers} == {(0.25, (5, 5))}
    assert any(layer.deformable.kernel_generator.weight.any() for layer in layers)

    ok(run("report", *plugin, "runs=runs/layers"))
    page = (folder / "runs/layers/report.html").read_text()
    assert re.search(r"rigid \+ local DK[^<]*, scope 5", page)
    assert "taps in the scopes of rigid + local DK" in page

    files = ["best.pt", "best.safetensors", "best.onnx"]
    for kind in ("safetensors", "onnx"):
        words = ("checkpoint=runs/layers/mixed/best.pt", f"format={kind}")
        ok(run("export", *plugin, *words))
    paths = ",".join(f"runs/layers/mixed/{file}" for file in files)
    found = rows(ok(run("eval.py", *plugin, f"checkpoint=[{paths}]")))
    assert [row["checkpoint"].split("/")[-1] for row in found] == files
    expected = lines(folder / "runs/layers/mixed")[-1]
    for row in found:
        assert percent(row) == pytest.approx(expected["top1"], abs=0.006)
        assert float(row["loss"]) == pytest.approx(expected["loss"], abs=2e-4)

    words = ("checkpoint=runs/layers/mixed/best.pt", "images=images/val0.png", "output=erf.png")
    assert "radius" in ok(run("erf", *plugin, *words))
    assert Image.open(folder / "erf.png").size[0] > 500

    forget_plugins()
    code, _, err = run("eval.py", "checkpoint=runs/layers/mixed/best.pt")
    assert code == 1
    assert err.endswith("got 'mixed'; --plugin MODULE adds those of a module\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("plugin", "name", "words", "classes"),
    [
        ("my_data", "arrays", ("data.options.mean=0.4", "data.workers=2"), ["0", "1", "2", "3"]),
        (
            "my_files",
            "listed",
            ("data.image_size=32", "data.workers=1", "augment.color_jitter=0"),
            [f"kind {i}" for i in range(4)],
        ),
    ],
)
def test_a_data_set_is_loaded_by_other_processes(folder, run, plugin, name, words, classes):
    common = (*TINY, f"data={name}", "data.root=images", f"name={name}", *words)
    learn = ("schedule.epochs=6", "train.eval_every=6", "optim.lr=0.1")
    ok(run("train.py", f"--plugin={plugin}", *common, *learn))
    state = read(folder / "runs" / name / "best.pt")
    assert state["classes"] == classes
    (row,) = rows(ok(run("eval.py", "--plugin", plugin, f"checkpoint=runs/{name}/best.pt")))
    assert row["images"] == "32"
    assert percent(row) > 60  # of four classes


def test_an_option_reaches_the_data_set_and_a_wrong_one_is_refused(run):
    ok(run("train.py", "--plugin", "my_data", *TINY, *ARRAYS, "data.options.mean=0.4", "name=mean"))
    assert dkcls.load("runs/mean/best.pt").input.mean == [0.4, 0.4, 0.4]
    words = ("--plugin", "my_data", *TINY, *ARRAYS, "name=wrong", "data.options.meen=0.4")
    code, _, err = run("train.py", *words)
    message = "data.options.meen: data set 'arrays' takes no 'meen'; did you mean 'mean'?"
    assert (code, err) == (1, f"error: data: {message}\n")
    code, _, err = run("train.py", *words[:-1], "data.image_size=32")
    message = "data set 'arrays' takes no image_size, got 32; data.image_size=null leaves it"
    assert code == 1
    assert err.startswith(f"error: data: {message}")


def test_a_logger_gets_the_metrics(folder, run):
    words = (*TINY, "data=synthetic", "data.options.length=64", "data.options.num_classes=4")
    words += ("data.image_size=32", "log.every=2", "name=logged", "log.to=[csv]")
    ok(run("train.py", "--plugin", "my_loggers", *words))
    assert logged(folder / "runs/logged") == written(folder / "runs/logged")


def logged(run_folder):
    """Return what the example of a logger has written."""
    with (run_folder / "metrics.csv").open() as file:
        return [(int(step), name, float(value)) for step, name, value in csv.reader(file)]


def written(run_folder):
    """Return the metrics of metrics.jsonl, as a logger should get them."""
    apart = ("kind", "step", "epoch", "seconds")
    return [
        (line["step"], f"{line['kind']}/{name}", value)
        for line in lines(run_folder)
        for name, value in line.items()
        if name not in apart
    ]


def test_another_loss_is_trained_and_the_network_is_a_classifier(folder, run):
    words = ("--plugin", "my_losses", *TINY, *FASHION, "task=focal", "name=focal", "log.every=1")
    ok(run("train.py", *words, "task.gamma=3", "schedule.warmup_epochs=0.25"))
    state = read(folder / "runs/focal/best.pt")
    assert state["config"]["task"] == {"name": "focal", "label_smoothing": 0.0, "gamma": 3.0}
    ok(run("train.py", *words[2:], "task=classification", "name=entropy"))
    focal, entropy = (lines(folder / "runs" / name)[0]["loss"] for name in ("focal", "entropy"))
    assert 0.4 < focal / entropy < 0.9  # 0.73 where all ten classes are equally likely

    task = TASKS["focal"]([0.5], [0.5], 3, torch.device("cpu"))
    task.gamma = 3.0
    chance = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    expected = -(0.3**3 * np.log(0.7) + 0.9**3 * np.log(0.1)) / 2
    assert task.criterion(chance.log(), torch.tensor([0, 1])).item() == pytest.approx(expected)

    (row,) = rows(ok(run("eval.py", "--plugin", "my_losses", "checkpoint=runs/focal/best.pt")))
    assert percent(row) == pytest.approx(lines(folder / "runs/focal")[-1]["top1"], abs=0.006)
    words = ("checkpoint=runs/focal/best.pt", "images=images/val0.png", "format=csv")
    assert "images/val0.png" in ok(run("predict", "--plugin", "my_losses", *words))
    assert "task.gamma=2" in ok(run("train.py", "--plugin", "my_losses", "--help"))


def test_a_task_is_trained_evaluated_and_started_from(folder, run):
    plugins = ("--plugin", "my_tasks", "--plugin", "my_data")
    words = (*TINY, *ARRAYS, "task=turns", "name=turns", "optim.lr=0.1", "schedule.epochs=6")
    ok(run("train.py", *plugins, *words, "train.eval_every=6", "task.turns=3"))
    (row,) = rows(ok(run("eval.py", *plugins, "checkpoint=runs/turns/best.pt")))
    assert (row["images"], percent(row)) == ("32", 100.0)
    assert read(folder / "runs/turns/best.pt")["classes"] == ["0", "90", "180"]

    ok(run("train.py", *plugins, *TINY[:1], *TINY[2:], *ARRAYS, "name=after", *start("turns")))
    before, after = (read(folder / "runs" / name / "best.pt") for name in ("turns", "after"))
    assert before["model"].keys() == after["model"].keys()
    assert torch.equal(before["model"]["conv_stem.weight"], after["model"]["conv_stem.weight"])

    code, _, err = run("eval.py", *plugins, "checkpoint=runs/turns/best.pt", "per_class=a.csv")
    assert (code, err.splitlines()[-1]) == (
        1,
        "error: per_class=a.csv is for classification, runs/turns/best.pt is not",
    )
    code, _, err = run("eval.py", *plugins, "checkpoint=runs/turns/best.pt", "confusion=a.png")
    assert (code, err.splitlines()[-1]) == (
        1,
        "error: confusion=a.png is for classification, runs/turns/best.pt is not",
    )


def start(name):
    return (f"model.pretrained=runs/{name}/best.pt", "model.freeze=stem")


@pytest.mark.slow
def test_a_job_of_a_launcher_imports_the_plugin_and_logs(folder, run, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = (*TINY, "data=synthetic", "data.options.length=32", "data.options.num_classes=4")
    words += ("data.image_size=32", "out=runs/jobs", "log.to=[csv]", "log.every=1", "name=job")
    ok(run("train.py", "--plugin", "my_loggers", "-m", "hydra/launcher=submitit_local", *words))
    assert logged(folder / "runs/jobs/job") == written(folder / "runs/jobs/job")
    assert len(logged(folder / "runs/jobs/job")) > 10
    (log,) = (folder / "runs/jobs/sweep/.submitit").rglob("*_log.err")
    assert "job: mobilenetv2_nano" in log.read_text()


def test_a_config_folder_of_ones_own(folder, run):
    words = ("--plugin", "my_layers", "--config-dir", "my_configs")
    assert " mixed," in ok(run("train.py", *words, "--help"))
    ok(run("train.py", *words, "experiment=mixed", "data.options.length=64", "log.to=[]"))
    (name,) = (path.name for path in (folder / "runs").glob("mixed*"))
    assert name == "mixed-data.options.length-64"
    config = yaml.safe_load((folder / "runs" / name / "config.yaml").read_text())
    assert (config["schedule"]["epochs"], config["schedule"]["warmup_epochs"]) == (1, 0.1)
    assert (config["train"]["batch_size"], config["model"]["options"]) == (64, {"share": 0.25})


def test_from_python(folder, run):
    sys.path.append(str(folder))
    found = runpy.run_path("from_python.py")
    assert found["result"]["images"] == 1000
    assert found["metrics"]["top1"] == pytest.approx(found["result"]["best_top1"], abs=1e-4)
    assert type(found["network"].model.blocks[0][0].conv_dw).__name__ == "MixedConv2d"
    assert (found["short"].name, found["short"].schedule.epochs) == (
        "mixed-data.options.length-1000",
        1,
    )


def test_errors_from_python_are_one_sentence(folder, run):
    with pytest.raises(UserError, match="there is no experiment 'quick'; near it: quickstart"):
        dkcls.compose("experiment=quick")
    with pytest.raises(UserError, match="Value 'x' of type 'str' could not be converted"):
        dkcls.compose("schedule.epochs=x")
    with pytest.raises(UserError, match="name=NAME is needed"):
        dkcls.train(dkcls.Config())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--plugin",), "--plugin needs the name of a module, as in --plugin my_module, got ''"),
        (("--plugin", "my_data.py"), "--plugin needs the name of a module, .* got 'my_data.py'"),
        (("--plugin", "../my_data"), "--plugin needs the name of a module, .* got '../my_data'"),
        (
            ("--plugin=no_module",),
            "--plugin no_module: there is no module no_module in this folder",
        ),
        (
            ("log.to=[csv]", *FASHION, *TINY[:3]),
            "log.to: logger must be one of tensorboard, got 'csv'; --plugin MODULE",
        ),
        (("task=focal",), "there is no task 'focal'"),
        (("data=arrays",), "there is no data 'arrays'"),
        (("task.gamma=2",), "there is no key 'task.gamma'"),
        (("--plugin", "my_losses", "task.gamma=2"), "task.gamma is a key of task=focal"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(run, words, message):
    code, _, err = run("train.py", *words)
    assert code == 1
    assert re.match(f"error: {message}", err.splitlines()[-1]), err
    assert "Traceback" not in err


def test_plugins_are_listed_by_the_help(run):
    page = ok(run("train.py", "--plugin", "my_data", "--plugin", "my_tasks", "--help"))
    assert re.search(r"^  data +arrays, ", page, re.M)
    assert re.search(r"^  task +classification, detection, turns$", page, re.M)
    assert re.search(r"^  task.turns=4 +how many there are to tell apart", page, re.M)
    assert "arrays" in ok(run("eval.py", "--plugin", "my_data", "--help"))


def test_nothing_of_a_plugin_is_left(run):
    flags = [word for plugin in PLUGINS for word in ("--plugin", plugin)]
    ok(run("train.py", *flags, *TINY, *ARRAYS, "model.spatial=mixed", "train.dry_run=true"))
    registries = (LAYERS, DATASETS, TASKS, LOGGERS)
    names = {"mixed", "arrays", "listed", "csv", "focal", "turns"}

    def left():
        return names & {name for registry in registries for name in registry.registered()}

    assert left() == names
    forget_plugins()
    assert left() == set()
    assert not names & TASK_CONFIGS.keys()
    assert not set(PLUGINS) & sys.modules.keys()
    assert not {"arrays.yaml", "turns.yaml"} & set(str(ConfigStore.instance().repo).split("'"))
