"""Memory of one rank's program without running it: its requests, in order, through the caching allocator.

Memory is taken and returned when the host says so, and so in the order of the ops. What lanes still use when it is
returned counts as free at once, as it is behind the flush that comes before PyTorch reports that memory has run out: so
a program that does not fit here fits no run either. The cache of a run, whose host is ahead of its lanes, is larger.
"""

from collections.abc import Sequence
from typing import Protocol

from zsim.allocator import FLUSH, AllocatorSettings, CachingAllocator
from zsim.figures.memory import AllocatedPeak, HighWater
from zsim.ops import OUTSIDE, Alloc, EmptyCache, Free, Op


def peak_of(ops: Sequence[Op], capacity_bytes: int, settings: AllocatorSettings | None) -> AllocatedPeak:
    """Categories at the first moment of the highest allocation.

    Args:
        ops: a rank's program.
        capacity_bytes: of its device.
        settings: of the allocator; None on a CPU, whose memory is neither rounded nor cached.

    """
    memory: _Memory = _Plain()
    if settings is not None:
        outside = sum(op.nbytes for op in ops if isinstance(op, Alloc) and op.category == OUTSIDE)
        memory = _Cached(CachingAllocator(settings, max(0, capacity_bytes - outside), device_bytes=capacity_bytes))
    high = HighWater()
    live: dict[str, tuple[int, Alloc]] = {}
    for handle, op in enumerate(ops):
        if isinstance(op, Alloc):
            live[op.buffer] = handle, op
            memory.take(handle, op)
            high.change(op.category, op.nbytes, memory.allocated_bytes)
        elif isinstance(op, Free):
            freed, alloc = live.pop(op.buffer)
            memory.give_back(freed, alloc)
            high.change(alloc.category, -alloc.nbytes, memory.allocated_bytes)
        elif isinstance(op, EmptyCache):
            memory.empty_cache()
    return AllocatedPeak(high.categories, high.allocated_bytes, capacity_bytes, memory.num_ooms)


class _Memory(Protocol):
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def num_ooms(self) -> int: ...

    def take(self, handle: int, op: Alloc) -> None: ...
    def give_back(self, handle: int, op: Alloc) -> None: ...
    def empty_cache(self) -> None: ...


class _Plain:
    """Of a process on a CPU."""

    num_ooms = 0

    def __init__(self) -> None:
        self.allocated_bytes = 0

    def take(self, handle: int, op: Alloc) -> None:  # noqa: ARG002  of the protocol
        self.allocated_bytes += op.nbytes

    def give_back(self, handle: int, op: Alloc) -> None:  # noqa: ARG002  of the protocol
        self.allocated_bytes -= op.nbytes

    def empty_cache(self) -> None:
        pass


class _Cached:
    """Of a process on a GPU; all streams in one order, the host's."""

    def __init__(self, cache: CachingAllocator) -> None:
        self._cache = cache
        self._streams: dict[str, int] = {}
        self._outside_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return self._cache.allocated_bytes + self._outside_bytes

    @property
    def num_ooms(self) -> int:
        return self._cache.num_ooms

    def take(self, handle: int, op: Alloc) -> None:
        if op.category == OUTSIDE:
            self._outside_bytes += op.nbytes
            return
        stream = self._streams.setdefault(op.lane, len(self._streams))
        if self._cache.malloc(handle, op.nbytes, stream) == FLUSH:
            self._cache.flush_and_malloc(handle, op.nbytes, stream)

    def give_back(self, handle: int, op: Alloc) -> None:
        if op.category == OUTSIDE:
            self._outside_bytes -= op.nbytes
        else:
            self._cache.free(handle)

    def empty_cache(self) -> None:
        self._cache.empty_cache()
