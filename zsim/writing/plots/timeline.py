"""What host and lanes do during a few layers, forward and backward, of one or two runs on one time scale."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from zsim.display import duration, tflops
from zsim.figures.breakdown import COLLECTIVE_CAUSE
from zsim.figures.findings.labels import sharding
from zsim.figures.metrics import Metrics
from zsim.figures.windows import Direction, Window, cut
from zsim.ops import COMPUTE, HOST
from zsim.trace import Span, Trace
from zsim.writing.plots.style import BLACK, BLUE, GREY, ORANGE, PURPLE, SKY, VERMILLION, wrapped

WAITING = "#E0E0E0"
COLOURS = {
    "forward, backward": BLUE,
    "recompute": SKY,
    "all-gather": ORANGE,
    "reduce": VERMILLION,
    "other collective": WAITING,
    "copies": PURPLE,
    "host: Python, hooks": GREY,
    "host: launches": BLACK,
    "host waits": WAITING,
}
LANE_NAMES = {HOST: "host", COMPUTE: "compute", "all_gather": "all-gather copies", "reduce": "reduce copies"}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

BAR_HEIGHT = 0.8
SMALLEST_GAP = 1 / 4000
"""Of a window: bars closer than this are drawn as one, they would share a pixel."""
SMALLEST_SHARE = 0.22
"""Of the picture's time: a shorter window gets an axis that long, for its title's sake."""
MILLISECONDS = 1e3
WIDTH_INCHES = 14.0
ROW_INCHES, LEGEND_INCHES = 0.30, 0.45
HEADLINE_POINTS = 12.0
ABOVE_INCHES, BELOW_INCHES = 0.98, 0.45
"""Room for headline and titles above the rows of a panel, and for its time axis below."""
CHARACTER_INCHES = 0.088
"""Of a tick label, at most."""
DOTS_PER_INCH = 130


class Panel(NamedTuple):
    """One experiment: a row of windows under a headline."""

    headline: str
    windows: tuple[Window, ...]
    lanes: tuple[str, ...]


@rc_context({"text.parse_math": False})
def figure(runs: Sequence[tuple[Trace, Metrics]], first_layer: int | None = None, num_layers: int = 1) -> Figure:
    """Draws the same layers of each run, forward on the left, backward on the right."""
    panels = [_panel(trace, metrics, first_layer, num_layers) for trace, metrics in runs]
    longest_s = [max(panel.windows[column].duration_s for panel in panels) for column in range(len(DIRECTIONS))]
    bodies = [len(panel.lanes) * ROW_INCHES for panel in panels]
    height = sum(bodies) + (ABOVE_INCHES + BELOW_INCHES) * len(panels) + LEGEND_INCHES
    picture = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH)
    margin = 0.25 + CHARACTER_INCHES * max(len(_lane_name(lane)) for panel in panels for lane in panel.lanes)
    top = height
    for panel, body in zip(panels, bodies, strict=True):
        lines = wrapped(panel.headline, WIDTH_INCHES * 0.976, HEADLINE_POINTS, max_lines=2, bold=True)
        place = (0.012, (top - 0.12) / height)
        picture.text(*place, "\n".join(lines), fontsize=HEADLINE_POINTS, fontweight="bold", va="top", linespacing=1.1)
        top -= ABOVE_INCHES + body
        _draw_row(picture, panel, longest_s, (margin / WIDTH_INCHES, top / height, body / height))
        top -= BELOW_INCHES
    _draw_legend(picture, panels)
    picture.set_label("; ".join(panel.headline for panel in panels))
    return picture


def _panel(trace: Trace, metrics: Metrics, first_layer: int | None, num_layers: int) -> Panel:
    windows = tuple(cut(trace, direction, first_layer, num_layers) for direction in DIRECTIONS)
    lanes = sorted({lane for window in windows for lane in window.lanes()}, key=_lane_order)
    spec, rate = trace.spec, metrics.hardware_tflops_per_gpu
    shown = f"{rate:.0f}" if rate >= 1 else tflops(rate)
    headline = (
        f"{spec.runtime.name}, {sharding(spec)}, {spec.model.name} on {spec.cluster.num_nodes} x "
        f"{spec.cluster.topology}: step {duration(metrics.step_time_s)}, "
        f"{shown} TFLOPS/GPU with recompute"
    )
    return Panel(headline, windows, tuple(lanes))


def _lane_order(lane: str) -> tuple[bool, bool, bool, str]:
    return lane != HOST, lane != COMPUTE, lane.startswith("nccl"), lane


def _lane_name(lane: str) -> str:
    return LANE_NAMES.get(lane, lane.replace("_", " ").replace("nccl.", "NCCL "))


def _draw_row(figure: Figure, panel: Panel, longest_s: Sequence[float], place: tuple[float, float, float]) -> None:
    """Axes as wide as their time, so that a millisecond is as long in every panel; place is left, bottom, height."""
    left, bottom, height = place
    right, gap = 0.97, 0.042
    shown_s = [max(seconds, SMALLEST_SHARE * sum(longest_s)) for seconds in longest_s]
    scale = (right - left - gap * (len(shown_s) - 1)) / sum(shown_s)
    for column, (window, axis_s) in enumerate(zip(panel.windows, shown_s, strict=True)):
        axes = figure.add_axes((left, bottom, axis_s * scale, height))
        _draw_bars(axes, window, panel.lanes)
        axes.set_yticks(range(len(panel.lanes)), [_lane_name(lane) if column == 0 else "" for lane in panel.lanes])
        _draw_time_axis(axes, axis_s, num_ticks=max(2, round(12 * axis_s / sum(shown_s))))
        axes.set_title(_title(window), loc="left", fontsize=10)
        _mark_end(axes, window, longest_s[column], len(panel.lanes))
        left += axis_s * scale + gap


def _draw_bars(axes: Axes, window: Window, lanes: Sequence[str]) -> None:
    for row, lane in enumerate(lanes):
        for label, bars in _bars(window, lane).items():
            axes.broken_barh(bars, (row - BAR_HEIGHT / 2, BAR_HEIGHT), facecolors=COLOURS[label], linewidth=0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _draw_time_axis(axes: Axes, axis_s: float, num_ticks: int) -> None:
    axes.set_xlim(0, axis_s * MILLISECONDS)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:g} ms")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _title(window: Window) -> str:
    last = window.first_layer + window.num_layers - 1
    blocks = f"block {last}" if window.num_layers == 1 else f"blocks {window.first_layer} to {last}"
    recomputes = any(span.key.phase == "recompute" for span in window.spans)
    passes = "backward with recompute" if window.direction == "backward" and recomputes else window.direction
    return f"{passes} of {blocks}\n{duration(window.duration_s)}, compute idle {window.idle_share:.0%}"


def _mark_end(axes: Axes, window: Window, longest_s: float, num_lanes: int) -> None:
    """Where the window ends before that of the slower run: the time won."""
    won_s = longest_s - window.duration_s
    axes.axvline(window.duration_s * MILLISECONDS, color=BLACK, linewidth=1.0)
    if won_s <= 0:
        return
    end_ms = window.duration_s * MILLISECONDS
    axes.axvspan(end_ms, longest_s * MILLISECONDS, color="#F4F4F4", zorder=0)
    if won_s > longest_s / 6:
        middle_ms = end_ms + won_s * MILLISECONDS / 2
        text = f"done\n{duration(won_s)}\nearlier"
        axes.text(middle_ms, (num_lanes - 1) / 2, text, ha="center", va="center", fontsize=9)


def _bars(window: Window, lane: str) -> dict[str, list[tuple[float, float]]]:
    """(start, length) in ms from the window's start by label; neighbours of one label become one bar."""
    smallest_s = window.duration_s * SMALLEST_GAP
    intervals: dict[str, list[list[float]]] = {}
    for span in window.spans:
        if span.lane != lane:
            continue
        start_s = max(span.start_s, window.start_s) - window.start_s
        end_s = min(span.end_s - span.stalled_s, window.end_s) - window.start_s
        if end_s <= start_s:
            continue
        drawn = intervals.setdefault(_label(span), [])
        if drawn and start_s - drawn[-1][1] <= smallest_s:
            drawn[-1][1] = max(drawn[-1][1], end_s)
        else:
            drawn.append([start_s, end_s])
    return {
        label: [(start_s * MILLISECONDS, (end_s - start_s) * MILLISECONDS) for start_s, end_s in drawn]
        for label, drawn in intervals.items()
    }


def _label(span: Span) -> str:
    """The line of the legend that a span belongs to."""
    if span.kind == "compute":
        return "recompute" if span.key.phase == "recompute" else "forward, backward"
    if span.kind in COLLECTIVE_CAUSE:
        return {"exposed_all_gather": "all-gather", "exposed_reduce": "reduce"}.get(
            COLLECTIVE_CAUSE[span.kind], "other collective"
        )
    host_labels = {"sync": "host waits", "queue": "host waits", "launch": "host: launches", "copy": "copies"}
    return host_labels.get(span.kind, "host: Python, hooks")


def _draw_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    present = {_label(span) for panel in panels for window in panel.windows for span in window.spans}
    patches = [Patch(facecolor=colour, label=label) for label, colour in COLOURS.items() if label in present]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=9)
