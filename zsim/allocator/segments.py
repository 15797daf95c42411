"""Segments: taken from the device with cudaMalloc, given back with cudaFree, and when."""

from zsim.allocator.blocks import delete_block, erase_free, is_split, new_block
from zsim.allocator.expandable import try_allocate_expandable_block, unmap_block
from zsim.allocator.sets import key_of, position
from zsim.allocator.sizes import segment_size
from zsim.allocator.state import (
    ALIGNMENT,
    ALLOWED,
    CALLS_SMALL,
    CAPACITY,
    EXPANDABLE,
    GC_BYTES,
    LARGE,
    MAX_SPLIT,
    NEXT_ADDRESS,
    NONE,
    NUM_DEVICE_ALLOC,
    NUM_DEVICE_FREE,
    OVERSIZE_SEGMENTS,
    RESERVED_BYTES,
    SEGMENT,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SMALL,
    State,
    current_of,
    decrease,
    increase,
    record_trace,
)
from zsim.allocator_settings import UNLIMITED


def alloc_block(state: State, pool: int, stream: int, size: int) -> int:
    """A new segment for a block of `size` bytes, in no pool; `NONE` where the device has no room."""
    settings, scalars = state.settings, state.scalars
    nbytes, reserved = segment_size(state, size), current_of(state, RESERVED_BYTES)
    if scalars[CAPACITY] != UNLIMITED and reserved + nbytes > settings[ALLOWED]:
        return NONE
    if settings[EXPANDABLE]:
        return try_allocate_expandable_block(state, pool, stream, size)
    if reserved + nbytes > scalars[CAPACITY]:
        return NONE
    address = scalars[NEXT_ADDRESS]
    scalars[NEXT_ADDRESS] = (address + nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    block = new_block(state, stream, pool, address, nbytes)
    increase(state, SEGMENT, pool, 1)
    increase(state, RESERVED_BYTES, pool, nbytes)
    if nbytes >= settings[MAX_SPLIT]:
        increase(state, OVERSIZE_SEGMENTS, SMALL, 1)
    scalars[NUM_DEVICE_ALLOC] += 1
    record_trace(state, SEGMENT_ALLOC, address, nbytes, stream)
    return block


def release_block(state: State, block: int) -> None:
    """Gives a whole free segment back to the device."""
    blocks = state.blocks
    pool, nbytes = blocks.pool[block], blocks.size[block]
    state.scalars[NUM_DEVICE_FREE] += 1
    record_trace(state, SEGMENT_FREE, blocks.address[block], nbytes, blocks.stream[block])
    decrease(state, SEGMENT, pool, 1)
    decrease(state, RESERVED_BYTES, pool, nbytes)
    if nbytes >= state.settings[MAX_SPLIT]:
        decrease(state, OVERSIZE_SEGMENTS, SMALL, 1)
    erase_free(state, block)
    delete_block(state, block)


def garbage_collect_cached_blocks(state: State) -> None:
    """Gives back whole free segments of the large pool, those of at least average age first; waits for nothing."""
    target = current_of(state, RESERVED_BYTES) - state.settings[GC_BYTES]
    if target <= 0:
        return
    blocks, members = state.blocks, state.free[LARGE]
    calls = state.scalars[CALLS_SMALL + LARGE]
    total_age, num_freeable = 0, 0
    for at in range(members.length[0]):
        block = members.blocks[at]
        if not is_split(state, block):
            total_age += calls - blocks.inserted_at[block]
            num_freeable += 1
    reclaimed, freed = 0, True
    while reclaimed < target and freed and num_freeable > 0:
        freed = False
        age_threshold, num_aged, at = total_age, num_freeable, 0
        while at < members.length[0]:
            block = members.blocks[at]
            age = calls - blocks.inserted_at[block]
            # age >= average, in whole numbers.
            if is_split(state, block) or age * num_aged < age_threshold or blocks.reservation[block] != 0:
                at += 1
                continue
            freed = True
            reclaimed += blocks.size[block]
            total_age -= age
            num_freeable -= 1
            release_block(state, block)


def release_available_cached_blocks(state: State, pool: int, stream: int, size: int) -> bool:
    """Gives back oversize blocks of the stream, one that is large enough or several from the largest on."""
    most = state.settings[MAX_SPLIT]
    if most == UNLIMITED:
        return False
    blocks, members = state.blocks, state.free[pool]
    wanted = max(size, most)
    at = position(members, key_of(stream, wanted), 0)
    if at < members.length[0] and blocks.stream[members.blocks[at]] == stream:
        if blocks.reservation[members.blocks[at]] != 0:
            return False
        release_block(state, members.blocks[at])
        return True
    released, at = 0, at - 1
    while at >= 0 and released < wanted:
        block = members.blocks[at]
        if blocks.size[block] < most or blocks.stream[block] != stream:
            break
        if blocks.reservation[block] == 0:
            released += blocks.size[block]
            release_block(state, block)
        at -= 1
    return released >= wanted


def release_cached_blocks(state: State) -> None:
    """Gives back every segment that is free as a whole; the caller has merged what waited for events."""
    release_blocks(state, LARGE)
    release_blocks(state, SMALL)


def release_blocks(state: State, pool: int) -> None:
    """Whole free segments of a pool, then whole free pages of its expandable ones."""
    blocks, members = state.blocks, state.free[pool]
    at = 0
    while at < members.length[0]:
        block = members.blocks[at]
        if blocks.reservation[block] == 0 and not is_split(state, block):
            release_block(state, block)
        else:
            at += 1
    at = 0
    while at < members.length[0]:
        block, length = members.blocks[at], members.length[0]
        if blocks.reservation[block] != 0:
            unmap_block(state, block)
        # What is left of its first and last page is smaller, so it now stands before the next one.
        at += members.length[0] - length + 1
