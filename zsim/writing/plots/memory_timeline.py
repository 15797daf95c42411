"""Memory of one GPU through a step: categories stacked, the allocator's cache above them, the device as a line."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zsim.display import gibibytes
from zsim.figures.findings.fits import shown
from zsim.figures.findings.memory_timeline import MemoryTimeline
from zsim.figures.memory import ROUNDING
from zsim.writing.plots.memory import COLOURS
from zsim.writing.plots.style import (
    BLACK,
    DARK,
    GREY,
    MARGIN_INCHES,
    SMALL_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    panel,
    slide,
    theme,
    width_inches,
)

NUM_MOMENTS = 900
"""About as many as the axes have pixels."""
ORDER = ("context", "communication", "parameters", "optimizer", "gradients", "buckets", "gathered", "activations",
         "temporary", ROUNDING)  # fmt: skip
"""From below: what stays, then what comes and goes."""
LEFT_INCHES, BOTTOM_INCHES, ABOVE_INCHES, GAP_INCHES, SETUP_INCHES = 0.9, 1.35, 0.28, 0.2, 0.62
LEGEND_COLUMNS = 6
_LEAST_SHARE = 0.001
"""Of the device: a category that never holds as much is not named."""
HEADROOM = 1.1
RESERVED = {"color": BLACK, "linewidth": 1.6}
ACTIVE = {"color": DARK, "linewidth": 1.0, "linestyle": ":"}


@theme()
def figure(timeline: MemoryTimeline) -> Figure:
    """Draws it."""
    picture, top_inches = slide(timeline.headline, timeline.shared)
    height = top_inches - BOTTOM_INCHES - ABOVE_INCHES
    setup_width = SETUP_INCHES * len(timeline.setup)
    left = LEFT_INCHES
    top = _top(timeline)
    if timeline.setup:
        _draw_setup(panel(picture, left, BOTTOM_INCHES, setup_width, height), timeline, top)
        left += setup_width + GAP_INCHES
    axes = panel(picture, left, BOTTOM_INCHES, WIDTH_INCHES - left - MARGIN_INCHES, height)
    axes.set_ylim(0, top)
    _draw_step(axes, timeline)
    _draw_capacity(axes, timeline)
    _mark_peak(axes, timeline)
    _name_phases(axes, timeline, WIDTH_INCHES - left - MARGIN_INCHES)
    if timeline.setup:
        axes.tick_params(axis="y", labelleft=False)
    (picture.axes[0]).set_ylabel("GiB of one GPU")
    _draw_legend(picture, timeline)
    return picture


def _top(timeline: MemoryTimeline) -> float:
    phases = timeline.course.phases
    highest = max(max(phase.reserved_bytes, phase.allocated_bytes) for phase in phases)
    return gibibytes(max(highest, timeline.capacity_bytes)) * HEADROOM


def _draw_setup(axes: Axes, timeline: MemoryTimeline, top: float) -> None:
    """Peaks of load and init, before all steps."""
    for column, phase in enumerate(timeline.setup):
        reached = 0.0
        for name in ORDER:
            height = gibibytes(phase.categories.get(name, 0))
            axes.bar(column, height, 0.7, reached, color=_colour(name))
            reached += height
        reserved = gibibytes(phase.reserved_bytes)
        axes.plot([column - 0.35, column + 0.35], [reserved, reserved], **RESERVED)  # type: ignore[arg-type]
    axes.set_xticks(range(len(timeline.setup)), [phase.phase for phase in timeline.setup])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(timeline.setup) - 0.4)
    axes.set_ylim(0, top)
    axes.axhline(gibibytes(timeline.capacity_bytes), color=BLACK, linewidth=1.6, linestyle="--")


def _draw_step(axes: Axes, timeline: MemoryTimeline) -> None:
    times_s = [moment.time_s for moment in timeline.moments]
    stacks = [[gibibytes(moment.categories.get(name, 0)) for moment in timeline.moments] for name in ORDER]
    axes.stackplot(times_s, stacks, colors=[_colour(name) for name in ORDER], step="post", linewidth=0)
    active = [gibibytes(moment.active_bytes) for moment in timeline.moments]
    reserved = [gibibytes(moment.reserved_bytes) for moment in timeline.moments]
    axes.step(times_s, active, where="post", **ACTIVE)  # type: ignore[arg-type]
    axes.step(times_s, reserved, where="post", **RESERVED)  # type: ignore[arg-type]
    for time_s in timeline.flushes_s:
        axes.axvline(time_s, color=VERMILLION, linewidth=1.0, alpha=0.8)
    axes.set_xlim(0, timeline.end_s)
    axes.set_xlabel("seconds since the step began, by the host")


def _draw_capacity(axes: Axes, timeline: MemoryTimeline) -> None:
    capacity = gibibytes(timeline.capacity_bytes)
    axes.axhline(capacity, color=BLACK, linewidth=1.6, linestyle="--")
    text = f"{timeline.device}: {shown(timeline.capacity_bytes)}"
    low, high = axes.get_ylim()
    axes.text(0.995, capacity + (high - low) * 0.012, text, transform=axes.get_yaxis_transform(), ha="right",
              va="bottom", fontsize=SMALL_POINTS)  # fmt: skip


def _mark_peak(axes: Axes, timeline: MemoryTimeline) -> None:
    """Of this step, which a host that is far ahead passes in a moment; what took it there is named."""
    peak = max(timeline.moments, key=lambda moment: moment.allocated_bytes)
    height = gibibytes(peak.allocated_bytes)
    axes.plot(peak.time_s, height, "D", color=VERMILLION, markersize=6, markeredgecolor="white", zorder=5)
    left = peak.time_s > timeline.end_s / 2
    text = f"peak {shown(peak.allocated_bytes)}"
    offset = (-8, 0) if left else (8, 0)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}
    axes.annotate(text, (peak.time_s, height), offset, textcoords="offset points", ha="right" if left else "left",
                  va="center", fontsize=SMALL_POINTS, bbox=paper, zorder=6)  # fmt: skip


def _name_phases(axes: Axes, timeline: MemoryTimeline, axes_inches: float) -> None:
    """Above the axes, where there is room for the name."""
    for stretch in timeline.stretches:
        axes.axvline(stretch.start_s, color=GREY, linewidth=0.8, linestyle=":")
        inches = (stretch.end_s - stretch.start_s) / timeline.end_s * axes_inches
        if inches > width_inches(stretch.phase, SMALL_POINTS) + 0.1:
            middle = (stretch.start_s + stretch.end_s) / 2
            axes.text(middle, 1.02, stretch.phase, transform=axes.get_xaxis_transform(), ha="center", color=DARK,
                      fontsize=SMALL_POINTS)  # fmt: skip


def _draw_legend(picture: Figure, timeline: MemoryTimeline) -> None:
    held = [moment.categories for moment in timeline.moments] + [phase.categories for phase in timeline.setup]
    least = _LEAST_SHARE * timeline.capacity_bytes
    present = [name for name in ORDER if any(categories.get(name, 0) > least for categories in held)]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_colour(name), edgecolor=DARK, linewidth=0.4, label=name) for name in present
    ]
    handles.append(Line2D([], [], label="active", **ACTIVE))  # type: ignore[arg-type]
    handles.append(Line2D([], [], label="reserved", **RESERVED))  # type: ignore[arg-type]
    if timeline.flushes_s:
        handles.append(Line2D([], [], color=VERMILLION, linewidth=1.0, label="flush"))
    columns = min(LEGEND_COLUMNS, len(handles))
    rows = -(-len(handles) // columns)
    # Legends fill columns first; this order reads along the rows.
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    placed = [handles[index] for index in order if index < len(handles)]
    picture.legend(handles=placed, loc="lower center", ncols=columns, frameon=False, columnspacing=1.4)


def _colour(name: str) -> str:
    return COLOURS.get(name, GREY)
