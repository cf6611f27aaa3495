"""What a user gets: the wheel in a folder of its own, and a package that needs no extras."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from dkcls.cli import EXTRAS
from tests.engine.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `import dkcls.ops, dkcls.layers, dkcls.models` must not need.
LEFT_OUT = ("hydra", "omegaconf", "tensorboard", "matplotlib", "sklearn", "scipy")
LEFT_OUT += ("simplejpeg", "pycocotools", "triton")
HIDE = "import sys; sys.modules.update(dict.fromkeys({!r}))\n"  # as if they were not installed


def python(*words, folder, **environment):
    """Run Python where no clone is, and without a network that anything could be fetched from."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=clean | nowhere | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the package as the wheel has it, and the wheel's names."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"  # pip builds in the tree, and would leave its files there
    clone.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    for tree in ("configs", "dkcls"):
        shutil.copytree(ROOT / tree, clone / tree, symlinks=True)
    pip = ("-m", "pip", "--quiet", "--no-cache-dir")
    build = ("wheel", "--no-build-isolation", "--no-deps", "-w", folder, clone)
    done = python(*pip, *build, folder=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    target = ("install", "--no-deps", "--no-index", "--target", folder / "site", wheel)
    done = python(*pip, *target, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "site", set(ZipFile(wheel).namelist())


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_what_is_no_python(installed):
    _, names = installed
    configs = {f"dkcls/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(configs) > 40
    assert configs | {"dkcls/py.typed", "dkcls/report/page.html"} <= names
    assert {"dkcls/data/sets/fashion.npz", "dkcls/data/sets/fashion.LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "scripts", "configs"))]


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_commands_run_from_the_wheel_in_an_empty_folder(installed, tmp_path):
    site, _ = installed

    def dkcls(*words):
        done = python(site / "bin/dkcls", *words, folder=tmp_path, PYTHONPATH=str(site))
        assert done.returncode == 0, done.stderr
        return done.stdout

    tiny = ("schedule.epochs=1", "data.options.length=256", "model.spatial=rigid")
    said = dkcls("train", "name=q", *tiny)
    assert "evaluate       dkcls eval checkpoint=runs/q/best.pt" in said
    assert "| top-1 |" in dkcls("eval", "checkpoint=runs/q/best.pt", "output=m.json")
    assert json.loads((tmp_path / "m.json").read_text())[0]["images"] == 256
    assert dkcls("predict", "checkpoint=runs/q/best.pt", "images=embedded:2").count("%") == 10
    dkcls("export", "checkpoint=runs/q/best.pt", "format=safetensors")
    dkcls("report", "runs=runs/q")
    found = {path.name for path in (tmp_path / "runs/q").iterdir()}
    assert {"best.pt", "best.safetensors", "report.html", "curves.png"} <= found
    code = "import dkcls; print(dkcls.__file__, dkcls.compose('experiment=resnet50').model.name)"
    done = python("-c", code, folder=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.split() == [str(site / "dkcls/__init__.py"), "resnet50"]


def test_operators_layers_and_networks_need_no_extras(tmp_path):
    code = HIDE.format(LEFT_OUT) + (
        "import dkcls.ops, dkcls.layers, dkcls.models, timm, torch\n"
        "net = timm.create_model('mobilenetv2_nano', spatial='local_dk')\n"
        "net(torch.randn(1, 1, 32, 32)).sum().backward()\n"
        "print(net.conv_stem.weight.grad.abs().sum() > 0)"
    )
    done = python("-c", code, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout == "tensor(True)\n", done.stderr


def test_a_missing_extra_is_one_sentence(tmp_path):
    write_checkpoint(tmp_path / "a.pt")
    code = HIDE.format(("matplotlib",)) + "from dkcls.cli import main; sys.exit(main())"
    words = ("erf", "checkpoint=a.pt", "images=embedded:1")
    done = python("-c", code, *words, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert done.stderr == "error: this needs matplotlib: pip install 'dkcls[analysis]'\n"


@pytest.mark.slow
def test_training_without_matplotlib_has_no_curves(tmp_path):
    code = HIDE.format(("matplotlib", "sklearn", "scipy")) + (
        "from dkcls.cli import main; sys.exit(main())"
    )
    tiny = ("schedule.epochs=1", "data.options.length=64", "model.spatial=rigid", "log.to=[]")
    done = python("-c", code, "train", "name=q", *tiny, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "top-1" in done.stdout
    assert "curves" not in done.stdout
    assert not (tmp_path / "runs/q/curves.png").exists()


def test_every_extra_is_one_of_the_projects():
    extras = PROJECT["optional-dependencies"]
    names = {"sklearn": "scikit-learn"}
    for package, extra in EXTRAS.items():
        assert names.get(package, package) in extras[extra]
    core = " ".join(PROJECT["dependencies"])
    assert not [package for package in EXTRAS if package in core]


def test_the_tested_versions_are_within_the_ranges():
    tested = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.split(";")[0].strip().partition("==")
            tested[name] = version
    assert all(tested.values())
    needed = [*PROJECT["dependencies"]]
    for extra in ("analysis", "detect", "onnx", "slurm"):
        needed += PROJECT["optional-dependencies"][extra]
    from packaging.requirements import Requirement

    for text in needed:
        requirement = Requirement(text)
        assert requirement.specifier.contains(tested[requirement.name]), text
