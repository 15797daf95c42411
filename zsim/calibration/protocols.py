"""Which of NCCL's protocols ran between nodes, as times tell it: LL and LL128 have other steps than Simple.

Whether NCCL may use them hangs on the network plugin and on variables, and no benchmark prints it. Where zsim without
LL128, or without both, comes clearly nearer to all rows of several nodes, each time with the numbers that these rows
imply, that is taken, and said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean
from typing import Final

from zsim.calibration.curves import Curve
from zsim.calibration.network import Determined, determine, is_modelled, predicted_s
from zsim.spec import ClusterSpec

_CHOICES: Final[tuple[dict[str, bool], ...]] = (
    {"ll128_inter": False},
    {"ll_inter": False, "ll128_inter": False},
)
_LEAST_ROWS: Final = 10
_CLEARLY: Final = 0.75
"""Of the error with the topology's protocols: what another choice must stay below."""
_NOISE: Final = 0.03
"""And the least by which it must be smaller."""


@dataclass(frozen=True, slots=True)
class Protocols:
    """A choice, and what it rests on."""

    found: Determined
    changed: dict[str, bool]
    """Fields of `NetworkSpec` that differ from the topology's; empty where that fits as well as any."""
    remark: str


def determine_protocols(curves: Sequence[Curve], cluster: ClusterSpec, version: str, source: str) -> Protocols:
    """The numbers of `determine` with the protocols that fit best."""
    first = determine(curves, cluster, version, source)
    before = _error(curves, first.cluster, version)
    best = Protocols(first, {}, "")
    if before is None:
        return best
    least = min(before * _CLEARLY, before - _NOISE)
    for choice in _CHOICES:
        changed = {field: value for field, value in choice.items() if getattr(cluster.network, field) != value}
        if not changed:
            continue
        network = replace(
            cluster.network,
            ll_inter=changed.get("ll_inter", cluster.network.ll_inter),
            ll128_inter=changed.get("ll128_inter", cluster.network.ll128_inter),
        )
        found = determine(curves, replace(cluster, network=network), version, source)
        error = _error(curves, found.cluster, version)
        if error is not None and error < least:
            named = " and ".join(f"{field} false" for field in changed)
            remark = f"{named}: zsim is {error:.0%} from the rows of several nodes on average, else {before:.0%}"
            best, least = Protocols(found, changed, remark), error * _CLEARLY
    return best


def _error(curves: Sequence[Curve], cluster: ClusterSpec, version: str) -> float | None:
    """Mean distance of the logarithms over rows of several nodes whose algorithm NCCL chose; None of too few.

    The mean, not the median: a protocol that did not run is far off at some sizes and without effect at others.
    """
    errors = [
        abs(log(predicted_s(curve.group, row.message_bytes, cluster, version) / row.time_s))
        for curve in curves
        if curve.group.num_nodes > 1 and is_modelled(curve.group) and not curve.group.algorithm
        for row in curve.group.measurements
        if row.message_bytes is not None and row.time_s is not None
    ]
    return fmean(errors) if len(errors) >= _LEAST_ROWS else None
