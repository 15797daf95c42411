"""Figures of samples of which some stand for more time than others."""

from collections.abc import Iterable

from zsim.calibration.measured import Measured
from zsim.units import Dimension

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9


def quantiles(samples: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile of (value, weight), by weight; weights above 0."""
    ordered = sorted(samples)
    whole = sum(weight for _, weight in ordered)
    found = []
    reached, position = 0.0, -1
    for share in (LOW, MIDDLE, HIGH):
        while reached < share * whole * (1 - 1e-12):
            position += 1
            reached += ordered[position][1]
        found.append(ordered[position][0])
    return found[0], found[1], found[2]


def measured(samples: Iterable[tuple[float, float]], unit: Dimension, source: str) -> Measured:
    """Median and spread of (value, weight), by weight."""
    samples = list(samples)
    low, middle, high = quantiles(samples)
    return Measured(middle, low, high, unit, source, len(samples))
