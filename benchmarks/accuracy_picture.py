"""Predicted against measured step times of the lab, a mark an engine: `docs/figures/accuracy_lab.png`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.accuracy_report import Row, groups, p90
from zsim.writing.plots import style

_MARKS: Final = {
    "reference": ("reference engine", style.BLUE, "o"),
    "ddp": ("DDP", style.GREEN, "v"),
    "deepspeed": ("DeepSpeed 0.19.8", style.ORANGE, "s"),
    "fsdp2": ("FSDP2", style.VERMILLION, "D"),
}
_BANDS: Final = (0.08, 0.15)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture; rows that do not count are left out."""
    kept = [row for row in rows if row.counted]
    with style.theme():
        figure, top = style.slide(*_titles(kept))
        axes = style.panel(figure, 1.0, 0.9, 5.6, top - 1.0)
        low = 0.8 * min(min(row.measured_s, row.predicted_s) for row in kept)
        high = 1.25 * max(max(row.measured_s, row.predicted_s) for row in kept)
        for band, shade in zip(reversed(_BANDS), ("#F2F2F2", "#DDDDDD"), strict=True):
            edges = [low, high]
            axes.fill_between(edges, [x * (1 - band) for x in edges], [x * (1 + band) for x in edges], color=shade)
        axes.plot([low, high], [low, high], color=style.BLACK, linewidth=1)
        for engine, (name, colour, marker) in _MARKS.items():
            mine = [row for row in kept if row.engine == engine]
            x, y = [row.measured_s for row in mine], [row.predicted_s for row in mine]
            if mine:
                axes.scatter(
                    x, y, s=34, color=colour, marker=marker, alpha=0.8, linewidths=0, label=f"{name}, {len(x)}"
                )
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_xlabel("measured step, s")
        axes.set_ylabel("predicted step, s")
        ticks = [value for value in (1, 2, 5, 10, 20, 50) if low < value < high]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{value:g}" for value in ticks])
            axis.set_ticks([], minor=True)
        axes.legend(loc="upper left", frameon=False)
        _say(figure, kept)
        style.save(figure, path)


def _titles(rows: Sequence[Row]) -> tuple[str, str]:
    sizes = sorted(abs(row.error) for row in rows)
    median = sizes[len(sizes) // 2]
    return (
        f"{len(rows)} real runs over slow links: half of them within {median:.0%} of the prediction",
        "Two nodes, 0.25 to 4 Gbit/s, stages 0 to 3, switches on and off; constants from loopback and 1 Gbit/s alone",
    )


def _say(figure: style.Picture, rows: Sequence[Row]) -> None:
    lines = []
    for name, members in groups(rows).items():
        sizes = [abs(row.error) for row in members]
        lines.append(f"{name}\n   {len(members)} points, median {_median(sizes):.1%}, p90 {p90(sizes):.1%}")
    place = (7.0 / style.WIDTH_INCHES, 0.72)
    figure.text(*place, "\n".join(lines), fontsize=style.SMALL_POINTS, va="top", linespacing=1.5)


def _median(sizes: Sequence[float]) -> float:
    return sorted(sizes)[len(sizes) // 2]
