"""Time of a collective by its size, as three numbers that people compare: latency, plateau, half-saturation.

    time = floor + S · factor / plateau · (1 + (knee / S)^ramp)

Latency is the time of the smallest message, plateau the bus bandwidth of the largest ones, half-saturation the size
that has half of it. `ramp` says how slowly the plateau is reached: 1 for a fixed cost more per message, less where
chunks and protocols change with size.
Fitted by least squares over the logarithm of time, so that each size counts alike, with Huber's loss, so that a row
that is far off does not pull. The plateau may lie at most a tenth above the highest bandwidth measured: beyond it the
fit would tell of sizes that nobody has seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import brentq, least_squares

from zsim.calibration.measured import Measured
from zsim.imports.collective_measurements import CollectiveMeasurement, CollectiveName, bus_factor

_HUBER: Final = 0.05
"""Relative residual from which a row counts less."""
_LEAST_SIZES: Final = 6
"""Different sizes for four numbers."""
_PLATEAU_SHARE: Final = 0.95
"""Of the highest bus bandwidth: what still counts as the plateau."""
RISING: Final = 0.08
"""More bus bandwidth by the last doubling of the size than this, and the plateau was not reached."""
_LEAST_RAMP, _MOST_RAMP = 0.3, 1.5
_BEYOND: Final = 1.1
"""Plateau over the highest bandwidth measured."""
_SMALL_BYTES: Final = 64 * 1024
"""A latency is told by messages up to here."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Group:
    """Measurements of one collective on one set of ranks."""

    collective: CollectiveName
    num_ranks: int
    num_nodes: int
    algorithm: str
    """Where it was forced."""
    measurements: tuple[CollectiveMeasurement, ...]
    """By size; those without one last."""

    @property
    def title(self) -> str:
        """`all_reduce, 16 ranks on 2 nodes`."""
        forced = f" ({self.algorithm})" if self.algorithm else ""
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return f"{self.collective}{forced}, {self.num_ranks} ranks on {nodes}"

    @property
    def plateau(self) -> tuple[CollectiveMeasurement, ...]:
        """Those that reach nearly the highest bus bandwidth, of the sizes from the largest down."""
        best = max(each.busbw_bytes_per_s for each in self.measurements)
        return tuple(each for each in self.measurements if each.busbw_bytes_per_s >= _PLATEAU_SHARE * best)

    @property
    def rise(self) -> float:
        """How much more bus bandwidth the largest size has than half of it; 0 where there is one size."""
        sized = [each for each in self.measurements if each.message_bytes is not None]
        sizes = sorted({each.message_bytes or 0 for each in sized})
        if len(sizes) < 2:
            return 0.0
        largest = sizes[-1]
        before = max((size for size in sizes if 2 * size <= largest), default=sizes[0])
        last, earlier = (
            np.median([each.busbw_bytes_per_s for each in sized if each.message_bytes == size])
            for size in (largest, before)
        )
        return float((last / earlier - 1) / np.log2(largest / before))


@dataclass(frozen=True, slots=True)
class Curve:
    """What a group comes to."""

    group: Group
    plateau: Measured
    """Bytes per second of bus bandwidth."""
    latency: Measured | None
    """Seconds; None where there are too few sizes, or no small ones."""
    half_bytes: float | None
    """Size with half of the plateau; None where all sizes have less, or more."""
    error: float | None
    """Median of the absolute relative residuals."""


class _Shape(NamedTuple):
    """The numbers of the formula above."""

    floor_s: float
    rate: float
    knee: float
    ramp: float

    def time_s(self, size: float, factor: float) -> float:
        return float(self.floor_s + size * factor / self.rate * (1 + (self.knee / size) ** self.ramp))


def grouped(measurements: Iterable[tuple[CollectiveMeasurement, int]]) -> list[Group]:
    """Measurements with their number of nodes, as groups, one node first."""
    groups: dict[tuple[int, int, CollectiveName, str], list[CollectiveMeasurement]] = {}
    for each, num_nodes in measurements:
        groups.setdefault((num_nodes, each.num_ranks, each.collective, each.algorithm), []).append(each)
    return [
        Group(collective, num_ranks, num_nodes, algorithm, tuple(sorted(found, key=_size)))
        for (num_nodes, num_ranks, collective, algorithm), found in sorted(groups.items())
    ]


def _size(measurement: CollectiveMeasurement) -> float:
    return float("inf") if measurement.message_bytes is None else measurement.message_bytes


def fit(group: Group, source: str) -> Curve:
    """The three numbers with their spread; of few sizes the plateau alone."""
    points = [(each.message_bytes, each.time_s) for each in group.measurements if each.message_bytes and each.time_s]
    plateau = Measured.of([each.busbw_bytes_per_s for each in group.plateau], "bytes_per_s", source)
    if len({size for size, _ in points}) < _LEAST_SIZES:
        return Curve(group, plateau, None, None, None)
    sizes, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    factor = bus_factor(group.collective, group.num_ranks)
    shape, residuals = _least_squares(sizes, times, factor)
    rate = shape.rate

    def missing(log_size: float) -> float:
        size = float(np.exp(log_size))
        return shape.time_s(size, factor) - 2 * size * factor / rate

    ends = float(np.log(sizes.min())), float(np.log(sizes.max()))
    crosses = missing(ends[0]) > 0 > missing(ends[1])
    half_bytes = float(np.exp(brentq(missing, *ends))) if crosses else None
    spread = Measured(rate, min(rate, plateau.low), max(rate, plateau.high), "bytes_per_s", source, plateau.num_samples)
    error = float(np.median(np.abs(np.expm1(residuals))))
    return Curve(
        group, spread, _latency(sizes, times, shape.time_s(float(sizes.min()), factor), source), half_bytes, error
    )


def _latency(sizes: Floats, times: Floats, latency_s: float, source: str) -> Measured | None:
    """That of the smallest message by the fit, with the spread of the small ones."""
    small = times[sizes <= _SMALL_BYTES]
    if not small.size:
        return None
    low, high = (float(value) for value in np.quantile(small, (0.1, 0.9)))
    return Measured(latency_s, min(low, latency_s), max(high, latency_s), "s", source, int(small.size))


def _least_squares(sizes: Floats, times: Floats, factor: float) -> tuple[_Shape, Floats]:
    """The four numbers, and the residuals of the logarithms."""

    def residuals(logs: Floats) -> Floats:
        floor_s, rate, knee = np.exp(logs[:3])
        predicted = floor_s + sizes * factor / rate * (1 + (knee / sizes) ** logs[3])
        return np.asarray(np.log(predicted / times), dtype=np.float64)

    best = float((sizes * factor / times).max())
    start = [np.log(times.min() / 2), np.log(best * 1.01), np.log(np.median(sizes)), 0.8]
    lowest = [np.log(times.min() / 1000), np.log(best * 0.9), np.log(1.0), _LEAST_RAMP]
    highest = [np.log(times.min() * 2), np.log(best * _BEYOND), np.log(sizes.max() * 10), _MOST_RAMP]
    found = least_squares(residuals, start, bounds=(lowest, highest), loss="huber", f_scale=_HUBER)
    floor_s, rate, knee = (float(value) for value in np.exp(found.x[:3]))
    return _Shape(floor_s, rate, knee, float(found.x[3])), residuals(found.x)
