"""Two steps as stacked bars, with a table of what each cause took before and after."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zsim.display import duration
from zsim.figures.breakdown import LABELS
from zsim.figures.findings.steps import Contrast, StepBar
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
    SMALL_POINTS,
    STRAW,
    TEXT_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    ink_on,
    panel,
    signed,
    slide,
    theme,
    wrapped,
)

COLOURS = {
    "compute": BLUE,
    "optimizer": NAVY,
    "exposed_all_gather": AMBER,
    "exposed_reduce": VERMILLION,
    "exposed_other_communication": MINT,
    "copies": PURPLE,
    "allocator": STRAW,
    "sync": PALE,
    "host": CHARCOAL,
}
"""As in the timeline where both show the same; each differs in lightness from all others."""

BAR_WIDTH, BAR_DISTANCE, SIDE = 0.9, 1.75, 0.85
"""And what is free left of the first and right of the last bar, from its middle."""
HEADROOM = 1.2
"""Height of the picture over that of the higher bar: three lines of text go above it."""
LOWEST_LABELLED = 0.045
"""Share of the axis below which a part is too low to be written on."""
TABLE_INCHES, ROW_INCHES = 4.35, 0.3
COLUMNS = (0.62, 0.81, 1.0)
"""Right edges of before, after and change, in parts of the table."""


@theme()
def figure(contrast: Contrast) -> Figure:
    """Draws it."""
    picture, top_inches = slide(contrast.headline, contrast.shared)
    left, bottom = 0.85, 0.65
    width = WIDTH_INCHES - left - TABLE_INCHES - 2 * MARGIN_INCHES
    axes = panel(picture, left, bottom, width, top_inches - bottom)
    bars = (contrast.before, contrast.after)
    tops = [max(bar.step_s, bar.measured.step_s if bar.measured else 0.0) for bar in bars]
    axes.set_ylim(0, max(tops) * HEADROOM)
    axes.set_xlim(-SIDE, BAR_DISTANCE + SIDE)
    for position, (bar, top) in enumerate(zip(bars, tops, strict=True)):
        _draw_bar(axes, position * BAR_DISTANCE, bar, contrast.causes)
        _write_total(axes, position * BAR_DISTANCE, bar, top)
    _draw_bands(axes, contrast)
    axes.set_ylabel("seconds of one step")
    bar_inches = width / (BAR_DISTANCE + 2 * SIDE) * BAR_DISTANCE - 0.1
    names = ["\n".join(wrapped(bar.label, bar_inches, TEXT_POINTS, max_lines=2)) for bar in bars]
    axes.set_xticks([0, BAR_DISTANCE], names)
    axes.tick_params(axis="x", length=0)
    _write_table(picture, contrast, bottom)
    return picture


def _draw_bar(axes: Axes, x: float, bar: StepBar, causes: tuple[str, ...]) -> None:
    reached_s = 0.0
    for cause in causes:
        seconds = bar.seconds.get(cause, 0.0)
        axes.bar(x, seconds, BAR_WIDTH, reached_s, color=COLOURS[cause], edgecolor="white", linewidth=0.6)
        if seconds > LOWEST_LABELLED * axes.get_ylim()[1]:
            ink = ink_on(COLOURS[cause])
            axes.text(x, reached_s + seconds / 2, duration(seconds), color=ink, ha="center", va="center")
        reached_s += seconds


def _draw_bands(axes: Axes, contrast: Contrast) -> None:
    """What becomes of each cause, as a pale band from bar to bar."""
    edges = (BAR_WIDTH / 2, BAR_DISTANCE - BAR_WIDTH / 2)
    lower = [0.0, 0.0]
    for cause in contrast.causes:
        upper = [low + bar.seconds.get(cause, 0.0) for low, bar in zip(lower, _bars(contrast), strict=True)]
        axes.fill_between(edges, lower, upper, color=COLOURS[cause], alpha=0.22, linewidth=0)
        lower = upper


def _bars(contrast: Contrast) -> tuple[StepBar, StepBar]:
    return contrast.before, contrast.after


def _write_total(axes: Axes, x: float, bar: StepBar, top_s: float) -> None:
    lines = [("bold", f"{bar.tflops:.1f} TFLOPS/GPU"), ("bold", duration(bar.step_s))]
    if bar.measured:
        # The sign in the text is that at the bar's edge.
        axes.plot(x + BAR_WIDTH / 2, bar.measured.step_s, "D", color=BLACK, markersize=7, clip_on=False, zorder=5)
        rate = f", {bar.measured.tflops:.4g}" if bar.measured.tflops is not None else ""
        lines.insert(0, ("normal", f"◆ measured {duration(bar.measured.step_s)}{rate}"))
    for row, (weight, text) in enumerate(lines):
        offset = (0, 9 + 15 * row)
        axes.annotate(
            text, (x, top_s), offset, textcoords="offset points", ha="center", weight=weight, fontsize=SMALL_POINTS
        )


def _write_table(picture: Figure, contrast: Contrast, bottom: float) -> None:
    """The legend, with the numbers: causes from the top of the stack to its bottom."""
    before, after = _bars(contrast)
    causes = contrast.causes[::-1]
    unit, scale, digits = ("ms", 1e3, 1) if max(before.step_s, after.step_s) < 1 else ("seconds", 1.0, 2)
    rows = [(unit, "before", "after", "change")]
    for name, one_s, other_s in (
        *((LABELS[cause], before.seconds.get(cause, 0.0), after.seconds.get(cause, 0.0)) for cause in causes),
        ("step", before.step_s, after.step_s),
    ):
        one, other = one_s * scale, other_s * scale
        rows.append((name, f"{one:,.{digits}f}", f"{other:,.{digits}f}", signed(other - one, digits)))
    axes = panel(picture, WIDTH_INCHES - TABLE_INCHES - MARGIN_INCHES, bottom, TABLE_INCHES, len(rows) * ROW_INCHES)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for row, (name, *cells) in enumerate(rows):
        weight = "bold" if row in {0, len(rows) - 1} else "normal"
        axes.text(0.065, row, name, va="center", weight=weight)
        for edge, cell in zip(COLUMNS, cells, strict=True):
            axes.text(edge, row, cell, ha="right", va="center", weight=weight)
    for row, cause in enumerate(causes, start=1):
        axes.add_patch(Rectangle((0, row - 0.33), 0.045, 0.66, facecolor=COLOURS[cause], edgecolor=DARK, linewidth=0.4))
    axes.axhline(len(rows) - 1.5, color=DARK, linewidth=0.8)
