"""Throughput and efficiency against the number of nodes, a line an experiment."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zsim.figures.findings.scaling import Rate, Scaling, ScalingLine
from zsim.writing.plots.style import (
    GREY,
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
    slide,
    theme,
    width_inches,
    wrapped,
)

AXIS_LABELS: dict[Rate, str] = {
    "tokens": "tokens/s per GPU",
    "tflops": "hardware TFLOPS per GPU",
}
LEFT_INCHES, BOTTOM_INCHES, GAP_INCHES, LABELS_INCHES = 0.95, 0.95, 0.85, 2.05
HEADROOM = 1.08
BEYOND = 1.25
"""The axis of nodes goes on by this factor on both sides."""


@theme()
def figure(scaling: Scaling, rate: Rate) -> Figure:
    """Draws it.

    Raises:
        ValueError: more lines than can be told apart.

    """
    check_lines(len(scaling.lines))
    picture, top_inches = slide(scaling.headline, scaling.shared)
    width = (WIDTH_INCHES - LEFT_INCHES - GAP_INCHES - LABELS_INCHES - MARGIN_INCHES) / 2
    height = top_inches - BOTTOM_INCHES
    throughput = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, height)
    ticks = _ticks(scaling, width)
    _draw(throughput, scaling, ticks, lambda line: [point.rate(rate) for point in line.points], AXIS_LABELS[rate])
    for line, (colour, _, _) in zip(scaling.lines, LINES, strict=False):
        throughput.axhline(line.base.rate(rate), color=colour, linewidth=0.7)
    efficiency = panel(picture, LEFT_INCHES + width + GAP_INCHES, BOTTOM_INCHES, width, height)
    _draw(efficiency, scaling, ticks, lambda line: [100 * share for share in line.efficiencies], "efficiency, %")
    efficiency.axhline(100, color=GREY, linewidth=0.7)
    _name_lines(efficiency, scaling, width, height)
    note(picture, _notes(scaling))
    return picture


def _notes(scaling: Scaling) -> str:
    parts = ["batch per GPU unchanged", "thin lines: ideal, as on the fewest nodes that fit"]
    if not all(point.fits for line in scaling.lines for point in line.points):
        parts.append("hollow: does not fit in memory")
    return "; ".join(parts)


def _draw(
    axes: Axes, scaling: Scaling, ticks: list[int], values_of: Callable[[ScalingLine], list[float]], name: str
) -> None:
    lowest, highest_nodes = _range(scaling)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{number:,}" for number in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(lowest, highest_nodes)
    highest = 0.0
    for line, (colour, marker, dashes) in zip(scaling.lines, LINES, strict=False):
        values = values_of(line)
        highest = max(highest, *values)
        numbers = [point.num_nodes for point in line.points]
        axes.plot(numbers, values, dashes, color=colour, linewidth=2.2)
        for point, value in zip(line.points, values, strict=True):
            face = colour if point.fits else "white"
            axes.plot(point.num_nodes, value, marker, color=colour, markerfacecolor=face, markersize=7)
    axes.set_ylim(0, highest * HEADROOM)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    gpus = f" of {scaling.gpus_per_node} GPUs" if scaling.gpus_per_node else ""
    axes.set_xlabel(f"nodes{gpus}")
    axes.set_ylabel(name)


def _nodes(scaling: Scaling) -> list[int]:
    return sorted({point.num_nodes for line in scaling.lines for point in line.points})


def _range(scaling: Scaling) -> tuple[float, float]:
    """Ends of the axis of nodes."""
    nodes = _nodes(scaling)
    return nodes[0] / BEYOND, nodes[-1] * BEYOND


def _ticks(scaling: Scaling, axes_inches: float) -> list[int]:
    """Numbers of nodes that have room beside each other, the last one among them."""
    nodes = _nodes(scaling)
    low, high = _range(scaling)
    label_inches = width_inches(f"{nodes[-1]:,}", TEXT_POINTS) + 0.12
    least_ratio = (high / low) ** (label_inches / axes_inches)
    kept: list[int] = []
    for number in reversed(nodes):
        if not kept or kept[-1] / number >= least_ratio:
            kept.append(number)
    return kept[::-1]


def _name_lines(axes: Axes, scaling: Scaling, width: float, height: float) -> None:
    """Each line's name, as near to its last point as the others allow."""
    top = axes.get_ylim()[1]
    room = LABELS_INCHES - NAME_INCHES
    blocks = [wrapped(line.label, room, TEXT_POINTS, max_lines=3, bold=True) for line in scaling.lines]
    ends = [100 * line.efficiencies[-1] for line in scaling.lines]
    row = top * TEXT_POINTS * LINE / POINTS_PER_INCH / height
    distance = row * (max(len(block) for block in blocks) + 0.3)
    places = apart(ends, distance, distance / 2, top - distance / 2)
    for block, place, style in zip(blocks, places, LINES, strict=False):
        name_line(axes, place, [(text, "bold") for text in block], style, width)
