"""Predicted against measured step times, and the errors of each source beside them."""

from collections.abc import Sequence
from math import log10
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from zsim.writing.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    SMALL_POINTS,
    TEXT_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    note,
    panel,
    slide,
    theme,
)

BAND: Final = 0.1
_STYLES: Final = (
    (BLUE, "o"),
    (ORANGE, "s"),
    (GREEN, "^"),
    (VERMILLION, "D"),
    (PURPLE, "v"),
    (SKY, "P"),
    (NAVY, "X"),
    (GREY, "*"),
)
"""Colour and marker of the first, second, ... source; after the last one they begin again with a rim."""
_LEFT_INCHES, _GAP_INCHES, _BOTTOM_INCHES, _RIGHT_INCHES = 0.85, 1.75, 0.95, 0.3
_SPREAD: Final = 0.32
"""Of a row of the right panel: where points of one source are laid out, so that they do not hide each other."""
_WIDEST_PCT: Final = 60.0
"""Errors beyond are drawn at the edge, with an arrow for marker."""


class Source(NamedTuple):
    """The scored rows of one source, as step times."""

    name: str
    measured_s: Sequence[float]
    predicted_s: Sequence[float]
    median_pct: float
    """Median of the absolute errors of the step time."""

    @property
    def errors_pct(self) -> list[float]:
        """Of each row, of its step time: above 0 where the prediction is slower."""
        return [100 * (p / m - 1) for p, m in zip(self.predicted_s, self.measured_s, strict=True)]


def figure(title: str, subtitle: str, sources: Sequence[Source]) -> Figure:
    """Draws it.

    Args:
        title: what was found.
        subtitle: over how many rows of what.
        sources: each with at least one row.

    """
    with theme():
        picture, top = slide(title, subtitle)
        height = top - _BOTTOM_INCHES
        side = min(height, 4.0)
        _scatter(panel(picture, _LEFT_INCHES, _BOTTOM_INCHES, side, height), sources)
        left = _LEFT_INCHES + side + _GAP_INCHES
        width = WIDTH_INCHES - left - _RIGHT_INCHES
        _errors(panel(picture, left, _BOTTOM_INCHES, width, height), sources)
        note(
            picture,
            f"Grey: within ±{BAND:.0%}. Right: the error of each row, the median of their sizes, and their number.",
        )
        return picture


def _style(place: int) -> dict[str, object]:
    colour, marker = _STYLES[place % len(_STYLES)]
    rim = BLACK if place >= len(_STYLES) else "none"
    return {"color": colour, "marker": marker, "edgecolors": rim, "linewidths": 0.6, "alpha": 0.75}


def _scatter(axes: Axes, sources: Sequence[Source]) -> None:
    ends = [value for source in sources for value in (*source.measured_s, *source.predicted_s)]
    low, high = min(ends) * 0.75, max(ends) * 1.35
    band = [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)]
    axes.fill_between([low, high], *band, color=PALE, linewidth=0, zorder=0)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, zorder=1)
    for place, source in enumerate(sources):
        axes.scatter(source.measured_s, source.predicted_s, s=18, zorder=2, **_style(place))  # type: ignore[arg-type]
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_decades(low, high))
        axis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms")
        axis.set_minor_formatter(lambda *_: "")
    axes.set_xlabel("measured step")
    axes.set_ylabel("predicted step")
    axes.tick_params(labelsize=SMALL_POINTS)


def _decades(low: float, high: float) -> LogLocator:
    return LogLocator(base=10, subs=(1.0,) if log10(high / low) > 1.5 else (1.0, 2.0, 5.0))


def _errors(axes: Axes, sources: Sequence[Source]) -> None:
    axes.axvspan(-100 * BAND, 100 * BAND, color=PALE, linewidth=0, zorder=0)
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=1)
    widest = min(_WIDEST_PCT, max(15.0, *(abs(error) * 1.15 for source in sources for error in source.errors_pct)))
    for place, source in enumerate(sources):
        shown = [(error, place + _offset(n, len(source.measured_s))) for n, error in enumerate(source.errors_pct)]
        x, y = ([point[axis] for point in shown if abs(point[0]) <= widest] for axis in (0, 1))
        axes.scatter(x, y, s=14, zorder=2, **_style(place))  # type: ignore[arg-type]
        for error, row in shown:
            if abs(error) > widest:
                edge = 0.98 * widest if error > 0 else -0.98 * widest
                axes.scatter([edge], [row], s=14, marker=">" if error > 0 else "<", color=BLACK, zorder=3)
    axes.set_xlim(-widest, widest)
    axes.set_ylim(len(sources) - 0.5, -0.5)
    labels = [f"{s.name}\n{s.median_pct:.1f} % of {len(s.measured_s):,}" for s in sources]
    axes.set_yticks(range(len(sources)), labels, fontsize=SMALL_POINTS if len(sources) < 9 else SMALL_POINTS - 2)
    axes.tick_params(axis="x", labelsize=SMALL_POINTS)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0")
    axes.set_xlabel("error of the step time", fontsize=TEXT_POINTS)


def _offset(number: int, count: int) -> float:
    """Points of one source side by side across its row, in the order of the file."""
    return 0.0 if count == 1 else _SPREAD * (2 * number / (count - 1) - 1)
