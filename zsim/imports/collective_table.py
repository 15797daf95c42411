"""Measured collectives as CSV, one a row, with a header: what a study or a spreadsheet has.

Needed columns: `collective`, `gpus`, `message_bytes`, and one of `time_us`, `algbw_GBps`, `busbw_GBps`. Read as well:
`nodes`, `hardware` (rows of several machines need --hardware), `algorithm`; `verified` other than yes leaves a row out.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, cast, get_args

from zsim.imports.collective_measurements import (
    GB_PER_S,
    CollectiveLog,
    CollectiveMeasurement,
    CollectiveName,
    Facts,
    Hints,
    Run,
    bus_factor,
)
from zsim.reading.documents import nearest
from zsim.units import InputError, shown

_NEEDED: Final = ("collective", "gpus", "message_bytes")
_TIMES: Final = ("time_us", "algbw_GBps", "busbw_GBps")
_ALGORITHMS: Final = ("ring", "tree", "nvls")


def recognises(text: str) -> bool:
    """Whether its first line names such columns."""
    columns = [column.strip() for column in text.lstrip("\ufeff").partition("\n")[0].split(",")]
    return "collective" in columns and len(columns) > 2


def read_collective_table(text: str, name: str, hints: Hints) -> CollectiveLog:
    """All rows that have a size and a time.

    Raises:
        InputError: a column that is missing, several machines, or no row.

    """
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")), strict=True)
    try:
        records = [(reader.line_num, record) for record in reader]
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: {error}; allowed: CSV with a header") from None
    _check_columns(reader.fieldnames or (), name)
    records = _of_one_machine(records, name, hints)
    left_out: Counter[str] = Counter()
    found = []
    for line, record in records:
        reason = _reason(record, hints)
        if reason:
            left_out[reason] += 1
        else:
            found.append(_measured(record, f"{name}:{line}"))
    if not found:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        raise InputError(f"{name}: no row to use of {len(records)} ({reasons or 'none there'})")
    remarks = tuple(f"{name}: left out {count}: {reason}" for reason, count in sorted(left_out.items()))
    return CollectiveLog(name, "csv", tuple(found), Facts(), remarks)


def _check_columns(given: Sequence[str], name: str) -> None:
    missing = [column for column in _NEEDED if column not in given]
    if missing:
        raise InputError(f"{name}:1: column {missing[0]} is missing; given: {', '.join(given)}")
    if not set(_TIMES) & set(given):
        raise InputError(f"{name}:1: no column of {', '.join(_TIMES)}; given: {', '.join(given)}")


def _of_one_machine(
    records: list[tuple[int, dict[str, str]]], name: str, hints: Hints
) -> list[tuple[int, dict[str, str]]]:
    machines = sorted({record.get("hardware") or "" for _, record in records})
    if hints.hardware is not None:
        if hints.hardware not in machines:
            raise InputError(
                f"{name}: --hardware {hints.hardware!a}: no such rows; {nearest(hints.hardware, machines)}"
            )
        return [(line, record) for line, record in records if (record.get("hardware") or "") == hints.hardware]
    if len(machines) > 1:
        raise InputError(f"{name}: rows of {len(machines)} machines; allowed: --hardware NAME, such as {machines[0]!a}")
    return records


def _reason(record: Mapping[str, str | None], hints: Hints) -> str:
    """Why a row is left out; empty where it is not."""
    if (record.get("verified") or "yes").strip() != "yes":
        return "not verified"
    collective = (record.get("collective") or "").strip()
    if collective not in get_args(CollectiveName):
        return f"collective {shown(collective)}"
    if hints.collective and collective != hints.collective:
        return f"not {hints.collective}"
    if not _whole(record.get("gpus")) or (_whole(record.get("gpus")) or 0) < 2:
        return "no number of ranks from 2"
    if not _whole(record.get("message_bytes")):
        return "no size"
    return "" if any(_positive(record.get(column)) for column in _TIMES) else "no time"


def _measured(record: Mapping[str, str | None], place: str) -> CollectiveMeasurement:
    collective = cast("CollectiveName", (record.get("collective") or "").strip())
    num_ranks, nbytes = _whole(record.get("gpus")) or 0, _whole(record.get("message_bytes")) or 0
    num_nodes = _whole(record.get("nodes"))
    if num_nodes is not None and not 1 <= num_nodes <= num_ranks:
        raise InputError(f"{place}: {num_ranks} ranks on {num_nodes} nodes; allowed: 1 to {num_ranks} nodes")
    time_us, algbw, busbw = (_positive(record.get(column)) for column in _TIMES)
    rate = algbw or (busbw or 0.0) / bus_factor(collective, num_ranks)
    time_s = time_us * 1e-6 if time_us else nbytes / (rate * GB_PER_S)
    if time_us and algbw and algbw >= 1 and abs(nbytes / time_s / GB_PER_S / algbw - 1) > 0.05:
        raise InputError(
            f"{place}: message_bytes over time_us is {nbytes / time_s / GB_PER_S:.4g} GB/s; given algbw_GBps {algbw:g}"
        )
    forced = (record.get("algorithm") or "").lower()
    algorithm = next((each for each in _ALGORITHMS if forced.startswith(each)), "")
    return Run(collective, num_ranks, num_nodes, algorithm).measured(nbytes, time_s, place)


def _whole(text: str | None) -> int | None:
    number = _positive(text)
    return int(number) if number is not None and number.is_integer() else None


def _positive(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None
