"""How much bandwidth between nodes hides the communication of a step."""

from collections.abc import Sequence
from concurrent.futures import Executor
from math import sqrt
from typing import Final

from zsim.figures.findings.bandwidth import BITS_PER_BYTE, GIGA, BandwidthCurve, BandwidthNeed, BandwidthPoint
from zsim.figures.findings.labels import tell_apart, with_fit
from zsim.figures.metrics import Metrics
from zsim.reading.constants import with_node_bandwidth
from zsim.spec import ClusterSpec, Spec
from zsim.studies.runs import Progress, Source, metrics_of, workers
from zsim.units import InputError

SHARES: Final = (0.05, 0.20)
"""Of the step: exposed communication that is nearly nothing, and that is still bearable."""
_LOWEST_BYTES_PER_S: Final = 50 / BITS_PER_BYTE * GIGA
_RATIO: Final = 2.0
"""Between simulated bandwidths of the first round."""
_PRECISION: Final = 1.05
"""Ratio of the answer to a bandwidth that is not enough."""
_ROUNDS: Final = 5
"""Halvings, in the logarithm, that bring the first ratio below the precision."""


def required_bandwidth(
    sources: Sequence[Source], shares: Sequence[float] = SHARES, progress: Progress | None = None
) -> BandwidthNeed:
    """Exposed communication against the bandwidth of a node, and the smallest that keeps it below each share.

    NICs get faster or slower as `constants.with_node_bandwidth` does it, from 50 Gbit/s a node up to where the GPUs'
    PCIe links carry no more. The answer is a bandwidth that was simulated; one 5 % smaller, or smaller by one in the
    second digit, was found not to be enough.

    Args:
        sources: experiments on two nodes or more.
        shares: largest allowed shares of the step, between 0 and 1.
        progress: called with (runs done, runs expected).

    Raises:
        InputError: a ValueError: an experiment on one node, or one that is wrong.

    """
    specs = [source.spec() for source in sources]
    for source, spec in zip(sources, specs, strict=True):
        if not isinstance(spec.cluster, ClusterSpec):
            place = f"{source.file}: cluster.topology: {spec.cluster.topology}"
            raise InputError(f"{place} has no NICs; allowed: a topology of GPUs")
        if spec.cluster.num_nodes == 1:
            raise InputError(f"{source.file}: cluster.nodes: given 1, nothing crosses nodes; allowed: from 2")
    if not shares or not all(0 < share < 1 for share in shares):
        raise InputError(f"shares: given {', '.join(map(str, shares)) or 'none'}; allowed: between 0 and 1")
    labels = tell_apart(specs)
    with workers(specs, 16) as pool:
        count = _Count(progress, sum(len(_grid(_gpus(spec))) + len(shares) * _ROUNDS for spec in specs))
        curves = [_curve(pool, count, *pair, shares) for pair in zip(labels.each, specs, strict=True)]
    return BandwidthNeed(labels.shared, tuple(curves))


class _Count:
    """Adds up the runs of all rounds."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self) -> None:
        """One more."""
        self._done = min(self._done + 1, self._total)
        if self._progress:
            self._progress(self._done, self._total)


def nominal_bytes_per_s(cluster: ClusterSpec) -> float:
    """All NICs of a node together, one way, as the data sheet has it."""
    return cluster.network.nics_per_node * cluster.network.nic_bytes_per_s


def useful_bytes_per_s(cluster: ClusterSpec) -> float:
    """Nominal bandwidth of NICs whose achieved part fills the PCIe links of all GPUs of a node."""
    network = cluster.network
    achieved_share = network.inter_bus_bytes_per_s / nominal_bytes_per_s(cluster)
    return cluster.gpus_per_node * network.pcie_bytes_per_s / achieved_share


def _gpus(spec: Spec) -> ClusterSpec:
    assert isinstance(spec.cluster, ClusterSpec), spec.cluster.topology
    return spec.cluster


def _grid(cluster: ClusterSpec) -> list[float]:
    """From the lowest upwards in steps of a factor, the useful limit, and the cluster as it is."""
    present, limit = nominal_bytes_per_s(cluster), useful_bytes_per_s(cluster)
    grid = [_LOWEST_BYTES_PER_S]
    while grid[-1] * _RATIO < limit:
        grid.append(grid[-1] * _RATIO)
    return sorted({*grid, limit, present})


def _curve(pool: Executor, count: _Count, label: str, spec: Spec, shares: Sequence[float]) -> BandwidthCurve:
    found: dict[float, BandwidthPoint] = {}
    fits = True
    wanted: set[float] = set(_grid(_gpus(spec)))
    while wanted:
        bandwidths = sorted(wanted)
        variants = [with_node_bandwidth(spec, bandwidth) for bandwidth in bandwidths]
        for bandwidth, metrics in zip(bandwidths, pool.map(metrics_of, variants), strict=True):
            fits = metrics.fits  # bandwidth does not change it
            found[bandwidth] = BandwidthPoint(bandwidth, exposed_share(metrics), metrics.step_time_s)
            count.add()
        wanted = {middle for share in shares if (middle := _between(found, share)) is not None}
    return BandwidthCurve(
        label=with_fit(label, fits),
        points=tuple(found[bandwidth] for bandwidth in sorted(found)),
        required_bytes_per_s={share: _bracket(found, share)[1] for share in shares},
        present=found[nominal_bytes_per_s(_gpus(spec))],
        limit_bytes_per_s=useful_bytes_per_s(_gpus(spec)),
    )


def exposed_share(metrics: Metrics) -> float:
    """Of the step: collectives, and the copies that serve them, which no compute covers."""
    return sum(s for name, s in metrics.breakdown_s.items() if name.startswith("exposed_")) / metrics.step_time_s


def _bracket(found: dict[float, BandwidthPoint], share: float) -> tuple[float | None, float | None]:
    """The largest bandwidth that is not enough, and the next one, from which on all are."""
    too_small = [bandwidth for bandwidth, point in found.items() if point.exposed_share >= share]
    largest = max(too_small, default=None)
    enough = [bandwidth for bandwidth in found if largest is None or bandwidth > largest]
    return largest, min(enough, default=None)


def _between(found: dict[float, BandwidthPoint], share: float) -> float | None:
    """The bandwidth to look at next; None where the answer is as sharp as it has to be."""
    low, high = _bracket(found, share)
    if low is None or high is None or high / low <= _PRECISION:
        return None
    middle = _two_digits(sqrt(low * high))
    return middle if low < middle < high else None


def _two_digits(bytes_per_s: float) -> float:
    """A bandwidth as one would ask for it: two significant digits of Gbit/s."""
    return float(f"{bytes_per_s * BITS_PER_BYTE / GIGA:.1e}") / BITS_PER_BYTE * GIGA
