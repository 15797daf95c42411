"""The events of a memory snapshot as calls of the allocator: what belongs to one malloc, and what to empty_cache().

An allocation records first what it found to be free (process_events), then, if the device had no room, what it waited
for and gave back, then the segment it got, and itself at last (CUDACachingAllocator.cpp, malloc). A block whose free is
completed at once was used on no other stream.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zsim.snapshot import NO_POOL, Event


class Completed(NamedTuple):
    """A freed block may serve again."""

    at: int
    """Index of the event."""
    address: int


class Malloc(NamedTuple):
    """A request that was served."""

    at: int
    """Of its "alloc"."""
    address: int
    nbytes: int
    stream: int
    completed: tuple[int, ...]
    """Blocks that the flush waited for; empty without one."""
    released: tuple[Event, ...]
    """Segments that it gave back,"""
    grown: tuple[Event, ...]
    """and what it took from the device."""


class EmptyCache(NamedTuple):
    """torch.cuda.empty_cache(), or garbage collection."""

    at: int
    completed: tuple[int, ...]
    released: tuple[Event, ...]


class OutOfMemory(NamedTuple):
    """A request that was not served."""

    at: int
    nbytes: int
    stream: int
    completed: tuple[int, ...]
    released: tuple[Event, ...]
    grown: tuple[Event, ...]
    device_free_bytes: int


class Grown(NamedTuple):
    """Memory was taken from the device for a request that came to nothing."""

    at: int
    grown: tuple[Event, ...]


Call = Completed | Malloc | EmptyCache | OutOfMemory | Grown


def calls(events: Sequence[Event]) -> Iterator[Call]:
    """In order; memory pools of CUDA graphs left out."""
    group = _Group()
    requested: int | None = None
    for index, event in enumerate(events):
        if event.pool_id != NO_POOL:
            continue
        match event.action:
            case "free_requested":
                yield from group.ended(index)
            case "free_completed" if event.address == requested:
                yield Completed(index, event.address)
            case "free_completed":
                group.completed.append((index, event.address))
            case "segment_free" | "segment_unmap":
                group.released.append(event)
            case "segment_alloc" | "segment_map":
                group.grown.append(event)
            case "alloc":
                if not (group.released and group.grown):
                    yield from group.ended(index, keep_grown=True)
                yield Malloc(index, event.address, event.size_bytes, event.stream, *group.taken())
            case "oom":
                yield OutOfMemory(index, event.size_bytes, event.stream, *group.taken(), event.device_free_bytes)
            case "snapshot":
                pass
        requested = event.address if event.action == "free_requested" else None
    yield from group.ended(len(events))


class _Group:
    """Events since the last call."""

    def __init__(self) -> None:
        self.completed: list[tuple[int, int]] = []
        self.released: list[Event] = []
        self.grown: list[Event] = []

    def taken(self) -> tuple[tuple[int, ...], tuple[Event, ...], tuple[Event, ...]]:
        """All of it, for a call that it belongs to."""
        taken = tuple(address for _, address in self.completed), tuple(self.released), tuple(self.grown)
        self.completed, self.released, self.grown = [], [], []
        return taken

    def ended(self, at: int, *, keep_grown: bool = False) -> Iterator[Call]:
        """What belongs to no malloc."""
        completed, released, grown = self.completed, self.released, self.grown
        self.completed, self.released, self.grown = [], [], grown if keep_grown else []
        if released:
            yield EmptyCache(at, tuple(address for _, address in completed), tuple(released))
        else:
            yield from (Completed(index, address) for index, address in completed)
        if grown and not keep_grown:
            yield Grown(at, tuple(grown))
