"""Predicted and measured step on one axis of time, and all events by what they take in both."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from zsim.display import duration
from zsim.figures.breakdown import cause
from zsim.ops import HOST
from zsim.trace import Span
from zsim.writing.plots.style import (
    BLACK,
    BLUE,
    DARK,
    GREY,
    HEIGHT_INCHES,
    ORANGE,
    PURPLE,
    SMALL_POINTS,
    TEXT_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    note,
    panel,
    slide,
    theme,
)

COLOURS: Final = {
    "compute": BLUE,
    "optimizer": BLUE,
    "exposed_all_gather": ORANGE,
    "exposed_reduce": VERMILLION,
    "exposed_other_communication": BLACK,
    "copies": PURPLE,
    "allocator": GREY,
    "sync": GREY,
    "host": GREY,
}
_LABELS: Final = {
    "compute": "compute",
    "exposed_all_gather": "all-gather",
    "exposed_reduce": "reduce",
    "exposed_other_communication": "other collective",
    "copies": "copies",
}
_LEFT_INCHES, _SCATTER_INCHES, _GAP_INCHES = 1.25, 2.9, 0.95
_SMALLEST_S: Final = 2e-5
"""Events below take no part in the scatter: no step hangs on them."""
_SMALLEST_BAR: Final = 1 / 2000
"""Of the axis: closer bars of one colour are drawn as one."""
_WITHIN: Final = 0.2
"""Band of the scatter that is marked."""


class Step(NamedTuple):
    """One step of one rank, its spans counted from its start."""

    title: str
    spans: Sequence[Span]
    start_s: float
    end_s: float


class Point(NamedTuple):
    """An event: seconds of its spans in a step."""

    cause: str
    predicted_s: float
    measured_s: float


def figure(title: str, subtitle: str, steps: Sequence[Step], points: Sequence[Point]) -> Figure:
    """Draws the steps one below the other, and the scatter beside them.

    Args:
        title: what was compared.
        subtitle: by how much they differ.
        steps: predicted, then measured.
        points: events of both.

    """
    with theme():
        picture, top = slide(title, subtitle)
        width = WIDTH_INCHES - _LEFT_INCHES - _GAP_INCHES - _SCATTER_INCHES - 0.35
        longest_s = max(step.end_s - step.start_s for step in steps)
        bottom, gap = 1.0, 0.75
        height = (top - bottom - gap * (len(steps) - 1) - 0.2) / len(steps)
        for place, step in enumerate(steps):
            y = top - 0.2 - (place + 1) * height - place * gap
            _timeline(panel(picture, _LEFT_INCHES, y, width, height), step, longest_s)
        left = _LEFT_INCHES + width + _GAP_INCHES
        _scatter(panel(picture, left, bottom + 0.2, _SCATTER_INCHES, top - bottom - 0.4), points)
        _legend(picture, points)
        note(picture, "Both steps on one axis of time, first rank. Right: an event's spans of one step together.")
        return picture


def _timeline(axes: Axes, step: Step, longest_s: float) -> None:
    lanes = sorted({span.lane for span in step.spans if span.lane != HOST}, key=lambda lane: (lane != "compute", lane))
    for row, lane in enumerate(lanes):
        for colour, bars in _bars(step, lane, longest_s).items():
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(lanes)), [lane.replace("nccl.", "") for lane in lanes], fontsize=SMALL_POINTS)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, longest_s * 1.02)
    axes.axvline(step.end_s - step.start_s, color=BLACK, linewidth=1)
    axes.set_title(step.title, loc="left", fontsize=TEXT_POINTS)
    axes.xaxis.set_major_formatter(lambda value, _: duration(value) if value else "0")
    axes.tick_params(axis="x", labelsize=SMALL_POINTS)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)


def _bars(step: Step, lane: str, longest_s: float) -> dict[str, list[tuple[float, float]]]:
    drawn: dict[str, list[list[float]]] = {}
    for span in step.spans:
        if span.lane != lane:
            continue
        begin_s, end_s = span.start_s - step.start_s, span.end_s - span.stalled_s - step.start_s
        bars = drawn.setdefault(COLOURS[cause(span)], [])
        if bars and begin_s - bars[-1][1] <= longest_s * _SMALLEST_BAR:
            bars[-1][1] = max(bars[-1][1], end_s)
        else:
            bars.append([begin_s, end_s])
    return {colour: [(begin_s, end_s - begin_s) for begin_s, end_s in bars] for colour, bars in drawn.items()}


def _scatter(axes: Axes, points: Sequence[Point]) -> None:
    shown = [point for point in points if min(point.predicted_s, point.measured_s) >= _SMALLEST_S]
    for name in dict.fromkeys(point.cause for point in shown):
        mine = [point for point in shown if point.cause == name]
        x, y = [point.measured_s for point in mine], [point.predicted_s for point in mine]
        axes.scatter(x, y, s=14, color=COLOURS[name], alpha=0.7, linewidths=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = [value for point in shown for value in (point.predicted_s, point.measured_s)]
    if ends:
        low, high = min(ends) * 0.7, max(ends) * 1.4
        axes.plot([low, high], [low, high], color=BLACK, linewidth=1)
        axes.fill_between(
            [low, high],
            [low * (1 - _WITHIN), high * (1 - _WITHIN)],
            [low * (1 + _WITHIN), high * (1 + _WITHIN)],
            color="#EEEEEE",
            zorder=0,
        )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(lambda value, _: duration(value).replace(".00", "").replace(".0", ""))
        axis.set_minor_formatter(lambda _value, _: "")
    axes.tick_params(labelsize=SMALL_POINTS)
    axes.set_xlabel("measured", fontsize=SMALL_POINTS, color=DARK)
    axes.set_ylabel("predicted", fontsize=SMALL_POINTS, color=DARK)
    axes.set_title(f"{len(shown)} events, band ±{_WITHIN:.0%}", loc="left", fontsize=TEXT_POINTS)


def _legend(picture: Figure, points: Sequence[Point]) -> None:
    present = {point.cause for point in points}
    patches = [Patch(facecolor=COLOURS[name], label=label) for name, label in _LABELS.items() if name in present]
    picture.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(_LEFT_INCHES / WIDTH_INCHES, 0.35 / HEIGHT_INCHES),
        ncols=len(patches) or 1,
        frameon=False,
        fontsize=SMALL_POINTS,
    )
