"""What is in pictures and reports, by value: each is made of a figure whose lines can be read back."""

import json

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dkcls.analysis import measures
from dkcls.analysis.curves import plot_curves
from dkcls.analysis.detections import Shown, draw_detections
from dkcls.analysis.dynamics import beside, collect_dynamics, explain, explain_control
from dkcls.analysis.erf import effective_receptive_field
from dkcls.analysis.erf_plots import overlay, radius_over_scale
from dkcls.analysis.plots import plot_factors, plot_gains, plot_sweep
from dkcls.analysis.probes import Look
from dkcls.analysis.report import Section, chart, facts, folded, heading, page, paragraph, table
from dkcls.analysis.report_sections import Subject, curves_section, dynamics_section, fields_section
from dkcls.analysis.style import COLOURS
from dkcls.data.deformed_fashion import DeformedFashion, Factors
from tests.models.common import awake, create, stir


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved, which take long to draw, instead of their files."""
    figures: list[Figure] = []
    monkeypatch.setattr("dkcls.analysis.plots.save", lambda figure, picture: figures.append(figure))
    monkeypatch.setattr(
        "dkcls.analysis.detections.save", lambda figure, picture: figures.append(figure)
    )
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure)
    )
    return figures


def points(line) -> list[tuple[float, float]]:
    return list(zip(*(np.asarray(values).tolist() for values in line.get_data()), strict=True))


def labelled(axes) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): points(line)
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def write_metrics(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("metric", "label"), [("map", "AP, %"), ("top1", "top-1, %")])
def test_curves_of_classifiers_and_detectors(drawn, tmp_path, metric, label):
    train = [{"kind": "train", "step": s, "loss": 4.0 / s, "lr_weights": 0.1 * s} for s in (1, 2)]
    val = [
        {"kind": "val", "step": s, "loss": 5.0 / s, "lr_weights": 9.0, metric: 10.0 * s}
        for s in (1, 2)
    ]
    plot_curves(write_metrics(tmp_path / "metrics.jsonl", *train, *val), tmp_path / "curves.png")
    loss, accuracy, rate = drawn[0].axes
    assert labelled(loss) == {"training": [(1, 4), (2, 2)], "validation": [(1, 5), (2, 2.5)]}
    assert labelled(accuracy) == {"validation": [(1, 10), (2, 20)]}
    assert accuracy.get_ylabel() == label
    assert labelled(rate) == {"training": [(1, 0.1), (2, 0.2)]}


def test_boxes_of_at_least_the_threshold_are_drawn_where_they_are(drawn):
    target = {"boxes": torch.tensor([[1.0, 2.0, 11.0, 7.0]])}
    boxes = torch.tensor([[2.0, 3.0, 12.0, 9.0], [0.0, 0.0, 5.0, 5.0], [4.0, 4.0, 8.0, 8.0]])
    found = {
        "boxes": boxes,
        "labels": torch.tensor([2, 1, 1]),
        "scores": torch.tensor([0.5, 0.25, 0.125]),
    }
    shown = Shown(torch.zeros(1, 16, 16, dtype=torch.uint8), target, found)
    draw_detections({"a": [shown]}, ["cat", "dog"], "none.png", threshold=0.25)
    axes = drawn[0].axes[0]
    drawn_boxes = [
        (*p.get_xy(), p.get_width(), p.get_height())
        for p in axes.patches
        if isinstance(p, Rectangle)
    ]
    # The middle of the first pixel is at 0 in a picture, and at 0.5 in a box.
    assert drawn_boxes == [(0.5, 1.5, 10, 5), (1.5, 2.5, 10, 6), (-0.5, -0.5, 5, 5)]
    assert [p.get_linestyle() for p in axes.patches] == ["--", "solid", "solid"]
    assert [text.get_text() for text in axes.texts] == ["dog 0.50", "cat 0.25"]
    assert [to_hex(p.get_edgecolor()) for p in axes.patches] == ["#ffffff", COLOURS[2], COLOURS[1]]


def test_bars_of_a_sweep_are_standard_deviations(drawn):
    """Of a sample: 2, 4 and 9 have a mean of 5 and a standard deviation of sqrt(13)."""
    plot_sweep(
        {"a": {4: [2.0, 4.0, 9.0], 3: [1.0]}},
        "none.png",
        xlabel="scope",
        ylabel="top-1",
        baselines={"b": [6.0, 8.0]},
    )
    axes = drawn[0].axes[0]
    (bars,) = axes.containers
    assert points(bars.lines[0]) == [(3, 1), (4, 5)]
    segments = bars.lines[2][0].get_segments()
    assert [float(upper[1] - lower[1]) / 2 for lower, upper in segments] == pytest.approx(
        [0, 13**0.5]
    )
    assert labelled(axes)["b"] == [(0, 7), (1, 7)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "4"]


def test_gains_are_over_the_first_network_with_the_same_seed(drawn):
    curves = {
        "rigid": {0: [1.0, 2.0], 1: [3.0, 4.0]},
        "dk": {1: [4.0, 8.0], 0: [3.0, 2.0], 5: [90.0, 90.0]},
    }
    plot_factors(
        np.array([1.0, 4.0, 16.0]), curves, (1.0, 2.0), "none.png", xlabel="scale", logarithmic=True
    )
    left, right = drawn[0].axes
    assert labelled(left) == {
        "rigid": [(2, 2), (8, 3)],
        "dk": [(2, pytest.approx(97 / 3)), (8, pytest.approx(100 / 3))],
    }
    assert labelled(right) == {"rigid": [(2, 0), (8, 0)], "dk": [(2, 1.5), (8, 2)]}
    band = right.collections[1].get_paths()[0].vertices[:, 1]
    # Gains of 1 and 2, and of 4 and 0, have standard errors of 0.5 and 2.
    assert (band.min(), band.max()) == (pytest.approx(0), pytest.approx(4))


def test_gains_of_networks_are_coloured_and_those_of_controls_grey(drawn):
    plot_gains(
        {"dk": [1.0, 2.0, 3.0], "control": [0.5]}, "none.png", xlabel="points", controls=["control"]
    )
    axes = drawn[0].axes[0]
    dots, interval, mean, control_dots, control_mean, zero = axes.lines
    half = (
        4.302652729911275 / 3**0.5
    )  # Student's t at 0.975 with 2 degrees of freedom, times the standard error
    assert interval.get_xdata() == pytest.approx([2 - half, 2 + half])
    assert points(mean) == [(2, 0)]
    assert {line.get_color() for line in (dots, interval, mean)} == {COLOURS[1]}
    assert {line.get_color() for line in (control_dots, control_mean)} == {COLOURS[0]}
    assert list(zero.get_xdata()) == [0, 0]
    assert axes.yaxis_inverted()  # the first is on top


def test_the_line_of_radii_is_the_mean_of_each_tenth():
    scales = np.random.default_rng(0).permutation(np.geomspace(0.4, 1.1, 20))
    figure = radius_over_scale(scales, {"last": {"a": 10 * scales}}, {"last": {"a": 1.0}})
    dots, means = figure.axes[0].lines
    assert points(dots) == list(zip(scales.tolist(), (10 * scales).tolist(), strict=True))
    ordered = np.sort(scales).reshape(10, 2)
    assert means.get_xdata() == pytest.approx(np.sqrt(ordered[:, 0] * ordered[:, 1]))
    assert means.get_ydata() == pytest.approx(10 * ordered.mean(1))


@pytest.mark.parametrize("pixels", [0, 1])
def test_a_field_of_few_pixels_is_shown(pixels):
    """Its 99.5th percentile is 0."""
    field = np.zeros((32, 32))
    field[3, :pixels] = 7.0
    shown = overlay(np.ones((32, 32)), field)
    assert shown.shape == (32, 32, 3)
    assert ((shown >= 0) & (shown <= 1)).all()
    assert shown[3, 0].mean() < 0.5 if pixels else (shown == 1).all()
    assert (shown[4] == 1).all()


def test_words_of_the_user_are_no_markup():
    name = 'a<b & "c"'
    escaped = "a&lt;b &amp; &quot;c&quot;"
    parts = [
        paragraph(name),
        heading(name),
        chart(b"", name),
        facts({name: name}),
        folded(name, name),
        table([{name: name}]),
    ]
    text = page(name, name, [Section(name, "".join(parts))], name)
    assert name not in text
    assert "a<b" not in text
    assert text.count(escaped) >= 5 + sum(part.count(escaped) for part in parts)


def test_the_best_row_of_a_table_stands_out_and_numbers_are_on_the_right():
    text = table([{"name": "a", "top1": "1.0"}, {"name": "b", "top1": "+2"}, {"name": "c"}], best=1)
    assert "<tr class=best><td>b</td><td class=number>+2</td></tr>" in text
    assert text.count("class=best") == 1
    assert "<td>c</td><td class=number></td>" in text


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("subject") / "metrics.jsonl"
    train = [{"kind": "train", "step": s, "loss": 4.0 / s} for s in (1, 2)]
    write_metrics(
        path,
        *train,
        {"kind": "val", "step": 1, "top1": 5.0},
        {"kind": "val", "step": 2, "top1": 6.0},
    )
    model = stir(awake(create(spatial="local_dk", num_classes=10, in_chans=1)))
    return Subject("local", model, DeformedFashion("val"), path)


def test_a_report_has_the_curves_of_its_runs(drawn, subject):
    assert "training loss and validation top-1 over the steps" in curves_section([subject]).content
    loss, accuracy = drawn[0].axes
    assert labelled(loss) == {"local": [(1, 4), (2, 2)]}
    assert labelled(accuracy) == {"local": [(1, 5), (2, 6)]}


def test_a_report_looks_into_networks_with_images_as_they_take_them(drawn, subject, monkeypatch):
    """The object's ERF is that of an image that is normalised by hand; it stands on pixel 16, half a pixel off the middle."""
    monkeypatch.setattr("dkcls.analysis.report_sections.SIZES", {"A large object": 1.05})
    monkeypatch.setattr(
        "dkcls.analysis.report_sections.middle", lambda *network: Look((16.0, 16.0), (2, 2))
    )  # which takes long to find
    content = fields_section([subject]).content
    dataset = subject.dataset
    index = np.flatnonzero(dataset.targets == dataset.class_names.index("Ankle boot"))[:1]
    factors = Factors(*(np.array([value]) for value in (1.05, 20.0, 0.5, 0.5)))
    images, masks = dataset.render(index, factors)
    field = effective_receptive_field(
        subject.model, (images / 255 - 0.15) / 0.25, (2, 2), projections=32
    )[0]
    inside = 100 * measures.share_inside(field, masks[0])
    assert f"local: radius {measures.radius(field):.1f}, {inside:.0f} % inside" in content


def test_a_report_says_what_the_last_layer_follows(drawn, subject, monkeypatch):
    monkeypatch.setattr("dkcls.analysis.report_sections.IMAGES", 60)
    content = dynamics_section([subject]).content
    batch = subject.dataset.load(np.arange(60)).batch
    found = collect_dynamics(subject.model, [(batch.images / 255 - 0.15) / 0.25])
    last = found[max(found)]  # the names are numbered: blocks.0, blocks.1, ...
    about = batch.targets.numpy(), subject.dataset.factors(np.arange(60)).scale
    cells = beside(explain(last.values, *about), explain_control(last, *about))
    assert table([{"setting": "local"} | cells]) in content
