"""The memory curve of a trace at its peak, held against the device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zsim.display import size
from zsim.figures.states import Counts, ways_to_fit
from zsim.ops import Alloc, Free, Op, Program
from zsim.spec import Spec
from zsim.trace import Trace

_FLUSH_RISK_SHARE = 0.6
"""Above this share of the device a warning says that flushes are left out: free blocks of one stream's pool do not
serve another's, so a cache of several pools can exhaust the device well before its allocations do."""


@dataclass(frozen=True, slots=True)
class AllocatedPeak:
    """Bytes of one rank at the moment when most is allocated."""

    categories: dict[str, int]
    """Allocated by category; "context" is what CUDA and the communicators take beside the caching allocator."""
    peak_allocated: int
    """All categories together."""
    capacity: int

    @property
    def excess(self) -> int:
        """Bytes above the capacity; negative is what stays free.

        Cached blocks are given back before PyTorch reports that it is out of memory, so what is allocated decides.
        """
        return self.peak_allocated - self.capacity

    @property
    def fits(self) -> bool:
        """Whether the rank has room for its peak."""
        return self.excess <= 0

    def to_json(self) -> dict[str, int]:
        """One flat object: categories, then the totals."""
        return {**self.categories, "peak_allocated": self.peak_allocated, "capacity": self.capacity}


@dataclass(frozen=True, slots=True)
class MemoryPeak(AllocatedPeak):
    """With what the allocator keeps, which takes a run to know."""

    peak_reserved: int
    """With the cached blocks of the allocator at most, not necessarily at the same moment."""

    def to_json(self) -> dict[str, int]:
        """With what is reserved."""
        return {**AllocatedPeak.to_json(self), "peak_reserved": self.peak_reserved}


def peak(trace: Trace) -> MemoryPeak:
    """Categories at the first moment of the highest allocation of the first rank, initialisation included."""
    first = min((sample.rank for sample in trace.memory), default=0)
    samples = [sample for sample in trace.memory if sample.rank == first]
    categories, peak_allocated = _highest((sample.category, sample.delta_bytes) for sample in samples)
    return MemoryPeak(
        categories=categories,
        peak_allocated=peak_allocated,
        peak_reserved=max((sample.reserved_bytes for sample in samples), default=0),
        capacity=int(trace.spec.cluster.device.memory_bytes),
    )


def peak_of(program: Program, capacity: int) -> AllocatedPeak:
    """The same without a run: memory is taken and returned when the host says so, and so in the order of the ops.

    Args:
        program: of the rank.
        capacity: bytes of its device.

    """
    return AllocatedPeak(*_highest(_changes(program.ops)), capacity)


def _changes(ops: Iterable[Op]) -> Iterator[tuple[str, int]]:
    live: dict[str, Alloc] = {}
    for op in ops:
        if isinstance(op, Alloc):
            live[op.buffer] = op
            yield op.category, op.nbytes
        elif isinstance(op, Free):
            freed = live.pop(op.buffer)
            yield freed.category, -freed.nbytes


def _highest(changes: Iterable[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """What each category holds when all together first hold most, and how much that is."""
    held: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    total = highest = 0
    for category, delta in changes:
        held[category] = held.get(category, 0) + delta
        total += delta
        if total > highest:
            highest = total
            at_peak = {name: nbytes for name, nbytes in held.items() if nbytes}
    return at_peak, highest


def fit_warnings(spec: Spec, memory: MemoryPeak, counts: Counts, num_retries: int = 0) -> list[str]:
    """What does not fit, by how much and what to change; and what fits only with flushes of the cache."""
    if not memory.fits:
        activations = memory.categories.get("activations", 0)
        ways = ways_to_fit(spec, counts, activations, memory.excess)
        advice = "; or ".join(ways) if ways else "no single change of this experiment saves memory"
        capacity = f"{size(memory.capacity)} of {spec.cluster.device.name}"
        return [f"does not fit: {size(memory.excess)} above the {capacity}; change: {advice}"]
    if num_retries:
        remedy = " (fsdp.limit_all_gathers=true bounds it)" if spec.runtime.framework == "fsdp1" else ""
        cause = "waits until freed memory is free and gives the cache back to the device"
        return [f"the allocator's cache does not fit: {num_retries} times a step the host {cause}{remedy}"]
    over = memory.peak_reserved - memory.capacity
    if over > 0:
        return [f"the allocator's cache exceeds the device by {size(over)}: it has to flush and retry"]
    share = memory.peak_allocated / memory.capacity
    if share > _FLUSH_RISK_SHARE and not spec.runtime.optimisations.preallocated_buffers and spec.zero.stage == 3:
        cause = f"{spec.runtime.name} takes its buckets and gradient partition anew each step"
        risk = f"{share:.0%} of the memory is in use at the peak and {cause}; a flush on one rank stalls all"
        return [f"cache flushes of the allocator are not modelled: {risk}"]
    return []
