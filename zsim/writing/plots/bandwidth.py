"""Exposed communication against the bandwidth of a node, with the bandwidth that hides enough of it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zsim.figures.findings.bandwidth import BITS_PER_BYTE, GIGA, BandwidthCurve, BandwidthNeed, gbit_per_s
from zsim.writing.plots.style import (
    BLACK,
    DARK,
    GREY,
    LINE,
    LINES,
    MARGIN_INCHES,
    NAME_INCHES,
    POINTS_PER_INCH,
    SMALL_POINTS,
    TEXT_POINTS,
    WIDTH_INCHES,
    Style,
    apart,
    check_lines,
    name_line,
    note,
    panel,
    slide,
    theme,
    wrapped,
)

LEFT_INCHES, BOTTOM_INCHES, LABELS_INCHES = 0.95, 0.98, 3.0
NOTE = "ring: the machine as it is; NICs change in speed alone; on the right the GPUs' PCIe links are full"
ROOMY_CURVES = 3
"""Curves that leave room to say all of each."""
HEADROOM = 1.12
"""Of the share axis over the highest point."""


@theme()
def figure(need: BandwidthNeed) -> Figure:
    """Draws it.

    Raises:
        ValueError: more curves than can be told apart.

    """
    check_lines(len(need.curves))
    picture, top_inches = slide(need.headline, need.shared)
    width = WIDTH_INCHES - LEFT_INCHES - LABELS_INCHES - MARGIN_INCHES
    height = top_inches - BOTTOM_INCHES
    axes = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, height)
    _set_axes(axes, need)
    for curve, style in zip(need.curves, LINES, strict=False):
        _draw_curve(axes, curve, style)
    _draw_thresholds(axes, need)
    _name_curves(axes, need, width, height)
    note(picture, NOTE)
    return picture


def _gbit(bytes_per_s: float) -> float:
    return bytes_per_s * BITS_PER_BYTE / GIGA


def _set_axes(axes: Axes, need: BandwidthNeed) -> None:
    points = [point for curve in need.curves for point in curve.points]
    lowest, highest = (_gbit(edge(point.bytes_per_s for point in points)) for edge in (min, max))
    axes.set_xscale("log", base=2)
    axes.set_xlim(lowest / 1.1, highest * 1.1)
    ticks = [50 * 2**power for power in range(16) if lowest / 1.1 <= 50 * 2**power <= highest * 1.1]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, min(100.0, max(point.exposed_share for point in points) * 100 * HEADROOM))
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_xlabel("Gbit/s per node, nominal, one way")
    axes.set_ylabel("exposed communication, % of the step")


def _draw_curve(axes: Axes, curve: BandwidthCurve, style: Style) -> None:
    colour, marker, dashes = style
    x, y = ([_gbit(point.bytes_per_s) for point in curve.points], [100 * p.exposed_share for p in curve.points])
    axes.plot(x, y, dashes, color=colour, linewidth=2.2)
    present = (_gbit(curve.present.bytes_per_s), 100 * curve.present.exposed_share)
    axes.plot(*present, "o", markersize=14, markerfacecolor="none", color=colour, markeredgewidth=1.8)
    for needed in curve.required_bytes_per_s.values():
        if needed is not None:
            reached = next(point.exposed_share for point in curve.points if point.bytes_per_s == needed)
            axes.plot([_gbit(needed)] * 2, [0, 100 * reached], color=colour, linewidth=1.0)
            axes.plot(_gbit(needed), 100 * reached, marker, color=BLACK, markersize=9, zorder=5)


def _draw_thresholds(axes: Axes, need: BandwidthNeed) -> None:
    for share in need.curves[0].required_bytes_per_s:
        axes.axhline(100 * share, color=GREY, linewidth=1.0, zorder=0)
        place = (axes.get_xlim()[0] * 1.03, 100 * share)
        axes.annotate(f"{share:.0%}", place, (0, 3), textcoords="offset points", color=DARK, fontsize=SMALL_POINTS)


def _name_curves(axes: Axes, need: BandwidthNeed, width: float, height: float) -> None:
    """What each curve asks for, right of it."""
    top = axes.get_ylim()[1]
    write = _texts if len(need.curves) <= ROOMY_CURVES else _few_texts
    blocks = [write(curve) for curve in need.curves]
    row = top * TEXT_POINTS * LINE / POINTS_PER_INCH / height
    distance = row * (max(len(block) for block in blocks) + 0.5)
    ends = [100 * curve.points[-1].exposed_share for curve in need.curves]
    places = apart(ends, distance, distance / 2, top - distance / 2)
    for block, place, style in zip(blocks, places, LINES, strict=False):
        name_line(axes, place, block, style, width)


def _texts(curve: BandwidthCurve) -> list[tuple[str, str]]:
    """Name, the machine as it is, and each answer; with their weights."""
    name = wrapped(curve.label, LABELS_INCHES - NAME_INCHES, TEXT_POINTS, max_lines=2, bold=True)
    now = f"now {curve.present.exposed_share:.1%} at {gbit_per_s(curve.present.bytes_per_s)}"
    needs = [
        f"below {share:.0%}: " + (f"from {gbit_per_s(needed)}" if needed is not None else "never")
        for share, needed in sorted(curve.required_bytes_per_s.items(), reverse=True)
    ]
    return [*((text, "bold") for text in name), *((text, "normal") for text in (now, *needs))]


def _few_texts(curve: BandwidthCurve) -> list[tuple[str, str]]:
    """Name and answers on a row each."""
    (name,) = wrapped(curve.label, LABELS_INCHES - NAME_INCHES, TEXT_POINTS, bold=True)
    needs = [
        f"{share:.0%}: {'never' if needed is None else f'{_gbit(needed):,.0f}'}"
        for share, needed in sorted(curve.required_bytes_per_s.items(), reverse=True)
    ]
    return [(name, "bold"), (f"{', '.join(needs)} Gbit/s", "normal")]
