"""What unequal ranks cost against their number, beside the expectation; where caches are flushed, how often."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zsim.display import size
from zsim.figures.findings.stragglers import StragglerLine, StragglerPoint, Straggling
from zsim.writing.plots.style import (
    LINE,
    LINES,
    MARGIN_INCHES,
    NAME_INCHES,
    POINTS_PER_INCH,
    TEXT_POINTS,
    WIDTH_INCHES,
    apart,
    check_lines,
    name_line,
    note,
    panel,
    signed,
    slide,
    theme,
    width_inches,
    wrapped,
)

LEFT_INCHES, BOTTOM_INCHES, GAP_INCHES, LABELS_INCHES = 0.95, 1.15, 0.95, 2.05
HEADROOM = 1.1
BEYOND = 1.25
"""The axis of ranks goes on by this factor on both sides."""
LEAST_TOP_PERCENT = 1.0
_MANY = 4
"""Lines whose names have one row each."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a panel shows, in percent."""

    name: str
    value: Callable[[StragglerPoint], float]
    expected: Callable[[StragglerPoint], float] | None = None
    upper: Callable[[StragglerPoint], float] | None = None


LOST = Quantity(
    "on top of a step of equal ranks, %",
    *(lambda point: 100 * point.lost, lambda point: 100 * point.expected, lambda point: 100 * point.lost_p95),
)
FLUSHING = Quantity("steps in which some rank flushes, %", lambda point: 100 * point.flushing_steps)


@theme()
def figure(found: Straggling) -> Figure:
    """Draws it.

    Raises:
        ValueError: more lines than can be told apart.

    """
    check_lines(len(found.curves))
    picture, top_inches = slide(found.headline, found.shared)
    quantities = (LOST, FLUSHING) if found.has_flushes else (LOST,)
    room = WIDTH_INCHES - LEFT_INCHES - LABELS_INCHES - MARGIN_INCHES
    width = (room - GAP_INCHES * (len(quantities) - 1)) / len(quantities)
    height = top_inches - BOTTOM_INCHES
    for column, quantity in enumerate(quantities):
        axes = panel(picture, LEFT_INCHES + column * (width + GAP_INCHES), BOTTOM_INCHES, width, height)
        _draw(axes, found, quantity, width)
    _name_lines(axes, found, quantities[-1], width, height)
    note(picture, _note(found))
    return picture


def _note(found: Straggling) -> str:
    steps = f"{found.num_steps:,} step{'s' if found.num_steps > 1 else ''} each"
    stray = f", stray memory of {size(found.stray_bytes)} in the mean" if found.stray_bytes else ""
    drawn = f"host seconds of each rank and step drawn with a deviation of {found.host_jitter:.0%}{stray}, {steps}"
    return f"{drawn}; thin: expected of the slowest host of so many; bars: up to the step that 5% exceed"


def _draw(axes: Axes, found: Straggling, quantity: Quantity, axes_inches: float) -> None:
    ranks = sorted({point.num_ranks for curve in found.curves for point in curve.points})
    axes.set_xscale("log", base=2)
    ticks = _with_room(ranks, axes_inches)
    axes.set_xticks(ticks, [f"{number:,}" for number in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(ranks[0] / BEYOND, ranks[-1] * BEYOND)
    lowest, highest = 0.0, LEAST_TOP_PERCENT
    for curve, (colour, marker, dashes) in zip(found.curves, LINES, strict=False):
        numbers = [point.num_ranks for point in curve.points]
        values = [quantity.value(point) for point in curve.points]
        axes.plot(numbers, values, dashes, marker=marker, color=colour, linewidth=2.2, markersize=7)
        shown = list(values)
        if quantity.expected is not None:
            expected = [quantity.expected(point) for point in curve.points]
            axes.plot(numbers, expected, "-", color=colour, linewidth=0.8)
            shown += expected
        if quantity.upper is not None:
            uppers = [max(value, quantity.upper(point)) for value, point in zip(values, curve.points, strict=True)]
            axes.vlines(numbers, values, uppers, color=colour, linewidth=1.2)
            shown += uppers
        lowest, highest = min(lowest, *shown), max(highest, *shown)
    axes.set_ylim(lowest * HEADROOM, highest * HEADROOM)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_xlabel("ranks")
    axes.set_ylabel(quantity.name)


def _with_room(ranks: Sequence[int], axes_inches: float) -> list[int]:
    """Numbers that have room beside each other, the last one among them."""
    label_inches = width_inches(f"{ranks[-1]:,}", TEXT_POINTS) + 0.12
    least_ratio = (ranks[-1] / ranks[0] * BEYOND**2) ** (label_inches / axes_inches)
    kept: list[int] = []
    for number in reversed(ranks):
        if not kept or kept[-1] / number >= least_ratio:
            kept.append(number)
    return kept[::-1]


def _name_lines(axes: Axes, found: Straggling, quantity: Quantity, width: float, height: float) -> None:
    """Each line's name, as near to its last point as the others allow."""
    low, high = axes.get_ylim()
    name_lines = 3 if len(found.curves) < _MANY else 1
    blocks = [_texts(curve, name_lines) for curve in found.curves]
    row = (high - low) * TEXT_POINTS * LINE / POINTS_PER_INCH / height
    distance = row * (max(len(block) for block in blocks) + 0.4)
    ends = [quantity.value(curve.points[-1]) for curve in found.curves]
    places = apart(ends, distance, low + distance / 2, high - distance / 2)
    for block, place, style in zip(blocks, places, LINES, strict=False):
        name_line(axes, place, block, style, width)


def _texts(curve: StragglerLine, name_lines: int) -> list[tuple[str, str]]:
    """Name, and the last point in words."""
    name = wrapped(curve.label, LABELS_INCHES - NAME_INCHES, TEXT_POINTS, max_lines=name_lines, bold=True)
    return [*((text, "bold") for text in name), (f"{signed(100 * curve.points[-1].lost, 1)}%", "normal")]
