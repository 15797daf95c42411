"""The memory curve of a trace at its peak, held against the device."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zsim.display import size
from zsim.figures.states import Counts, ways_to_fit
from zsim.ops import OUTSIDE
from zsim.spec import Spec
from zsim.trace import MemorySample, Trace

ROUNDING = "rounding"
"""Category of what blocks are larger than what was asked for."""


@dataclass(frozen=True, slots=True)
class AllocatedPeak:
    """Bytes of one rank at the moment when most is allocated."""

    categories: dict[str, int]
    """Allocated by category; "context" is what CUDA and the communicators take beside the caching allocator."""
    peak_allocated: int
    """All categories together."""
    capacity: int
    num_ooms: int
    """Requests for which there was no segment even with an empty cache: free blocks lay between live ones."""

    @property
    def excess(self) -> int:
        """Bytes allocated above the capacity; negative is what stays free."""
        return self.peak_allocated - self.capacity

    @property
    def fits(self) -> bool:
        """Whether every request could be served."""
        return self.excess <= 0 and not self.num_ooms

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


class HighWater:
    """What each category holds when all together first hold most."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._held: dict[str, int] = {}
        self._at_peak: dict[str, int] = {}

    def change(self, category: str, delta_bytes: int, allocated_bytes: int) -> None:
        """One request or return, and what blocks hold behind it."""
        self._held[category] = self._held.get(category, 0) + delta_bytes
        if allocated_bytes > self.allocated_bytes:
            self.allocated_bytes = allocated_bytes
            self._at_peak = self._held.copy()

    @property
    def categories(self) -> dict[str, int]:
        """What makes it up."""
        return by_category(self._at_peak, self.allocated_bytes)


def by_category(held: Mapping[str, int], allocated_bytes: int) -> dict[str, int]:
    """What adds up to the allocated bytes: categories that hold anything, and what blocks are larger."""
    kept = {name: nbytes for name, nbytes in held.items() if nbytes}
    rounding = allocated_bytes - sum(kept.values())
    return kept | ({ROUNDING: rounding} if rounding else {})


def peak(trace: Trace) -> MemoryPeak:
    """Categories at the first moment of the highest allocation of the first rank.

    Since its process began, as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count: set-up is part of it,
    and so are steps that warm up.
    """
    high = HighWater()
    reserved = 0
    for sample in samples_of_first_rank(trace):
        high.change(sample.category, sample.delta_bytes, sample.allocated_bytes)
        reserved = max(reserved, sample.reserved_bytes)
    capacity = int(trace.spec.cluster.device.memory_bytes)
    return MemoryPeak(high.categories, high.allocated_bytes, capacity, trace.num_ooms, reserved)


def num_alloc_retries(trace: Trace) -> int:
    """Flushes of the first rank's allocator in the steps that count."""
    samples = samples_of_first_rank(trace)
    before = [sample for sample in samples if sample.key is not None and sample.key.step < 0]
    ends = [part[-1].num_alloc_retries if part else 0 for part in (samples, before)]
    return ends[0] - ends[1]


def flushing(samples: Iterable[MemorySample]) -> Iterator[MemorySample]:
    """Those of allocations for which the allocator flushed, of one rank from the beginning of its run."""
    num_before = 0
    for sample in samples:
        if sample.num_alloc_retries > num_before:
            yield sample
        num_before = sample.num_alloc_retries


def samples_of_first_rank(trace: Trace) -> list[MemorySample]:
    """In order of time, set-up and the steps that warm up included."""
    first = min((sample.rank for sample in trace.memory), default=0)
    return [sample for sample in trace.memory if sample.rank == first]


def fit_warnings(spec: Spec, memory: MemoryPeak, counts: Counts, num_retries: int = 0) -> list[str]:
    """What does not fit, by how much and what to change; and what fits only with flushes of the cache."""
    if not memory.fits:
        return [_what_lacks(spec, memory, counts)]
    if num_retries:
        remedy = " (fsdp.limit_all_gathers=true bounds it)" if spec.runtime.framework == "fsdp1" else ""
        cause = "the allocator finds no room beside its cache, waits for the device and gives cached segments back"
        return [f"cache flushes: {num_retries} times a step {cause}{remedy}; num_alloc_retries counts them"]
    return []


def _what_lacks(spec: Spec, memory: MemoryPeak, counts: Counts) -> str:
    """Which limit the first rank passes and by how much; or that it passes none, and another rank does."""
    capacity = f"{size(memory.capacity)} of {spec.cluster.device.name}"
    held = memory.peak_reserved - memory.categories.get(OUTSIDE, 0)
    fraction = spec.allocator.per_process_memory_fraction
    allowed = int(fraction * memory.capacity)
    ways: list[str] = []
    if memory.excess > 0:
        what, excess = f"{size(memory.excess)} above the {capacity}", memory.excess
    elif fraction and held > allowed:
        excess = held - allowed
        limit = f"{size(allowed)} that fraction {fraction} allows"
        what = f"{size(held)} of the allocator are {size(excess)} above the {limit}"
        ways = [f"a larger per_process_memory_fraction than {fraction}"]
    elif spec.noise.stray_bytes and memory.peak_reserved <= memory.capacity:
        first = f"the first rank holds {size(memory.peak_reserved)} at most of {capacity}"
        other = "noise.stray_memory takes more on another rank"
        return f"does not fit: {first}, but {other}; change: less noise.stray_memory, or what saves as much"
    else:
        excess = max(1, memory.peak_reserved - memory.capacity)
        free = "with the free blocks between live ones, "
        what = f"{free}{size(memory.peak_reserved)} are {size(excess)} above the {capacity}"
        if not spec.allocator.expandable_segments:
            ways = ["environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    ways += ways_to_fit(spec, counts, memory.categories.get("activations", 0), excess)
    advice = "; or ".join(ways) if ways else "no single change of this experiment saves memory"
    return f"does not fit: {what}; change: {advice}"
