"""Ordered sets of blocks (`BlockPool`): four in one sorted column of keys, searched by bisection.

The free blocks of the small and of the large pool in the order of (stream, size, address), and the unmapped ones of
either in that of (stream, address).
"""

from bisect import bisect_left, bisect_right
from typing import Final

from zsim.allocator.state import ADDRESS, KEYS, KEYS_END, POOL, SIZE, STATUS, STREAM, TO_MEMBER, UNMAPPED, State

UNMAPPED_SETS: Final = 2
"""A set of free blocks is known by its pool; those of unmapped blocks follow."""
SET_SHIFT: Final = 61
STREAM_SHIFT: Final = 44
"""Below it the size in units of 512 bytes, up to 2**53 bytes."""
SIZE_SHIFT: Final = 9


def key_of(which: int, stream: int, size: int) -> int:
    """Set, stream, size: all of the order but for the address."""
    return (which << SET_SHIFT) | (stream << STREAM_SHIFT) | (size >> SIZE_SHIFT)


def member(state: State, at: int) -> int:
    """The block at a position, which is that of its key in the state."""
    return state[at + state[TO_MEMBER]]


def is_of_stream(state: State, at: int, which: int, stream: int) -> bool:
    """Whether a position belongs to a stream's part of a set."""
    if at >= state[KEYS_END]:
        return False
    return state[at] >> STREAM_SHIFT == (which << (SET_SHIFT - STREAM_SHIFT)) | stream


def is_of_set(state: State, at: int, which: int) -> bool:
    """Whether a position belongs to a set."""
    return at < state[KEYS_END] and state[at] >> SET_SHIFT == which


def lower_bound(state: State, which: int, stream: int, size: int) -> int:
    """Position of the first block of at least this stream and size."""
    return bisect_left(state, key_of(which, stream, size), state[KEYS], state[KEYS_END])


def key_of_block(state: State, block: int) -> int:
    """The set follows from pool and status."""
    pool, stream = state[block + POOL], state[block + STREAM]
    if state[block + STATUS] == UNMAPPED:
        return key_of(UNMAPPED_SETS + pool, stream, 0)
    return key_of(pool, stream, state[block + SIZE])


def position(state: State, key: int, address: int) -> int:
    """Where a block of this key and address stands or would stand."""
    end = state[KEYS_END]
    low = bisect_left(state, key, state[KEYS], end)
    if low == end or state[low] != key or state[member(state, low) + ADDRESS] >= address:
        return low
    high = bisect_right(state, key, low, end)
    while low < high:
        middle = (low + high) >> 1
        if state[member(state, middle) + ADDRESS] < address:
            low = middle + 1
        else:
            high = middle
    return low


def insert(state: State, block: int) -> None:
    """Adds a block to the set that it belongs to."""
    key, end = key_of_block(state, block), state[KEYS_END]
    at = position(state, key, state[block + ADDRESS])
    block_at = at + state[TO_MEMBER]
    move(state, at, at + 1, end - at)
    move(state, block_at, block_at + 1, end - at)
    state[at] = key
    state[block_at] = block
    state[KEYS_END] = end + 1


def erase_at(state: State, at: int) -> None:
    """Takes out the block at a position."""
    end, block_at = state[KEYS_END] - 1, at + state[TO_MEMBER]
    move(state, at + 1, at, end - at)
    move(state, block_at + 1, block_at, end - at)
    state[KEYS_END] = end


def erase(state: State, block: int) -> None:
    """Takes a block out of its set."""
    erase_at(state, position(state, key_of_block(state, block), state[block + ADDRESS]))


def move(state: State, source: int, target: int, length: int) -> None:
    """`memmove`."""
    state[target : target + length] = state[source : source + length]
