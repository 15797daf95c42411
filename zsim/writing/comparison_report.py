"""Predicted beside measured, for people: seven figures, and the events that make up the error of the step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from zsim.display import duration, size
from zsim.writing.report import section
from zsim.writing.tables import plain_table

LABELS: Final = {
    "step": "step",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "exposed_comm": "exposed communication",
    "bytes": "bytes",
    "memory": "memory",
}
_SIZES: Final = frozenset({"bytes", "memory"})


class Figure(NamedTuple):
    """One line: seconds or bytes; None where it is not known."""

    name: str
    predicted: float | None
    measured: float | None
    error_pct: float | None
    noise_pct: float | None
    note: str = ""


class Event(NamedTuple):
    """A key, and the seconds of the step that it has."""

    key: str
    predicted_s: float
    measured_s: float


def report(
    heading: Iterable[str], figures: Iterable[Figure], events: Sequence[Event], findings: Iterable[str]
) -> RenderableType:
    """Everything that `zsim compare` prints."""
    parts: list[RenderableType] = [*(Text(line) for line in heading), Text(""), _figures(figures)]
    if events:
        parts.append(section("Keys that add most to the error of the step", _events(events)))
    parts += [Text(f"looks like: {finding}", style="yellow") for finding in findings]
    return Group(*parts)


def amount(name: str, value: float | None) -> str:
    """Seconds or bytes in a readable unit."""
    if value is None:
        return "–"
    return size(value) if name in _SIZES else duration(value)


def figure_lines(comparison: Mapping[str, Mapping[str, float | None]], notes: Mapping[str, str]) -> list[Figure]:
    """The lines of a comparison's JSON."""
    return [
        Figure(
            name,
            comparison["predicted"][name],
            comparison["measured"][name],
            comparison["error_pct"][name],
            comparison["noise_of_each_pct"][name],
            notes.get(name, ""),
        )
        for name in LABELS
    ]


def _figures(figures: Iterable[Figure]) -> RenderableType:
    table = plain_table()
    table.add_column("")
    for heading in ("predicted", "measured", "error", "noise"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for row in figures:
        table.add_row(
            LABELS[row.name],
            amount(row.name, row.predicted),
            amount(row.name, row.measured),
            "" if row.error_pct is None else f"{row.error_pct:+.1f}%",
            "" if row.noise_pct is None else f"±{row.noise_pct:.1f}%",
            row.note,
        )
    return table


def _events(events: Iterable[Event]) -> RenderableType:
    table = plain_table()
    table.add_column("micro-batch/phase/layer/what")
    for heading in ("predicted", "measured", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in events:
        change_s = row.predicted_s - row.measured_s
        sign = "-" if change_s < 0 else "+"
        table.add_row(row.key, duration(row.predicted_s), duration(row.measured_s), f"{sign}{duration(abs(change_s))}")
    return table
