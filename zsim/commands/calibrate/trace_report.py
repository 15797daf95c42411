"""What `zsim calibrate trace` prints: where a step goes, and the rates that are read from its kernels."""

from collections.abc import Iterable
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zsim.calibration.measured import Measured, quantity
from zsim.calibration.trace import TraceCalibration
from zsim.display import duration, size
from zsim.figures.breakdown import LABELS, PASSES
from zsim.writing.report import section

MOST_ROWS = 12
"""Of a table; --json has all."""


def report(found: TraceCalibration) -> RenderableType:
    """Everything, the first rank's step first."""
    device = found.device_time
    parts: list[RenderableType] = [
        Text(_heading(found)),
        Text(""),
        _pairs(
            [
                ("step time", duration(found.step_time_s), "mean"),
                *((name, duration(found.phases_s[name]), "") for name in PASSES),
                *((f"  {LABELS[name]}", duration(value), "") for name, value in found.breakdown_s.items() if value > 0),
                ("communication", duration(device.communication_s), f"{device.overlap_pct:.1f}% beside computation"),
            ]
        ),
        section("Kernels by module", _modules(found)),
    ]
    if found.shapes:
        parts.append(section("GEMMs by shape", _shapes(found)))
    if found.sizes:
        parts.append(section("Collectives by size", _sizes(found)))
    if found.constants:
        parts.append(section("Numbers for `constants` of an experiment", _constants(found.constants)))
    parts += [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


def _heading(found: TraceCalibration) -> str:
    ranks = "1 rank" if found.num_profiles == 1 else f"{found.num_profiles} ranks"
    steps = "1 step" if found.num_steps == 1 else f"{found.num_steps} steps"
    return f"{found.device.name if found.device else 'unnamed device'}: {ranks}, {steps} by {found.told_by}"


def _pairs(rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _table(columns: Iterable[str], rows: Iterable[tuple[str, ...]], num_words: int) -> Table:
    """Words to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_words else "right", no_wrap=place == 0)
    for row in islice(rows, MOST_ROWS):
        table.add_row(*row)
    return table


def _modules(found: TraceCalibration) -> Table:
    rows = ((row.phase, row.what, duration(row.seconds), f"{row.num_kernels:,.0f}") for row in found.modules)
    return _table(("pass", "module.operator", "a step", "kernels"), rows, 2)


def _shapes(found: TraceCalibration) -> Table:
    rows = (
        (
            f"{row.gemm.m} x {row.gemm.n} x {row.gemm.k}" + (f" x {row.gemm.batch}" if row.gemm.batch > 1 else ""),
            f"{8 * row.element_bytes} bit",
            str(row.num_samples),
            duration(row.seconds),
            f"{row.flop_per_s / 1e12:.1f}",
            "" if row.efficiency is None else f"{row.efficiency:.3f}",
        )
        for row in found.shapes
    )
    return _table(("m x n x k", "operands", "samples", "median", "TFLOP/s", "efficiency"), rows, 2)


def _sizes(found: TraceCalibration) -> Table:
    rows = (
        (
            row.kind,
            size(row.nbytes) if row.nbytes else "unknown",
            str(row.group_size),
            str(row.num_samples),
            duration(row.seconds),
            "" if row.bus_bytes_per_s is None else f"{row.bus_bytes_per_s.value / 1e9:.1f}",
        )
        for row in sorted(found.sizes, key=lambda row: -row.seconds * row.num_samples)
    )
    return _table(("collective", "size", "ranks", "samples", "median", "bus GB/s"), rows, 1)


def _constants(constants: dict[str, Measured]) -> Table:
    rows = (
        (
            path,
            str(quantity(value.value, value.unit)),
            f"{quantity(value.low, value.unit)} to {quantity(value.high, value.unit)}",
            str(value.num_samples),
        )
        for path, value in constants.items()
    )
    return _table(("path", "median", "10th to 90th percentile", "samples"), rows, 1)
