"""Lines of a picture read back, and files of metrics."""

import json

import numpy as np


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
