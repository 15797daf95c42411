"""Times of collectives by size: what was measured as points, what zsim predicts as lines."""

from matplotlib.figure import Figure

from zsim.figures.findings.collectives import CollectiveTimes
from zsim.writing.plots.style import LINES, MARGIN_INCHES, WIDTH_INCHES, check_lines, note, panel, slide, theme

LEFT_INCHES, BOTTOM_INCHES, LABELS_INCHES = 0.95, 0.98, 3.1
NOTE = "points: measured; lines: predicted with the numbers found, and the median of their errors"
MICROSECONDS = 1e6


@theme()
def figure(times: CollectiveTimes) -> Figure:
    """Draws it.

    Raises:
        ValueError: more series than can be told apart.

    """
    check_lines(len(times.series))
    picture, top_inches = slide(times.headline, times.shared)
    width = WIDTH_INCHES - LEFT_INCHES - LABELS_INCHES - MARGIN_INCHES
    axes = panel(picture, LEFT_INCHES, BOTTOM_INCHES, width, top_inches - BOTTOM_INCHES)
    axes.set(xscale="log", yscale="log", xlabel="message, bytes", ylabel="time, µs")
    for series, (colour, marker, dashes) in zip(times.series, LINES, strict=False):
        sizes, seconds = zip(*series.predicted, strict=True)
        axes.plot(sizes, [each * MICROSECONDS for each in seconds], dashes, color=colour, linewidth=1.8)
        sizes, seconds = zip(*series.measured, strict=True)
        label = f"{series.label}\nmedian error {series.median_error:.1%}"
        times_us = [each * MICROSECONDS for each in seconds]
        axes.plot(sizes, times_us, marker, label=label, color=colour, markersize=6, markerfacecolor="none")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelspacing=0.9)
    note(picture, NOTE)
    return picture
