"""Memory and throughput against the micro-batch: where the allocator's cache meets the device."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zsim.display import gibibytes
from zsim.figures.findings.fits import shown
from zsim.figures.findings.flushes import FlushPoint, FlushRisk
from zsim.writing.plots.style import (
    BLACK,
    BLUE,
    DARK,
    GREY,
    MARGIN_INCHES,
    ORANGE,
    SMALL_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    note,
    panel,
    slide,
    theme,
)

LEFT_INCHES, BOTTOM_INCHES, GAP_INCHES, ABOVE_INCHES = 0.95, 1.25, 0.95, 0.3
HEADROOM = 1.14
FLUSH_ZONE = "#FBE3D6"
"""Light vermillion: behind micro-batches that fit only with flushes."""


@theme()
def figure(risk: FlushRisk) -> Figure:
    """Draws it."""
    picture, top_inches = slide(risk.headline, risk.shared)
    width = (WIDTH_INCHES - LEFT_INCHES - GAP_INCHES - MARGIN_INCHES) / 2
    height = top_inches - BOTTOM_INCHES - ABOVE_INCHES
    memory = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, height)
    _draw_memory(memory, risk)
    throughput = panel(picture, LEFT_INCHES + width + GAP_INCHES, BOTTOM_INCHES, width, height)
    _draw_throughput(throughput, risk)
    for axes in (memory, throughput):
        _set_axis(axes, risk)
    note(picture, _notes(risk))
    return picture


def _draw_memory(axes: Axes, risk: FlushRisk) -> None:
    capacity = gibibytes(risk.capacity_bytes)
    numbers = [point.micro_batch for point in risk.points]
    reserved = [gibibytes(point.reserved_bytes) for point in risk.fitting]
    allocated = [gibibytes(point.allocated_bytes) for point in risk.points]
    axes.plot(numbers[: len(reserved)], reserved, "--", color=ORANGE, linewidth=2.2, label="reserved")
    _draw_marks(axes, risk.fitting, reserved, ORANGE, "s")
    axes.plot(numbers, allocated, "-", color=BLUE, linewidth=2.2, label="allocated")
    _draw_marks(axes, risk.points, allocated, BLUE, "o")
    highest = max(capacity, *reserved, *allocated)
    axes.axhline(capacity, color=BLACK, linewidth=1.6, linestyle="--")
    axes.set_ylim(0, highest * HEADROOM)
    text = f"{risk.device}: {shown(risk.capacity_bytes)}"
    axes.text(0.02, capacity + highest * 0.035, text, transform=axes.get_yaxis_transform(), fontsize=SMALL_POINTS)
    axes.set_ylabel("GiB of one GPU at its peak")
    axes.legend(loc="lower right", frameon=False)


def _draw_throughput(axes: Axes, risk: FlushRisk) -> None:
    fitting = risk.fitting
    values = [point.samples_per_s for point in fitting]
    axes.plot([point.micro_batch for point in fitting], values, "-", color=BLUE, linewidth=2.2)
    _draw_marks(axes, fitting, values, BLUE, "o")
    axes.set_ylim(0, max(values, default=1.0) * HEADROOM)
    axes.set_ylabel("samples/s of the whole cluster")
    for point in fitting:
        if point.flushes:
            where = (point.micro_batch, point.samples_per_s)
            text, colour = f"{point.num_retries}", VERMILLION
            axes.annotate(text, where, (0, 9), textcoords="offset points", ha="center", color=colour, weight="bold")


def _draw_marks(axes: Axes, points: tuple[FlushPoint, ...], values: list[float], colour: str, marker: str) -> None:
    for point, value in zip(points, values, strict=True):
        face = colour if point.fits else "white"
        axes.plot(point.micro_batch, value, marker, color=colour, markerfacecolor=face, markersize=7)


def _set_axis(axes: Axes, risk: FlushRisk) -> None:
    numbers = [point.micro_batch for point in risk.points]
    margin = max(0.5, (numbers[-1] - numbers[0]) * 0.05)
    axes.set_xlim(numbers[0] - margin, numbers[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel("micro-batch of one GPU")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    flushing = [index for index, point in enumerate(risk.points) if point.flushes]
    if flushing:
        first, last = flushing[0], flushing[-1]
        start = (numbers[first] + numbers[first - 1]) / 2 if first else numbers[0] - margin
        end = (numbers[last] + numbers[last + 1]) / 2 if last + 1 < len(numbers) else numbers[-1] + margin
        axes.axvspan(start, end, color=FLUSH_ZONE, zorder=0)
        axes.text(
            (start + end) / 2,
            1.02,
            "flushes",
            transform=axes.get_xaxis_transform(),
            ha="center",
            color=DARK,
            fontsize=SMALL_POINTS,
        )
    refused = [number for number, point in zip(numbers, risk.points, strict=True) if not point.fits]
    if refused:
        axes.axvline(refused[0] - margin / 2, color=GREY, linewidth=1.0, linestyle=":")


def _notes(risk: FlushRisk) -> str:
    parts = ["all else unchanged"]
    if any(point.flushes for point in risk.points):
        parts.append("numbers: flushes of the cache a step (num_alloc_retries)")
    if not all(point.fits for point in risk.points):
        parts.append("hollow, behind the dotted line: does not fit")
    return "; ".join(parts)
