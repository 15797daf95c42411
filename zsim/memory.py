"""The memory curve of a trace at its peak, held against the device."""

from dataclasses import dataclass

from zsim.spec import Spec
from zsim.states import GIB, ways_to_fit
from zsim.trace import Trace

CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Bytes of one rank at the moment when most is allocated."""

    categories: dict[str, int]
    """Allocated by category; "context" is what CUDA and the communicators take outside the allocator."""
    peak_allocated: int
    peak_reserved: int
    """Held by the caching allocator at most, not necessarily at the same moment."""
    capacity: int

    @property
    def context(self) -> int:
        """Bytes outside the caching allocator."""
        return self.categories.get(CONTEXT, 0)

    @property
    def excess(self) -> int:
        """Bytes above the capacity; negative is what stays free.

        Cached blocks are given back before PyTorch reports that it is out of memory, so what is allocated decides.
        """
        return self.peak_allocated + self.context - self.capacity

    @property
    def fits(self) -> bool:
        """Whether the rank has room for its peak."""
        return self.excess <= 0

    def to_json(self) -> dict[str, int]:
        """One flat object: categories, then the totals."""
        return {
            **self.categories,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "capacity": self.capacity,
        }


def peak(trace: Trace) -> MemoryPeak:
    """Categories at the first moment of the highest allocation of the first rank, initialisation included."""
    device = trace.spec.cluster.device
    first = min((sample.rank for sample in trace.memory), default=0)
    held: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    peak_allocated = peak_reserved = 0
    for sample in trace.memory:
        if sample.rank != first:
            continue
        held[sample.category] = held.get(sample.category, 0) + sample.delta_bytes
        peak_reserved = max(peak_reserved, sample.reserved_bytes)
        if sample.allocated_bytes > peak_allocated:
            peak_allocated = sample.allocated_bytes
            at_peak = {name: nbytes for name, nbytes in held.items() if nbytes}
    return MemoryPeak(
        categories={**at_peak, CONTEXT: int(device.context_bytes)},
        peak_allocated=peak_allocated,
        peak_reserved=peak_reserved,
        capacity=int(device.memory_bytes),
    )


def fit_warnings(spec: Spec, memory: MemoryPeak, num_parameters: int) -> list[str]:
    """What does not fit, by how much and what to change; and what fits only with flushes of the cache."""
    if not memory.fits:
        activations = memory.categories.get("activations", 0)
        ways = ways_to_fit(spec, num_parameters, activations, memory.excess)
        advice = "; or ".join(ways) if ways else "no single change of this experiment saves memory"
        capacity = f"{memory.capacity / GIB:.1f} GiB of {spec.cluster.device.name}"
        return [f"does not fit: {memory.excess / GIB:.1f} GiB above the {capacity}; change: {advice}"]
    if memory.peak_reserved + memory.context > memory.capacity:
        over = memory.peak_reserved + memory.context - memory.capacity
        return [f"the allocator's cache exceeds the device by {over / GIB:.1f} GiB: it has to flush and retry"]
    return []
