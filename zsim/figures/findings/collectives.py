"""Times of collectives by size, measured and predicted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveSeries:
    """One collective on one set of ranks."""

    label: str
    measured: tuple[tuple[int, float], ...]
    """Bytes and seconds."""
    predicted: tuple[tuple[int, float], ...]
    """By size, rising."""
    median_error: float
    """Of the predictions at the measured sizes, absolute and relative."""


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Several of them."""

    headline: str
    shared: str
    series: tuple[CollectiveSeries, ...]
