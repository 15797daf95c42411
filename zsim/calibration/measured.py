"""A number that was measured: its median and spread, and the mapping of a data file that it becomes."""

import datetime as dt
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from zsim.units import FACTORS, Dimension

_DIGITS: Final = 4
"""Significant ones in a data file; no measurement has more."""
_PREFERRED: Final[dict[Dimension, tuple[str, ...]]] = {
    "bytes": ("B", "kB", "MB", "GB", "TB"),
    "bytes_per_s": ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"),
    "s": ("ns", "us", "ms", "s"),
    "flop_per_s": ("MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"),
    "1": ("",),
}
"""Units of a data file, smallest first: decimal, as data sheets have them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Median of several samples, and their 10th and 90th percentile; SI units."""

    value: float
    low: float
    high: float
    unit: Dimension
    source: str
    """How it was measured, by what command, on what machine and when: `provenance` says the latter three."""
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float], unit: Dimension, source: str) -> "Measured":
        """The figures of some samples, one or more."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], unit, source, 1)
        tenths = quantiles(samples, n=10, method="inclusive")
        return cls(median(samples), tenths[0], tenths[-1], unit, source, len(samples))

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a fraction of the median; 0 where that is 0."""
        return (self.high - self.low) / self.value if self.value else 0.0

    def as_data(self) -> dict[str, Any]:
        """The mapping of a topology, device or software file, with units as people write them."""
        value, low, high = (quantity(number, self.unit) for number in (self.value, self.low, self.high))
        source = f"{self.source}; median of {self.num_samples}, 10th to 90th percentile"
        return {"value": value, "origin": "measured", "range": [low, high], "source": source}


def quantity(value: float, unit: Dimension) -> str | float:
    """A number in SI units as a data file has it: "97.31 GFLOP/s", "5.2 us", or a plain number without unit."""
    rounded = float(f"{value:.{_DIGITS}g}")
    if unit == "1":
        return rounded
    names = _PREFERRED[unit]
    name = next((name for name in reversed(names) if abs(rounded) >= FACTORS[unit][name]), names[0])
    return f"{rounded / FACTORS[unit][name]:.{_DIGITS}g} {name}"


def provenance(command: str, device: str | None = None) -> str:
    """What the source of a measured number ends in: command, device (by default this machine's CPU) and day."""
    today = dt.datetime.now(tz=dt.UTC).date()
    return f"{command}, {device or cpu_name()}, {today:%Y-%m-%d}"


def cpu_name() -> str:
    """As the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
