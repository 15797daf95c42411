"""Micro-batches against what the allocator does with them: where the cache meets the device, and what that costs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from zsim.figures.findings.fits import shown
from zsim.figures.metrics import Metrics

_FALL = 0.01
"""Relative loss of throughput that is called none."""


class FlushPoint(NamedTuple):
    """One micro-batch."""

    micro_batch: int
    allocated_bytes: int
    """At the peak of one GPU;"""
    reserved_bytes: int
    """with the allocator's cache at its own."""
    num_retries: int
    """Flushes in one step."""
    samples_per_s: float
    fits: bool

    @property
    def flushes(self) -> bool:
        """Whether it fits only with flushes."""
        return self.fits and self.num_retries > 0


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """Largest micro-batches, all else being equal."""

    fits: FlushPoint | None
    """The largest that fits; None where none does."""
    without_flush: FlushPoint | None
    """The largest of which no step flushes the cache; None where every one does, or none fits."""

    def to_json(self) -> dict[str, Any]:
        """Each with its run; null where there is none."""
        points = {"fits": self.fits, "without_flush": self.without_flush}
        return {name: None if point is None else point._asdict() for name, point in points.items()}


@dataclass(frozen=True, slots=True)
class FlushRisk:
    """Micro-batches in rising order, from small ones to the first that does not fit."""

    shared: str
    device: str
    capacity_bytes: int
    points: tuple[FlushPoint, ...]

    @property
    def fitting(self) -> tuple[FlushPoint, ...]:
        """Those that the device holds."""
        return tuple(point for point in self.points if point.fits)

    @property
    def headline(self) -> str:
        """Where flushes begin and what the largest micro-batch loses by them."""
        if not self.fitting:
            return f"No micro-batch fits in the {shown(self.capacity_bytes)} of {self.device}"
        last = self.fitting[-1]
        best = max(self.fitting, key=lambda point: point.samples_per_s)
        first = next((point for point in self.fitting if point.flushes), None)
        if first is None:
            return f"No flush up to micro-batch {last.micro_batch}, the largest of these that fits"
        begin = f"From micro-batch {first.micro_batch} on the allocator flushes its cache"
        if last.samples_per_s > best.samples_per_s * (1 - _FALL):
            return f"{begin}; throughput still rises to {last.samples_per_s:.1f} samples/s at {last.micro_batch}"
        fall = f"from {best.samples_per_s:.1f} samples/s at {best.micro_batch} to {last.samples_per_s:.1f}"
        return f"{begin}: throughput falls {fall} at {last.micro_batch}, before memory runs out"


def flush_point(micro_batch: int, metrics: Metrics) -> FlushPoint:
    """What a run of that micro-batch came to."""
    return FlushPoint(
        micro_batch=micro_batch,
        allocated_bytes=metrics.memory.peak_allocated,
        reserved_bytes=metrics.memory.peak_reserved,
        num_retries=metrics.num_alloc_retries,
        samples_per_s=metrics.samples_per_s,
        fits=metrics.fits,
    )
