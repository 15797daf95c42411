"""Bus bandwidth of a profile's collectives by kind and size, as nccl-tests define it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from zsim.calibration.measured import Measured
from zsim.calibration.trace import weighted
from zsim.costs.collective import alone
from zsim.imports.kineto.records import Kind
from zsim.imports.kineto.spans import RankSpans, collective_of
from zsim.spec import ClusterSpec

LARGE_BYTES: Final = 16 * 2**20
"""Latency hardly counts above."""
_RINGS: Final = frozenset({"all_gather", "reduce_scatter"})
"""NCCL has rings only for these; all-reduce also has trees and multicast, whose bus bandwidth is another."""


@dataclass(frozen=True, slots=True)
class SizeRate:
    """Collectives of one kind, size and number of ranks."""

    kind: Kind
    nbytes: int
    """Of the whole tensor; 0 where the trace does not say."""
    group_size: int
    num_samples: int
    seconds: float
    """Median."""
    bus_bytes_per_s: Measured | None
    """None where the size is not known."""


def size_rates(ranked: Sequence[RankSpans], source: str) -> tuple[SizeRate, ...]:
    """Of all ranks, by kind, then size; times from the last rank's arrival, where the traces of others tell it."""
    times: dict[tuple[Kind, int, int], list[float]] = {}
    for one in ranked:
        for index, transfer_s in one.transfers_s.items():
            if one.places[index].step < 0 or transfer_s <= 0:
                continue
            chain = one.profile.enclosing(one.launches[index])
            call = collective_of(one.profile.activities[index], chain, one.profile.world_size)
            times.setdefault((call.kind, call.nbytes, call.group_size), []).append(transfer_s)
    rows = []
    for (kind, nbytes, group_size), values in sorted(times.items()):
        _, middle_s, _ = weighted.quantiles((value, 1.0) for value in values)
        factor = bus_factor(kind, group_size)
        rate = None
        if nbytes and factor:
            samples = ((nbytes * factor / value, 1.0) for value in values)
            rate = weighted.measured(samples, "bytes_per_s", source)
        rows.append(SizeRate(kind, nbytes, group_size, len(values), middle_s, rate))
    return tuple(rows)


def bus_factor(kind: Kind, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md); 0 for a group of one."""
    if group_size < 2:
        return 0.0
    match kind:
        case "all_reduce":
            return 2 * (group_size - 1) / group_size
        case "all_gather" | "reduce_scatter" | "other":
            return (group_size - 1) / group_size
        case "reduce" | "broadcast" | "send_recv":
            return 1.0


def bandwidths(
    rates: Sequence[SizeRate], cluster: ClusterSpec, nccl_version: str, *, is_single_rank: bool
) -> tuple[dict[str, Measured], list[str]]:
    """`intra_bus_bytes_per_s` and `inter_bus_bytes_per_s` of the network, and why one of them is not there.

    Of all-gathers and reduce-scatters, whose rings these numbers are of, and of the size that has most of their time;
    the latency of the ring's steps, as the cost model has it, is taken off. A single rank cannot tell transfer from
    waiting for ranks that come late.
    """
    found: dict[str, Measured] = {}
    notes = []
    network = cluster.network
    limits = {
        "intra_bus_bytes_per_s": network.intra_link_bytes_per_s,
        "inter_bus_bytes_per_s": network.nics_per_node * network.nic_bytes_per_s,
    }
    for name, limit in limits.items():
        if name.startswith("inter") and cluster.num_nodes == 1:
            continue
        rows = [row for row in rates if _is_ring(row) and _crosses(row, cluster) == name.startswith("inter")]
        if not rows:
            notes.append(f"{name}: no all-gather or reduce-scatter of {LARGE_BYTES // 2**20} MiB over its links")
            continue
        rate = _asymptote(max(rows, key=lambda row: row.seconds * row.num_samples), cluster, nccl_version)
        if rate.value > limit:
            notes.append(f"{name}: {rate.value / 1e9:.4g} GB/s came out, above the links' {limit / 1e9:.4g} GB/s")
            continue
        if is_single_rank:
            notes.append(f"{name}: a single rank's times hold the waiting for others; give the traces of all ranks")
        else:
            found[name] = rate
    return found, notes


def _is_ring(row: SizeRate) -> bool:
    return row.kind in _RINGS and row.nbytes >= LARGE_BYTES and row.bus_bytes_per_s is not None


def _crosses(row: SizeRate, cluster: ClusterSpec) -> bool:
    """Whether it goes between nodes: groups that fit into one are taken to be in one."""
    return row.group_size > cluster.gpus_per_node


def _asymptote(row: SizeRate, cluster: ClusterSpec, nccl_version: str) -> Measured:
    """Bus bandwidth of a ring whose steps had no latency."""
    rate = row.bus_bytes_per_s
    assert rate is not None
    assert row.kind != "other"
    ranks = tuple(range(min(row.group_size, cluster.num_ranks)))
    latency_s = alone(row.kind, row.nbytes, ranks, cluster, nccl_version).latency_s
    moved = row.nbytes * bus_factor(row.kind, row.group_size)
    # More than half of the time cannot be latency at these sizes.
    values = (moved / max(moved / value - latency_s, moved / value / 2) for value in (rate.value, rate.low, rate.high))
    value, low, high = values
    return replace(rate, value=value, low=low, high=high, source=f"{row.kind} of large messages; {rate.source}")
