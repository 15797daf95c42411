"""Ordered sets of blocks (`BlockPool`): sorted columns, searched by bisection."""

from bisect import bisect_left, bisect_right
from typing import Final

from zsim.allocator.state import OrderedSet

STREAM_SHIFT: Final = 44
"""Bits below the stream in a key; sizes are counted in blocks of 512 bytes, up to 2**53 bytes."""
SIZE_SHIFT: Final = 9


def key_of(stream: int, size: int) -> int:
    """Stream first, then size (`BlockComparatorSize`); with size 0 the stream alone (`BlockComparatorAddress`)."""
    return (stream << STREAM_SHIFT) | (size >> SIZE_SHIFT)


def position(members: OrderedSet, key: int, address: int) -> int:
    """Where a block of this key and address stands or would stand."""
    length = members.length[0]
    begin = bisect_left(members.keys, key, 0, length)
    if begin == length or members.keys[begin] != key or members.addresses[begin] >= address:
        return begin
    end = bisect_right(members.keys, key, begin, length)
    return bisect_left(members.addresses, address, begin, end)


def insert(members: OrderedSet, key: int, address: int, block: int) -> None:
    """Adds a block."""
    at, length = position(members, key, address), members.length[0]
    members.keys[at + 1 : length + 1] = members.keys[at:length]
    members.addresses[at + 1 : length + 1] = members.addresses[at:length]
    members.blocks[at + 1 : length + 1] = members.blocks[at:length]
    members.keys[at] = key
    members.addresses[at] = address
    members.blocks[at] = block
    members.length[0] = length + 1


def erase_at(members: OrderedSet, at: int) -> None:
    """Takes out the block at a position."""
    length = members.length[0]
    members.keys[at : length - 1] = members.keys[at + 1 : length]
    members.addresses[at : length - 1] = members.addresses[at + 1 : length]
    members.blocks[at : length - 1] = members.blocks[at + 1 : length]
    members.length[0] = length - 1


def erase(members: OrderedSet, key: int, address: int) -> None:
    """Takes out the block of a key and address."""
    erase_at(members, position(members, key, address))
