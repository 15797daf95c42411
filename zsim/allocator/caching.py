"""One allocator for Python callers: the engine of single ranks, snapshots, replays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from zsim.allocator import operations, sets, state
from zsim.allocator.events import process_events
from zsim.allocator.layout import Room, enlarge, new_state, numbers
from zsim.allocator.operations import EMPTY, FULL
from zsim.allocator.state import NONE, current_of
from zsim.allocator_settings import UNLIMITED, AllocatorSettings

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]
ACTIONS: Final[tuple[Action, ...]] = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)
BlockState = Literal["inactive", "active_allocated", "active_pending_free"]
_STATES: Final[tuple[BlockState, ...]] = ("inactive", "active_allocated", "active_pending_free")
_KINDS: Final = (
    ("allocation", state.ALLOCATION),
    ("segment", state.SEGMENT),
    ("active", state.ACTIVE),
    ("inactive_split", state.INACTIVE_SPLIT),
    ("allocated_bytes", state.ALLOCATED_BYTES),
    ("reserved_bytes", state.RESERVED_BYTES),
    ("active_bytes", state.ACTIVE_BYTES),
    ("inactive_split_bytes", state.INACTIVE_SPLIT_BYTES),
    ("requested_bytes", state.REQUESTED_BYTES),
)


class Event(NamedTuple):
    """An entry of a memory trace (`TraceEntry`); sizes of alloc and free are those requested."""

    action: Action
    address: int
    """Of "oom": the free bytes of the device."""
    nbytes: int
    stream: int


class Block(NamedTuple):
    """A block of a segment."""

    address: int
    nbytes: int
    requested_bytes: int
    """0 while inactive."""
    state: BlockState


class Segment(NamedTuple):
    """Memory from one cudaMalloc, or a run of mapped pages of an expandable segment; its blocks tile it in order."""

    address: int
    nbytes: int
    stream: int
    is_large: bool
    is_expandable: bool
    blocks: tuple[Block, ...]


class CachingAllocator:
    """The allocator of one device.

    Args:
        settings: what PYTORCH_CUDA_ALLOC_CONF sets.
        capacity_bytes: what the device has for it: all but the CUDA context, NCCL and other processes.
        device_bytes: all of the device, by which memory fractions and address space go; by default the capacity.
        recorder: called with every event, in order, before the method that caused it returns.

    """

    __slots__ = ("_recorder", "_settings", "_state")

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int,
        *,
        device_bytes: int | None = None,
        recorder: Callable[[Event], None] | None = None,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        device_bytes = capacity_bytes if device_bytes is None else device_bytes
        start = numbers(settings, capacity_bytes, device_bytes, records=recorder is not None)
        self._state = new_state(Room(), start)

    def process_events(self, finished: Sequence[int]) -> None:
        """Frees blocks whose events have passed: `finished[stream]` items of each stream have finished so far.

        PyTorch does this at the begin of every malloc; a stream that blocks have been recorded on has an entry.
        """
        if self._state[state.NUM_PENDING_EVENTS]:
            process_events(self._state, finished)  # type: ignore[arg-type]
            self._report()

    def malloc(self, handle: int, nbytes: int, stream: int) -> int:
        """Takes memory under a handle that is not in use: `HIT`, `GROWN` or `FLUSH`.

        On `FLUSH` the device has no room: no block was taken (oversize segments may have been given back, pages
        mapped). The caller waits for everything in `pending()` and calls `flush_and_malloc`.
        """
        self._admit(handle, stream)
        outcome = operations.malloc(self._state, handle, nbytes, stream)
        while outcome == FULL:
            self._grow()
            outcome = operations.malloc(self._state, handle, nbytes, stream)
        self._report()
        return outcome

    def flush_and_malloc(self, handle: int, nbytes: int, stream: int) -> int:
        """Behind a `FLUSH` and the wait for events: gives free segments back, asks the device again: `GROWN` or `OOM`.

        The memory is taken in either case: from `OOM` on the device has no end, so that a run that does not fit can be
        carried on.
        """
        self._admit(handle, stream)
        outcome = operations.flush_and_malloc(self._state, handle, nbytes, stream)
        while outcome == FULL:
            self._grow()
            outcome = operations.flush_and_malloc(self._state, handle, nbytes, stream)
        self._report()
        return outcome

    def free(self, handle: int) -> None:
        """Gives memory back; what `record_stream` has noted for it is waited for."""
        if self.address(handle) is None:
            raise ValueError(f"handle {handle} is not in use")
        operations.free(self._state, handle)
        self._report()

    def record_stream(self, handle: int, stream: int, count: int) -> None:
        """Right before `free`: the block may be reused once `stream` has finished `count` items; for several uses."""
        self._admit_stream(stream)
        if self.address(handle) is None:
            raise ValueError(f"handle {handle} is not in use")
        while operations.record_stream(self._state, handle, stream, count) == FULL:
            self._grow()

    def free_behind(self, handle: int, stream: int, count: int) -> None:
        """`record_stream` of one use, and `free`."""
        self.record_stream(handle, stream, count)
        self.free(handle)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`; the caller has waited for everything in `pending()`."""
        while operations.empty_cache(self._state) == FULL:
            self._grow()
        self._report()

    def pending(self) -> Iterator[tuple[int, int]]:
        """(stream, count) of every event that has not been seen to pass, in the order of the queues."""
        now = self._state
        for event in self._pending_events():
            yield now[event + state.EVENT_STREAM], now[event + state.AWAITED]

    def _pending_events(self) -> Iterator[int]:
        now = self._state
        for queue in range(now[state.NUM_STREAMS]):
            event = now[now[state.QUEUES] + 2 * queue]
            while event != NONE:
                yield event
                event = now[event + state.NEXT_IN_QUEUE]

    def address(self, handle: int) -> int | None:
        """Where the memory of a handle begins; 0 for no bytes, None where the handle is not in use."""
        now = self._state
        block = now[now[state.HANDLES] + handle] if handle < now[state.NUM_HANDLES] else NONE
        if block == NONE:
            return None
        return 0 if block == EMPTY else now[block + state.ADDRESS]

    @property
    def settings(self) -> AllocatorSettings:
        """As given."""
        return self._settings

    @property
    def allocated_bytes(self) -> int:
        """In blocks that the program holds."""
        return current_of(self._state, state.ALLOCATED_BYTES)

    @property
    def active_bytes(self) -> int:
        """Allocated, or freed with events that have not passed."""
        return current_of(self._state, state.ACTIVE_BYTES)

    @property
    def reserved_bytes(self) -> int:
        """Taken from the device."""
        return current_of(self._state, state.RESERVED_BYTES)

    @property
    def requested_bytes(self) -> int:
        """Active, before rounding."""
        return current_of(self._state, state.REQUESTED_BYTES)

    @property
    def inactive_split_bytes(self) -> int:
        """Free, in segments that a flush cannot give back; expandable segments not counted."""
        return current_of(self._state, state.INACTIVE_SPLIT_BYTES)

    @property
    def num_alloc_retries(self) -> int:
        """Flushes."""
        return self._state[state.NUM_ALLOC_RETRIES]

    @property
    def num_ooms(self) -> int:
        """At most 1: behind it the device has no end."""
        return self._state[state.NUM_OOMS]

    @property
    def num_sync_all_streams(self) -> int:
        """Waits for all events: flushes and `empty_cache`."""
        return self._state[state.NUM_SYNC_ALL_STREAMS]

    @property
    def num_device_alloc(self) -> int:
        """Calls of cudaMalloc and mappings."""
        return self._state[state.NUM_DEVICE_ALLOC]

    @property
    def num_device_free(self) -> int:
        """Calls of cudaFree and unmappings."""
        return self._state[state.NUM_DEVICE_FREE]

    def memory_stats(self) -> dict[str, int]:
        """`torch.cuda.memory_stats()`, in its order."""
        now = self._state
        found: dict[str, int] = {}
        for name, kind in _KINDS:
            small, large = now[kind : kind + 3], now[kind + 3 : kind + 6]
            peak = now[state.PEAKS + (kind - state.STATISTICS) // 6]
            both = [small[0] + large[0], peak, small[2] + large[2]]
            for pool_name, figures in (("all", both), ("small_pool", small), ("large_pool", large)):
                found |= _figures(f"{name}.{pool_name}", figures)
        for name, kind in (
            ("oversize_allocations", state.OVERSIZE_ALLOCATIONS),
            ("oversize_segments", state.OVERSIZE_SEGMENTS),
        ):
            found |= _figures(name, now[kind : kind + 3])
        most = self._settings.max_split_bytes
        found["max_split_size"] = -1 if most == UNLIMITED else most
        for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
            found[name] = getattr(self, name)
        return dict(sorted(found.items()))

    def segments(self) -> list[Segment]:
        """All memory of the device that is reserved, by address (`snapshot`)."""
        now = self._state
        known = {sets.member(now, at) for at in range(now[state.KEYS], now[state.KEYS_END])}
        known |= {now[now[state.HANDLES] + handle] for handle in range(now[state.NUM_HANDLES])} - {NONE, EMPTY}
        known |= {now[event + state.EVENT_BLOCK] for event in self._pending_events()}
        heads = [
            block for block in known if self._is_mapped(block) and not self._is_mapped(now[block + state.PREVIOUS])
        ]
        return [self._segment(head) for head in sorted(heads, key=lambda block: now[block + state.ADDRESS])]

    def _segment(self, head: int) -> Segment:
        now, found, block = self._state, [], head
        while self._is_mapped(block):
            status = now[block + state.STATUS]
            requested = 0 if status == state.FREE else now[block + state.REQUESTED]
            found.append(Block(now[block + state.ADDRESS], now[block + state.SIZE], requested, _STATES[status]))
            block = now[block + state.NEXT]
        return Segment(
            now[head + state.ADDRESS],
            sum(one.nbytes for one in found),
            now[head + state.STREAM],
            now[head + state.POOL] == state.LARGE,
            now[head + state.RESERVATION] != 0,
            tuple(found),
        )

    def _is_mapped(self, block: int) -> bool:
        """Whether there is such a block, and memory behind it."""
        return block != NONE and self._state[block + state.STATUS] != state.UNMAPPED

    def _admit(self, handle: int, stream: int) -> None:
        """Room for a handle and a stream that are new."""
        if handle >= self._state[state.NUM_HANDLES]:
            self._enlarge(handles=2 * handle + 2)
        if self._state[self._state[state.HANDLES] + handle] != NONE:
            raise ValueError(f"handle {handle} is in use")
        self._admit_stream(stream)

    def _admit_stream(self, stream: int) -> None:
        if stream >= self._state[state.NUM_STREAMS]:
            self._enlarge(streams=stream + 1)

    def _grow(self) -> None:
        """Twice the records."""
        self._enlarge(blocks=2 * self._state[state.NUM_BLOCKS], events=2 * self._state[state.NUM_EVENTS])

    def _enlarge(self, **wanted: int) -> None:
        now = self._state
        room = Room(now[state.NUM_BLOCKS], now[state.NUM_EVENTS], now[state.NUM_STREAMS], now[state.NUM_HANDLES])
        enlarge(now, room._replace(**wanted))

    def _report(self) -> None:
        """Hands what happened to the recorder."""
        if self._recorder is None:
            return
        now = self._state
        begin, num_traced, now[state.NUM_TRACED] = now[state.TRACE], now[state.NUM_TRACED], 0
        for at in range(begin, begin + state.TRACE_WORDS * num_traced, state.TRACE_WORDS):
            action, address, nbytes, stream = now[at : at + state.TRACE_WORDS]
            self._recorder(Event(ACTIONS[action], address, nbytes, stream))


def _figures(name: str, figures: Sequence[int]) -> dict[str, int]:
    current, peak, total = figures
    return {
        f"{name}.current": current,
        f"{name}.peak": peak,
        f"{name}.allocated": total,
        f"{name}.freed": total - current,
    }
