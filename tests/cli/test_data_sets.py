"""The commands, as a user calls them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.data.common import make_folder
from tests.data.sets.test_coco import write as write_coco
from tests.engine.common import call

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "images")


@pytest.fixture
def run(monkeypatch, capfd):
    """Return a function that runs a script as Python does, but in this process.

    This process has imported torch already.
    """

    def run(script, *arguments):
        code = call(monkeypatch, script, *arguments)
        stdout, stderr = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def test_check_dataset_reports_what_is_there(run, folder, tmp_path):
    (folder / "val" / "class1" / "001.jpg").write_bytes(b"")
    result = run("check-data", f"root={folder}", "workers=0", f"output={tmp_path / 'bad.txt'}")
    assert result.returncode == 1, result.stderr
    assert "22 good and 0 bad files" in result.stdout
    assert "6 good and 1 bad files" in result.stdout
    assert (
        "3 classes with 7 images in the median, fewest 7 (class1), most 8 (class0)" in result.stdout
    )
    assert "height 47 to 47" in result.stdout
    assert (
        tmp_path / "bad.txt"
    ).read_text() == f"{folder / 'val' / 'class1' / '001.jpg'}: empty file\n"


def test_pack_tar_then_check(run, folder, tmp_path):
    result = run("pack", f"root={folder}", f"output={tmp_path / 'tar'}", "shard=10")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "train: 22 images in 3 shards; 3 written, read back and compared, "
        "0 there already with the same files",
        "val: 7 images in 1 shards; 1 written, read back and compared, "
        "0 there already with the same files",
    ]
    checked = run("check-data", f"root={tmp_path / 'tar'}", "workers=0")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_check_dataset_knows_coco(run, tmp_path):
    write_coco(write_coco(tmp_path), split="val2017", file="instances_val2017.json")
    good = run("check-data", f"root={tmp_path}", "workers=0")
    assert good.returncode == 0, good.stdout + good.stderr
    # Of train and val; test is left out, as it would be val again.
    assert good.stdout.count("9 good and 0 bad files") == 2
    assert (
        "3 classes with 2 objects in the median, fewest 1 (kind 9), most 8 (kind 1)" in good.stdout
    )
    Image.new("RGB", (7, 5)).save(tmp_path / "train/3.png")
    bad = run("check-data", f"root={tmp_path}", "workers=0")
    assert bad.returncode == 1
    assert "8 good and 1 bad files" in bad.stdout
    assert (
        f"{tmp_path}/train/3.png: height x width must be 50 x 30, as train.json has it, got 5 x 7"
        in bad.stdout
    )


def test_a_wrong_root_is_one_sentence(tmp_path):
    """Check in processes of their own, as a user has them; both run at once."""
    commands = [
        [sys.executable, "-m", "dkcls", command, f"root={tmp_path / 'nowhere'}", *extra]
        for command, extra in (("check-data", []), ("pack", [f"output={tmp_path}"]))
    ]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 1
        assert stderr.startswith(
            f"error: {tmp_path / 'nowhere'} must hold the folders train and val"
        )
        assert len(stderr.splitlines()) == 1


@pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities of TorchVision are deprecated"
)
def test_bench_data_runs(run):
    result = run("scripts/bench/data.py", "--images", "10", "--rounds", "1", "--workers", "0")
    assert result.returncode == 0, result.stderr
    assert "pixels differ from PIL's by at most 1 level" in result.stdout
    assert result.stdout.count("| ours   ") == 2
