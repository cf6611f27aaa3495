"""Tables, and differences between networks with equal seeds."""

import pytest

from dkcls.report.tables import compare, csv_table, markdown_table


def test_interval_and_p_are_students():
    result = compare({0: 2.0, 1: 4.0, 2: 6.0, 7: 0.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert result.differences == [1.0, 2.0, 3.0]
    assert result.mean == 2.0
    half = 4.302652729911275 / 3**0.5  # t(0.975, 2) times the standard error
    assert (result.low, result.high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert result.p == pytest.approx(0.07417990022744853)  # t = 2 sqrt(3), 2 degrees of freedom


def test_one_seed_has_no_interval():
    result = compare({3: 2.0}, {3: 1.5})
    assert (result.mean, result.low, result.p) == (0.5, None, None)
    assert str(result) == "+0.50"


def test_equal_differences_have_no_interval():
    result = compare({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.5, 1: 2.5, 2: 3.5})
    assert (result.differences, result.mean) == ([0.5] * 3, 0.5)
    assert (result.low, result.high, result.p) == (None, None, None)
    assert str(result) == "+0.50"


def test_no_common_seed_is_refused():
    with pytest.raises(ValueError, match="no seed that both have"):
        compare({0: 1.0}, {1: 1.0})


def test_tables():
    rows = [
        {"network": "a", "top1": 70.125, "top1_std": 0.5, "parameters": 12345},
        {"network": "b", "top1": 1.0, "top1_std": None},
    ]
    assert markdown_table(rows).splitlines() == [
        "| network | top1 | parameters |",
        "| --- | --- | --- |",
        "| a | 70.12 ± 0.50 | 12,345 |",
        "| b | 1.00 |  |",
    ]
    assert csv_table(rows).splitlines() == [
        "network,top1,top1_std,parameters",
        "a,70.125,0.5,12345",
        "b,1.0,,",
    ]
