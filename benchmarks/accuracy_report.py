"""What `benchmarks.accuracy_lab` has found: errors, order, gains and bytes, from the rows that it leaves in docs/.

The rows are the CSV that `--write` makes of measured and predicted points; every table here and in docs/ is read from
it, so that what is printed can be checked without a lab.
"""

import csv
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from benchmarks import ROOT, Bar, bars_table, table

ROWS: Final = ROOT / "docs" / "benchmarks" / "accuracy_lab.csv"
PICTURE: Final = ROOT / "docs" / "figures" / "accuracy_lab.png"
NOT_MEASURED: Final = "Not measured yet."
LIMITING_RATE: Final = 1.0
"""Gbit/s; above, the CPU limits too."""
CLEAR: Final = 0.10
"""Measured times that differ by more have an order."""
GAIN_SHARE, GAIN_OF_STEP = 0.25, 0.03
ORDER_BAR, BYTES_BAR = 0.95, 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """A point, predicted and measured."""

    model: str
    rate_gbit: float
    accumulation: int
    kind: str
    num_ranks: int
    engine: str
    measured_s: float
    """Median of its steps."""
    low_s: float
    high_s: float
    """Shortest and longest of them."""
    num_steps: int
    predicted_s: float
    measured_bytes: float
    """That a node sent in a step, without headers."""
    predicted_bytes: float
    counted: bool
    """Whether compute alone was as fast as usual, right before and right behind."""

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float:
        """Of the bytes."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0

    @property
    def is_own(self) -> bool:
        """Of the reference engine or DDP."""
        return self.engine in {"reference", "ddp"}

    @property
    def cell(self) -> tuple[str, float, int, int]:
        """What configurations share whose order is asked for."""
        return self.model, self.rate_gbit, self.accumulation, self.num_ranks


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configurations of one cell: the first measured faster."""

    fast: Row
    slow: Row

    @property
    def is_right(self) -> bool:
        """Whether the prediction has the same order."""
        return self.fast.predicted_s < self.slow.predicted_s

    @property
    def measured_gain_s(self) -> float:
        """Seconds of a step."""
        return self.slow.measured_s - self.fast.measured_s

    @property
    def predicted_gain_s(self) -> float:
        """The same."""
        return self.slow.predicted_s - self.fast.predicted_s

    @property
    def is_size_right(self) -> bool:
        """Within a quarter of the gain or 3 % of the step."""
        allowed_s = max(GAIN_SHARE * abs(self.measured_gain_s), GAIN_OF_STEP * self.slow.measured_s)
        return abs(self.predicted_gain_s - self.measured_gain_s) <= allowed_s


def read(path: Path = ROWS) -> list[Row]:
    """The rows of a CSV; none where there is none."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Row)}
    convert = {"str": str, "float": float, "int": int, "bool": lambda text: text == "True"}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                **{
                    name: convert[str(getattr(kinds[name], "__name__", kinds[name]))](text)
                    for name, text in line.items()
                }
            )
            for line in csv.DictReader(file)
        ]


def write(rows: Sequence[Row], path: Path = ROWS) -> None:
    """As CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in asdict(row).items()} for row in rows)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What is shown apart; a row that does not count is in none."""
    kept = [row for row in rows if row.counted]
    own = [row for row in kept if row.is_own]
    found = {
        f"reference and DDP, up to {LIMITING_RATE:g} Gbit/s": [r for r in own if r.rate_gbit <= LIMITING_RATE],
        "reference and DDP, above": [r for r in own if r.rate_gbit > LIMITING_RATE],
        "of both, 4 ranks on two cores": [r for r in own if r.num_ranks > 2],
        "of both, DDP": [r for r in own if r.engine == "ddp"],
        "DeepSpeed 0.19.8": [r for r in kept if r.engine == "deepspeed"],
        "FSDP2": [r for r in kept if r.engine == "fsdp2"],
        "DeepSpeed and FSDP2": [r for r in kept if not r.is_own],
    }
    return {name: members for name, members in found.items() if members}


def p90(values: Sequence[float]) -> float:
    """90th percentile, between neighbours in proportion."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def errors_table() -> str:
    """Errors of the step by group, of the rows in docs/."""
    return _errors_table(rows) if (rows := read()) else NOT_MEASURED


def _errors_table(rows: Sequence[Row]) -> str:
    lines = []
    for name, members in groups(rows).items():
        sizes = [abs(row.error) for row in members]
        bias = statistics.median(row.error for row in members)
        lines.append(
            (
                name,
                len(members),
                f"{statistics.median(sizes):.1%}",
                f"{p90(sizes):.1%}",
                f"{max(sizes):.1%}",
                f"{bias:+.1%}",
            )
        )
    return table(("step time", "points", "median error", "90th percentile", "largest", "bias"), lines)


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """All pairs of a cell whose measured times differ clearly."""
    found = []
    for one, other in itertools.combinations([row for row in rows if row.counted], 2):
        fast, slow = sorted((one, other), key=lambda row: row.measured_s)
        if one.cell == other.cell and slow.measured_s > (1 + CLEAR) * fast.measured_s:
            found.append(Pair(fast, slow))
    return found


def ends(rows: Iterable[Row]) -> list[Pair]:
    """All switches on against all off, where one cell has both at one stage."""
    kept = [row for row in rows if row.counted and row.engine == "reference"]
    return [
        Pair(on, off)
        for on, off in itertools.permutations(kept, 2)
        if on.cell == off.cell and on.kind.endswith(" on") and off.kind == on.kind.replace(" on", " off")
    ]


def bars(rows: Sequence[Row] | None = None) -> list[Bar]:
    """What has to hold."""
    rows = read() if rows is None else rows
    found: list[Bar] = []
    by_name = groups(rows)
    own = next(iter(by_name), "")
    for name, median_bar, p90_bar in (
        (own, 0.08, 0.15),
        ("reference and DDP, above", 0.15, 0.30),
        ("DeepSpeed and FSDP2", 0.12, 0.25),
    ):
        if sizes := [abs(row.error) for row in by_name.get(name, ())]:
            middle, high = statistics.median(sizes), p90(sizes)
            found.append(Bar(f"median error, {name}", f"{middle:.1%}", f"≤ {median_bar:.0%}", middle <= median_bar))
            found.append(Bar(f"90th percentile, {name}", f"{high:.1%}", f"≤ {p90_bar:.0%}", high <= p90_bar))
    if ordered := pairs(rows):
        share = sum(pair.is_right for pair in ordered) / len(ordered)
        found.append(Bar(f"order of {len(ordered)} pairs", f"{share:.1%}", f"≥ {ORDER_BAR:.0%}", share >= ORDER_BAR))
    if gains := [pair for pair in ends(rows) if abs(pair.measured_gain_s) > CLEAR * pair.fast.measured_s]:
        right = sum(pair.measured_gain_s * pair.predicted_gain_s > 0 for pair in gains)
        sized = sum(pair.is_size_right for pair in gains)
        found.append(Bar("sign of the gain, all switches", f"{right} of {len(gains)}", "all", right == len(gains)))
        found.append(Bar("size of the gain, all switches", f"{sized} of {len(gains)}", "all", sized == len(gains)))
    if sent := [abs(row.bytes_error) for row in rows if row.measured_bytes]:
        found.append(Bar("bytes on the wire, largest error", f"{max(sent):.2%}", "≤ 2%", max(sent) <= BYTES_BAR))
    return found


def verdicts_table() -> str:
    """The bars, of the rows in docs/."""
    return bars_table(bars(rows)) if (rows := read()) else NOT_MEASURED


def points_table() -> str:
    """Every point, of the rows in docs/."""
    return _points_table(rows) if (rows := read()) else NOT_MEASURED


def _points_table(rows: Iterable[Row]) -> str:
    lines = [
        (
            row.model,
            f"{row.rate_gbit:g}",
            row.accumulation,
            row.num_ranks,
            row.kind.replace("ds ", "deepspeed "),
            f"{row.measured_s:.2f} ({row.low_s:.2f} to {row.high_s:.2f})",
            f"{row.predicted_s:.2f}",
            f"{row.error:+.1%}" if row.counted else "slow spell",
            f"{row.bytes_error:+.2%}",
        )
        for row in sorted(rows, key=lambda row: (not row.is_own, row.model, row.rate_gbit, row.accumulation, row.kind))
    ]
    headings = ("model", "Gbit/s", "micro-batches", "ranks", "run:", "measured, s", "predicted, s", "error", "bytes")
    return table(headings, lines)


def slow_spells(rows: Sequence[Row]) -> str:
    """How many points do not count."""
    lost = [row for row in rows if not row.counted]
    return (
        f"{len(rows)} points, {len(lost)} of them without a visit that counts: a step of compute alone right before or "
        f"right behind took more than 1.15 times the median of all such steps."
    )


def report(rows: Sequence[Row]) -> str:
    """Everything, as Markdown."""
    parts = (slow_spells(rows), bars_table(bars(rows)), _errors_table(rows), _points_table(rows))
    return "\n\n".join(parts)
