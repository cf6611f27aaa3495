"""Pictures of metrics and predictions, by value: their lines are read back."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from dkcls.report.plots import (
    Shown,
    draw_detections,
    plot_confusion,
    plot_curves,
    plot_factors,
    plot_gains,
    plot_sweep,
)
from dkcls.report.style import COLOURS
from tests.report.common import labelled, points, write_metrics


@pytest.mark.parametrize(("metric", "label"), [("ap", "AP, %"), ("top1", "top-1, %")])
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
    shown = Shown(torch.zeros(1, 16, 16, dtype=torch.uint8), found, target)
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


@pytest.mark.parametrize("classes", [20, 21])
def test_numbers_of_a_confusion_matrix_are_written_as_long_as_they_fit(classes):
    matrix = (10 * np.eye(classes, dtype=int)).tolist()
    matrix[0] = [0] * classes  # no images
    axes = plot_confusion(matrix, [f"class {i}" for i in range(classes)], "all right").axes[0]
    assert axes.get_title() == "all right"
    assert axes.images[0].get_array()[0].tolist() == [0] * classes
    assert np.diag(axes.images[0].get_array())[1:].tolist() == [100] * (classes - 1)
    written = {text.get_position(): text for text in axes.texts}  # (column, row)
    assert len(written) == (400 if classes == 20 else 0)
    if written:
        assert (written[0, 0].get_text(), written[0, 0].get_color()) == ("0", "black")
        assert (written[1, 1].get_text(), written[1, 1].get_color()) == ("100", "white")
