"""A memory snapshot played backwards: what the allocator held before any of its recorded events.

A snapshot has the state at its end and the last events, as many as were kept. PyTorch's viewer undoes them one by one
from the end, and so is the state at an earlier moment found here. Events that the state contradicts are an error: then
the two do not belong together, and what follows from them would be wrong.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from zsim.snapshot import NO_POOL, Block, Event, Segment, Snapshot
from zsim.units import InputError

SMALL_BUFFER_BYTES: Final = 2 * 2**20
"""kSmallBuffer of CUDACachingAllocator.cpp: a segment of the pool for small requests; others are larger."""
SMALL_SIZE_BYTES: Final = 2**20
"""kSmallSize: the largest request of that pool, and the largest rest that a block of the other pool keeps."""
_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Rewound:
    """One device of a snapshot."""

    device: int
    events: tuple[Event, ...]
    before: tuple[Segment, ...]
    """Segments before the first event."""
    states: dict[int, tuple[Segment, ...]]
    """Segments before the events that were asked for, by index."""


def _rounded(nbytes: int) -> int:
    return max(_BLOCK_BYTES, -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)


def rewind(
    snapshot: Snapshot, device: int, stops: Collection[int] = (), size_of: Callable[[int], int] = _rounded
) -> Rewound:
    """The states of a device before its events.

    Args:
        snapshot: with the events of the device.
        device: its index.
        stops: indices of events; the states before them are kept as well.
        size_of: of a block, from the bytes that were asked for; PyTorch rounds up to 512 by default.

    Raises:
        InputError: a ValueError: events and segments contradict each other; the message names the first such event.

    """
    events = snapshot.events(device)
    state = _State([segment for segment in snapshot.segments if segment.device == device], size_of)
    wanted = set(stops)
    states: dict[int, tuple[Segment, ...]] = {}
    for index in range(len(events) - 1, -1, -1):
        if events[index].pool_id == NO_POOL:
            problem = state.undo(events[index])
            if problem:
                where = f"device_traces[{device}][{index}]: {events[index].action} at {events[index].address:#x}"
                raise InputError(f"{where}: {problem}; allowed: events that lead to the segments of the snapshot")
        if index in wanted:
            states[index] = state.segments()
    return Rewound(device, events, state.segments(), states)


class _State:
    """Segments and live blocks, both by address."""

    def __init__(self, segments: list[Segment], size_of: Callable[[int], int]) -> None:
        self.size_of = size_of
        self.ranges = {segment.address: replace_blocks(segment, ()) for segment in segments}
        self.starts = sorted(self.ranges)
        self.live = {
            block.address: block for segment in segments for block in segment.blocks if block.state != "inactive"
        }

    def undo(self, event: Event) -> str:
        """Takes one event back; the contradiction, if there is one."""
        match event.action:
            case "alloc":
                return self._undo_alloc(event)
            case "free_requested":
                return self._undo_request(event)
            case "free_completed":
                return self._undo_free(event)
            case "segment_alloc" | "segment_map":
                return self._take_away(event)
            case "segment_free" | "segment_unmap":
                return self._give_back(event)
            case "oom" | "snapshot":
                return ""

    def _undo_alloc(self, event: Event) -> str:
        block = self.live.pop(event.address, None)
        if block is None:
            return "no block of the state behind it begins there"
        if event.size_bytes > block.size_bytes:
            return f"{event.size_bytes:,} bytes, but the block of the state behind it has {block.size_bytes:,}"
        return ""

    def _undo_request(self, event: Event) -> str:
        block = self.live.get(event.address)
        if block is None:
            return "no block of the state behind it begins there"
        self.live[event.address] = block._replace(state="active_allocated")
        return ""

    def _undo_free(self, event: Event) -> str:
        if event.address in self.live:
            return "a block of the state behind it begins there"
        held = self._segment_of(event.address, event.size_bytes)
        if held is None:
            return "no segment of the state behind it holds it"
        size = min(self.size_of(event.size_bytes), _end(held) - event.address)
        block = Block(event.address, size, event.size_bytes, "active_pending_free", event.frames)
        self.live[event.address] = block
        return ""

    def _take_away(self, event: Event) -> str:
        """A segment that did not exist before, or a part of an expandable one."""
        start, end = event.address, event.address + event.size_bytes
        held = self._segment_of(start, event.size_bytes)
        if held is None or (
            event.action == "segment_alloc" and (held.address, held.total_bytes) != (start, end - start)
        ):
            return "no such segment in the state behind it"
        if any(start <= address < end for address in self.live):
            return "a block is in it before it exists"
        self._remove(held.address)
        for left, right in ((held.address, start), (end, held.address + held.total_bytes)):
            if left < right:
                self._insert(replace_range(held, left, right))
        return ""

    def _give_back(self, event: Event) -> str:
        """A segment that still existed before, or a part of an expandable one, which joins its neighbours."""
        start, end = event.address, event.address + event.size_bytes
        at = bisect_right(self.starts, start)
        before = self.ranges[self.starts[at - 1]] if at else None
        after = self.ranges[self.starts[at]] if at < len(self.starts) else None
        if (before and before.address + before.total_bytes > start) or (after and after.address < end):
            return "a segment of the state behind it lies there"
        expandable = event.action == "segment_unmap"
        large = event.size_bytes != SMALL_BUFFER_BYTES
        made = Segment(start, end - start, event.stream, large, (), is_expandable=expandable)
        if expandable:
            for neighbour in (before, after):
                if neighbour and neighbour.is_expandable and neighbour.stream == event.stream:
                    left, right = min(neighbour.address, made.address), max(_end(neighbour), _end(made))
                    if right - left == neighbour.total_bytes + made.total_bytes:
                        self._remove(neighbour.address)
                        made = replace_range(neighbour, left, right)
        self._insert(made)
        return ""

    def _insert(self, segment: Segment) -> None:
        self.ranges[segment.address] = segment
        self.starts.insert(bisect_right(self.starts, segment.address), segment.address)

    def _remove(self, address: int) -> None:
        del self.ranges[address]
        del self.starts[bisect_right(self.starts, address) - 1]

    def _segment_of(self, address: int, size: int) -> Segment | None:
        """The segment that holds a range; None where no segment does."""
        at = bisect_right(self.starts, address)
        if not at:
            return None
        found = self.ranges[self.starts[at - 1]]
        return found if address + size <= _end(found) else None

    def segments(self) -> tuple[Segment, ...]:
        """In order of address, tiled by blocks."""
        live = sorted(self.live.values())
        addresses = [block.address for block in live]
        made = []
        for start in self.starts:
            segment = self.ranges[start]
            inside = live[bisect_right(addresses, start - 1) : bisect_right(addresses, _end(segment) - 1)]
            made.append(replace_blocks(segment, _tiles(segment, inside)))
        return tuple(made)


def _tiles(segment: Segment, live: list[Block]) -> tuple[Block, ...]:
    """Live blocks and what is free between them.

    How large a block was that is gone at the end is known by what was asked for; what the large pool leaves behind a
    block, up to 1 MiB, belongs to it.
    """
    tiles: list[Block] = []
    starts = [*(block.address for block in live), _end(segment)]
    if first := starts[0] - segment.address:
        tiles.append(Block(segment.address, first, 0, "inactive"))
    for block, end in zip(live, starts[1:], strict=True):
        if block.size_bytes > end - block.address:  # rounded by other settings than those of the process
            block = block._replace(size_bytes=end - block.address)  # noqa: PLW2901
        rest = end - block.address - block.size_bytes
        if rest and rest <= SMALL_SIZE_BYTES and segment.is_large and not segment.is_expandable:
            block, rest = block._replace(size_bytes=block.size_bytes + rest), 0  # noqa: PLW2901
        tiles.append(block)
        if rest:
            tiles.append(Block(end - rest, rest, 0, "inactive"))
    return tuple(tiles)


def _end(segment: Segment) -> int:
    return segment.address + segment.total_bytes


def replace_blocks(segment: Segment, blocks: tuple[Block, ...]) -> Segment:
    """The same segment with other blocks."""
    return segment._replace(blocks=blocks)


def replace_range(segment: Segment, start: int, end: int) -> Segment:
    """A part of it, or more."""
    return segment._replace(address=start, total_bytes=end - start)
