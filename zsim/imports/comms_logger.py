"""DeepSpeed's comms logger: lines of single calls, tables of all calls, tables with what waiting for others took.

    comm op: all_reduce | time (ms): 9.46 | msg size: 678.86 MB | algbw (Gbps): 1204.52 | busbw (Gbps): 1129.23

    Comm. Op  Message Size  Count  Total Latency(ms)  Avg Latency(ms)  tput_avg (Gbps)  busbw_avg (Gbps)
    reduce_scatter_tensor
              678.86 MB     40     602.29             9.69             1468.06          1376.31

What it prints is not what nccl-tests print (deepspeed/utils/comms_logging.py, deepspeed/comm/utils.py):

- averages are trimmed means, the tenth of the calls at either end left out; the time taken here is total over count;
- `algbw` counts an all-reduce's bytes twice, and those of a gather or scatter twice (2022) or once per rank (later), so
  it is not used, but for busbw over algbw, (n-1)/n for all of them, which tells the number of ranks;
- a size is that of the argument named `tensor`: the shard of an all-gather, the whole input of a reduce-scatter; units
  count 1 KB as 1024 bytes;
- a time contains the wait for other ranks, unless the table with stragglers is printed: its `comm lat` is the least of
  all ranks and is preferred here. An asynchronous call shows its launch alone: rates that no link has are left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from zsim.imports.collective_measurements import (
    CollectiveLog,
    CollectiveMeasurement,
    CollectiveName,
    Hints,
    Run,
    decide_nodes,
    decide_ranks,
    ranks_of,
    ratio_of,
)
from zsim.imports.nccl_info import read_facts
from zsim.units import InputError

_CALL: Final = re.compile(
    r"comm op: (\w+)(?: \|[^|]*Caller Func[^|]*)?\s*\| time \(ms\): ([\d.]+) \| msg size: ([\d.]+)\s*([KMGT]?B)"
    r"(?: \| algbw \(Gbps\): ([\d.]+)\s*\| busbw \(Gbps\): ([\d.]+))?"
)
_HEADER: Final = re.compile(r"Comm\. Op\s+Message Size\s+Count\s+Total (Latency|comm lat)\(ms\)")
_OPERATION: Final = re.compile(r"^(?:\S+:\s*)?([a-z]\w*(?: \| \[Caller Func: [^\]]*\])?)\s*$")
_ROW: Final = re.compile(r"\s([\d.]+)\s*([KMGT]?B)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$")
_PARTIAL_ROW: Final = re.compile(r"^\s+[\d.]+\s*[KMGT]?B\s+\d+")
_UNITS: Final = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_OPERATIONS: Final[dict[str, CollectiveName]] = {
    "all_reduce": "all_reduce", "inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "all_gather": "all_gather", "all_gather_base": "all_gather", "all_gather_into_tensor": "all_gather",
    "allgather_fn": "all_gather", "reduce_scatter": "reduce_scatter", "reduce_scatter_fn": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip
_SHARD: Final = ("all_gather", "all_gather_base", "all_gather_into_tensor", "allgather_fn")
"""Their size is that of one rank's part."""
_RATIOS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operation of one size."""

    operation: str
    """With its caller, where that was logged."""
    size_bytes: float
    seconds: float
    algbw: float
    """As printed; 0 where it is not."""
    busbw: float
    kind: Literal["call", "total", "straggler"]
    line: int

    @property
    def collective(self) -> str:
        """DeepSpeed's name of it."""
        return self.operation.partition(" ")[0]


def recognises(text: str) -> bool:
    """Whether there are such lines or tables."""
    return bool(_CALL.search(text) or _HEADER.search(text))


def read_comms_logger(text: str, name: str, hints: Hints) -> CollectiveLog:
    """Calls, or where there are tables these.

    Raises:
        InputError: nothing that is whole, or a number of ranks that nothing tells.

    """
    lines = text.splitlines()
    remarks: list[str] = []
    entries = _best([*_calls(lines), *_rows(lines, name, remarks)])
    if hints.collective:
        entries = [entry for entry in entries if _OPERATIONS.get(entry.collective) == hints.collective]
    unknown = sorted({entry.collective for entry in entries if entry.collective not in _OPERATIONS})
    remarks += [f"{name}: left out, operation {operation}" for operation in unknown]
    entries = [entry for entry in entries if entry.collective in _OPERATIONS and entry.seconds > 0]
    if not entries:
        raise InputError(f"{name}: no whole line of the comms logger: operation, size, time")
    facts = read_facts(lines)
    pairs = ((each.algbw, each.busbw) for each in entries if _OPERATIONS[each.collective] in _RATIOS)
    num_ranks = decide_ranks(ranks_of(ratio_of(pairs), "all_gather"), facts.num_ranks, hints, name)
    num_nodes = decide_nodes(num_ranks, facts.num_nodes, hints, name)
    found = [_measured(entry, num_ranks, num_nodes, name) for entry in entries]
    if not any(entry.kind == "straggler" for entry in entries):
        remarks.append(f"{name}: its times contain the wait for other ranks; show_straggler=True tells them apart")
    return CollectiveLog(name, "comms_logger", tuple(found), facts, tuple(remarks))


def _calls(lines: Sequence[str]) -> list[_Entry]:
    found = []
    for number, line in enumerate(lines, start=1):
        if match := _CALL.search(line):
            size = float(match[3]) * _UNITS[match[4]]
            algbw, busbw = float(match[5] or 0), float(match[6] or 0)
            found.append(_Entry(match[1], size, float(match[2]) * 1e-3, algbw, busbw, "call", number))
    return found


def _rows(lines: Sequence[str], name: str, remarks: list[str]) -> list[_Entry]:
    """A row belongs to the operation above it, and is of the kind that the last header names."""
    found: list[_Entry] = []
    kind: Literal["total", "straggler"] | None = None
    operation = ""
    for number, line in enumerate(lines, start=1):
        if match := _HEADER.search(line):
            kind = "total" if match[1] == "Latency" else "straggler"
        elif kind and (match := _ROW.search(line)) and operation:
            count, total_ms = int(match[3]), float(match[4])
            algbw, busbw = (float(match[6]), float(match[7])) if kind == "total" else (0.0, 0.0)
            size = float(match[1]) * _UNITS[match[2]]
            found.append(_Entry(operation, size, total_ms * 1e-3 / max(1, count), algbw, busbw, kind, number))
        elif kind and _PARTIAL_ROW.match(line):
            remarks.append(f"{name}:{number}: left out, a row without all of its columns")
        elif kind and (match := _OPERATION.match(line)) and not line.startswith((" ", "-", "_")):
            operation = match[1]
    return found


def _best(entries: Sequence[_Entry]) -> list[_Entry]:
    """Of each operation and size the last table, for they add up; with stragglers if there is one; calls if none."""
    tabled = {(each.operation, each.size_bytes): each for each in entries if each.kind == "total"}
    for entry in entries:
        key = entry.operation, entry.size_bytes
        if entry.kind == "straggler":
            before = tabled.get(key, entry)
            tabled[key] = _Entry(*key, entry.seconds, before.algbw, before.busbw, "straggler", entry.line)
    calls = [each for each in entries if each.kind == "call" and (each.operation, each.size_bytes) not in tabled]
    return sorted([*tabled.values(), *calls], key=lambda entry: entry.line)


def _measured(entry: _Entry, num_ranks: int, num_nodes: int | None, name: str) -> CollectiveMeasurement:
    whole = entry.size_bytes * (num_ranks if entry.collective in _SHARD else 1)
    collective = _OPERATIONS[entry.collective]
    return Run(collective, num_ranks, num_nodes).measured(round(whole), entry.seconds, f"{name}:{entry.line}")
