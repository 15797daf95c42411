"""Throughput and efficiency against the number of nodes, a line an experiment."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zsim.figures.findings.scaling import Rate, Scaling, ScalingLine
from zsim.writing.plots.style import (
    DARK,
    GREY,
    LINES,
    MARGIN_INCHES,
    TEXT_POINTS,
    WIDTH_INCHES,
    apart,
    note,
    panel,
    slide,
    theme,
    wrapped,
)

AXIS_LABELS: dict[Rate, str] = {
    "tokens": "tokens/s per GPU",
    "tflops": "hardware TFLOPS per GPU",
}
LEFT_INCHES, BOTTOM_INCHES, GAP_INCHES, LABELS_INCHES = 0.95, 0.95, 0.85, 1.75
HEADROOM = 1.08


@theme()
def figure(scaling: Scaling, rate: Rate) -> Figure:
    """Draws it.

    Raises:
        ValueError: more lines than can be told apart.

    """
    if len(scaling.lines) > len(LINES):
        raise ValueError(f"{len(scaling.lines)} experiments; allowed: at most {len(LINES)} on one picture")
    picture, top_inches = slide(scaling.headline, scaling.shared)
    width = (WIDTH_INCHES - LEFT_INCHES - GAP_INCHES - LABELS_INCHES - MARGIN_INCHES) / 2
    height = top_inches - BOTTOM_INCHES
    throughput = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, height)
    _draw(throughput, scaling, lambda line: [point.rate(rate) for point in line.points], AXIS_LABELS[rate])
    for line, (colour, _, _) in zip(scaling.lines, LINES, strict=False):
        throughput.axhline(line.base.rate(rate), color=colour, linewidth=0.7)
    efficiency = panel(picture, LEFT_INCHES + width + GAP_INCHES, BOTTOM_INCHES, width, height)
    _draw(efficiency, scaling, lambda line: [100 * share for share in line.efficiencies], "efficiency, %")
    efficiency.axhline(100, color=GREY, linewidth=0.7)
    _label_lines(efficiency, scaling, height)
    note(picture, _notes(scaling))
    return picture


def _notes(scaling: Scaling) -> str:
    parts = ["batch per GPU unchanged", "thin lines: ideal, as on the fewest nodes that fit"]
    if not all(point.fits for line in scaling.lines for point in line.points):
        parts.append("hollow: does not fit in memory")
    return "; ".join(parts)


def _draw(axes: Axes, scaling: Scaling, values_of: Callable[[ScalingLine], list[float]], name: str) -> None:
    nodes = sorted({point.num_nodes for line in scaling.lines for point in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(_thinned(nodes), [f"{number:,}" for number in _thinned(nodes)])
    axes.set_xticks([], minor=True)
    axes.set_xlim(nodes[0] / 1.25, nodes[-1] * 1.25)
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


def _thinned(nodes: list[int]) -> list[int]:
    """Ticks that have room beside each other: at least a factor of 1.4 apart, the last one among them."""
    kept: list[int] = []
    for number in reversed(nodes):
        if not kept or kept[-1] / number >= 1.4:
            kept.append(number)
    return kept[::-1]


def _label_lines(axes: Axes, scaling: Scaling, height: float) -> None:
    """Each line's name behind its last point."""
    top = axes.get_ylim()[1]
    blocks = [wrapped(line.label, LABELS_INCHES, TEXT_POINTS, max_lines=2) for line in scaling.lines]
    ends = [100 * line.efficiencies[-1] for line in scaling.lines]
    distance = top * 0.4 / height * max(len(block) for block in blocks)
    places = apart(ends, distance, distance / 2, top - distance / 2)
    for line, block, place, (colour, _, _) in zip(scaling.lines, blocks, places, LINES, strict=False):
        last = line.points[-1].num_nodes
        x = axes.get_xlim()[1] * 1.06
        text = "\n".join(block)
        axes.text(x, place, text, color=colour, va="center", weight="bold", clip_on=False)
        axes.plot(
            [last * 1.12, x / 1.02], [100 * line.efficiencies[-1], place], color=DARK, linewidth=0.6, clip_on=False
        )
