"""Measured collectives, whatever benchmark printed them: sizes and bandwidths as nccl-tests define them.

S is the whole tensor: the buffer of an all-reduce, the output of an all-gather, the input of a reduce-scatter.

    algbw = S / time        busbw = algbw · factor(collective, ranks)
    factor: all-reduce 2(n-1)/n; all-gather, reduce-scatter, all-to-all, gather, scatter (n-1)/n; the others 1

(nccl-tests, doc/PERFORMANCE.md). Both are computed anew from the time, for what is printed has two decimals.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Final, Literal, NamedTuple

from zsim.units import InputError

CollectiveName = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
    "gather",
    "scatter",
    "hypercube",
]
Format = Literal["nccl-tests", "all_reduce_bench", "comms_logger", "galvatron", "csv"]

GB_PER_S: Final = 1e9
_ONE_WAY: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_MOST_NAMED: Final = 5
"""Candidates in a message."""


@dataclass(frozen=True, slots=True)
class CollectiveMeasurement:
    """One line of a benchmark: one collective of one size."""

    collective: CollectiveName
    num_ranks: int
    num_nodes: int | None
    """None where the log does not say."""
    message_bytes: int | None
    """S; None where only a bandwidth is known."""
    time_s: float | None
    """None as well then."""
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    in_place: bool
    place: str
    """File and line."""
    algorithm: str = ""
    """NCCL's where it was forced, in small letters: "ring", "tree", "nvls"."""
    num_groups: int = 1
    """Groups of ranks that ran it at the same time and shared the NICs."""


class Facts(NamedTuple):
    """What else a log says of the run."""

    num_ranks: int | None = None
    num_nodes: int | None = None
    nccl_version: str = ""
    """As printed: "2.21.5"."""
    network: str = ""
    """What NCCL sent over: "IB", "Socket", "AWS Libfabric", ..."""
    algorithm: str = ""
    """NCCL_ALGO where it was set, in small letters."""


class Hints(NamedTuple):
    """What the user says of a log that does not say it itself."""

    num_ranks: int | None = None
    num_nodes: int | None = None
    collective: CollectiveName | None = None
    gpus_per_node: int | None = None
    hardware: str | None = None
    """Of a table with rows of several machines."""


@dataclass(frozen=True, slots=True)
class CollectiveLog:
    """What a file holds."""

    name: str
    format: Format
    measurements: tuple[CollectiveMeasurement, ...]
    facts: Facts
    remarks: tuple[str, ...]
    """What was left out, and why; a line each."""


def bus_factor(collective: CollectiveName, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if collective == "all_reduce":
        return 2.0 * (num_ranks - 1) / num_ranks
    return (num_ranks - 1) / num_ranks if collective in _ONE_WAY else 1.0


class Run(NamedTuple):
    """What ran, on how much of the machine."""

    collective: CollectiveName
    num_ranks: int
    num_nodes: int | None
    algorithm: str = ""

    def measured(
        self, message_bytes: int, time_s: float, place: str, *, in_place: bool = False
    ) -> CollectiveMeasurement:
        """One size, with both bandwidths from size and time."""
        algbw = message_bytes / time_s
        return CollectiveMeasurement(
            collective=self.collective,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            message_bytes=message_bytes,
            time_s=time_s,
            algbw_bytes_per_s=algbw,
            busbw_bytes_per_s=algbw * bus_factor(self.collective, self.num_ranks),
            in_place=in_place,
            place=place,
            algorithm=self.algorithm,
        )


class Ratio(NamedTuple):
    """Between what busbw over algbw must lie, by how both were rounded."""

    low: float
    high: float


def ratio_of(pairs: Iterable[tuple[float, float]], decimals: int = 2) -> Ratio:
    """Of algbw and busbw as they were printed; every pair narrows it. Pairs that say nothing are passed over.

    A pair that contradicts what larger ones have left is passed over.
    """
    half = 0.5 * 10.0**-decimals
    low, high = 0.0, inf
    for algbw, busbw in sorted(pairs, reverse=True):
        if algbw <= half:
            break
        least, most = (busbw - half) / (algbw + half), (busbw + half) / (algbw - half)
        if least > high or most < low:
            continue
        low, high = max(low, least), min(high, most)
    return Ratio(low, high)


def ranks_of(ratio: Ratio, collective: CollectiveName) -> range:
    """Numbers of ranks that a ratio allows; empty where it fits none, or the collective's says nothing of them."""
    scale = 2.0 if collective == "all_reduce" else 1.0
    if collective not in (*_ONE_WAY, "all_reduce") or ratio.low >= scale:
        return range(0)
    least = max(2, ceil(round(scale / (scale - ratio.low), 9)))
    most = 10**6 if ratio.high >= scale else floor(round(scale / (scale - ratio.high), 9))
    return range(least, most + 1)


def decide_ranks(candidates: Sequence[int], known: int | None, hints: Hints, name: str) -> int:
    """The number of ranks: what the user says, else what the log says, else what its bandwidths leave.

    Args:
        candidates: what busbw over algbw allows; empty where it says nothing.
        known: what the log says elsewhere.
        hints: what the user says; where several fit, whole nodes are preferred.
        name: of the file.

    Raises:
        InputError: none fits, several do, or what is said contradicts the bandwidths.

    """
    said = hints.num_ranks or known
    if said is not None:
        if candidates and said not in candidates:
            source = "--ranks" if hints.num_ranks else "the log's list of ranks"
            fits = _listed(candidates)
            raise InputError(f"{name}: {source} says {said} ranks; its busbw over algbw fits {fits}")
        return said
    found: Sequence[int] = candidates
    if len(found) > 1 and hints.gpus_per_node:
        per_node = hints.gpus_per_node
        whole = [per_node * hints.num_nodes] if hints.num_nodes else [n for n in found if n % per_node == 0]
        found = [count for count in whole if count in candidates] or candidates
    if len(found) == 1:
        return found[0]
    reason = f"its busbw over algbw fits {_listed(candidates)}" if candidates else "nothing in it says"
    raise InputError(f"{name}: how many ranks? {reason}; allowed: --ranks N")


def _listed(candidates: Sequence[int]) -> str:
    if len(candidates) > _MOST_NAMED:
        return f"{candidates[0]} to {candidates[-1]} ranks"
    return f"{', '.join(map(str, candidates))} ranks"


def decide_nodes(num_ranks: int, known: int | None, hints: Hints, name: str) -> int | None:
    """The number of nodes: what the user says, else the log; None where neither does.

    Raises:
        InputError: more nodes than ranks.

    """
    nodes = hints.num_nodes or known
    if nodes is not None and nodes > num_ranks:
        raise InputError(f"{name}: {num_ranks} ranks cannot be on {nodes} nodes; allowed: --nodes up to {num_ranks}")
    return nodes
