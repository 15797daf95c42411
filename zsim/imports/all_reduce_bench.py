"""The all-reduce benchmark of torch.distributed that has gone from hand to hand since BigScience, in three generations.

2021, BigScience (experiments/bandwidth/all_reduce_bench.py), each rank and trial a block:

    0:
     duration: 0.0479 sec
     algo throughput: 1336480609710.5195 bps, 1336.4806 Gbps      twice the bytes of the buffer over the time
     busbw: 1002.3605  Gbps                                       2(n-1)/n of the bytes over the time, as nccl-tests

2023, ml-engineering (network/benchmarks/all_reduce_bench.py), one average:

    The average bandwidth of all_reduce with a 4.0GB payload (5 trials, 8 ranks):
     algbw: 225.42 GBps (1803.4 Gbps)
     busbw: 394.49 GBps (3155.9 Gbps)

Later a table by size, whose payloads count 1 KB as 1024 bytes and whose bandwidths count 1 GB as 10⁹:

    The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):
    | payload |    busbw   |    algbw   |
    |    32KB |   1.01GBps |   0.58GBps |
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from zsim.imports.collective_measurements import (
    GB_PER_S,
    CollectiveLog,
    CollectiveMeasurement,
    Facts,
    Hints,
    Run,
    bus_factor,
    decide_nodes,
    decide_ranks,
    ranks_of,
    ratio_of,
)
from zsim.imports.nccl_info import read_facts
from zsim.units import InputError

_PAYLOAD: Final = re.compile(r"data size:\s*([\d.]+)\s*GB")
_LABEL: Final = re.compile(r"^\s*(\d+):\s*$")
_BLOCK: Final = re.compile(
    r"duration:\s*([\d.]+)\s*sec\s+algo throughput:\s*([\d.]+)\s*bps,.*?\s+busbw:\s*([\d.]+)\s*Gbps", re.DOTALL
)
_AVERAGE: Final = re.compile(
    r"average bandwidth of all_reduce with a ([\d.]+)\s*GB payload \((\d+) trials, (\d+) ranks\):"
    r"\s+algbw:\s*([\d.]+)\s*GBps.*?\s+busbw:\s*([\d.]+)\s*GBps",
    re.DOTALL,
)
_OVER: Final = re.compile(r"average bandwidth of all_reduce over (\d+) ranks")
_ROW: Final = re.compile(r"\|\s*([\d.]+)\s*([KMG]?)B\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\s*\|")
_PARTIAL: Final = re.compile(r"algo throughput:|average bandwidth of all_reduce|\|\s*payload\s*\|")
_PREFIXES: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LEAST: Final = 0.05
"""GB/s; two decimals of less are no figure."""
_TOLERANCE: Final = 0.03
_HALF_DIGITS: Final = 0.015
"""GB/s: what two decimals leave open, of both bandwidths."""


def recognises(text: str) -> bool:
    """Whether any generation has printed this."""
    return bool(_PARTIAL.search(text))


def read_all_reduce_bench(text: str, name: str, hints: Hints) -> CollectiveLog:
    """All results of a log.

    Raises:
        InputError: none that is whole; bandwidths that do not fit the number of ranks; units that cannot be.

    """
    facts = read_facts(text.splitlines())
    remarks: list[str] = []
    found = [*_blocks(text, name, facts, hints), *_averages(text, name, facts, hints)]
    found += _tables(text, name, facts, hints, remarks)
    if not found:
        raise InputError(f"{name}: no whole result of all_reduce_bench: payload, algbw and busbw")
    if hints.collective not in {None, "all_reduce"}:
        raise InputError(f"{name}: --collective says {hints.collective}; all_reduce_bench measures all_reduce")
    return CollectiveLog(name, "all_reduce_bench", tuple(found), facts, tuple(remarks))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _blocks(text: str, name: str, facts: Facts, hints: Hints) -> Iterator[CollectiveMeasurement]:
    """The generation whose throughput counts the bytes twice, so that busbw is (n-1)/n of it."""
    blocks = list(_BLOCK.finditer(text))
    payload = _PAYLOAD.search(text)
    if not blocks:
        return
    if payload is None:
        raise InputError(f"{name}: a bandwidth without its payload; allowed: the whole log, with 'data size: ... GB'")
    nbytes = round(float(payload[1]) * 1e9)
    ratio = ratio_of(((float(each[2]) / 1e9, float(each[3])) for each in blocks), decimals=4)
    labels = [int(match[1]) for line in text.splitlines() if (match := _LABEL.match(line))]
    candidates = ranks_of(ratio, "all_gather")
    # A log may have kept the words of rank 0 alone.
    labelled = max(labels) + 1 if labels and max(labels) + 1 in candidates else None
    num_ranks = decide_ranks(candidates, facts.num_ranks or labelled, hints, name)
    num_nodes = decide_nodes(num_ranks, facts.num_nodes, hints, name)
    run = Run("all_reduce", num_ranks, num_nodes, facts.algorithm)
    for block in blocks:
        seconds, throughput = float(block[1]), float(block[2])
        place = f"{name}:{_line(text, block.start())}"
        time_s = 2 * nbytes * 8 / throughput
        if abs(time_s - seconds) > 1e-4 + _TOLERANCE * seconds:
            raise InputError(
                f"{place}: {nbytes / 1e9:g} GB twice over {seconds:g} s are {2 * nbytes * 8 / seconds / 1e9:.4g} Gbps;"
                f" given {throughput / 1e9:.4g} Gbps"
            )
        yield run.measured(nbytes, time_s, place, in_place=True)


def _averages(text: str, name: str, facts: Facts, hints: Hints) -> Iterator[CollectiveMeasurement]:
    for match in _AVERAGE.finditer(text):
        place = f"{name}:{_line(text, match.start())}"
        result = _Result(round(float(match[1]) * 1e9), float(match[4]), float(match[5]), place)
        yield result.measured(int(match[3]), facts, hints)


def _tables(text: str, name: str, facts: Facts, hints: Hints, remarks: list[str]) -> Iterator[CollectiveMeasurement]:
    """Rows below `over N ranks`; which column is which stands in the table's head."""
    num_ranks: int | None = None
    busbw_first = True
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _OVER.search(line):
            num_ranks = int(match[1])
        if "payload" in line and "busbw" in line and "algbw" in line:
            busbw_first = line.index("busbw") < line.index("algbw")
        match = _ROW.search(line)
        if match is None:
            continue
        place = f"{name}:{number}"
        first, second = float(match[3]), float(match[4])
        busbw, algbw = (first, second) if busbw_first else (second, first)
        if algbw < _LEAST:
            remarks.append(f"{place}: left out, {algbw:g} GB/s has too few decimals")
            continue
        ranks = num_ranks or decide_ranks(ranks_of(ratio_of([(algbw, busbw)]), "all_reduce"), None, hints, place)
        nbytes = round(float(match[1]) * _PREFIXES[match[2]])
        yield _Result(nbytes, algbw, busbw, place).measured(ranks, facts, hints)


class _Result(NamedTuple):
    """Bandwidths of one payload, as printed."""

    nbytes: int
    algbw: float
    busbw: float
    place: str

    def measured(self, num_ranks: int, facts: Facts, hints: Hints) -> CollectiveMeasurement:
        """Checked against the number of ranks."""
        if hints.num_ranks not in {None, num_ranks}:
            raise InputError(f"{self.place}: --ranks says {hints.num_ranks} ranks; the log says {num_ranks}")
        ratio = bus_factor("all_reduce", num_ranks)
        if abs(self.busbw - self.algbw * ratio) > _HALF_DIGITS + _TOLERANCE * self.busbw:
            raise InputError(
                f"{self.place}: busbw {self.busbw:g} GB/s; allowed: {ratio:g} times algbw,"
                f" {self.algbw * ratio:.4g} GB/s, with {num_ranks} ranks"
            )
        num_nodes = decide_nodes(num_ranks, facts.num_nodes, hints, self.place)
        run = Run("all_reduce", num_ranks, num_nodes, facts.algorithm)
        return run.measured(self.nbytes, self.nbytes / (self.algbw * GB_PER_S), self.place, in_place=True)
