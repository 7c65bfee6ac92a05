"""How reports write and draw their figures."""

import pytest

from scheduler_service.sim import drawing


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (0.0, "0.00 ms"),
        (0.8437, "0.84 ms"),
        (84.21, "84.2 ms"),
        (999.7, "1.00 s"),
        (10_925.59, "10.9 s"),
        (1_520_000, "1,520 s"),
    ],
)
def test_times_have_units_that_fit_them(ms: float, said: str) -> None:
    assert drawing.duration(ms) == said


def test_a_legend_stands_above_its_lines() -> None:
    figure, (axis,) = drawing.figure()
    axis.plot([0, 1], [1, 1], label="one")
    drawing.legend(axis)
    figure.draw_without_rendering()
    legend = axis.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 >= axis.get_window_extent().y1


def test_a_page_has_the_colours_of_its_reader_and_needs_nothing_else() -> None:
    figure, (axis,) = drawing.figure()
    axis.plot([0, 1], [0, 1])
    page = drawing.page("Title", {"model": "<tiny>"}, "<p>body</p>", [("Plot", figure)])
    assert "color-scheme:light dark" in page
    assert "#000000" not in page
    assert "<dd>&lt;tiny&gt;</dd>" in page
    assert "http" not in page.replace("http://www.w3.org", "")
