"""Expandable segments: address space reserved once, memory mapped into it page by page (`ExpandableSegment`)."""

from zsim.allocator.blocks import (
    delete_block,
    erase_free,
    erase_unmapped,
    insert_free,
    insert_unmapped,
    new_block,
    splice,
    try_merge,
)
from zsim.allocator.sets import key_of, position
from zsim.allocator.sizes import page_size
from zsim.allocator.state import (
    ADDRESS_SPACE,
    ALIGNMENT,
    CAPACITY,
    FREE,
    NEXT_ADDRESS,
    NONE,
    NUM_DEVICE_ALLOC,
    NUM_DEVICE_FREE,
    RESERVED_BYTES,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
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
    blocks = state.blocks
    candidate = find_expandable_block(state, pool, stream, size)
    if blocks.status[candidate] == UNMAPPED and not map_block(state, candidate, min(blocks.size[candidate], size)):
        return NONE
    while blocks.size[candidate] < size:
        # Free, and address space behind it: mapping merges the two.
        following = blocks.next[candidate]
        remaining = size - blocks.size[candidate]
        if following == NONE or not map_block(state, following, min(remaining, blocks.size[following])):
            return NONE
        candidate = following
    erase_free(state, candidate)
    return candidate


def find_expandable_block(state: State, pool: int, stream: int, size: int) -> int:
    """The lowest address with room for `size` bytes, free or not yet mapped; a new segment where there is none."""
    blocks, members = state.blocks, state.unmapped[pool]
    at = position(members, key_of(stream, 0), 0)
    while at < members.length[0]:
        candidate = members.blocks[at]
        if blocks.stream[candidate] != stream:
            break
        before = blocks.previous[candidate]
        if before != NONE and is_available(state, before):
            candidate = before
        if has_address_space(state, candidate, size):
            return candidate
        at += 1
    return reserve(state, pool, stream, size)


def is_available(state: State, block: int) -> bool:
    """Whether nothing uses it, mapped or not."""
    status = state.blocks.status[block]
    return status in (FREE, UNMAPPED)


def has_address_space(state: State, block: int, size: int) -> bool:
    """Whether unused blocks from this one on have room for `size` bytes."""
    blocks = state.blocks
    found = 0
    while found < size and block != NONE and is_available(state, block):
        found += blocks.size[block]
        block = blocks.next[block]
    return found >= size


def reserve(state: State, pool: int, stream: int, size: int) -> int:
    """A new segment (cuMemAddressReserve): 1 1/8 of the device, so that pages can move to its end."""
    scalars, blocks = state.scalars, state.blocks
    space = state.settings[ADDRESS_SPACE]
    if scalars[CAPACITY] == UNLIMITED:
        space = max(space, size)
    page = page_size(state, pool)
    space = (space + page - 1) // page * page
    address = scalars[NEXT_ADDRESS]
    scalars[NEXT_ADDRESS] = (address + space + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    block = new_block(state, stream, pool, address, space)
    blocks.status[block] = UNMAPPED
    blocks.reservation[block] = address
    insert_unmapped(state, block)
    return block


def map_block(state: State, block: int, size: int) -> bool:
    """Maps whole pages for the first `size` bytes of unmapped address space; False, and nothing, on a full device."""
    blocks = state.blocks
    pool, stream, address = blocks.pool[block], blocks.stream[block], blocks.address[block]
    page = page_size(state, pool)
    mapped = (size + page - 1) // page * page
    if current_of(state, RESERVED_BYTES) + mapped > state.scalars[CAPACITY]:
        return False
    erase_unmapped(state, block)
    blocks.status[block] = FREE
    if mapped < blocks.size[block]:
        remaining = new_block(state, stream, pool, address + mapped, blocks.size[block] - mapped)
        blocks.status[remaining] = UNMAPPED
        blocks.reservation[remaining] = blocks.reservation[block]
        splice(state, remaining, block, blocks.next[block])
        insert_unmapped(state, remaining)
        blocks.size[block] = mapped
    try_merge(state, block, blocks.previous[block])
    try_merge(state, block, blocks.next[block])
    insert_free(state, block)
    increase(state, RESERVED_BYTES, pool, mapped)
    state.scalars[NUM_DEVICE_ALLOC] += 1
    record_trace(state, SEGMENT_MAP, address, mapped, stream)
    return True


def unmap_block(state: State, block: int) -> None:
    """Gives the pages back that lie wholly in a free block, and the segment with the last of them."""
    blocks = state.blocks
    pool, stream, base = blocks.pool[block], blocks.stream[block], blocks.reservation[block]
    begin, end = blocks.address[block], blocks.address[block] + blocks.size[block]
    page = page_size(state, pool)
    first = base + (begin - base + page - 1) // page * page
    last = base + (end - base) // page * page
    if first >= last:
        return
    erase_free(state, block)
    if begin < first:
        before = new_block(state, stream, pool, begin, first - begin)
        blocks.reservation[before] = base
        splice(state, before, blocks.previous[block], block)
        insert_free(state, before)
    if last < end:
        after = new_block(state, stream, pool, last, end - last)
        blocks.reservation[after] = base
        splice(state, after, block, blocks.next[block])
        insert_free(state, after)
    blocks.address[block] = first
    blocks.size[block] = last - first
    blocks.status[block] = UNMAPPED
    try_merge(state, block, blocks.previous[block])
    try_merge(state, block, blocks.next[block])
    insert_unmapped(state, block)
    decrease(state, RESERVED_BYTES, pool, last - first)
    state.scalars[NUM_DEVICE_FREE] += 1
    record_trace(state, SEGMENT_UNMAP, first, last - first, stream)
    if blocks.previous[block] == NONE and blocks.next[block] == NONE:
        # `release_expandable_segment`: its address space goes with its last page.
        erase_unmapped(state, block)
        delete_block(state, block)
