import pytest

from workers.cli.chart import columns, sparkline


def test_sparkline_spans_its_extremes() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5]) == sparkline([0.1, 0.1])
    assert len(sparkline(list(range(100)), width=40)) == 40
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"


def test_columns_by_hand() -> None:
    lines = columns([0.0, 0.5, 1.0], height=2, max_width=3)
    assert lines == [
        "  1.00 |  █",
        "  0.50 | ██",
        "  0.00 +---",
        "        0 2",
    ]


def test_half_filled_cells_and_the_scale() -> None:
    top, *_ = columns([0.75], height=2, max_width=1, low=0.0, high=1.0)
    assert top == "  1.00 |▄"
    assert columns([4.0], height=1, max_width=1)[0].startswith("  4.00 |")


def test_many_values_are_averaged_in_equal_stretches() -> None:
    lines = columns([1.0, 0.0] * 50, height=2, max_width=50)
    assert lines[0].strip() == "1.00 |"
    assert lines[1] == "  0.50 |" + "█" * 50
    assert lines[-1].endswith("99")


@pytest.mark.parametrize("count", [1, 2, 5, 24, 71, 72, 73, 1500])
def test_a_chart_never_exceeds_its_width(count: int) -> None:
    lines = columns([0.3] * count, max_width=72)
    assert max(len(line) for line in lines) <= 72 + 9
    assert str(count - 1) in lines[-1]


def test_ascii_only() -> None:
    assert all(line.isascii() for line in columns([0.1, 0.9], ascii_only=True))
    assert columns([]) == []
