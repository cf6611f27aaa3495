"""Output of eval.py: tables and the picture of the confusion matrix."""

import csv

import matplotlib.figure

from dkcls.cli.eval import draw_confusion, table, write_per_class

RESULT = {
    **{"checkpoint": "a.pt", "top1": 62.5, "classes": ["cat", "dog", "hat"]},
    "per_class": [[4, 4, 0], [3, 2, 0], [4, 3, 0]],
    "confusion": [[3, 1, 0], [1, 2, 1], [0, 0, 0]],
}


def test_the_picture_of_confusion_has_shares_of_the_true_class(monkeypatch, tmp_path):
    drawn = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    draw_confusion(str(tmp_path / "confusion.png"), RESULT)
    axes = drawn[0].axes[0]
    written = {text.get_position(): text.get_text() for text in axes.texts}  # (column, row)
    assert [[written[column, row] for column in range(3)] for row in range(3)] == [
        ["75", "25", "0"], ["25", "50", "25"], ["0", "0", "0"]
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == RESULT["classes"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true", "predicted")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_classes_in_percent_and_nothing_for_a_class_without_images(tmp_path):
    write_per_class(str(tmp_path / "new/classes.csv"), [RESULT])
    rows = list(csv.reader((tmp_path / "new/classes.csv").open()))
    assert rows[1:] == [
        ["a.pt", "cat", "4", "75.0000", "100.0000"],
        ["a.pt", "dog", "4", "50.0000", "75.0000"],
        ["a.pt", "hat", "0", "", ""],
    ]
    assert table([RESULT]).splitlines() == [
        "| checkpoint | top-1 |",
        "|---|---|",
        "| a.pt | 62.50 % |",
    ]
