"""Micro-batch × nodes, coloured by what a cell is worth; what does not fit is hatched."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zsim.display import gibibytes
from zsim.figures.findings.fits import HEADINGS, FitCell, FitMap, shown
from zsim.writing.plots.style import (
    BLACK,
    DARK,
    GREY,
    LINE,
    MARGIN_INCHES,
    POINTS_PER_INCH,
    SMALL_POINTS,
    TEXT_POINTS,
    WIDTH_INCHES,
    ink_on,
    note,
    panel,
    slide,
    theme,
    width_inches,
)

COLOURMAP = "cividis"
"""Made for colour-blind readers; its lightness rises evenly, so grey prints keep the order."""
LEFT_INCHES, BOTTOM_INCHES, SCALE_INCHES = 0.95, 0.98, 1.45
AXES_WIDTH_INCHES = WIDTH_INCHES - LEFT_INCHES - SCALE_INCHES - MARGIN_INCHES
LEAST_HEIGHT_INCHES = 3.4
"""Of the axes under a headline of two lines."""
MOST_CELLS = 12
"""Along one side: more cannot be written in."""


@theme()
def figure(fit_map: FitMap) -> Figure:
    """Draws it.

    Raises:
        ValueError: more cells than can be written in.

    """
    check_cells(len(fit_map.rows), len(fit_map.rows[0]))
    picture, top_inches = slide(fit_map.headline, fit_map.shared)
    height = top_inches - BOTTOM_INCHES
    axes = panel(picture, LEFT_INCHES, BOTTOM_INCHES, AXES_WIDTH_INCHES, height)
    colours = _colours(fit_map)
    for row, cells in enumerate(fit_map.rows):
        for column, cell in enumerate(cells):
            _draw_cell(axes, (column, row), cell, fit_map, colours)
    _set_axes(axes, fit_map)
    if colours is not None and colours.low < colours.high:
        bar = panel(picture, LEFT_INCHES + AXES_WIDTH_INCHES + 0.3, BOTTOM_INCHES, 0.22, height)
        mappable = ScalarMappable(Normalize(colours.low, colours.high), colours.colormap)
        picture.colorbar(mappable, cax=bar, format="{x:,g}", label=HEADINGS[fit_map.unit])
    if any(not cell.fits for cells in fit_map.rows for cell in cells):
        note(picture, f"hatched: needs more than the {shown(fit_map.capacity_bytes)} of {fit_map.device}")
    return picture


def check_cells(num_rows: int, num_columns: int) -> None:
    """Raises ValueError where there are more cells than can be written in."""
    if max(num_rows, num_columns) > MOST_CELLS:
        most = f"{MOST_CELLS} x {MOST_CELLS}"
        raise ValueError(f"{num_rows} x {num_columns} cells; allowed: at most {most} on one picture")


class _Colours(NamedTuple):
    """From one end of the scale to the other; good is light."""

    low: float
    high: float
    colormap: Colormap

    def of(self, value: float) -> str:
        """As "#rrggbb"; the good end where all values are one."""
        share = (value - self.low) / (self.high - self.low) if self.low < self.high else 1.0
        return to_hex(self.colormap(share))


def _colours(fit_map: FitMap) -> _Colours | None:
    """None where nothing fits."""
    values = [cell.value for cells in fit_map.rows for cell in cells if cell.value is not None]
    if not values:
        return None
    name = COLOURMAP if fit_map.unit == "tokens" else f"{COLOURMAP}_r"
    return _Colours(min(values), max(values), colormaps[name])


def _set_axes(axes: Axes, fit_map: FitMap) -> None:
    columns: Sequence[FitCell] = fit_map.rows[0]
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(fit_map.rows) - 0.5)
    axes.set_xticks(range(len(columns)), [f"{cell.num_nodes:,}" for cell in columns])
    axes.set_yticks(range(len(fit_map.rows)), [f"{cells[0].micro_batch:,}" for cells in fit_map.rows])
    axes.tick_params(length=0)
    axes.set_xlabel("nodes")
    axes.set_ylabel("micro-batch of one GPU")


def _draw_cell(axes: Axes, place: tuple[int, int], cell: FitCell, fit_map: FitMap, colours: _Colours | None) -> None:
    corner = (place[0] - 0.5, place[1] - 0.5)
    if cell.value is None or colours is None:
        box = Rectangle(corner, 1, 1, facecolor="#F2F2F2", edgecolor=GREY, hatch="///", linewidth=0.8)
        axes.add_patch(box)
        paper = {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 2.0}
        text = _fitting(_excuses(cell), fit_map, SMALL_POINTS)
        axes.text(*place, text, ha="center", va="center", color=DARK, fontsize=SMALL_POINTS, bbox=paper)
        return
    colour = colours.of(cell.value)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
    is_best = cell == fit_map.best
    numbers = [f"{cell.value:,.{1 if fit_map.unit == 'days' else 0}f}", f"{cell.value / 1e3:,.0f}k"]
    text = _fitting([f"{numbers[0]}\nbest", *numbers] if is_best else numbers, fit_map, TEXT_POINTS)
    axes.text(*place, text, ha="center", va="center", color=ink_on(colour), weight="bold" if is_best else "normal")
    if is_best:
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=BLACK, linewidth=3.0, zorder=4))


def _excuses(cell: FitCell) -> list[str]:
    """What is written where nothing fits, the longest first."""
    if cell.needed_bytes is None:
        return ["does not fit", "too big", "–"]
    needed = f"{gibibytes(cell.needed_bytes):,.0f} GiB"
    return [f"does not fit\nneeds {needed}", f"needs\n{needed}", needed, "–"]


def _fitting(texts: list[str], fit_map: FitMap, points: float) -> str:
    """The first text that has room in a cell, else the last one."""
    width = 0.92 * AXES_WIDTH_INCHES / len(fit_map.rows[0])
    height = 0.85 * LEAST_HEIGHT_INCHES / len(fit_map.rows)
    for text in texts:
        lines = text.split("\n")
        tall = len(lines) * points * LINE / POINTS_PER_INCH
        if tall <= height and max(width_inches(line, points, bold=True) for line in lines) <= width:
            return text
    return texts[-1]
