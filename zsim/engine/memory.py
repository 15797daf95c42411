"""Memory of one rank while its host runs: the caching allocator of a GPU, or plain memory that is never full.

Memory is taken and returned when the host says so; which block serves a request depends on how far the lanes have come
by then. What the allocator asks of the device takes time: each cudaMalloc and cudaFree, and a flush waits for every
event that a freed block still hangs on, and for the whole device before the first cudaFree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from zsim import allocator, snapshot
from zsim.allocator import FLUSH, AllocatorSettings, CachingAllocator
from zsim.allocator.snapshots import event_of, segments_of
from zsim.engine.lanes import Lane
from zsim.ops import OUTSIDE, Alloc, Free
from zsim.trace import MemorySample

ENDLESS: Final = 2**62
"""Bytes of a device without end."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the caching allocator of each rank has, and what its calls to the device cost."""

    capacity_bytes: float
    """Of the device."""
    malloc_s: float = 0.0
    """Of one cudaMalloc,"""
    free_s: float = 0.0
    """and of one cudaFree without the wait for the device."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    records: bool = False
    """Whether the lowest rank keeps what its allocator does."""

    @property
    def free_of_charge(self) -> "DeviceMemory":
        """The same, whose calls take no time."""
        return replace(self, malloc_s=0.0, free_s=0.0)


class Recording(NamedTuple):
    """What the allocator of a rank did and what it holds, streams being lanes by number."""

    events: tuple[snapshot.Event, ...]
    segments: tuple[snapshot.Segment, ...]
    lanes: tuple[str, ...]


class RankMemory(Protocol):
    """What a host asks of its memory."""

    live: dict[str, Alloc]
    """Buffers by name."""

    @property
    def num_ooms(self) -> int:
        """Requests that not even a flush could serve."""

    @property
    def has_called(self) -> bool:
        """Whether the device has been asked for memory or been given it back since the last question."""

    @property
    def recording(self) -> Recording | None:
        """None where nothing is recorded."""

    def take(self, op: Alloc, lane: int) -> bool:
        """Takes memory from the pool of a lane; False if that needs a flush."""

    def flush_and_take(self, op: Alloc, lane: int) -> None:
        """Gives cached segments back and takes memory, once all events have passed."""

    def empty_cache(self) -> None:
        """Gives cached segments back, once all events have passed."""

    def give_back(self, op: Free, used: tuple[int, int] | None) -> None:
        """Returns memory: at once, or when a lane has finished so many of its items."""

    def pending(self) -> Sequence[tuple[int, int]]:
        """Lane and number of items of each event that freed memory still hangs on."""

    def device_calls(self) -> tuple[int, int]:
        """How often memory was taken from the device and given back to it since the last question, which this is."""

    def sample(self, rank: int, now: float, op: Alloc | Free) -> MemorySample:
        """The state after a change."""


class PlainMemory:
    """As a C library gives it to a process on a CPU: what is returned is free, and there is always some."""

    def __init__(self) -> None:
        self.live: dict[str, Alloc] = {}
        self.num_ooms = 0
        self.has_called = False
        self.recording = None
        self._allocated = 0
        self._freed: Alloc | None = None

    def take(self, op: Alloc, lane: int) -> bool:  # noqa: ARG002  of the protocol
        """Never full."""
        self.live[op.buffer] = op
        self._allocated += op.nbytes
        return True

    def flush_and_take(self, op: Alloc, lane: int) -> None:
        """Nothing is cached."""
        self.take(op, lane)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def give_back(self, op: Free, used: tuple[int, int] | None) -> None:  # noqa: ARG002  of the protocol
        """At once."""
        self._freed = self.live.pop(op.buffer)
        self._allocated -= self._freed.nbytes

    def pending(self) -> Sequence[tuple[int, int]]:
        """Nothing waits."""
        return ()

    def device_calls(self) -> tuple[int, int]:
        """None that takes time."""
        return 0, 0

    def sample(self, rank: int, now: float, op: Alloc | Free) -> MemorySample:
        """Reserved is what is allocated."""
        alloc, sign = (op, 1) if isinstance(op, Alloc) else (self._freed, -1)
        assert alloc is not None
        held = self._allocated
        return MemorySample(rank, now, alloc.category, sign * alloc.nbytes, held, held, held, 0, op.key, op.buffer)


class CachedMemory:
    """As PyTorch's caching allocator gives it to a process on a GPU."""

    def __init__(self, device: DeviceMemory, lanes: Sequence[Lane], outside_bytes: int) -> None:
        self.live: dict[str, Alloc] = {}
        self._handles: dict[str, int] = {}
        self._lanes = lanes
        capacity_bytes = int(min(device.capacity_bytes, ENDLESS))
        self._events: list[snapshot.Event] = []
        self._cache = CachingAllocator(
            device.settings,
            max(0, capacity_bytes - outside_bytes),
            device_bytes=capacity_bytes,
            recorder=self._record if device.records else None,
        )
        self._num_handles = 0
        self._asked = (0, 0)
        self._freed: Alloc | None = None
        self._outside = 0

    @property
    def recording(self) -> Recording | None:
        """None where nothing is recorded."""
        if not self._events:
            return None
        return Recording(tuple(self._events), segments_of(self._cache), tuple(lane.name for lane in self._lanes))

    def _record(self, event: allocator.Event) -> None:
        self._events.append(event_of(event))

    @property
    def has_called(self) -> bool:
        """Any cudaMalloc or cudaFree."""
        return self._asked != (self._cache.num_device_alloc, self._cache.num_device_free)

    @property
    def num_ooms(self) -> int:
        """Requests that not even a flush could serve."""
        return self._cache.num_ooms

    def take(self, op: Alloc, lane: int) -> bool:
        """process_events() comes first, as with each malloc of the allocator."""
        if op.category == OUTSIDE:
            self._outside += op.nbytes
        else:
            self._cache.process_events([each.finished for each in self._lanes])
            if self._cache.malloc(self._num_handles, op.nbytes, lane) == FLUSH:
                return False
        self._keep(op)
        return True

    def flush_and_take(self, op: Alloc, lane: int) -> None:
        """What still does not fit is taken all the same: the run goes on, and does not fit."""
        self._cache.flush_and_malloc(self._num_handles, op.nbytes, lane)
        self._keep(op)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache()."""
        self._cache.empty_cache()

    def give_back(self, op: Free, used: tuple[int, int] | None) -> None:
        """With record_stream the block waits for its event."""
        self._freed = alloc = self.live.pop(op.buffer)
        handle = self._handles.pop(op.buffer)
        if alloc.category == OUTSIDE:
            self._outside -= alloc.nbytes
        elif used is None:
            self._cache.free(handle)
        else:
            self._cache.free_behind(handle, *used)

    def pending(self) -> Sequence[tuple[int, int]]:
        """In the order in which they were recorded."""
        return list(self._cache.pending())

    def device_calls(self) -> tuple[int, int]:
        """CudaMallocs and cudaFrees."""
        before = self._asked
        self._asked = self._cache.num_device_alloc, self._cache.num_device_free
        return self._asked[0] - before[0], self._asked[1] - before[1]

    def sample(self, rank: int, now: float, op: Alloc | Free) -> MemorySample:
        """The change as it was asked for, the totals as the allocator and the device see them."""
        alloc, sign = (op, 1) if isinstance(op, Alloc) else (self._freed, -1)
        assert alloc is not None
        cache, outside = self._cache, self._outside
        totals = (cache.allocated_bytes + outside, cache.reserved_bytes + outside, cache.active_bytes + outside)
        change = (rank, now, alloc.category, sign * alloc.nbytes)
        return MemorySample(*change, *totals, cache.num_alloc_retries, op.key, op.buffer)

    def _keep(self, op: Alloc) -> None:
        self.live[op.buffer] = op
        self._handles[op.buffer] = self._num_handles
        self._num_handles += 1
