"""How large: rounding of requests, pools, segments and remainders.

Constants and rules of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp.
"""

from typing import Final

from zsim.allocator.state import DIVISIONS, EXPANDABLE, LARGE, LARGE_SEGMENT, MAX_SPLIT, SMALL, State
from zsim.allocator_settings import NUM_INTERVALS

MIN_BLOCK: Final = 512
"""kMinBlockSize: every size is a multiple of it."""
SMALL_SIZE: Final = 2**20
"""kSmallSize: the largest block of the small pool."""
SMALL_BUFFER: Final = 2**21
"""kSmallBuffer: a segment of the small pool."""
MIN_LARGE_ALLOC: Final = 10 * 2**20
"""kMinLargeAlloc: smaller blocks of the large pool share segments of `large_segment_size`, 20 MiB by default."""
ROUND_LARGE: Final = 2**21
"""kRoundLarge: larger ones have a segment of their own size, rounded up to it."""
LOG_FIRST_INTERVAL: Final = 20
"""Intervals of `roundup_power2_divisions` begin at 1 MiB; smaller sizes belong to the first."""


def floor_log2(size: int) -> int:
    """Position of the highest bit."""
    log = 0
    while size > 1:
        size >>= 1
        log += 1
    return log


def divisions_of(state: State, size: int) -> int:
    """`AcceleratorAllocatorConfig::roundup_power2_divisions`."""
    interval = min(max(floor_log2(size) - LOG_FIRST_INTERVAL, 0), NUM_INTERVALS - 1)
    return state[DIVISIONS + interval]


def round_size(state: State, size: int) -> int:
    """Bytes of the block that serves a request of `size` bytes."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    divisions = divisions_of(state, size)
    if divisions > 1 and size > MIN_BLOCK * divisions:
        return next_division(size, divisions)
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def next_division(size: int, divisions: int) -> int:
    """`roundup_power2_next_division`: the space between two powers of two in equal divisions."""
    power = 1 << floor_log2(size)
    if power == size:
        return size
    division = power // divisions
    return (size + division - 1) // division * division


def pool_of(size: int) -> int:
    """`get_pool`."""
    return SMALL if size <= SMALL_SIZE else LARGE


def segment_size(state: State, size: int) -> int:
    """`get_allocation_size`: what is asked of cudaMalloc for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return state[LARGE_SEGMENT]
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def should_split(state: State, pool: int, block_size: int, size: int) -> bool:
    """Whether the rest of a block becomes a block of its own."""
    remaining = block_size - size
    if pool == SMALL or state[EXPANDABLE]:
        return remaining >= MIN_BLOCK
    return size < state[MAX_SPLIT] and remaining > SMALL_SIZE


def page_size(state: State, pool: int) -> int:
    """Of an expandable segment."""
    return SMALL_BUFFER if pool == SMALL else state[LARGE_SEGMENT]
