"""Steps of ranks that empty their caches together behind every k-th step, and never."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zsim.display import duration
from zsim.figures.findings.stragglers import CacheBar, EmptyingCaches
from zsim.writing.plots.style import (
    AMBER,
    BLACK,
    BLUE,
    MARGIN_INCHES,
    SMALL_POINTS,
    WIDTH_INCHES,
    ink_on,
    note,
    panel,
    signed,
    slide,
    theme,
)

LEFT_INCHES, BOTTOM_INCHES = 0.85, 1.25
PARTS = (("a step of equal ranks", BLUE), ("lost to the slowest rank", AMBER))
"""From below."""
HEADROOM = 1.22
"""Two lines of text go above the bars."""
BAR_WIDTH = 0.62
LEAST_LABELLED = 0.045


@theme()
def figure(found: EmptyingCaches) -> Figure:
    """Draws it."""
    picture, top_inches = slide(found.headline, found.shared)
    width = WIDTH_INCHES - LEFT_INCHES - MARGIN_INCHES
    axes = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, top_inches - BOTTOM_INCHES)
    axes.set_ylim(0, max(bar.mean_s for bar in found.bars) * HEADROOM)
    for position, bar in enumerate(found.bars):
        _draw_bar(axes, position, bar, found)
    axes.set_xlim(-0.6, len(found.bars) - 0.4)
    axes.set_xticks(range(len(found.bars)), [bar.name for bar in found.bars])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("torch.cuda.empty_cache() on all ranks")
    axes.set_ylabel("seconds of a step")
    handles = [axes.bar(0, 0, color=colour, edgecolor="white") for _, colour in PARTS]
    axes.legend(
        handles, [name for name, _ in PARTS], loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
    )
    note(
        picture,
        f"{found.num_ranks:,} ranks, mean of {found.num_steps:,} steps; flushes: of one rank, for lack of memory",
    )
    return picture


def _draw_bar(axes: Axes, position: int, bar: CacheBar, found: EmptyingCaches) -> None:
    quiet_s = min(bar.quiet_s, bar.mean_s)
    reached_s = 0.0
    for seconds, (_, colour) in zip((quiet_s, bar.mean_s - quiet_s), PARTS, strict=True):
        axes.bar(position, seconds, BAR_WIDTH, reached_s, color=colour, edgecolor="white", linewidth=0.6)
        if seconds > LEAST_LABELLED * axes.get_ylim()[1]:
            middle = reached_s + seconds / 2
            axes.text(position, middle, duration(seconds), color=ink_on(colour), ha="center", va="center")
        reached_s += seconds
    change = f", {signed(-100 * found.won(bar), 1)}%" if bar.every else ""
    said = f"{duration(bar.mean_s)}{change}\n{bar.flushes:.3g} flushes a step"
    axes.annotate(
        said, (position, reached_s), (0, 4), textcoords="offset points", ha="center", va="bottom", color=BLACK,
        fontsize=SMALL_POINTS,
    )  # fmt: skip
