"""dkcls predict: files, folders, a list on stdin; tables, CSV, JSON; unreadable files."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dkcls.engine.network import load
from tests.data.common import make_dataset
from tests.engine.checkpoints import write_checkpoint, write_images
from tests.engine.common import run_here
from tests.models.common import awake, create


@pytest.fixture
def predict(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "a.pt", spatial="local_dk")

    def run(*arguments):
        code = run_here(monkeypatch, tmp_path, *arguments, "workers=0", script="predict")
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_embedded_images_as_files_are_what_they_are_in_the_data_set(predict, tmp_path):
    """Grey or in colour, whatever the batch."""
    batch = make_dataset("deformed_fashion", split="test").load(np.arange(9)).batch
    network = load(str(tmp_path / "a.pt"))
    with torch.no_grad():
        shares = network.model.eval()((batch.images / 255 - 0.15) / 0.25).softmax(1)
    for colour in (False, True):
        write_images(tmp_path / f"photos{colour}", 9, colour=colour)
        code, out, _ = predict(
            "checkpoint=a.pt", f"images=photos{colour}", "format=json", "top=3", "batch_size=4"
        )
        predictions = json.loads(out)
        assert (code, len(predictions)) == (0, 9)
        for prediction in predictions:
            number = int(prediction["image"].removesuffix(".png")[-3:])
            best = shares[number].topk(3)
            assert prediction["classes"] == [network.classes[i] for i in best.indices.tolist()]
            assert prediction["probabilities"] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_formats_and_places(predict, tmp_path, monkeypatch):
    write_images(tmp_path / "photos", 6)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    code, table, _ = predict("checkpoint=a.pt", "images=photos")
    assert (code, table.count("\n")) == (0, 6)
    assert all(
        line.startswith(file) and line.count("%") == 5
        for line, file in zip(table.splitlines(), files, strict=True)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(files[:2]) + "\n"))
    _, listed, _ = predict("checkpoint=a.pt", "images=-", "format=csv", "top=2")
    rows = list(csv.DictReader(io.StringIO(listed)))
    assert [(row["image"], row["rank"]) for row in rows] == [
        (file, rank) for file in files[:2] for rank in "12"
    ]
    assert float(rows[0]["probability"]) >= float(rows[1]["probability"])
    assert (
        predict(
            "checkpoint=a.pt",
            f"images=[{','.join(files[:2])}]",
            "format=csv",
            "top=2",
            "output=out.csv",
        )[1]
        == ""
    )
    assert (tmp_path / "out.csv").read_text() == listed


def test_what_cannot_be_read_is_named_and_the_rest_done(predict, tmp_path, caplog):
    write_images(tmp_path / "photos", 3)
    (tmp_path / "photos/broken.jpg").write_bytes(b"\xff\xd8\xffnonsense")
    code, out, err = predict(
        "checkpoint=a.pt", "images=[photos,nowhere.png]", "format=csv", "top=1"
    )
    assert (code, out.count("\n")) == (1, 1 + 3)
    assert "Traceback" not in err
    assert "bad file photos/broken.jpg: not an image" in caplog.text
    assert "bad file nowhere.png: No such file or directory" in caplog.text


def test_plain_weights_of_timm(predict, tmp_path):
    """1000 classes that nobody named are ImageNet's."""
    save_file(awake(create("mobilenetv2_100")).state_dict(), tmp_path / "w.safetensors")
    write_images(tmp_path / "photos", 1, colour=True)
    code, out, _ = predict(
        "model.name=mobilenetv2_100", "checkpoint=w.safetensors", "images=photos", "top=1"
    )
    assert code == 0
    assert " n0" in out or " n1" in out


def test_bad_arguments(predict, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, sentence in (
        (("images=x.png",), "checkpoint=... is needed"),
        (("checkpoint=a.pt",), "images=... is needed"),
        (("checkpoint=a.pt", "images=empty"), "there are no images in empty"),
        (
            ("checkpoint=a.pt", "images=x.png", "format=xml"),
            "format must be table, csv or json, got 'xml'",
        ),
        (("checkpoint=a.pt", "images=x.png", "top=0"), "top must be at least 1, got 0"),
        (("checkpoint=b.pt", "images=x.png"), "there is no file b.pt"),
    ):
        code, out, err = predict(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert sentence in err


def test_embedded_images_are_the_first_of_the_test_split(predict, tmp_path):
    batch = make_dataset("deformed_fashion", split="test").load(np.arange(3)).batch
    network = load(str(tmp_path / "a.pt"))
    with torch.no_grad():
        shares = network.model.eval()((batch.images / 255 - 0.15) / 0.25).softmax(1)
    code, out, _ = predict("checkpoint=a.pt", "images=embedded:3", "format=json", "top=1")
    found = json.loads(out)
    assert (code, [each["image"] for each in found]) == (0, [f"embedded:{i}" for i in range(3)])
    assert [each["probabilities"][0] for each in found] == pytest.approx(
        shares.amax(1).tolist(), abs=1e-5
    )


@pytest.mark.parametrize("number", ["embedded:", "embedded:x", "embedded:5001"])
def test_a_wrong_number_of_embedded_images_is_refused(predict, number):
    code, _, err = predict("checkpoint=a.pt", f"images={number}")
    assert code == 1
    assert f"must be of 1 to 5000 images, got '{number}'" in err
