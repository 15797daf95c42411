"""One allocator for Python callers: the engine of single ranks, snapshots, replays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from zsim.allocator import operations, state
from zsim.allocator.events import process_events
from zsim.allocator.layout import Rows, grow, new_state
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

    __slots__ = ("_recorder", "_rows", "_settings", "_state")

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
        self._rows = Rows()
        device_bytes = capacity_bytes if device_bytes is None else device_bytes
        self._state = new_state(self._rows, settings, capacity_bytes, device_bytes, records=recorder is not None)

    def process_events(self, finished: Sequence[int]) -> None:
        """Frees blocks whose events have passed: `finished[stream]` items of each stream have finished so far.

        PyTorch does this at the begin of every malloc; a stream that blocks have been recorded on has an entry.
        """
        if self._state.scalars[state.NUM_ITEMS]:
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
        self._room_for_stream(stream)
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
        events = self._state.events
        for first in events.first:
            item = first
            while item != NONE:
                yield events.stream[item], events.awaited[item]
                item = events.item_next[item]

    def address(self, handle: int) -> int | None:
        """Where the memory of a handle begins; 0 for no bytes, None where the handle is not in use."""
        block_of = self._state.block_of
        block = block_of[handle] if handle < len(block_of) else NONE
        if block == NONE:
            return None
        return 0 if block == EMPTY else self._state.blocks.address[block]

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
        return self._state.scalars[state.NUM_ALLOC_RETRIES]

    @property
    def num_ooms(self) -> int:
        """At most 1: behind it the device has no end."""
        return self._state.scalars[state.NUM_OOMS]

    @property
    def num_sync_all_streams(self) -> int:
        """Waits for all events: flushes and `empty_cache`."""
        return self._state.scalars[state.NUM_SYNC_ALL_STREAMS]

    @property
    def num_device_alloc(self) -> int:
        """Calls of cudaMalloc and mappings."""
        return self._state.scalars[state.NUM_DEVICE_ALLOC]

    @property
    def num_device_free(self) -> int:
        """Calls of cudaFree and unmappings."""
        return self._state.scalars[state.NUM_DEVICE_FREE]

    def memory_stats(self) -> dict[str, int]:
        """`torch.cuda.memory_stats()`, in its order."""
        statistics = self._state.statistics
        found: dict[str, int] = {}
        for name, kind in _KINDS:
            small, large = (statistics[6 * kind + 3 * pool :][:3] for pool in (state.SMALL, state.LARGE))
            both = [small[0] + large[0], statistics[state.PEAK_OF_BOTH + kind], small[2] + large[2]]
            for pool_name, figures in (("all", both), ("small_pool", small), ("large_pool", large)):
                found |= _figures(f"{name}.{pool_name}", figures)
        for name, kind in (
            ("oversize_allocations", state.OVERSIZE_ALLOCATIONS),
            ("oversize_segments", state.OVERSIZE_SEGMENTS),
        ):
            found |= _figures(name, statistics[6 * kind :][:3])
        most = self._settings.max_split_bytes
        found["max_split_size"] = -1 if most == UNLIMITED else most
        for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
            found[name] = getattr(self, name)
        return dict(sorted(found.items()))

    def segments(self) -> list[Segment]:
        """All memory of the device that is reserved, by address (`snapshot`)."""
        blocks = self._state.blocks
        mapped = {state.FREE, state.ALLOCATED, state.PENDING}
        heads = [
            block
            for block, status in enumerate(blocks.status)
            if status in mapped
            and (blocks.previous[block] == NONE or blocks.status[blocks.previous[block]] not in mapped)
        ]
        return [self._segment(head, mapped) for head in sorted(heads, key=blocks.address.__getitem__)]

    def _segment(self, head: int, mapped: set[int]) -> Segment:
        blocks, found, block = self._state.blocks, [], head
        while block != NONE and blocks.status[block] in mapped:
            status = blocks.status[block]
            requested = 0 if status == state.FREE else blocks.requested[block]
            found.append(Block(blocks.address[block], blocks.size[block], requested, _STATES[status]))
            block = blocks.next[block]
        return Segment(
            blocks.address[head],
            sum(one.nbytes for one in found),
            blocks.stream[head],
            blocks.pool[head] == state.LARGE,
            blocks.reservation[head] != 0,
            tuple(found),
        )

    def _admit(self, handle: int, stream: int) -> None:
        """Room for a handle and a stream that are new."""
        if handle >= len(self._state.block_of):
            self._state.block_of.extend([NONE] * (handle + 1 + len(self._state.block_of)))
        if self._state.block_of[handle] != NONE:
            raise ValueError(f"handle {handle} is in use")
        self._room_for_stream(stream)

    def _room_for_stream(self, stream: int) -> None:
        missing = stream + 1 - len(self._state.events.first)
        if missing > 0:
            self._state.events.first.extend([NONE] * missing)
            self._state.events.last.extend([NONE] * missing)

    def _grow(self) -> None:
        self._rows = grow(self._state, self._rows)

    def _report(self) -> None:
        """Hands what happened to the recorder."""
        if self._recorder is None:
            return
        scalars, trace = self._state.scalars, self._state.trace
        num_traced, scalars[state.NUM_TRACED] = scalars[state.NUM_TRACED], 0
        for at in range(num_traced):
            self._recorder(Event(ACTIONS[trace.action[at]], trace.address[at], trace.size[at], trace.stream[at]))


def _figures(name: str, figures: Sequence[int]) -> dict[str, int]:
    current, peak, total = figures
    return {
        f"{name}.current": current,
        f"{name}.peak": peak,
        f"{name}.allocated": total,
        f"{name}.freed": total - current,
    }
