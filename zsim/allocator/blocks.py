"""Blocks: found, split, freed, merged with their neighbours; functions bear the names of the C++ code."""

from zsim.allocator.sets import erase, erase_at, insert, is_of_stream, lower_bound, member
from zsim.allocator.sizes import should_split
from zsim.allocator.state import (
    ACTIVE,
    ACTIVE_BYTES,
    ADDRESS,
    ALLOC,
    ALLOCATED,
    ALLOCATED_BYTES,
    ALLOCATION,
    EVENT_COUNT,
    EXPANDABLE,
    FREE,
    FREE_COMPLETED,
    GC_BYTES,
    GC_COUNT_BASE,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    MAX_NON_SPLIT_ROUNDING,
    MAX_SPLIT,
    NEXT,
    NEXT_BLOCK,
    NONE,
    NUM_SEARCHES,
    NUM_SPARE_BLOCKS,
    OVERSIZE_ALLOCATIONS,
    POOL,
    PREVIOUS,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVATION,
    SIZE,
    SMALL,
    SPARE,
    STATUS,
    STREAM,
    UNMAPPED,
    State,
    decrease,
    increase,
    record_trace,
)


def new_block(state: State, stream: int, pool: int, address: int, size: int) -> int:
    """A block without neighbours; the caller has made sure of a spare record."""
    block = state[NEXT_BLOCK]
    state[NEXT_BLOCK] = state[block + NEXT]
    state[NUM_SPARE_BLOCKS] -= 1
    state[block + ADDRESS] = address
    state[block + SIZE] = size
    state[block + REQUESTED] = 0
    state[block + STREAM] = stream
    state[block + POOL] = pool
    state[block + STATUS] = FREE
    state[block + PREVIOUS] = NONE
    state[block + NEXT] = NONE
    state[block + EVENT_COUNT] = 0
    state[block + RESERVATION] = 0
    return block


def delete_block(state: State, block: int) -> None:
    """Its record is spare again."""
    state[block + STATUS] = SPARE
    state[block + NEXT] = state[NEXT_BLOCK]
    state[NEXT_BLOCK] = block
    state[NUM_SPARE_BLOCKS] += 1


def splice(state: State, block: int, previous: int, following: int) -> None:
    """Puts a block between two neighbours."""
    state[block + PREVIOUS] = previous
    state[block + NEXT] = following
    if previous != NONE:
        state[previous + NEXT] = block
    if following != NONE:
        state[following + PREVIOUS] = block


def is_split(state: State, block: int) -> bool:
    """Whether it shares its segment with other blocks."""
    return state[block + PREVIOUS] != NONE or state[block + NEXT] != NONE


def insert_free(state: State, block: int) -> None:
    """`insert_into_blocks`: from now on it may serve requests, and its age begins."""
    state[block + GC_COUNT_BASE] = state[NUM_SEARCHES + state[block + POOL]]
    insert(state, block)


def get_free_block(state: State, pool: int, stream: int, size: int) -> int:
    """The best fit among the free blocks of a stream, taken out of the pool, or `NONE`."""
    if state[GC_BYTES] > 0:
        state[NUM_SEARCHES + pool] += 1
    at = lower_bound(state, pool, stream, size)
    if not is_of_stream(state, at, pool, stream):
        return NONE
    if state[EXPANDABLE]:
        at = least_expandable(state, pool, stream, at)
    block = member(state, at)
    found, most = state[block + SIZE], state[MAX_SPLIT]
    # An oversize block serves no smaller request, and an oversize request none much larger than itself.
    if (size < most <= found) or (size >= most and found >= size + state[MAX_NON_SPLIT_ROUNDING]):
        return NONE
    erase_at(state, at)
    return block


def least_expandable(state: State, pool: int, stream: int, at: int) -> int:
    """The first position from `at` on whose successor could not grow to less.

    A block before unmapped address space counts with the size that it can grow to, so that the tail of a segment is not
    cut while there are other blocks.
    """
    while is_of_stream(state, at + 1, pool, stream):
        if expandable_size(state, member(state, at + 1)) >= expandable_size(state, member(state, at)):
            break
        at += 1
    return at


def expandable_size(state: State, block: int) -> int:
    """What a block could grow to by mapping the address space behind it."""
    following = state[block + NEXT]
    if following != NONE and state[following + STATUS] == UNMAPPED:
        return state[block + SIZE] + state[following + SIZE]
    return state[block + SIZE]


def alloc_found_block(state: State, block: int, requested: int, size: int) -> int:
    """Splits a block that is in no pool where the rest is worth it, and hands out the low part."""
    pool, stream = state[block + POOL], state[block + STREAM]
    was_split, in_segment = is_split(state, block), state[block + RESERVATION] == 0
    if should_split(state, pool, state[block + SIZE], size):
        remaining = block
        block = new_block(state, stream, pool, state[remaining + ADDRESS], size)
        state[block + RESERVATION] = state[remaining + RESERVATION]
        splice(state, block, state[remaining + PREVIOUS], remaining)
        state[remaining + ADDRESS] += size
        state[remaining + SIZE] -= size
        insert_free(state, remaining)
        if in_segment and was_split:
            decrease(state, INACTIVE_SPLIT_BYTES, pool, size)
        elif in_segment:
            increase(state, INACTIVE_SPLIT_BYTES, pool, state[remaining + SIZE])
            increase(state, INACTIVE_SPLIT, pool, 1)
    elif in_segment and was_split:
        decrease(state, INACTIVE_SPLIT_BYTES, pool, state[block + SIZE])
        decrease(state, INACTIVE_SPLIT, pool, 1)
    taken = state[block + SIZE]
    state[block + STATUS] = ALLOCATED
    state[block + REQUESTED] = requested
    record_trace(state, ALLOC, state[block + ADDRESS], requested, stream)
    increase(state, ALLOCATION, pool, 1)
    increase(state, ALLOCATED_BYTES, pool, taken)
    increase(state, ACTIVE, pool, 1)
    increase(state, ACTIVE_BYTES, pool, taken)
    increase(state, REQUESTED_BYTES, pool, requested)
    if taken >= state[MAX_SPLIT]:
        increase(state, OVERSIZE_ALLOCATIONS, SMALL, 1)
    return block


def free_block(state: State, block: int) -> None:
    """Merges a block that nothing uses with its free neighbours and puts it into its pool."""
    pool, size, requested = state[block + POOL], state[block + SIZE], state[block + REQUESTED]
    record_trace(state, FREE_COMPLETED, state[block + ADDRESS], requested, state[block + STREAM])
    state[block + STATUS] = FREE
    net_blocks, net_bytes = 0, 0
    for neighbour in (state[block + PREVIOUS], state[block + NEXT]):
        subsumed = try_merge(state, block, neighbour)
        if subsumed > 0:
            net_blocks -= 1
            net_bytes -= subsumed
    insert_free(state, block)
    if is_split(state, block):
        net_blocks += 1
        net_bytes += state[block + SIZE]
    if state[block + RESERVATION] == 0:
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
    if neighbour == NONE or state[neighbour + STATUS] != state[block + STATUS]:
        return 0
    erase(state, neighbour)
    if state[block + PREVIOUS] == neighbour:
        state[block + ADDRESS] = state[neighbour + ADDRESS]
        splice(state, block, state[neighbour + PREVIOUS], state[block + NEXT])
    else:
        splice(state, block, state[block + PREVIOUS], state[neighbour + NEXT])
    subsumed = state[neighbour + SIZE]
    state[block + SIZE] += subsumed
    delete_block(state, neighbour)
    return subsumed
