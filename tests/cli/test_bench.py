"""dkcls bench: tables and CSV of operators and of networks; what is refused before any timing."""

import csv
import math
import sys

import pytest
import timm
import torch
from torch import nn

from dkcls import cli
from dkcls.cli.bench import Arguments, measure, networks, ops
from dkcls.layers import DynamicConv2d, offset_generators
from dkcls.models import PAPER, count_parameters
from tests.models.common import PAPER_NAMES

TINY = ("image_size=32", "batch_size=2", "rounds=2")
COLUMNS = {
    "inference": "inference s/image",
    "training": "training s/image",
    "memory": "memory MiB",
}


@pytest.fixture(autouse=True)
def leave_the_c_library_alone(monkeypatch):
    monkeypatch.setattr(measure, "keep_freed_memory", lambda: None)


@pytest.fixture
def bench(monkeypatch, capsys):
    """Return a function that runs the command; it returns exit code, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dkcls", "bench", *words])
        try:
            code = cli.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def no_timing(monkeypatch):
    def refuse(*arguments):
        pytest.fail("something is timed")

    for module in (measure, ops, networks):
        for name in ("seconds", "medians"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)


def printed(out):
    """Return the Markdown table of an output, as a list of rows by column."""
    lines = [line for line in out.splitlines() if line.startswith("| ") and "---" not in line]
    header, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_networks_over_their_rigid_form_and_over_resnet50(bench, tmp_path):
    names = "names=[mobilenetv2_100_local4,test_resnet]"
    code, out, err = bench("what=networks", names, *TINY, f"output={tmp_path}/n.csv")
    assert code == 0, err
    threads = f"CPU, {torch.get_num_threads()} threads"
    assert out.startswith(f"{threads}, torch.float32, torch {torch.__version__}; batches of 2 ")
    assert "images of 32 x 32, medians of 2 rounds" in out.splitlines()[0]

    rows = read(tmp_path / "n.csv")
    expected = ["device", "dtype", "batch_size", "image_size", "network"]
    for what, column in COLUMNS.items():
        expected += [column, f"{what} over rigid", f"{what} over resnet50"]
    assert list(rows[0]) == expected
    assert [list(row.values())[:4] for row in rows] == [[threads, "float32", "2", "32"]] * 4
    table = printed(out)
    assert list(table[0]) == expected[4:]
    assert [row["inference s/image"] for row in table] == [row[expected[5]] for row in rows]

    of = {row["network"]: row for row in rows}
    rigid = {
        "resnet50": "resnet50",
        "mobilenetv2_dw": "mobilenetv2_dw",
        "mobilenetv2_100_local4": "mobilenetv2_dw",
        "test_resnet": None,
    }
    assert list(of) == list(rigid)
    for name, row in of.items():
        for what, column in COLUMNS.items():
            value = float(row[column])
            assert value > 0
            for over, other in (("rigid", rigid[name]), ("resnet50", "resnet50")):
                ratio = row[f"{what} over {over}"]
                if other is None:
                    assert ratio == ""
                else:
                    expected_ratio = value / float(of[other][column])
                    assert float(ratio) == pytest.approx(expected_ratio, rel=0.002, abs=0.006)
    # At least the gradients, in float32, and not much more for images this small.
    weights = 25_557_032 * 4 / 2**20
    assert weights < float(of["resnet50"]["memory MiB"]) < 1.5 * weights


def test_operators_over_the_rigid_convolution(bench, tmp_path):
    code, out, err = bench(
        "what=ops", "shapes=[1x8x6x5,2x16x8x8s2]", "rounds=2", f"output={tmp_path}/new/o.csv"
    )
    assert code == 0, err
    assert "times over those of F.conv2d, medians of 2 rounds" in out
    rows = read(tmp_path / "new/o.csv")
    columns = ["shape", "operator", "forward", "forward + backward", "extra memory"]
    assert list(rows[0]) == ["device", "dtype", *columns]
    operators = [operator.name for operator in (*ops.RIGID, *ops.OPERATORS)]
    assert [(row["shape"], row["operator"]) for row in rows] == [
        (shape, name) for shape in ("1x8x6x5", "2x16x8x8s2") for name in operators
    ]
    assert [{column: row[column] for column in columns} for row in rows] == printed(out)
    for shape in ("1x8x6x5", "2x16x8x8s2"):
        for way in ("forward", "forward + backward"):
            rigid = [float(row[way]) for row in rows if row["shape"] == shape][:2]
            assert min(rigid) == 1
    assert all(bool(row["extra memory"]) == (row["operator"] == ops.LOCAL.name) for row in rows)


def test_extra_memory_is_beyond_inputs_output_and_gradients():
    """An operator that holds three more inputs while it runs."""

    def hungry(x, weight, kernel_offset, image_offset, stride):
        held = x.detach().repeat(3, 1, 1, 1)
        return ops.ours(x, weight, kernel_offset, image_offset, stride) + held[0].sum() * 0

    def extra(function):
        operator = ops.LOCAL._replace(function=function)
        shape = ops.Shape(4, 16, 32, 32)
        return ops.extra_memory(ops.Call(operator, shape, "cpu", torch.float32), "cpu")

    assert 0 <= extra(ops.ours) < 1
    assert 1 < extra(hungry) < 4


def test_medians_of_turns_within_a_budget():
    """Both timers of a pair run at least once; a pair beyond its budget sits out the rest."""
    calls = []

    def timer(name, *seconds):
        rest = iter(seconds)

        def call():
            calls.append(name)
            return next(rest)

        return call

    fast = timer("a", 1, 9, 2), timer("b", 3, 4, 8)
    slow = timer("c", 100), timer("d", 50)
    with measure.tqdm(total=12, disable=True) as bar:
        found = measure.medians([fast, slow], rounds=3, budget=30, bar=bar)
    assert found == [(2, 4), (100, 50)]
    assert sorted(calls[:4]) == ["a", "b", "c", "d"]
    assert sorted(calls[4:]) == ["a", "a", "b", "b"]


def test_a_wrong_operator_is_not_timed(bench, no_timing, monkeypatch, tmp_path):
    def slightly_wrong(*arguments):
        return ops.ours(*arguments) * 1.0001

    wrong = ops.OPERATORS[1]._replace(function=slightly_wrong)
    monkeypatch.setattr(ops, "OPERATORS", (ops.LOCAL, wrong))
    code, out, err = bench("what=ops", "shapes=1x8x6x5", f"output={tmp_path}/o.csv")
    assert (code, out) == (1, "")
    sentence = "error: local DK, scope 9 is wrong at 2x40x7x6 in torch.float32: a relative error of"
    assert sentence in err
    assert err.rstrip().endswith("; nothing is timed")
    assert list(tmp_path.iterdir()) == []


def test_a_network_with_infinite_outputs_is_not_timed(bench, no_timing, monkeypatch, tmp_path):
    class Broken(nn.Sequential):
        def forward(self, x):
            return super().forward(x) / (0.0 if self.training else 1.0)

    def broken(config, *arguments, **keywords):
        model = create_network(config, *arguments, **keywords)
        return Broken(model) if config.name == "test_resnet" else model

    create_network = networks.create_network
    monkeypatch.setattr(networks, "create_network", broken)
    code, out, err = bench("what=networks", "names=test_resnet", *TINY, f"output={tmp_path}/n.csv")
    assert (code, out) == (1, "")
    assert (
        "error: test_resnet gives outputs that are not finite, in train mode in torch.float32; "
        "nothing is timed"
    ) in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "what=... is needed"),
        (["what=layers"], "what must be ops or networks, got 'layers'"),
        (["what=ops", "device=gpu"], "device must be cpu or cuda, got 'gpu'"),
        (["what=ops", "dtype=int8"], "dtype must be float32, float16, bfloat16 or null, got"),
        (["what=ops", "rounds=0"], "rounds must be at least 1, got 0"),
        (["what=ops", "budget=0"], "budget must be above 0, got 0"),
        (["what=ops", "output=a.txt"], "output must be a file.csv, got 'a.txt'"),
        (["what=ops", "shapes=8x3"], "a shape is NxCxHxW or NxCxHxWsSTRIDE, such as 8x256x56x"),
        (["what=ops", "shapes=[1x8x6x5,1x8x0x5]"], "such as 8x256x56x56s2, got '1x8x0x5'"),
        (["what=ops", "shapes=[models,1x8x6x5]"], "such as 8x256x56x56s2, got 'models'"),
        (["what=ops", "shapes=[]"], "shapes must be one or more, got []"),
        (["what=ops", "batch_size=4"], "batch_size goes with shapes=models"),
        (["what=ops", "names=resnet50"], "names must be left out with what=ops, got 'resnet50'"),
        (["what=ops", "image_size=64"], "image_size must be left out with what=ops, got 64"),
        (["what=networks", "shapes=models"], "shapes must be left out with what=networks"),
        (["what=networks", "image_size=0"], "image_size must be at least 1, got 0"),
        (
            ["what=networks", "names=[resnet18,resnet50_dw_lokal4]"],
            "there is no network 'resnet50_dw_lokal4'; did you mean 'resnet50_dw_local4'?",
        ),
        pytest.param(
            ["what=ops", "device=cuda"],
            "there is no CUDA or ROCm device on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(bench, no_timing, words, sentence):
    code, out, err = bench(*words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_shapes_of_the_models():
    arguments = cli.parse(["what=ops", "shapes=models", "batch_size=3"], Arguments)
    shapes = ops.shapes_of(arguments)
    assert {shape.n for shape in shapes} == {3}
    assert ops.Shape(3, 128, 56, 56) in shapes
    assert ops.Shape(3, 576, 14, 14, 2) in shapes
    default = ops.shapes_of(cli.parse(["what=ops"], Arguments))
    assert [str(shape) for shape in default] == ops.SHAPES


@pytest.mark.parametrize("name", [*PAPER_NAMES, "resnet50_dw", "mobilenetv2_dw"])
def test_the_rigid_form_has_the_rigid_rows_parameters_and_no_other_layer(name):
    of_paper = {row.name: row.parameters for row in PAPER}
    families = {"mobilenetv2": "mobilenetv2_100", "resnet50_dw": "resnet50_dw"}
    [rigid] = [row for start, row in families.items() if name.startswith(start)] or ["resnet50"]
    with torch.device("meta"):
        model = timm.create_model(networks.RIGID[name])
    assert count_parameters(model) == of_paper[rigid]
    assert not any(isinstance(module, DynamicConv2d) for module in model.modules())
    assert not list(offset_generators(model))


def test_names_come_after_their_references_once():
    names = ["mobilenetv2_100_dcn", "resnet18", "resnet50", "mobilenetv2_100_local4"]
    assert networks.with_references(names) == [
        "resnet50",
        "mobilenetv2_dw",
        "mobilenetv2_100_dcn",
        "resnet18",
        "mobilenetv2_100_local4",
    ]
    for name in networks.NAMES:
        assert networks.RIGID[name] != name


def test_offsets_are_about_a_step():
    subject = networks.Subject("mobilenetv2_100_local4", 4, 64, "cpu", torch.float32)
    spreads = []
    for _, generator in offset_generators(subject.model):
        generator.register_forward_hook(lambda *call: spreads.append(call[-1].std().item()))
    subject.model.train()
    subject.infer()
    assert len(spreads) == 17
    assert 0.5 < math.prod(spreads) ** (1 / len(spreads)) < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_trains_in_the_dtype_and_frees_its_gradients(dtype):
    subject = networks.Subject("test_resnet", 2, 32, "cpu", dtype)
    dtypes = set()
    conv = next(m for m in subject.model.modules() if isinstance(m, nn.Conv2d))
    conv.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    before = conv.weight.clone()
    for timed in (subject.inference_seconds, subject.training_seconds):
        assert 0 < timed() < 60
        assert subject.model.training == (timed == subject.training_seconds)
    assert dtypes == {dtype}
    assert all(p.grad is None for p in subject.model.parameters())
    assert not conv.weight.equal(before)
    torch.testing.assert_close(conv.weight, before, rtol=0, atol=1e-3)
