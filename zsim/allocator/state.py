"""What an allocator knows, as columns of integers: a row of each block column is a `Block` of the C++ code.

A column is a list when interpreted and a slice of int64 when compiled; functions only index it, assign slices of equal
length, and bisect it.
"""

from typing import Final, NamedTuple

from zsim.allocator_settings import NUM_INTERVALS

Column = list[int]

NONE: Final = -1
"""No block, no item."""

# Status of a block.
SPARE: Final = -1
"""Not a block: the row waits for one."""
FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
"""Freed by the host, while streams recorded with `record_stream` may still use it."""
UNMAPPED: Final = 3
"""Address space of an expandable segment without memory behind it."""

SMALL: Final = 0
LARGE: Final = 1

# `settings`: what the rules ask for. Bytes, but for the two switches and the divisions.
LARGE_SEGMENT: Final = 0
MAX_SPLIT: Final = 1
MAX_NON_SPLIT_ROUNDING: Final = 2
GC_BYTES: Final = 3
"""Reserved bytes above which garbage is collected; 0 for never."""
EXPANDABLE: Final = 4
GLOBAL_QUEUE: Final = 5
ADDRESS_SPACE: Final = 6
"""Of an expandable segment: 1 1/8 of the device."""
ALLOWED: Final = 7
"""Reserved bytes that `per_process_memory_fraction` allows; `UNLIMITED` without it."""
DIVISIONS: Final = 8
"""First of `NUM_INTERVALS` entries, for sizes from 1 MiB on by powers of two."""
NUM_SETTINGS: Final = DIVISIONS + NUM_INTERVALS

# `scalars`: single numbers that change.
CAPACITY: Final = 0
"""Bytes that the device gives; `UNLIMITED` once an allocation has failed for good."""
NEXT_ADDRESS: Final = 1
NEXT_BLOCK: Final = 2
"""First spare row of the block columns, chained by `next`."""
NUM_SPARE_BLOCKS: Final = 3
NEXT_ITEM: Final = 4
"""First spare row of the event columns, chained by `item_next`."""
NUM_SPARE_ITEMS: Final = 5
NUM_ITEMS: Final = 6
"""Events recorded that have not passed yet."""
NUM_TRACED: Final = 7
RECORDING: Final = 8
NUM_ALLOC_RETRIES: Final = 9
NUM_OOMS: Final = 10
NUM_SYNC_ALL_STREAMS: Final = 11
NUM_DEVICE_ALLOC: Final = 12
NUM_DEVICE_FREE: Final = 13
CALLS_SMALL: Final = 14
"""`get_free_blocks_call_count` of the small pool; that of the large one follows."""
NUM_SCALARS: Final = 16

# `statistics`: by kind and pool CURRENT, PEAK and TOTAL, behind them the peaks of both pools together.
ALLOCATION: Final = 0
SEGMENT: Final = 1
ACTIVE: Final = 2
INACTIVE_SPLIT: Final = 3
ALLOCATED_BYTES: Final = 4
RESERVED_BYTES: Final = 5
ACTIVE_BYTES: Final = 6
INACTIVE_SPLIT_BYTES: Final = 7
REQUESTED_BYTES: Final = 8
OVERSIZE_ALLOCATIONS: Final = 9
OVERSIZE_SEGMENTS: Final = 10
NUM_KINDS: Final = 11
CURRENT: Final = 0
PEAK: Final = 1
TOTAL: Final = 2
"""All increases since the start."""
PEAK_OF_BOTH: Final = 6 * NUM_KINDS
NUM_STATISTICS: Final = 7 * NUM_KINDS

FIRST_ADDRESS: Final = 0x7F00_0000_0000
ALIGNMENT: Final = 2**21
"""Of an address that cudaMalloc or cuMemAddressReserve returns."""


class OrderedSet(NamedTuple):
    """Blocks in the order of (key, address), as `std::set` holds them; the first `length[0]` rows count."""

    keys: Column
    addresses: Column
    blocks: Column
    length: Column


class Blocks(NamedTuple):
    """`struct Block`; neighbours are those in the same segment."""

    address: Column
    size: Column
    requested: Column
    stream: Column
    """Of the allocation: a block serves no other, ever."""
    pool: Column
    status: Column
    previous: Column
    next: Column
    num_events: Column
    """`event_count`: recorded behind it and not passed."""
    inserted_at: Column
    """`gc_count_base`: calls of `get_free_block` when it became free."""
    reservation: Column
    """Address of the expandable segment it lies in; 0 outside of one."""


class Events(NamedTuple):
    """Queues of (event, block), one a stream or one for all; an event is the `awaited`-th item of a stream."""

    first: Column
    last: Column
    block: Column
    stream: Column
    awaited: Column
    item_next: Column


class Trace(NamedTuple):
    """What happened since the reader last emptied it (`NUM_TRACED` rows)."""

    action: Column
    address: Column
    size: Column
    stream: Column


class State(NamedTuple):
    """One device's allocator (`DeviceCachingAllocator`)."""

    settings: Column
    scalars: Column
    statistics: Column
    blocks: Blocks
    free: tuple[OrderedSet, OrderedSet]
    """Small and large pool, by (stream, size, address)."""
    unmapped: tuple[OrderedSet, OrderedSet]
    """Of the two pools, by (stream, address)."""
    events: Events
    block_of: Column
    """Handle of the caller -> block."""
    trace: Trace


def increase(state: State, kind: int, pool: int, amount: int) -> None:
    """`Stat::increase` of a pool and of both together."""
    statistics = state.statistics
    at = 6 * kind + 3 * pool
    current = statistics[at] + amount
    statistics[at] = current
    statistics[at + TOTAL] += amount
    statistics[at + PEAK] = max(statistics[at + PEAK], current)
    both = current + statistics[6 * kind + 3 * (1 - pool)]
    statistics[PEAK_OF_BOTH + kind] = max(statistics[PEAK_OF_BOTH + kind], both)


def decrease(state: State, kind: int, pool: int, amount: int) -> None:
    """`Stat::decrease`."""
    state.statistics[6 * kind + 3 * pool] -= amount


def current_of(state: State, kind: int) -> int:
    """Of both pools."""
    return state.statistics[6 * kind] + state.statistics[6 * kind + 3]


# Actions of a trace, as torch.cuda.memory names them.
ALLOC: Final = 0
FREE_REQUESTED: Final = 1
FREE_COMPLETED: Final = 2
SEGMENT_ALLOC: Final = 3
SEGMENT_FREE: Final = 4
SEGMENT_MAP: Final = 5
SEGMENT_UNMAP: Final = 6
OUT_OF_MEMORY: Final = 7
"""Its address is the free memory of the device."""


def record_trace(state: State, action: int, address: int, size: int, stream: int) -> None:
    """Notes what happened, where somebody wants to know."""
    scalars, trace = state.scalars, state.trace
    if scalars[RECORDING] == 0:
        return
    at = scalars[NUM_TRACED]
    trace.action[at] = action
    trace.address[at] = address
    trace.size[at] = size
    trace.stream[at] = stream
    scalars[NUM_TRACED] = at + 1
