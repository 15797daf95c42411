"""Expandable segments: address space reserved once, memory mapped into it page by page (`ExpandableSegment`)."""

from zsim.allocator.blocks import delete_block, insert_free, new_block, splice, try_merge
from zsim.allocator.sets import UNMAPPED_SETS, erase, insert, is_of_stream, lower_bound, member
from zsim.allocator.sizes import page_size
from zsim.allocator.state import (
    ADDRESS,
    ADDRESS_SPACE,
    ALIGNMENT,
    CAPACITY,
    FREE,
    NEXT,
    NEXT_ADDRESS,
    NONE,
    NUM_DEVICE_ALLOC,
    NUM_DEVICE_FREE,
    POOL,
    PREVIOUS,
    RESERVATION,
    RESERVED_BYTES,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SIZE,
    STATUS,
    STREAM,
    UNMAPPED,
    State,
    current_of,
    decrease,
    increase,
    record_trace,
)
from zsim.allocator_settings import UNLIMITED


def try_allocate_expandable_block(state: State, pool: int, stream: int, size: int) -> int:
    """A block of at least `size` bytes in no pool, or `NONE` where the device is full; what was mapped stays mapped."""
    candidate = find_expandable_block(state, pool, stream, size)
    if state[candidate + STATUS] == UNMAPPED and not map_block(state, candidate, min(state[candidate + SIZE], size)):
        return NONE
    while state[candidate + SIZE] < size:
        # Free, and address space behind it: mapping merges the two.
        following = state[candidate + NEXT]
        remaining = size - state[candidate + SIZE]
        if following == NONE or not map_block(state, following, min(remaining, state[following + SIZE])):
            return NONE
        candidate = following
    erase(state, candidate)
    return candidate


def find_expandable_block(state: State, pool: int, stream: int, size: int) -> int:
    """The lowest address with room for `size` bytes, free or not yet mapped; a new segment where there is none."""
    unmapped = UNMAPPED_SETS + pool
    at = lower_bound(state, unmapped, stream, 0)
    while is_of_stream(state, at, unmapped, stream):
        candidate = member(state, at)
        before = state[candidate + PREVIOUS]
        if before != NONE and is_available(state, before):
            candidate = before
        if has_address_space(state, candidate, size):
            return candidate
        at += 1
    return reserve(state, pool, stream, size)


def is_available(state: State, block: int) -> bool:
    """Whether nothing uses it, mapped or not."""
    status = state[block + STATUS]
    return status == FREE or status == UNMAPPED  # noqa: PLR1714 - half the code once compiled


def has_address_space(state: State, block: int, size: int) -> bool:
    """Whether unused blocks from this one on have room for `size` bytes."""
    found = 0
    while found < size and block != NONE and is_available(state, block):
        found += state[block + SIZE]
        block = state[block + NEXT]
    return found >= size


def reserve(state: State, pool: int, stream: int, size: int) -> int:
    """A new segment (cuMemAddressReserve): 1 1/8 of the device, so that pages can move to its end."""
    space = state[ADDRESS_SPACE]
    if state[CAPACITY] == UNLIMITED:
        space = max(space, size)
    page = page_size(state, pool)
    space = (space + page - 1) // page * page
    address = state[NEXT_ADDRESS]
    state[NEXT_ADDRESS] = (address + space + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    block = new_block(state, stream, pool, address, space)
    state[block + STATUS] = UNMAPPED
    state[block + RESERVATION] = address
    insert(state, block)
    return block


def map_block(state: State, block: int, size: int) -> bool:
    """Maps whole pages for the first `size` bytes of unmapped address space; False, and nothing, on a full device."""
    pool, stream, address = state[block + POOL], state[block + STREAM], state[block + ADDRESS]
    page = page_size(state, pool)
    mapped = (size + page - 1) // page * page
    if current_of(state, RESERVED_BYTES) + mapped > state[CAPACITY]:
        return False
    erase(state, block)
    state[block + STATUS] = FREE
    if mapped < state[block + SIZE]:
        remaining = new_block(state, stream, pool, address + mapped, state[block + SIZE] - mapped)
        state[remaining + STATUS] = UNMAPPED
        state[remaining + RESERVATION] = state[block + RESERVATION]
        splice(state, remaining, block, state[block + NEXT])
        insert(state, remaining)
        state[block + SIZE] = mapped
    try_merge(state, block, state[block + PREVIOUS])
    try_merge(state, block, state[block + NEXT])
    insert_free(state, block)
    increase(state, RESERVED_BYTES, pool, mapped)
    state[NUM_DEVICE_ALLOC] += 1
    record_trace(state, SEGMENT_MAP, address, mapped, stream)
    return True


def unmap_block(state: State, block: int) -> int:
    """Gives the pages back that lie wholly in a free block, and the segment with the last of them.

    By how many blocks the pool has grown: -1 where the block was made of whole pages, up to 1.
    """
    pool, stream, base = state[block + POOL], state[block + STREAM], state[block + RESERVATION]
    begin, end = state[block + ADDRESS], state[block + ADDRESS] + state[block + SIZE]
    page = page_size(state, pool)
    first = base + (begin - base + page - 1) // page * page
    last = base + (end - base) // page * page
    if first >= last:
        return 0
    erase(state, block)
    grown = -1
    if begin < first:
        grown += 1
        before = new_block(state, stream, pool, begin, first - begin)
        state[before + RESERVATION] = base
        splice(state, before, state[block + PREVIOUS], block)
        insert_free(state, before)
    if last < end:
        grown += 1
        after = new_block(state, stream, pool, last, end - last)
        state[after + RESERVATION] = base
        splice(state, after, block, state[block + NEXT])
        insert_free(state, after)
    state[block + ADDRESS] = first
    state[block + SIZE] = last - first
    state[block + STATUS] = UNMAPPED
    try_merge(state, block, state[block + PREVIOUS])
    try_merge(state, block, state[block + NEXT])
    insert(state, block)
    decrease(state, RESERVED_BYTES, pool, last - first)
    state[NUM_DEVICE_FREE] += 1
    record_trace(state, SEGMENT_UNMAP, first, last - first, stream)
    if state[block + PREVIOUS] == NONE and state[block + NEXT] == NONE:
        # `release_expandable_segment`: its address space goes with its last page.
        erase(state, block)
        delete_block(state, block)
    return grown
