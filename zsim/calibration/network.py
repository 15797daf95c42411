"""Measured collectives -> the numbers of a topology that they determine.

The numbers are those of `spec.NetworkSpec` with which zsim's own model of NCCL (`costs/collective.py`) takes as long as
was measured: each row of a plateau implies a bandwidth, each small message a hop. So an all-reduce over two nodes,
whose trees put S and not 2(n-1)/n · S on the NICs, is read by what its NICs carried, and NVLink multicast by what a
ring would get.

| number | from |
|---|---|
| intra_bus_bytes_per_s | plateaus on one node, rings first |
| inter_bus_bytes_per_s | plateaus on several nodes that the NICs bound; all-gather and reduce-scatter first |
| hop_latency_s | small messages on several nodes |

Which algorithm a row took is NCCL's tuner's choice, which hangs on none of the three. The spread of the implied values,
10th to 90th percentile, becomes the range.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple, cast, get_args

from scipy.optimize import brentq

from zsim.calibration.curves import RISING, Curve, Group
from zsim.calibration.measured import Measured
from zsim.costs.collective import alone, alone_with, communicator_of, place
from zsim.costs.nccl import candidates, time_s
from zsim.costs.nccl_tables import Algorithm, Protocol
from zsim.imports.collective_measurements import CollectiveMeasurement
from zsim.ops import CollectiveKind
from zsim.spec import ClusterSpec

SMALL_BYTES: Final = 64 * 1024
"""A message up to here is latency."""
LARGE_BYTES: Final = 2**20
"""A plateau lies above."""
SIZE_CLASSES: Final = ((SMALL_BYTES, "up to 64 KiB"), (2**20, "to 1 MiB"), (64 * 2**20, "to 64 MiB"), (2**62, "above"))
_RINGS: Final = ("all_gather", "reduce_scatter")
"""Nothing but rings (multicast wants registered buffers)."""
_SENSITIVE: Final = 0.05
"""Of its time that a row must change by for a fifth of a bandwidth, to tell that bandwidth."""
_ENDLESS_BYTES: Final = 2**32
"""A size for bandwidths that came without one."""
_RATES: Final = (1e7, 1e14)
_HOPS_S: Final = (0.0, 0.1)


@dataclass(frozen=True, slots=True)
class Determined:
    """Numbers that logs determine, and why they do not determine others."""

    numbers: dict[str, Measured]
    """Field of `NetworkSpec` -> its value."""
    missing: dict[str, str]
    """Field -> what was lacking."""
    remarks: tuple[str, ...]
    cluster: ClusterSpec
    """With these numbers."""


class SizeError(NamedTuple):
    """How far zsim is from what was measured, with the numbers found."""

    title: str
    size_class: str
    num_rows: int
    median_error: float
    bias: float


def ranks_of_group(group: Group, cluster: ClusterSpec) -> tuple[int, ...]:
    """Ranks of a group on whole nodes, the same number on each."""
    per_node = group.num_ranks // group.num_nodes
    return tuple(node * cluster.gpus_per_node + gpu for node in range(group.num_nodes) for gpu in range(per_node))


def predicted_s(group: Group, nbytes: int, cluster: ClusterSpec, nccl_version: str) -> float:
    """What zsim says of one collective alone; the algorithm forced where the measurement's was."""
    kind, ranks = cast("CollectiveKind", group.collective), ranks_of_group(group, cluster)
    pick = _forced(group, nbytes, cluster, nccl_version)
    if pick is None:
        return alone(kind, nbytes, ranks, cluster, nccl_version).alone_s
    return alone_with(kind, nbytes, ranks, cluster, pick).alone_s


def _forced(group: Group, nbytes: int, cluster: ClusterSpec, nccl_version: str) -> tuple[Algorithm, Protocol] | None:
    """The best protocol of an algorithm that NCCL_ALGO named."""
    if not group.algorithm:
        return None
    communicator = communicator_of(place(ranks_of_group(group, cluster), cluster.gpus_per_node), cluster, nccl_version)
    kind = cast("CollectiveKind", group.collective)
    picks = [pick for pick in candidates(kind, communicator) if pick[0] == group.algorithm]
    return min(picks, key=lambda pick: time_s(kind, pick[0], pick[1], communicator, nbytes), default=None)


def is_modelled(group: Group) -> bool:
    """Whether zsim has this collective."""
    return group.collective in get_args(CollectiveKind)


def determine(curves: Sequence[Curve], cluster: ClusterSpec, nccl_version: str, source: str) -> Determined:
    """The three numbers, in the order in which one needs the other.

    Args:
        curves: of all groups.
        cluster: the base topology with as many nodes as the largest group; its other numbers hold.
        nccl_version: a name of `nccl_tables.VERSIONS`.
        source: command and day, for the data file.

    """
    groups = [curve.group for curve in curves if is_modelled(curve.group)]
    found = Determined({}, {}, (), cluster)
    within = [group for group in groups if group.num_nodes == 1]
    found = _bandwidth(found, "intra_bus_bytes_per_s", within, nccl_version, source)
    across = [group for group in groups if group.num_nodes > 1]
    found = _bandwidth(found, "inter_bus_bytes_per_s", across, nccl_version, source)
    return _hop(found, across, nccl_version, source)


def _bandwidth(found: Determined, field: str, groups: Sequence[Group], version: str, source: str) -> Determined:
    """One bandwidth from the groups that tell most directly."""
    where = "one node" if field.startswith("intra") else "several nodes"
    if not groups:
        return _without(found, field, f"no log of {where}")
    implied: dict[Group, list[float]] = {}
    for group in groups:
        rows = [each for each in group.plateau if (each.message_bytes or LARGE_BYTES) >= LARGE_BYTES]
        values = [value for row in rows if (value := _implied_rate(found, field, group, row, version)) is not None]
        if values:
            implied[group] = values
    if not implied:
        return _without(found, field, f"no row of {where} from 1 MiB on whose time it decides")
    used = _most_direct(implied)
    values = [value for each in used.values() for value in each]
    number = Measured.of(values, "bytes_per_s", f"{'; '.join(group.title for group in used)}: {source}")
    if all(group.rise > RISING for group in used) and number.value < getattr(found.cluster.network, field):
        rise = max(group.rise for group in used)
        reason = (
            f"{number.value / 1e9:.4g} GB/s and {rise:.0%} more with each doubling of the size: messages are too small"
        )
        return _without(found, field, reason)
    remarks = [*found.remarks, *(remark for group in used if (remark := _remark(group, field, found.cluster, version)))]
    limit = _limit(found.cluster, field)
    if number.value > limit:
        implies = f"{number.value / 1e9:.4g} GB/s implied"
        remarks.append(f"{field}: {implies}, above the links' {limit / 1e9:.4g}: those are taken")
        number = replace(number, value=limit, low=min(number.low, limit))
    return _with(found, field, replace(number, high=min(number.high, limit)), remarks)


def _most_direct(implied: Mapping[Group, list[float]]) -> dict[Group, list[float]]:
    """Groups whose plateau was reached before others; of these rings, which the number means, before the rest."""
    settled = {group: values for group, values in implied.items() if group.rise <= RISING} or dict(implied)
    return {group: values for group, values in settled.items() if group.collective in _RINGS} or settled


def _limit(cluster: ClusterSpec, field: str) -> float:
    network = cluster.network
    if field == "intra_bus_bytes_per_s":
        return network.intra_link_bytes_per_s
    return network.nics_per_node * network.nic_bytes_per_s


def _remark(group: Group, field: str, cluster: ClusterSpec, version: str) -> str:
    """What has to be known of a figure of an all-reduce over two nodes."""
    if group.collective != "all_reduce" or group.num_nodes != 2:
        return ""
    last = group.plateau[-1]
    algbw, busbw = f"{last.algbw_bytes_per_s / 1e9:.4g}", f"{last.busbw_bytes_per_s / 1e9:.4g}"
    better = "all_gather_perf on these nodes tells what ZeRO and FSDP get"
    kind, nbytes = "all_reduce", last.message_bytes or _ENDLESS_BYTES
    forced = _forced(group, nbytes, cluster, version)
    chosen = forced or alone(kind, nbytes, ranks_of_group(group, cluster), cluster, version)[:2]
    if chosen[0] == "ring":
        return (
            f"{group.title}: taken as a ring, as NCCL's tuner would choose, whose NICs carry the busbw, {busbw} GB/s;"
            f" had it been a tree they carried {algbw}; {better}"
        )
    return (
        f"{group.title}: over two nodes NCCL's trees put algbw, {algbw} GB/s, on the NICs, not the busbw of {busbw}:"
        f" {field} is what the NICs carried; no all-gather or reduce-scatter has that busbw; {better}"
    )


def _implied_rate(
    found: Determined, field: str, group: Group, row: CollectiveMeasurement, version: str
) -> float | None:
    """The bandwidth with which zsim takes the measured time; None where that hardly hangs on it."""
    nbytes, seconds = row.message_bytes, row.time_s
    if row.num_groups > 1:
        return None
    if nbytes is None or seconds is None:
        # A bandwidth without a size is one of large messages.
        nbytes = _ENDLESS_BYTES
        seconds = nbytes / row.algbw_bytes_per_s

    def excess(rate: float) -> float:
        return predicted_s(group, nbytes, _changed(found.cluster, field, rate), version) / seconds - 1

    value = _root(excess, _RATES)
    if value is None or excess(value * 0.8) - excess(value * 1.25) < _SENSITIVE:
        return None
    return value


def _root(excess: Callable[[float], float], bounds: tuple[float, float]) -> float | None:
    """Where it is zero; None where it is not between the bounds."""
    low, high = (excess(bound) for bound in bounds)
    if low * high > 0:
        return None
    return float(brentq(excess, *bounds, xtol=1e-12, rtol=1e-6, maxiter=200))


def _hop(found: Determined, groups: Sequence[Group], version: str, source: str) -> Determined:
    """One message between two nodes, from all small rows of groups on several nodes."""
    field = "hop_latency_s"
    if not groups:
        return _without(found, field, "no log of several nodes")
    rows = [
        (group, each)
        for group in groups
        for each in group.measurements
        if each.message_bytes is not None and each.message_bytes <= SMALL_BYTES and each.num_groups == 1
    ]
    if not rows:
        return _without(found, field, "no row of several nodes up to 64 KiB")
    implied = [value for group, row in rows if (value := _implied_hop(found, group, row, version)) is not None]
    if len(implied) * 2 < len(rows):
        # Shorter than NCCL's own steps on the GPU: the model has no room for a message.
        return _without(found, field, "small messages take less than zsim's NCCL takes without any network")
    titles = "; ".join(dict.fromkeys(group.title for group, _ in rows))
    return _with(found, field, Measured.of(implied, "s", f"{titles}, up to 64 KiB: {source}"), list(found.remarks))


def _implied_hop(found: Determined, group: Group, row: CollectiveMeasurement, version: str) -> float | None:
    nbytes, seconds = row.message_bytes, row.time_s
    assert nbytes is not None
    assert seconds is not None

    def excess(hop_s: float) -> float:
        return predicted_s(group, nbytes, _changed(found.cluster, "hop_latency_s", hop_s), version) / seconds - 1

    return _root(excess, _HOPS_S)


def _with(found: Determined, field: str, number: Measured, remarks: Sequence[str]) -> Determined:
    return replace(
        found,
        numbers={**found.numbers, field: number},
        remarks=tuple(remarks),
        cluster=_changed(found.cluster, field, number.value),
    )


def _changed(cluster: ClusterSpec, field: str, value: float) -> ClusterSpec:
    change: dict[str, Any] = {field: value}
    return replace(cluster, network=replace(cluster.network, **change))


def _without(found: Determined, field: str, reason: str) -> Determined:
    return replace(found, missing={**found.missing, field: reason})


def errors(groups: Sequence[Group], cluster: ClusterSpec, nccl_version: str) -> list[SizeError]:
    """By group and size, over all rows, those that no number was taken from included."""
    found = []
    for group in groups:
        by_class: dict[str, list[float]] = {}
        for row in group.measurements:
            if row.message_bytes is None or row.time_s is None or not is_modelled(group):
                continue
            name = next(name for limit, name in SIZE_CLASSES if row.message_bytes <= limit)
            error = predicted_s(group, row.message_bytes, cluster, nccl_version) / row.time_s - 1
            by_class.setdefault(name, []).append(error)
        found += [
            SizeError(group.title, name, len(values), median(abs(value) for value in values), median(values))
            for name, values in by_class.items()
        ]
    return found
