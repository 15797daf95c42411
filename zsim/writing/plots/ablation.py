"""A waterfall from one experiment to another through single changes."""

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zsim.figures.findings.steps import Ladder, MeasuredStep
from zsim.writing.plots.style import (
    BLACK,
    BLUE,
    DARK,
    GREEN,
    MARGIN_INCHES,
    SMALL_POINTS,
    TEXT_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    panel,
    signed,
    slide,
    theme,
    wrapped,
)

Unit = Literal["tflops", "seconds"]
AXIS_LABELS: dict[Unit, str] = {
    "tflops": "hardware TFLOPS per GPU (recomputation counted)",
    "seconds": "seconds of one step",
}
DIGITS: dict[Unit, int] = {"tflops": 1, "seconds": 2}
BAR_HEIGHT = 0.72
LABEL_INCHES = 4.1
BOTTOM_INCHES = 0.72
ROOM_FOR_VALUES_INCHES = 1.25
"""Right of the longest bar."""
ROOMY_ROWS, MOST_ROWS = 14, 20
"""Rows that leave room for larger names, and that can be read on one slide at all."""


@theme()
def figure(ladder: Ladder, unit: Unit) -> Figure:
    """Draws it.

    Raises:
        ValueError: more changes than a slide has room for.

    """
    names, ends, measured = _rows(ladder, unit)
    if len(names) > MOST_ROWS:
        raise ValueError(f"{len(names)} rows; allowed: at most {MOST_ROWS} on one picture")
    picture, top_inches = slide(ladder.headline(unit), ladder.shared)
    left = LABEL_INCHES + MARGIN_INCHES
    width = WIDTH_INCHES - left - MARGIN_INCHES
    axes = panel(picture, left, BOTTOM_INCHES, width, top_inches - BOTTOM_INCHES)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max(*ends, *measured.values()) / (1 - ROOM_FOR_VALUES_INCHES / width))
    size = TEXT_POINTS if len(names) <= ROOMY_ROWS else SMALL_POINTS
    for row in range(len(names)):
        _draw_row(axes, row, ends, unit)
    for row, value in measured.items():
        axes.plot(value, row, "D", color=BLACK, markersize=7, markeredgecolor="white", zorder=5)
        place = (max(value, ends[row]), row)
        text = f"measured {value:.4g}" if unit == "tflops" else f"measured {value:.2f}"
        axes.annotate(text, place, (9, 0), textcoords="offset points", va="center", fontsize=SMALL_POINTS)
    labels = [wrapped(name, LABEL_INCHES - 0.15, size)[0] for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 5, 10]))
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_xlabel(AXIS_LABELS[unit])
    return picture


def _rows(ladder: Ladder, unit: Unit) -> tuple[list[str], list[float], dict[int, float]]:
    """Names, where each row ends, and what was measured by row."""
    names = [ladder.start.label, *(rung.what for rung in ladder.rungs), ladder.end.label]
    if unit == "seconds":
        ends = [ladder.start.step_s, *(rung.step_s for rung in ladder.rungs), ladder.end.step_s]
    else:
        ends = [ladder.start.tflops, *(rung.tflops for rung in ladder.rungs), ladder.end.tflops]
    stated = {0: _measured(ladder.start.measured, unit), len(names) - 1: _measured(ladder.end.measured, unit)}
    return names, ends, {row: value for row, value in stated.items() if value is not None}


def _measured(measured: MeasuredStep | None, unit: Unit) -> float | None:
    if measured is None:
        return None
    return measured.step_s if unit == "seconds" else measured.tflops


def _draw_row(axes: Axes, row: int, ends: list[float], unit: Unit) -> None:
    """A whole bar first and last, between them the part that a change adds or takes."""
    end = ends[row]
    if row in {0, len(ends) - 1}:
        axes.barh(row, end, BAR_HEIGHT, color=BLUE)
        axes.text(
            end / 2,
            row,
            f"{end:.{DIGITS[unit]}f}",
            color="white",
            ha="center",
            va="center",
            weight="bold",
            fontsize=SMALL_POINTS,
        )
        reached = end
    else:
        start = ends[row - 1]
        gained = end >= start if unit == "tflops" else end <= start
        # Losses are hatched too: in grey the two colours are one.
        look: Any = {"color": GREEN} if gained else {"facecolor": VERMILLION, "edgecolor": "white", "hatch": "////"}
        axes.barh(row, end - start, BAR_HEIGHT, start, **look)
        reached = max(start, end)
        text = signed(end - start, DIGITS[unit])
        place = (reached, row)
        axes.annotate(text, place, (5, 0), textcoords="offset points", va="center", fontsize=SMALL_POINTS)
    if row + 1 < len(ends):
        axes.plot([end, end], [row, row + 1], color=DARK, linewidth=0.7, zorder=0)
