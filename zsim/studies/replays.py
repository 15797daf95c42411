"""A recorded memory snapshot replayed through zsim's allocator, and where the two part.

The allocator starts from the segments that existed before the first recorded event and is asked for the same memory in
the same order. The device is the recorded one: where that had no room, this one has none; where that returned a
segment, this one returns one at the same address. So every difference is one of rules, or follows from an earlier one.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from zsim import allocator
from zsim.allocator import FLUSH, HIT
from zsim.allocator.replaying import ReplayedAllocator
from zsim.allocator.snapshots import segment_from
from zsim.allocator_settings import UNLIMITED, AllocatorSettings
from zsim.figures.fragmentation import fragmentation, owners, why_it_fails
from zsim.figures.replays import Difference, OomReport, Replay, Totals
from zsim.figures.rewinding import SMALL_SIZE_BYTES, Rewound, rewind
from zsim.figures.snapshot_calls import Completed, EmptyCache, Grown, Malloc, OutOfMemory, calls
from zsim.snapshot import NO_POOL, Event, Snapshot
from zsim.units import InputError

_MOST_DIFFERENCES: Final = 10
_MOST_OOMS: Final = 20
_APART: Final = 2**46
"""Addresses of segments that only ours has begin so far above all recorded ones."""
_ALIGNMENT: Final = 2**21
_DEVICE_BYTES: Final = 2**38
"""More than any device has: by it goes the address space of expandable segments, which a snapshot does not tell."""


def replay(snapshot: Snapshot, settings: AllocatorSettings, device: int | None = None) -> list[Replay]:
    """Each device of a snapshot, or one.

    Args:
        snapshot: read by `imports.memory_snapshot`.
        settings: of the recorded allocator.
        device: index of the only one to replay.

    Raises:
        InputError: a ValueError: nothing is recorded of the device, or its events contradict its segments.

    """
    devices = snapshot.devices if device is None else (device,)
    if device is not None and device not in snapshot.devices:
        known = ", ".join(map(str, snapshot.devices)) or "none"
        raise InputError(f"device {device}: nothing is recorded of it; allowed: {known}")
    if not devices:
        raise InputError("no segments and no events: there is nothing to replay; allowed: a device with some")
    # Of how much memory the process might have had which part, no snapshot says.
    notes: tuple[str, ...] = ()
    if settings.per_process_memory_fraction:
        settings = replace(settings, per_process_memory_fraction=0.0, garbage_collection_threshold=0.0)
        notes = ("per_process_memory_fraction: of what a snapshot does not say, so no garbage is collected early",)
    return [_replay(_without_private_pools(snapshot, each, notes), settings, each) for each in devices]


class _Public(NamedTuple):
    snapshot: Snapshot
    notes: tuple[str, ...]


def _without_private_pools(snapshot: Snapshot, device: int, notes: tuple[str, ...]) -> _Public:
    """Without memory pools of CUDA graphs, whose rules differ; an event tells its pool itself, or lies in a segment."""
    private = [one for one in snapshot.segments if one.device == device and one.pool_id != NO_POOL]
    segments = tuple(one for one in snapshot.segments if one.device == device and one.pool_id == NO_POOL)
    if not private:
        return _Public(Snapshot(segments, snapshot.traces, snapshot.allocator_settings), notes)
    starts = [one.address for one in private]

    def is_private(event: Event) -> bool:
        at = bisect_right(starts, event.address) - 1
        return event.pool_id != NO_POOL or (at >= 0 and event.address < private[at].address + private[at].total_bytes)

    events = tuple(event for event in snapshot.events(device) if not is_private(event))
    traces = tuple(events if index == device else () for index in range(len(snapshot.traces)))
    note = f"{len(private)} segments of private pools (CUDA graphs, MemPool) are left out, with their events"
    return _Public(Snapshot(segments, traces, snapshot.allocator_settings), (*notes, note))


def _replay(public: _Public, settings: AllocatorSettings, device: int) -> Replay:
    snapshot = public.snapshot
    events = snapshot.events(device)
    ooms = [index for index, event in enumerate(events) if event.action == "oom"][-_MOST_OOMS:]
    sizes = ReplayedAllocator(settings, UNLIMITED)
    rewound = rewind(snapshot, device, ooms, sizes.block_bytes)
    course = _Course(rewound, settings)
    course.run()
    notes = list(public.notes)
    if not events:
        notes.append("no events: recorded without torch.cuda.memory._record_memory_history()")
    return Replay(
        device=device,
        num_events=len(events),
        num_allocs=course.num_allocs,
        num_same=course.num_same,
        recorded=course.recorded.totals(),
        ours=course.ours.totals(),
        differences=tuple(course.differences),
        ooms=tuple(_explained(events[index], index, rewound, course.streams) for index in ooms),
        final=fragmentation(snapshot.segments),
        owners=tuple(owners(snapshot.segments)),
        notes=tuple(notes),
    )


def _explained(event: Event, index: int, rewound: Rewound, streams: dict[int, int]) -> OomReport:
    assert event.stream in streams
    state = fragmentation(rewound.states[index])
    reasons = why_it_fails(state, event.size_bytes, event.stream, event.device_free_bytes)
    return OomReport(index, event.size_bytes, event.stream, event.device_free_bytes, tuple(reasons))


@dataclass(slots=True)
class _Tally:
    """What comes and goes."""

    reserved: int
    peak: int = 0
    num_alloc: int = 0
    num_free: int = 0
    alloc_bytes: int = 0
    free_bytes: int = 0

    def add(self, action: str, nbytes: int) -> None:
        """Segments and mapped pages; nothing for other events."""
        if action in {"segment_alloc", "segment_map"}:
            self.num_alloc += 1
            self.alloc_bytes += nbytes
            self.reserved += nbytes
        elif action in {"segment_free", "segment_unmap"}:
            self.num_free += 1
            self.free_bytes += nbytes
            self.reserved -= nbytes
        self.peak = max(self.peak, self.reserved)

    def totals(self) -> Totals:
        """So far."""
        peak = max(self.peak, self.reserved)
        return Totals(self.num_alloc, self.num_free, self.alloc_bytes, self.free_bytes, peak, self.reserved)


@dataclass(slots=True)
class _Course:
    """The two side by side."""

    rewound: Rewound
    settings: AllocatorSettings
    num_allocs: int = 0
    num_same: int = 0
    differences: list[Difference] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    recorded: _Tally = field(init=False)
    ours: _Tally = field(init=False)
    _cache: ReplayedAllocator = field(init=False)
    _handles: dict[int, int] = field(init=False)
    """By recorded address."""
    _num_handles: int = field(init=False)
    _starts: list[int] = field(default_factory=list)
    """Of our segments, in order,"""
    _lengths: dict[int, int] = field(default_factory=dict)
    """and their bytes."""
    _own_place: int = field(init=False)

    def __post_init__(self) -> None:
        before, events = self.rewound.before, self.rewound.events
        for stream in sorted({one.stream for one in before} | {event.stream for event in events}):
            self.streams[stream] = len(self.streams)
        reserved = sum(segment.total_bytes for segment in before)
        self.recorded, self.ours = _Tally(reserved), _Tally(reserved)
        self._cache = ReplayedAllocator(self.settings, UNLIMITED, device_bytes=_DEVICE_BYTES, recorder=self._note)
        segments = [segment_from(segment, self.streams) for segment in before]
        self._handles = self._cache.restore(segments, self._reservations())
        self._num_handles = len(self._handles)
        for segment in before:
            insort(self._starts, segment.address)
            self._lengths[segment.address] = segment.total_bytes
        highest = max([*(segment.address for segment in before), *(event.address for event in events)], default=0)
        self._own_place = -(-(highest + _APART) // _ALIGNMENT) * _ALIGNMENT

    def _reservations(self) -> dict[tuple[int, bool], int]:
        """Lowest address that was mapped on each stream for small and for large requests."""
        found: dict[tuple[int, bool], int] = {}
        for call in calls(self.rewound.events):
            if isinstance(call, Malloc) and call.grown and call.grown[0].action == "segment_map":
                key = self.streams[call.stream], call.nbytes > SMALL_SIZE_BYTES
                found[key] = min(found.get(key, call.grown[0].address), *(event.address for event in call.grown))
        return found

    def _note(self, event: allocator.Event) -> None:
        """Of ours."""
        self.ours.add(event.action, event.nbytes)
        if event.action == "segment_alloc":
            insort(self._starts, event.address)
            self._lengths[event.address] = event.nbytes
            if event.address >= self._own_place:
                self._own_place = -(-(event.address + event.nbytes) // _ALIGNMENT) * _ALIGNMENT
        elif event.action == "segment_free":
            del self._starts[bisect_left(self._starts, event.address)]
            del self._lengths[event.address]

    def run(self) -> None:
        """All calls."""
        for call in calls(self.rewound.events):
            match call:
                case Completed():
                    self._complete([call.address])
                case Malloc():
                    self._malloc(call)
                case EmptyCache():
                    self._complete(call.completed)
                    self._record(call.released)
                    self._cache.empty_cache()
                case OutOfMemory():
                    self._fail(call)
                case Grown():
                    self._record(call.grown)

    def _complete(self, addresses: tuple[int, ...] | list[int]) -> None:
        for address in addresses:
            self._cache.free(self._handles.pop(address))

    def _record(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.recorded.add(event.action, event.size_bytes)

    def _malloc(self, call: Malloc) -> None:
        cache, handle = self._cache, self._num_handles
        self._num_handles += 1
        self.num_allocs += 1
        self._record(call.released)
        self._record(call.grown)
        before = cache.num_device_alloc, cache.num_device_free
        cache.place_next(self._place_of(call))
        if call.released:
            self._malloc_without_room(call, handle)
        elif cache.malloc(handle, call.nbytes, self.streams[call.stream]) == FLUSH:
            where = f"device_traces[{self.rewound.device}][{call.at}]: alloc of {call.nbytes:,} bytes"
            raise InputError(f"{where}: beside {cache.reserved_bytes:,}; allowed: what a device may have")
        self._handles[call.address] = handle
        grew, released = cache.num_device_alloc > before[0], cache.num_device_free > before[1]
        self._compare(call, cache.address(handle), _done(grew=grew, released=released))

    def _malloc_without_room(self, call: Malloc, handle: int) -> None:
        """The recorded allocator gave segments back and took one: in a flush, or in empty_cache() right before.

        It flushes only where no block fits. If one does, or if some of what it gave back is more than a request with
        `max_split_size_mb` gives back on its own, then somebody has called empty_cache().
        """
        cache, stream = self._cache, self.streams[call.stream]
        cache.limit(cache.reserved_bytes)
        outcome = cache.malloc(handle, call.nbytes, stream)
        cache.limit(UNLIMITED)
        if outcome == HIT:
            cache.free(handle)
        self._complete(call.completed)
        if outcome == FLUSH:
            cache.flush_and_malloc(handle, call.nbytes, stream)
        elif outcome == HIT:
            cache.empty_cache()
            cache.malloc(handle, call.nbytes, stream)
        elif not all(self._is_oversize(event, call.stream) for event in call.released):
            cache.empty_cache()

    def _is_oversize(self, event: Event, stream: int) -> bool:
        return event.stream == stream and event.size_bytes >= self.settings.max_split_bytes

    def _place_of(self, call: Malloc) -> int:
        """Of the recorded segment, unless something of ours lies there."""
        if not call.grown:
            return self._own_place
        start, end = call.grown[0].address, call.grown[0].address + call.grown[0].size_bytes
        at = bisect_left(self._starts, end) - 1
        if at >= 0 and self._starts[at] + self._lengths[self._starts[at]] > start:
            return self._own_place
        return start

    def _compare(self, call: Malloc, address: int | None, ours: str) -> None:
        recorded = _done(grew=bool(call.grown), released=bool(call.released))
        if recorded == ours and address == call.address:
            self.num_same += 1
        elif len(self.differences) < _MOST_DIFFERENCES:
            what = f"alloc of {call.nbytes:,} bytes on stream {call.stream}"
            places = (f"{recorded} at {call.address:#x}", f"{ours} at {address or 0:#x}")
            self.differences.append(Difference(call.at, what, *places))

    def _fail(self, call: OutOfMemory) -> None:
        """What was given back before, and whether ours would have failed as well."""
        cache, handle = self._cache, self._num_handles
        self._num_handles += 1
        self._record(call.released)
        self._record(call.grown)
        room = self.recorded.reserved + call.device_free_bytes
        cache.limit(min(room, UNLIMITED - 1))
        outcome = cache.malloc(handle, call.nbytes, self.streams[call.stream])
        self._complete(call.completed)
        needed = cache.segment_bytes(call.nbytes)
        if outcome == FLUSH:
            cache.empty_cache()
        else:
            cache.free(handle)
        if outcome != FLUSH or cache.reserved_bytes + needed <= room:
            served = "a block of the cache" if outcome == HIT else f"a segment of {needed:,} bytes"
            what = f"request of {call.nbytes:,} bytes on stream {call.stream}"
            if len(self.differences) < _MOST_DIFFERENCES:
                self.differences.append(Difference(call.at, what, "out of memory", f"served by {served}"))
        cache.limit(UNLIMITED)


def _done(*, grew: bool, released: bool) -> str:
    if grew and released:
        return "segments given back and a new one"
    return "a new segment" if grew else "a block of the cache"
