"""The table of nccl-tests and rccl-tests, as it stands in logs.

Behind prefixes of mpirun, srun or kubectl, between INFO lines, without its header or summary, cut within a line.

    size count type [redop] [root]  time algbw busbw #wrong  [time algbw busbw #wrong]

A row is known by its size, count and type, whatever is before them. Which collective it is stands in the log of late
versions (`Collective test starting: all_reduce_perf`), often in the command or the file's name; else the columns tell:
redop and root, and busbw over algbw. `count` of the collectives that gather or scatter is that of one rank (nccl-tests,
src/all_gather.cu), so it tells how many ranks there were.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from zsim.imports.collective_measurements import (
    GB_PER_S,
    CollectiveLog,
    CollectiveMeasurement,
    CollectiveName,
    Facts,
    Hints,
    Run,
    decide_nodes,
    decide_ranks,
    ranks_of,
    ratio_of,
)
from zsim.imports.nccl_info import read_facts
from zsim.units import InputError

_TYPE_BYTES: Final = {
    "int8": 1, "uint8": 1, "char": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "f8e4m3": 1, "f8e5m2": 1,
    "half": 2, "float16": 2, "bfloat16": 2, "bf16": 2,
    "int32": 4, "uint32": 4, "int": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
_ROW: Final = re.compile(
    rf"(?:^|[\s:>\]|])(\d+)\s+(\d+)\s+({'|'.join(sorted(_TYPE_BYTES, key=len, reverse=True))})\s+(\S.*)"
)
_HEADER: Final = re.compile(r"#\s+size\s+count\s+(?:\(\w+\)\s+)?type\b")
_NAMED: Final = re.compile(r"([a-z]+(?:_[a-z]+)*)_perf\b")
_REDOPS: Final = ("sum", "prod", "max", "min", "avg", "mulsum", "all")
_GROUP: Final = 4
"""Columns of out-of-place, and of in-place."""
_TOLERANCE: Final = 0.03
"""Between algbw as printed and size over time, of which both are rounded."""
_NAMES: Final[dict[str, CollectiveName]] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast", "reduce": "reduce", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "sendrecv": "send_recv", "send_recv": "send_recv", "gather": "gather", "scatter": "scatter",
    "hypercube": "hypercube",
}  # fmt: skip


class _Cells(NamedTuple):
    """Time, both bandwidths and the check of one row, out of place or in place, as printed."""

    time_us: float
    algbw: float
    busbw: float
    wrong: str
    in_place: bool


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    size: int
    count: int
    type: str
    redop: str
    root: int | None
    cells: tuple[_Cells, ...]


@dataclass(slots=True)
class _Table:
    """Rows below one header."""

    named: str = ""
    rows: list[_Row] = field(default_factory=list)


def recognises(text: str) -> bool:
    """Whether a row or the header of its table is in there."""
    return bool(_HEADER.search(text)) or any(_ROW.search(line) and _row(line, 0) for line in text.splitlines())


def read_nccl_tests(text: str, name: str, hints: Hints) -> CollectiveLog:
    """All tables of a log.

    Raises:
        InputError: no row; columns that cannot be microseconds and GB/s; a collective or a number of ranks that the log
            does not tell, or contradicts.

    """
    lines = html.unescape(text).splitlines()
    facts = read_facts(lines)
    remarks: list[str] = []
    tables = _tables(lines, name, remarks)
    if not any(table.rows for table in tables):
        raise InputError(f"{name}: no row of nccl-tests in {len(lines)} lines: size, count, type, time, algbw, busbw")
    found: list[CollectiveMeasurement] = []
    for table in tables:
        found += _measured(table, name, facts, hints, remarks) if table.rows else []
    return CollectiveLog(name, "nccl-tests", tuple(found), facts, tuple(remarks))


def _tables(lines: Sequence[str], name: str, remarks: list[str]) -> list[_Table]:
    tables = [_Table()]
    for number, line in enumerate(lines, start=1):
        named = _NAMED.findall(line)
        if (named or _HEADER.search(line)) and tables[-1].rows:
            tables.append(_Table(tables[-1].named))
        if known := [each for each in named if each in _NAMES]:
            tables[-1].named = known[-1]
        if match := _ROW.search(line):
            row = _row(line, number)
            if row is None:
                remarks.append(f"{name}:{number}: left out, a row that ends after {match[3]} {match[4].strip()[:60]!r}")
            else:
                tables[-1].rows.append(row)
    return tables


def _row(line: str, number: int) -> _Row | None:
    """A row with at least one whole group of columns; None where the line was cut before."""
    match = _ROW.search(line)
    assert match
    words = match[4].split()
    redop = words.pop(0) if words[0] in (*_REDOPS, "none") else ""
    root = None
    # Without decimals a time looks like a root: the number of columns tells them apart.
    if len(words) % _GROUP == 1 or (words and words[0].startswith("-")):
        root = _number(words.pop(0))
        if root is None:
            return None
    groups = [words[first : first + _GROUP] for first in range(0, len(words) - _GROUP + 1, _GROUP)][:2]
    cells = []
    for index, group in enumerate(groups):
        numbers = [_number(word) for word in group[:3]]
        if None in numbers:
            return None
        time_us, algbw, busbw = (number or 0.0 for number in numbers)
        cells.append(_Cells(time_us, algbw, busbw, group[3], in_place=index == 1))
    if not cells:
        return None
    return _Row(
        number, int(match[1]), int(match[2]), match[3], redop, None if root is None else int(root), tuple(cells)
    )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _measured(table: _Table, name: str, facts: Facts, hints: Hints, remarks: list[str]) -> list[CollectiveMeasurement]:
    rows = table.rows
    _check_units(rows, name)
    rows = [row for row in rows if row.size and row.cells[0].time_us]
    if not rows:
        remarks.append(f"{name}: left out, a table whose rows are all of size 0")
        return []
    ratio = ratio_of((cell.algbw, cell.busbw) for row in rows for cell in row.cells)
    collective = _collective(table, name, hints)
    by_count = _ranks_by_count(rows, collective)
    candidates: Sequence[int] = ranks_of(ratio, collective)
    if by_count is not None and (not candidates or by_count in candidates):
        candidates = (by_count,)
    num_ranks = decide_ranks(candidates, facts.num_ranks, hints, name)
    num_nodes = decide_nodes(num_ranks, facts.num_nodes, hints, name)
    run = Run(collective, num_ranks, num_nodes, facts.algorithm)
    found = []
    for row in rows:
        for cell in row.cells:
            if problem := _problem(row, cell):
                remarks.append(f"{name}:{row.line}: left out, {problem}")
            else:
                time_s = cell.time_us * 1e-6
                found.append(run.measured(row.size, time_s, f"{name}:{row.line}", in_place=cell.in_place))
    return found


def _problem(row: _Row, cell: _Cells) -> str:
    """Why a row says nothing; empty where it does."""
    wrong = _number(cell.wrong)
    # Older versions print the largest difference instead of a count: rounding of sums is no fault.
    if wrong is not None and wrong >= 1 and "." not in cell.wrong and "e" not in cell.wrong:
        return f"{cell.wrong} wrong values in the result"
    if cell.time_us <= 0:
        return "no time"
    return "its algbw is not size over time" if not _agrees(row, cell) else ""


def _agrees(row: _Row, cell: _Cells) -> bool:
    """Whether size over time is algbw, as far as its two decimals can tell."""
    return abs(row.size / (cell.time_us * 1e-6) / GB_PER_S - cell.algbw) <= 0.006 + _TOLERANCE * cell.algbw


def _check_units(rows: Sequence[_Row], name: str) -> None:
    """Raises where most rows say that time is not in microseconds, or bandwidth not in GB/s."""
    telling = [(row, row.cells[0]) for row in rows if row.cells[0].algbw >= 1 and row.cells[0].time_us > 0]
    if not telling or sum(_agrees(*pair) for pair in telling) * 2 > len(telling):
        return
    factor = median(row.size / (cell.time_us * 1e-6) / GB_PER_S / cell.algbw for row, cell in telling)
    raise InputError(
        f"{name}:{telling[0][0].line}: size over time is {factor:.4g} times algbw; allowed: the columns of nccl-tests,"
        f" time in us, algbw and busbw in GB/s"
    )


def _collective(table: _Table, name: str, hints: Hints) -> CollectiveName:
    """By what the user or the log says, held against the columns; else by the columns, then by the file's name."""
    possible = _possible(table.rows)
    if hints.collective or table.named:
        said = hints.collective or _NAMES[table.named]
        if said not in possible:
            source = "--collective" if hints.collective else f"{table.named}_perf"
            raise InputError(f"{name}: {source} says {said}; its columns fit {' or '.join(possible) or 'none'}")
        return said
    # Nobody calls these without saying so, and their columns are those of others.
    likely = [each for each in possible if each not in {"hypercube", "send_recv"}]
    stem = name.rpartition("/")[2].lower().replace("-", "_")
    by_file = [_NAMES[each] for each in sorted(_NAMES, key=len, reverse=True) if each in stem]
    if len(likely) > 1 and by_file and by_file[0] in likely:
        return by_file[0]
    if len(likely) == 1:
        return likely[0]
    fits = " and ".join(likely) or "none"
    raise InputError(f"{name}: which collective? its columns fit {fits}; allowed: --collective NAME")


def _possible(rows: Sequence[_Row]) -> tuple[CollectiveName, ...]:
    """By redop, root, and busbw over algbw."""
    ratio = ratio_of((cell.algbw, cell.busbw) for row in rows for cell in row.cells)
    below, once, above = ratio.low < 1, ratio.low <= 1 <= ratio.high, ratio.high >= 1
    redop, root = rows[0].redop, rows[0].root
    reduces, copies = redop != "none", redop in {"none", ""}
    rooted, rootless = root is None or root >= 0, root is None or root < 0
    table: tuple[tuple[CollectiveName, bool], ...] = (
        ("all_reduce", reduces and rootless and above),
        ("reduce_scatter", reduces and rootless and below),
        ("all_gather", copies and rootless and below),
        ("all_to_all", copies and rootless and below),
        ("broadcast", copies and rooted and once),
        ("reduce", reduces and rooted and once),
        ("send_recv", rootless and once),
        ("gather", copies and rooted and root is not None and below),
        ("scatter", copies and rooted and root is not None and below),
        ("hypercube", copies and rootless and below),
    )
    return tuple(name for name, is_possible in table if is_possible)


def _ranks_by_count(rows: Sequence[_Row], collective: CollectiveName) -> int | None:
    """Size over the bytes of one rank, where all rows agree."""
    if collective not in {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}:
        return None
    found = {row.size / (row.count * _TYPE_BYTES[row.type]) for row in rows if row.count}
    shares = [share for share in found if share.is_integer() and share >= 2]
    return int(shares[0]) if len(found) == 1 and shares else None
