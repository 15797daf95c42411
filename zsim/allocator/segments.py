"""Segments: taken from the device with cudaMalloc, given back with cudaFree, and when."""

from zsim.allocator.blocks import delete_block, is_split, new_block
from zsim.allocator.expandable import try_allocate_expandable_block, unmap_block
from zsim.allocator.sets import erase, is_of_set, is_of_stream, lower_bound, member
from zsim.allocator.sizes import segment_size
from zsim.allocator.state import (
    ADDRESS,
    ALIGNMENT,
    ALLOWED,
    CAPACITY,
    EXPANDABLE,
    GC_BYTES,
    GC_COUNT_BASE,
    KEYS,
    LARGE,
    MAX_SPLIT,
    NEXT_ADDRESS,
    NONE,
    NUM_DEVICE_ALLOC,
    NUM_DEVICE_FREE,
    NUM_SEARCHES,
    OVERSIZE_SEGMENTS,
    POOL,
    RESERVATION,
    RESERVED_BYTES,
    SEGMENT,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SIZE,
    SMALL,
    STREAM,
    State,
    current_of,
    decrease,
    increase,
    record_trace,
)
from zsim.allocator_settings import UNLIMITED


def alloc_block(state: State, pool: int, stream: int, size: int) -> int:
    """A new segment for a block of `size` bytes, in no pool; `NONE` where the device has no room."""
    nbytes, reserved = segment_size(state, size), current_of(state, RESERVED_BYTES)
    if state[CAPACITY] != UNLIMITED and reserved + nbytes > state[ALLOWED]:
        return NONE
    if state[EXPANDABLE]:
        return try_allocate_expandable_block(state, pool, stream, size)
    if reserved + nbytes > state[CAPACITY]:
        return NONE
    address = state[NEXT_ADDRESS]
    state[NEXT_ADDRESS] = (address + nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    block = new_block(state, stream, pool, address, nbytes)
    increase(state, SEGMENT, pool, 1)
    increase(state, RESERVED_BYTES, pool, nbytes)
    if nbytes >= state[MAX_SPLIT]:
        increase(state, OVERSIZE_SEGMENTS, SMALL, 1)
    state[NUM_DEVICE_ALLOC] += 1
    record_trace(state, SEGMENT_ALLOC, address, nbytes, stream)
    return block


def release_block(state: State, block: int) -> None:
    """Gives a whole free segment back to the device."""
    pool, nbytes = state[block + POOL], state[block + SIZE]
    state[NUM_DEVICE_FREE] += 1
    record_trace(state, SEGMENT_FREE, state[block + ADDRESS], nbytes, state[block + STREAM])
    decrease(state, SEGMENT, pool, 1)
    decrease(state, RESERVED_BYTES, pool, nbytes)
    if nbytes >= state[MAX_SPLIT]:
        decrease(state, OVERSIZE_SEGMENTS, SMALL, 1)
    erase(state, block)
    delete_block(state, block)


def garbage_collect_cached_blocks(state: State) -> None:
    """Gives back whole free segments of the large pool, those of at least average age first; waits for nothing."""
    target = current_of(state, RESERVED_BYTES) - state[GC_BYTES]
    if target <= 0:
        return
    searches = state[NUM_SEARCHES + LARGE]
    total_age, num_freeable = 0, 0
    begin = lower_bound(state, LARGE, 0, 0)
    at = begin
    while is_of_set(state, at, LARGE):
        if not is_split(state, member(state, at)):
            total_age += searches - state[member(state, at) + GC_COUNT_BASE]
            num_freeable += 1
        at += 1
    reclaimed, freed = 0, True
    while reclaimed < target and freed and num_freeable > 0:
        freed = False
        age_of_all, num_aged, at = total_age, num_freeable, begin
        while is_of_set(state, at, LARGE):
            block = member(state, at)
            age = searches - state[block + GC_COUNT_BASE]
            # In whole numbers: the age is below the average.
            if is_split(state, block) or state[block + RESERVATION] != 0 or age * num_aged < age_of_all:
                at += 1
                continue
            freed = True
            reclaimed += state[block + SIZE]
            total_age -= age
            num_freeable -= 1
            release_block(state, block)


def release_available_cached_blocks(state: State, pool: int, stream: int, size: int) -> bool:
    """Gives back oversize blocks of the stream, one that is large enough or several from the largest on."""
    most = state[MAX_SPLIT]
    if most == UNLIMITED:
        return False
    wanted = max(size, most)
    at = lower_bound(state, pool, stream, wanted)
    if is_of_stream(state, at, pool, stream):
        if state[member(state, at) + RESERVATION] != 0:
            return False
        release_block(state, member(state, at))
        return True
    released, at = 0, at - 1
    while at >= state[KEYS] and released < wanted and is_of_stream(state, at, pool, stream):
        block = member(state, at)
        if state[block + SIZE] < most:
            break
        if state[block + RESERVATION] == 0:
            released += state[block + SIZE]
            release_block(state, block)
        at -= 1
    return released >= wanted


def release_cached_blocks(state: State) -> None:
    """Gives back every segment that is free as a whole; the caller has merged what waited for events."""
    release_blocks(state, LARGE)
    release_blocks(state, SMALL)


def release_blocks(state: State, pool: int) -> None:
    """Whole free segments of a pool, then whole free pages of its expandable ones."""
    begin = lower_bound(state, pool, 0, 0)
    at = begin
    while is_of_set(state, at, pool):
        block = member(state, at)
        if state[block + RESERVATION] == 0 and not is_split(state, block):
            release_block(state, block)
        else:
            at += 1
    at = begin
    while is_of_set(state, at, pool):
        block = member(state, at)
        at += 1
        if state[block + RESERVATION] != 0:
            # What is left of its first and last page is smaller than it was, so it stands before the next one.
            at += unmap_block(state, block)
