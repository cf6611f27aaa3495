"""Whatever is loaded, code that a file contains does not run."""

import json
import os
import pickle
import resource
import threading
import time
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature

import onnx
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models import build_model_with_cfg

from dkcls.config import ModelConfig
from dkcls.engine import checkpoint
from dkcls.engine.network import create_network, load, read_weights
from dkcls.errors import UserError
from dkcls.files import DamagedFile
from tests.engine.checkpoints import write_checkpoint
from tests.engine.common import run_here


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def pickled(path):
    path.write_bytes(pickle.dumps({"model": Evil()}, 2))


def saved(path):
    torch.save({"format": 1, "model": {}, "ema": None, "config": Evil()}, path)


@pytest.mark.parametrize("save", [pickled, saved])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".onnx"])
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("eval.py", ("checkpoint=FILE",)),
        ("eval.py", ("model.name=resnet18", "model.pretrained=FILE")),
        ("train.py", ("model.pretrained=FILE",)),
        ("predict", ("checkpoint=FILE", "images=x.png")),
        ("export", ("checkpoint=FILE", "format=torch")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_in_a_file_runs(save, suffix, script, arguments, tmp_path, monkeypatch, capsys):
    save(tmp_path / f"evil{suffix}")
    arguments = [word.replace("FILE", f"evil{suffix}") for word in arguments]
    assert run_here(monkeypatch, tmp_path, *arguments, script=script) == 1
    assert f"evil{suffix} is not a" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


def test_it_would_run_if_it_were_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "evil").exists()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("honest") / "honest.pt")


@pytest.fixture
def site():
    """A site on this machine: its address, and what was asked of it."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def rewritten(source, path, change):
    """Write a checkpoint or an export whose card was changed by `change(config, content)`."""
    content = torch.load(source, weights_only=True)
    change(content["config"], content)
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        card = {key: json.dumps(content[key]) for key in ("config", "classes", "input")}
        save_file(content["model"], path, {"dkcls": "1", **card})
    return path


COMMANDS = (
    ("eval.py", ("checkpoint=FILE",)),
    ("predict", ("checkpoint=FILE", "images=embedded:2", "workers=0")),
    ("export", ("checkpoint=FILE", "format=safetensors", "output=out.safetensors")),
    ("train.py", ("model.pretrained=FILE", "experiment=finetune")),
)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(("script", "arguments"), COMMANDS, ids=lambda value: str(value)[:8])
def test_a_file_fetches_and_writes_nothing(
    honest, site, script, arguments, suffix, tmp_path, monkeypatch, capsys
):
    address, asked = site
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    url = {"url": address + "/${oc.env:SECRET}", "file": ""}
    cases = {
        "pretrained_cfg": {"pretrained": True, "pretrained_cfg": url},
        "cache_dir": {"cache_dir": str(tmp_path / "cache")},
        "checkpoint_path": {"checkpoint_path": str(honest)},
        "pretrained_cfg_overlay": {"pretrained_cfg_overlay": {"url": address}},
    }
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for name, kwargs in cases.items():
        path = rewritten(
            honest,
            tmp_path / f"evil{suffix}",
            lambda config, _, kwargs=kwargs: config["model"]["kwargs"].update(kwargs),
        )
        words = [word.replace("FILE", str(path)) for word in arguments]
        assert run_here(monkeypatch, tmp_path, *words, script=script) == 1, name
        said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(said) == 1
        assert f"model.kwargs.{'pretrained' if 'url' in str(kwargs) else name}" in said[0]
        assert {path.name for path in tmp_path.iterdir()} - {"runs"} == {f"evil{suffix}"}
        path.unlink()
    assert asked == []


def put(key, value):
    def change(config, content):
        *groups, last = key.split(".")
        for group in groups:
            content = content[group]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("config.model.name", "${oc.env:SECRET}", r"must not hold \$\{"),
        ("config.data.root", "\\${oc.env:SECRET}", r"must not hold \$\{"),
        ("config.model.kwargs", {"x": ["${oc.env:SECRET}"]}, r"must not hold \$\{"),
        ("config.model.kwargs", {"features_only": True}, "model.kwargs.features_only"),
        ("config.model.kwargs", {"device": "cuda"}, "model.kwargs.device"),
        ("config.model.kwargs", {"nonsense": 1}, "nonsense"),
        ("config.model.options", {"nonsense": 1}, "nonsense"),
        ("config.model.scope", 10**9, "scope"),
        ("config.model.name", "vit_giant_patch14_224", "does not hold the network"),
        ("config.model.name", "hf-hub:a/b", "no network"),
        ("config.model.pretrained", "/etc/passwd", ""),
        ("config.data.download", True, ""),
        ("config.data.workers", 10**6, "data.workers"),
        ("classes", 7, "classes"),
        ("classes", "abc", "classes"),
        ("classes", ["a"] * 3, "does not hold the network"),
        ("config", [1], "config"),
        ("input.image_size", 10**7, "image_size"),
        ("input.image_size", 32.5, "image_size"),
        ("input.mean", "abc", "mean"),
        ("input.std", [0.0], "std"),
        ("input.channels", -1, "channels"),
        ("input.crop_ratio", float("nan"), "crop_ratio"),
        ("input.interpolation", "x", "interpolation"),
        ("model", {"a": 1}, "safe to load|state dict"),
    ],
)
def test_a_card_is_checked(honest, tmp_path, monkeypatch, key, value, said):
    monkeypatch.setenv("SECRET", "hunter2")
    path = rewritten(honest, tmp_path / "evil.pt", put(key, value))
    if not said:
        network = load(str(path))
        assert not network.config.data.download
        assert network.config.model.pretrained is None
        return
    with pytest.raises(UserError, match=said) as error:
        load(str(path))
    assert "hunter2" not in str(error.value)


def test_a_network_takes_no_more_memory_than_its_file_has_bytes(honest, tmp_path):
    huge = {"name": "resnet18", "kwargs": {"layers": [2000, 2000, 2000, 2000]}}
    wide = {"name": "vit_tiny_patch16_224", "kwargs": {"embed_dim": 60000, "num_heads": 1}}
    many = {"name": "vit_tiny_patch16_224", "kwargs": {"depth": 10**9}}
    for number, model in enumerate((huge, wide, many)):
        path = tmp_path / f"{number}.pt"
        rewritten(honest, path, lambda config, _, model=model: config["model"].update(model))
        started = time.monotonic()
        with pytest.raises(UserError, match=r"hold the network|up to 65536"):
            load(str(path))
        assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20


def deflated(path, honest):
    """A file that is much larger once it is read."""
    content = torch.load(honest, weights_only=True)
    torch.save(content, path)
    honest = path.rename(path.with_suffix(".good"))
    with zipfile.ZipFile(honest) as good, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            bad.writestr(name, bytes(2**24) if name.endswith("data/0") else good.read(name))


def stretched(path, honest):
    content = torch.load(honest, weights_only=True)
    for name, value in content["model"].items():
        content["model"][name] = torch.zeros(1).expand(2**40) if value.dim() > 3 else value
    torch.save(content, path)


def repeated(path, honest):
    """Lists of lists of lists: few bytes, of which a walk has no end."""
    content = torch.load(honest, weights_only=True)
    inner = ["x"]
    for _ in range(40):
        inner = [inner] * 10
    torch.save(content | {"classes": inner}, path)


def called(path, honest):
    torch.save(torch.load(honest, weights_only=True) | {"x": bytearray(2**24)}, path)


def sparse(path, honest):
    torch.save(torch.load(honest, weights_only=True) | {"x": torch.eye(3).to_sparse()}, path)


@pytest.mark.parametrize("make", [stretched, repeated, called, sparse])
def test_a_file_that_grows_as_it_is_read(honest, tmp_path, make):
    make(tmp_path / "evil.pt", honest)
    for read in (read_weights, partial(checkpoint.read, need_hash=False)):
        with pytest.raises((UserError, DamagedFile), match="safe to load"):
            read(tmp_path / "evil.pt")


def test_a_zip_bomb_is_not_even_opened(honest, tmp_path, monkeypatch):
    deflated(tmp_path / "evil.pt", honest)
    opened = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: opened.append(args))
    with pytest.raises(UserError, match="safe to load"):
        read_weights(tmp_path / "evil.pt")
    assert not opened


def test_deep_json_in_an_export(honest, tmp_path):
    path = rewritten(honest, tmp_path / "deep.safetensors", lambda config, content: None)
    with safe_open(path, "pt") as file:
        card = file.metadata() | {"classes": "[" * 100_000}
    save_file({"a": torch.zeros(1)}, path, card)
    with pytest.raises(UserError, match=r"deep\.safetensors"):
        load(str(path))


def test_an_onnx_file_must_map_images_to_its_classes(honest, tmp_path):
    content = torch.load(honest, weights_only=True)
    channels, size = content["input"]["channels"], content["input"]["image_size"]
    for shape, good in (([channels, size, size], True), ([channels, 8, 8], False)):
        nodes = [
            onnx.helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
            onnx.helper.make_node("Flatten", ["pooled"], ["logits"]),
        ]
        places = (("images", ["batch", *shape]), ("logits", ["batch", channels]))
        ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in places]
        graph = onnx.helper.make_graph(nodes, "x", ends[:1], ends[1:])
        opset = [onnx.helper.make_opsetid("", 20)]
        model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=9)
        for classes in (["a"] * channels, ["a"] * 7):
            card = {key: json.dumps(content[key]) for key in ("config", "input")}
            onnx.helper.set_model_props(model, {**card, "classes": json.dumps(classes)})
            onnx.save(model, tmp_path / "x.onnx")
            if good and len(classes) == channels:
                assert load(str(tmp_path / "x.onnx")).num_classes == channels
                continue
            with pytest.raises(UserError, match=r"x\.onnx does not hold the network"):
                load(str(tmp_path / "x.onnx"))


def test_timms_own_arguments_are_refused_by_name():
    """Whoever gives them: what timm reads, fetches and writes is not the network's."""
    own = {*signature(timm.create_model).parameters, *signature(build_model_with_cfg).parameters}
    for name in (*own - {"model_name", "kwargs"}, "pruned", "out_indices"):
        with pytest.raises(UserError, match=rf"model\.kwargs\.{name} "):
            create_network(ModelConfig(name="resnet18", kwargs={name: 1}), 10, 3)
