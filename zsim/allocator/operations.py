"""What a program asks of its allocator: malloc, free, record_stream, empty_cache.

`DeviceCachingAllocator::malloc` in two halves, because the wait for events between them takes time, which is not known
here: `malloc` ends with `FLUSH` where it would call `release_cached_blocks`, and `flush_and_malloc` goes on from there.

Records are limited. A function that returns `FULL` has changed nothing: its caller makes room and calls again.
"""

from typing import Final

from zsim.allocator.blocks import alloc_found_block, free_block, get_free_block
from zsim.allocator.events import insert_event, synchronize_and_free_events
from zsim.allocator.segments import (
    alloc_block,
    garbage_collect_cached_blocks,
    release_available_cached_blocks,
    release_cached_blocks,
)
from zsim.allocator.sizes import pool_of, round_size
from zsim.allocator.state import (
    ADDRESS,
    ALLOCATED_BYTES,
    ALLOCATION,
    CAPACITY,
    EVENT_COUNT,
    EXPANDABLE,
    FREE_REQUESTED,
    GC_BYTES,
    HANDLES,
    KEYS,
    KEYS_END,
    MAX_SPLIT,
    NONE,
    NUM_ALLOC_RETRIES,
    NUM_OOMS,
    NUM_PENDING_EVENTS,
    NUM_SPARE_BLOCKS,
    NUM_SPARE_EVENTS,
    OUT_OF_MEMORY,
    OVERSIZE_ALLOCATIONS,
    PENDING,
    POOL,
    REQUESTED,
    RESERVED_BYTES,
    SIZE,
    SMALL,
    STATUS,
    STREAM,
    State,
    current_of,
    decrease,
    record_trace,
)
from zsim.allocator_settings import UNLIMITED

FULL: Final = -1
"""No spare records; nothing has changed."""
HIT: Final = 0
"""Served from the cache."""
GROWN: Final = 1
"""Served from a new segment or new pages."""
FLUSH: Final = 2
"""The device has no room: the caller waits for all events, then calls `flush_and_malloc`."""
OOM: Final = 3
"""No room after the flush either. From here on the device is taken to be without end, so that the run goes on."""

EMPTY: Final = -2
"""Block of a request of no bytes: no block."""

BLOCKS_PER_MALLOC: Final = 4
"""Blocks that a malloc adds at most: a segment or reservation, what is left unmapped of it, and a remainder."""


def malloc(state: State, handle: int, nbytes: int, stream: int) -> int:
    """Takes `nbytes` for `handle` from the pool of `stream`: `HIT`, `GROWN`, `FLUSH` or `FULL`.

    The caller processes events before. On `FLUSH` no block was taken, but oversize blocks may have been given back.
    """
    if nbytes == 0:
        state[state[HANDLES] + handle] = EMPTY
        return HIT
    if state[NUM_SPARE_BLOCKS] < BLOCKS_PER_MALLOC:
        return FULL
    size = round_size(state, nbytes)
    pool = pool_of(size)
    block = get_free_block(state, pool, stream, size)
    outcome = HIT
    if block == NONE:
        outcome = GROWN
        if state[GC_BYTES] > 0:
            garbage_collect_cached_blocks(state)
        block = alloc_block(state, pool, stream, size)
        if block == NONE and release_available_cached_blocks(state, pool, stream, size):
            block = alloc_block(state, pool, stream, size)
        if block == NONE:
            return FLUSH
    state[state[HANDLES] + handle] = alloc_found_block(state, block, nbytes, size)
    return outcome


def flush_and_malloc(state: State, handle: int, nbytes: int, stream: int) -> int:
    """Gives back every free segment and asks the device again: `GROWN`, `OOM` or `FULL`.

    As in the C++ code the pools are not searched again, although the events have just filled them.
    """
    if state[NUM_SPARE_BLOCKS] < BLOCKS_PER_MALLOC or lacks_blocks_to_flush(state):
        return FULL
    size = round_size(state, nbytes)
    pool = pool_of(size)
    synchronize_and_free_events(state)
    release_cached_blocks(state)
    state[NUM_ALLOC_RETRIES] += 1
    outcome = GROWN
    block = alloc_block(state, pool, stream, size)
    if block == NONE:
        outcome = OOM
        state[NUM_OOMS] += 1
        free_bytes = state[CAPACITY] - current_of(state, RESERVED_BYTES)
        record_trace(state, OUT_OF_MEMORY, free_bytes, size, stream)
        state[CAPACITY] = UNLIMITED
        block = alloc_block(state, pool, stream, size)
    state[state[HANDLES] + handle] = alloc_found_block(state, block, nbytes, size)
    return outcome


def empty_cache(state: State) -> int:
    """`torch.cuda.empty_cache()`, its events waited for by the caller: `HIT` or `FULL`."""
    if lacks_blocks_to_flush(state):
        return FULL
    synchronize_and_free_events(state)
    release_cached_blocks(state)
    return HIT


def lacks_blocks_to_flush(state: State) -> bool:
    """Unmapping leaves up to two pieces of each free block."""
    needed = 2 * (state[KEYS_END] - state[KEYS] + state[NUM_PENDING_EVENTS] + 1)
    return state[EXPANDABLE] != 0 and state[NUM_SPARE_BLOCKS] < needed


def record_stream(state: State, handle: int, stream: int, count: int) -> int:
    """The block is used on another stream, whose event is the `count`-th item there: `HIT` or `FULL`.

    To be called right before `free`, because that is when the events are recorded. A use on the block's own stream is
    none.
    """
    if state[NUM_SPARE_EVENTS] == 0:
        return FULL
    block = state[state[HANDLES] + handle]
    if block != EMPTY and state[block + STREAM] != stream:
        insert_event(state, block, stream, count)
    return HIT


def free(state: State, handle: int) -> None:
    """Gives a block back: at once, or behind the events recorded for it."""
    block = state[state[HANDLES] + handle]
    state[state[HANDLES] + handle] = NONE
    if block == EMPTY:
        return
    pool, size = state[block + POOL], state[block + SIZE]
    state[block + STATUS] = PENDING
    decrease(state, ALLOCATION, pool, 1)
    decrease(state, ALLOCATED_BYTES, pool, size)
    record_trace(state, FREE_REQUESTED, state[block + ADDRESS], state[block + REQUESTED], state[block + STREAM])
    if size >= state[MAX_SPLIT]:
        decrease(state, OVERSIZE_ALLOCATIONS, SMALL, 1)
    if state[block + EVENT_COUNT] == 0:
        free_block(state, block)
