"""An allocator put into a given state: the segments of a memory snapshot, with their blocks."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zsim.allocator.blocks import insert_free, new_block, splice
from zsim.allocator.sets import insert
from zsim.allocator.state import (
    ACTIVE,
    ACTIVE_BYTES,
    ADDRESS_SPACE,
    ALIGNMENT,
    ALLOCATED,
    ALLOCATED_BYTES,
    ALLOCATION,
    HANDLES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    MAX_SPLIT,
    NEXT_ADDRESS,
    NONE,
    OVERSIZE_ALLOCATIONS,
    OVERSIZE_SEGMENTS,
    POOL,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVATION,
    RESERVED_BYTES,
    SEGMENT,
    SIZE,
    SMALL,
    STATUS,
    UNMAPPED,
    State,
    increase,
)

Tile = tuple[int, int, int]
"""Size of a block, what was asked for, and its handle; `NONE` of a free one."""


class Home(NamedTuple):
    """What the blocks of a segment share."""

    stream: int
    pool: int
    reservation: int = 0
    """Address of an expandable segment."""


def restore_segment(state: State, address: int, home: Home, tiles: Sequence[Tile]) -> None:
    """Adds a segment that one cudaMalloc has returned; the caller has made sure of spare records."""
    nbytes = sum(size for size, _, _ in tiles)
    _add_tiles(state, address, home, tiles)
    increase(state, SEGMENT, home.pool, 1)
    increase(state, RESERVED_BYTES, home.pool, nbytes)
    if nbytes >= state[MAX_SPLIT]:
        increase(state, OVERSIZE_SEGMENTS, SMALL, 1)
    _move_on(state, address + nbytes)


def restore_expandable(state: State, home: Home, runs: Iterable[tuple[int, Sequence[Tile]]]) -> None:
    """Adds the expandable segment of a stream and pool: its reservation, in it mapped runs of blocks, by address."""
    base = at = home.reservation
    last = NONE
    for address, tiles in runs:
        if address > at:
            last = _add_unmapped(state, (at, address), home, last)
        last = _add_tiles(state, address, home, tiles, last)
        nbytes = sum(size for size, _, _ in tiles)
        increase(state, RESERVED_BYTES, home.pool, nbytes)
        at = address + nbytes
    space = max(state[ADDRESS_SPACE] // ALIGNMENT * ALIGNMENT, at - base)
    if base + space > at:
        _add_unmapped(state, (at, base + space), home, last)
    _move_on(state, base + space)


def _add_tiles(state: State, address: int, home: Home, tiles: Sequence[Tile], previous: int = NONE) -> int:
    """Blocks behind each other; returns the last one."""
    is_whole = len(tiles) == 1
    for size, requested, handle in tiles:
        block = new_block(state, home.stream, home.pool, address, size)
        state[block + RESERVATION] = home.reservation
        splice(state, block, previous, NONE)
        if handle == NONE:
            insert_free(state, block)
            if not is_whole and not home.reservation:
                increase(state, INACTIVE_SPLIT, home.pool, 1)
                increase(state, INACTIVE_SPLIT_BYTES, home.pool, size)
        else:
            _take(state, block, requested, handle)
        previous, address = block, address + size
    return previous


def _take(state: State, block: int, requested: int, handle: int) -> None:
    pool, size = state[block + POOL], state[block + SIZE]
    state[block + STATUS] = ALLOCATED
    state[block + REQUESTED] = requested
    state[state[HANDLES] + handle] = block
    for kind, amount in (
        (ALLOCATION, 1),
        (ALLOCATED_BYTES, size),
        (ACTIVE, 1),
        (ACTIVE_BYTES, size),
        (REQUESTED_BYTES, requested),
    ):
        increase(state, kind, pool, amount)
    if size >= state[MAX_SPLIT]:
        increase(state, OVERSIZE_ALLOCATIONS, SMALL, 1)


def _add_unmapped(state: State, space: tuple[int, int], home: Home, previous: int) -> int:
    """Address space without memory, from its first address to its end."""
    start, end = space
    block = new_block(state, home.stream, home.pool, start, end - start)
    state[block + STATUS] = UNMAPPED
    state[block + RESERVATION] = home.reservation
    splice(state, block, previous, NONE)
    insert(state, block)
    return block


def _move_on(state: State, end: int) -> None:
    """New segments lie behind the old ones."""
    aligned = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    state[NEXT_ADDRESS] = max(state[NEXT_ADDRESS], aligned)
