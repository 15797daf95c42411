"""Blocks: found, split, freed, merged with their neighbours; functions bear the names of the C++ code."""

from zsim.allocator.sets import erase, erase_at, insert, key_of, position
from zsim.allocator.sizes import should_split
from zsim.allocator.state import (
    ACTIVE,
    ACTIVE_BYTES,
    ALLOC,
    ALLOCATED,
    ALLOCATED_BYTES,
    ALLOCATION,
    CALLS_SMALL,
    EXPANDABLE,
    FREE,
    FREE_COMPLETED,
    GC_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    MAX_NON_SPLIT_ROUNDING,
    MAX_SPLIT,
    NEXT_BLOCK,
    NONE,
    NUM_SPARE_BLOCKS,
    OVERSIZE_ALLOCATIONS,
    REQUESTED_BYTES,
    SMALL,
    SPARE,
    UNMAPPED,
    State,
    decrease,
    increase,
    record_trace,
)


def new_block(state: State, stream: int, pool: int, address: int, size: int) -> int:
    """A block without neighbours; the caller has made sure of a spare row."""
    scalars, blocks = state.scalars, state.blocks
    block = scalars[NEXT_BLOCK]
    scalars[NEXT_BLOCK] = blocks.next[block]
    scalars[NUM_SPARE_BLOCKS] -= 1
    blocks.address[block] = address
    blocks.size[block] = size
    blocks.requested[block] = 0
    blocks.stream[block] = stream
    blocks.pool[block] = pool
    blocks.status[block] = FREE
    blocks.previous[block] = NONE
    blocks.next[block] = NONE
    blocks.num_events[block] = 0
    blocks.reservation[block] = 0
    return block


def delete_block(state: State, block: int) -> None:
    """Its row is spare again."""
    scalars, blocks = state.scalars, state.blocks
    blocks.status[block] = SPARE
    blocks.next[block] = scalars[NEXT_BLOCK]
    scalars[NEXT_BLOCK] = block
    scalars[NUM_SPARE_BLOCKS] += 1


def splice(state: State, block: int, previous: int, following: int) -> None:
    """Puts a block between two neighbours."""
    blocks = state.blocks
    blocks.previous[block] = previous
    blocks.next[block] = following
    if previous != NONE:
        blocks.next[previous] = block
    if following != NONE:
        blocks.previous[following] = block


def is_split(state: State, block: int) -> bool:
    """Whether it shares its segment with other blocks."""
    return state.blocks.previous[block] != NONE or state.blocks.next[block] != NONE


def insert_free(state: State, block: int) -> None:
    """`insert_into_blocks`: from now on it may serve requests, and its age begins."""
    blocks = state.blocks
    pool = blocks.pool[block]
    blocks.inserted_at[block] = state.scalars[CALLS_SMALL + pool]
    key = key_of(blocks.stream[block], blocks.size[block])
    insert(state.free[pool], key, blocks.address[block], block)


def erase_free(state: State, block: int) -> None:
    """Takes a block out of its pool."""
    blocks = state.blocks
    key = key_of(blocks.stream[block], blocks.size[block])
    erase(state.free[blocks.pool[block]], key, blocks.address[block])


def insert_unmapped(state: State, block: int) -> None:
    """Address space that may be mapped."""
    blocks = state.blocks
    insert(state.unmapped[blocks.pool[block]], key_of(blocks.stream[block], 0), blocks.address[block], block)


def erase_unmapped(state: State, block: int) -> None:
    """Address space that is being mapped, or merged into other such."""
    blocks = state.blocks
    erase(state.unmapped[blocks.pool[block]], key_of(blocks.stream[block], 0), blocks.address[block])


def get_free_block(state: State, pool: int, stream: int, size: int) -> int:
    """The best fit among the free blocks of a stream, taken out of the pool, or `NONE`."""
    settings, blocks, members = state.settings, state.blocks, state.free[pool]
    if settings[GC_BYTES] > 0:
        state.scalars[CALLS_SMALL + pool] += 1
    at = position(members, key_of(stream, size), 0)
    if at == members.length[0]:
        return NONE
    block = members.blocks[at]
    if blocks.stream[block] != stream:
        return NONE
    if settings[EXPANDABLE]:
        at = least_expandable(state, pool, stream, at)
        block = members.blocks[at]
    found, most = blocks.size[block], settings[MAX_SPLIT]
    # An oversize block serves no smaller request, and an oversize request none much larger than itself.
    if (size < most <= found) or (size >= most and found >= size + settings[MAX_NON_SPLIT_ROUNDING]):
        return NONE
    erase_at(members, at)
    return block


def least_expandable(state: State, pool: int, stream: int, at: int) -> int:
    """The first position from `at` on whose successor could not grow to less.

    A block before unmapped address space counts with the size that it can grow to, so that the tail of a segment is not
    cut while there are other blocks.
    """
    blocks, members = state.blocks, state.free[pool]
    while at + 1 < members.length[0]:
        following = members.blocks[at + 1]
        if blocks.stream[following] != stream:
            break
        if expandable_size(state, following) >= expandable_size(state, members.blocks[at]):
            break
        at += 1
    return at


def expandable_size(state: State, block: int) -> int:
    """What a block could grow to by mapping the address space behind it."""
    blocks = state.blocks
    following = blocks.next[block]
    if following != NONE and blocks.status[following] == UNMAPPED:
        return blocks.size[block] + blocks.size[following]
    return blocks.size[block]


def alloc_found_block(state: State, block: int, requested: int, size: int) -> int:
    """Splits a block that is in no pool where the rest is worth it, and hands out the low part."""
    blocks = state.blocks
    pool = blocks.pool[block]
    was_split, in_segment = is_split(state, block), blocks.reservation[block] == 0
    if should_split(state, pool, blocks.size[block], size):
        remaining = block
        block = new_block(state, blocks.stream[remaining], pool, blocks.address[remaining], size)
        blocks.reservation[block] = blocks.reservation[remaining]
        splice(state, block, blocks.previous[remaining], remaining)
        blocks.address[remaining] += size
        blocks.size[remaining] -= size
        insert_free(state, remaining)
        if in_segment and was_split:
            decrease(state, INACTIVE_SPLIT_BYTES, pool, size)
        elif in_segment:
            increase(state, INACTIVE_SPLIT_BYTES, pool, blocks.size[remaining])
            increase(state, INACTIVE_SPLIT, pool, 1)
    elif in_segment and was_split:
        decrease(state, INACTIVE_SPLIT_BYTES, pool, blocks.size[block])
        decrease(state, INACTIVE_SPLIT, pool, 1)
    taken = blocks.size[block]
    blocks.status[block] = ALLOCATED
    blocks.requested[block] = requested
    record_trace(state, ALLOC, blocks.address[block], requested, blocks.stream[block])
    increase(state, ALLOCATION, pool, 1)
    increase(state, ALLOCATED_BYTES, pool, taken)
    increase(state, ACTIVE, pool, 1)
    increase(state, ACTIVE_BYTES, pool, taken)
    increase(state, REQUESTED_BYTES, pool, requested)
    if taken >= state.settings[MAX_SPLIT]:
        increase(state, OVERSIZE_ALLOCATIONS, SMALL, 1)
    return block


def free_block(state: State, block: int) -> None:
    """Merges a block that nothing uses with its free neighbours and puts it into its pool."""
    blocks = state.blocks
    pool, size, requested = blocks.pool[block], blocks.size[block], blocks.requested[block]
    record_trace(state, FREE_COMPLETED, blocks.address[block], requested, blocks.stream[block])
    blocks.status[block] = FREE
    net_blocks, net_bytes = 0, 0
    for neighbour in (blocks.previous[block], blocks.next[block]):
        subsumed = try_merge(state, block, neighbour)
        if subsumed > 0:
            net_blocks -= 1
            net_bytes -= subsumed
    insert_free(state, block)
    if is_split(state, block):
        net_blocks += 1
        net_bytes += blocks.size[block]
    if blocks.reservation[block] == 0:
        change(state, INACTIVE_SPLIT, pool, net_blocks)
        change(state, INACTIVE_SPLIT_BYTES, pool, net_bytes)
    decrease(state, ACTIVE, pool, 1)
    decrease(state, ACTIVE_BYTES, pool, size)
    decrease(state, REQUESTED_BYTES, pool, requested)


def change(state: State, kind: int, pool: int, amount: int) -> None:
    """Increase or decrease, by the sign."""
    if amount > 0:
        increase(state, kind, pool, amount)
    elif amount < 0:
        decrease(state, kind, pool, -amount)


def try_merge(state: State, block: int, neighbour: int) -> int:
    """Bytes of a neighbour of the same status that `block` has swallowed, else 0.

    `block` itself is in no set; the neighbour is taken out of its own.
    """
    blocks = state.blocks
    if neighbour == NONE or blocks.status[neighbour] != blocks.status[block]:
        return 0
    if blocks.status[neighbour] == UNMAPPED:
        erase_unmapped(state, neighbour)
    else:
        erase_free(state, neighbour)
    if blocks.previous[block] == neighbour:
        blocks.address[block] = blocks.address[neighbour]
        splice(state, block, blocks.previous[neighbour], blocks.next[block])
    else:
        splice(state, block, blocks.previous[block], blocks.next[neighbour])
    subsumed = blocks.size[neighbour]
    blocks.size[block] += subsumed
    delete_block(state, neighbour)
    return subsumed
