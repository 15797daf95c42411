"""Memory of one GPU by ZeRO stage against what the device has."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from zsim.display import gibibytes
from zsim.figures.findings.fits import StageBar, StageMemory, shown
from zsim.figures.memory import ROUNDING
from zsim.writing.plots.style import (
    AMBER,
    BLACK,
    BLUE,
    CHARCOAL,
    DARK,
    MARGIN_INCHES,
    MINT,
    NAVY,
    PALE,
    PURPLE,
    SLATE,
    SMALL_POINTS,
    STRAW,
    TEXT_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    ink_on,
    panel,
    slide,
    theme,
    width_inches,
    wrapped,
)

COLOURS = {
    "parameters": BLUE,
    "optimizer": NAVY,
    "gradients": VERMILLION,
    "gathered": AMBER,
    "buckets": PURPLE,
    "activations": MINT,
    "temporary": PALE,
    ROUNDING: SLATE,
    "communication": STRAW,
    "context": CHARCOAL,
}
"""From left to right; neighbours differ in lightness."""

LEFT_INCHES, BOTTOM_INCHES, TOTALS_INCHES, CAPACITY_INCHES = 1.55, 1.3, 2.1, 0.3
"""Room for names, axis and legend, totals, and the name of the capacity's line above the bars."""
LEGEND_COLUMNS = 5
BAR_HEIGHT = 0.62
HEADROOM = 1.04


@theme()
def figure(memory: StageMemory) -> Figure:
    """Draws it."""
    picture, top_inches = slide(memory.headline, memory.shared)
    width = WIDTH_INCHES - LEFT_INCHES - TOTALS_INCHES - MARGIN_INCHES
    height = top_inches - CAPACITY_INCHES - BOTTOM_INCHES
    axes = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, height)
    highest = max(memory.capacity_bytes, *(bar.total_bytes for bar in memory.bars))
    axes.set_xlim(0, gibibytes(highest) * HEADROOM)
    axes.set_ylim(len(memory.bars) - 0.4, -0.6)
    for row, bar in enumerate(memory.bars):
        _draw_bar(axes, row, bar, width)
        _write_total(axes, row, bar, memory)
    _draw_capacity(axes, memory, width)
    _name_rows(axes, memory)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("GiB of one GPU at its peak")
    _draw_legend(picture, memory)
    return picture


def _draw_bar(axes: Axes, row: int, bar: StageBar, axes_inches: float) -> None:
    reached = 0.0
    for category, colour in COLOURS.items():
        length = gibibytes(bar.categories.get(category, 0))
        axes.barh(row, length, BAR_HEIGHT, reached, color=colour, edgecolor="white", linewidth=0.6)
        text = f"{length:.1f}"
        if length / axes.get_xlim()[1] * axes_inches > width_inches(text, TEXT_POINTS) + 0.1:
            axes.text(reached + length / 2, row, text, color=ink_on(colour), ha="center", va="center")
        reached += length


def _write_total(axes: Axes, row: int, bar: StageBar, memory: StageMemory) -> None:
    """Right of the axes, where no bar and no line passes."""
    fits = memory.fits(bar)
    left = shown(abs(memory.capacity_bytes - bar.total_bytes))
    verdict = f"fits, {left} free" if fits else f"{left} too much"
    x = axes.get_xlim()[1] * 1.03
    text = f"{shown(bar.total_bytes)}\n{verdict}"
    axes.text(x, row, text, va="center", weight="normal" if fits else "bold", color=BLACK, clip_on=False)


def _draw_capacity(axes: Axes, memory: StageMemory, axes_inches: float) -> None:
    capacity = gibibytes(memory.capacity_bytes)
    axes.axvline(capacity, color="white", linewidth=3.6)
    axes.axvline(capacity, color=BLACK, linewidth=1.6, linestyle="--")
    text = wrapped(f"{memory.device}: {shown(memory.capacity_bytes)}", axes_inches, SMALL_POINTS)[0]
    half = width_inches(text, SMALL_POINTS) / axes_inches / 2
    # In parts of the axes, pushed inwards where half of it would stick out.
    middle = min(max(capacity / axes.get_xlim()[1], half), 1 - half)
    axes.text(middle, 1.02, text, transform=axes.transAxes, ha="center", va="bottom", fontsize=SMALL_POINTS)


def _name_rows(axes: Axes, memory: StageMemory) -> None:
    many = len(memory.bars) > 1
    names = [
        "\n".join([*wrapped(bar.label, LEFT_INCHES - 0.3, TEXT_POINTS, max_lines=2), *(["(as it is)"] * here)])
        for bar in memory.bars
        for here in [many and bar.present]
    ]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)


def _draw_legend(picture: Figure, memory: StageMemory) -> None:
    """Below the axes, in the order of the bars."""
    present = [name for name in COLOURS if any(bar.categories.get(name) for bar in memory.bars)]
    patches = [Patch(facecolor=COLOURS[name], edgecolor=DARK, linewidth=0.4, label=name) for name in present]
    columns = min(LEGEND_COLUMNS, len(patches))
    rows = -(-len(patches) // columns)
    # Legends fill columns first; this order reads along the rows.
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    handles = [patches[index] for index in order if index < len(patches)]
    picture.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, columnspacing=1.6)
