"""What an allocator knows: one column of integers, a list when interpreted, a row of int64 when compiled.

Single numbers stand at fixed places: `state[NUM_OOMS]`. Blocks and events are records somewhere behind them; a record
is known by its index, its fields are offsets: `state[block + SIZE]`.
"""

from typing import Final

from zsim.allocator_settings import NUM_INTERVALS

State = list[int]

NONE: Final = -1
"""No block, no event."""

# Status of a block.
SPARE: Final = -1
"""Not a block: the record waits for one."""
FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
"""Freed by the host, while streams recorded with `record_stream` may still use it."""
UNMAPPED: Final = 3
"""Address space of an expandable segment without memory behind it."""

SMALL: Final = 0
LARGE: Final = 1

# First what the settings ask for. Bytes, but for the two switches and the divisions.
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
"""First of `NUM_INTERVALS`, for sizes from 1 MiB on by powers of two."""

# Then where the columns lie within the state, and how long they are.
HANDLES: Final = DIVISIONS + NUM_INTERVALS
"""Handle of the caller -> block."""
NUM_HANDLES: Final = HANDLES + 1
QUEUES: Final = HANDLES + 2
"""First and last event of each queue: of a stream, or of all."""
NUM_STREAMS: Final = HANDLES + 3
KEYS: Final = HANDLES + 4
"""Sorted keys of the free and of the unmapped blocks, see `sets`."""
KEYS_END: Final = HANDLES + 5
TO_MEMBER: Final = HANDLES + 6
"""From a key to its block."""
TRACE: Final = HANDLES + 7
"""Records of action, address, size and stream."""
NUM_BLOCKS: Final = HANDLES + 8
"""Records, in use or spare."""
NUM_EVENTS: Final = HANDLES + 9
"""Records, in use or spare."""

# Then counters.
CAPACITY: Final = HANDLES + 10
"""Bytes that the device gives; `UNLIMITED` once an allocation has failed for good."""
NEXT_ADDRESS: Final = CAPACITY + 1
NEXT_BLOCK: Final = CAPACITY + 2
"""First spare record of a block, chained by `NEXT`."""
NUM_SPARE_BLOCKS: Final = CAPACITY + 3
NEXT_EVENT: Final = CAPACITY + 4
"""First spare record of an event, chained by `NEXT_IN_QUEUE`."""
NUM_SPARE_EVENTS: Final = CAPACITY + 5
NUM_PENDING_EVENTS: Final = CAPACITY + 6
"""Recorded and not seen to pass."""
RECORDING: Final = CAPACITY + 7
NUM_TRACED: Final = CAPACITY + 8
"""Records of the trace since its reader last set this to 0."""
NUM_ALLOC_RETRIES: Final = CAPACITY + 9
NUM_OOMS: Final = CAPACITY + 10
NUM_SYNC_ALL_STREAMS: Final = CAPACITY + 11
NUM_DEVICE_ALLOC: Final = CAPACITY + 12
NUM_DEVICE_FREE: Final = CAPACITY + 13
NUM_SEARCHES: Final = CAPACITY + 14
"""`get_free_blocks_call_count` of the small pool; that of the large one follows."""

# Then statistics: by kind and pool CURRENT, PEAK and TOTAL, behind them the peaks of both pools together.
STATISTICS: Final = CAPACITY + 16
ALLOCATION: Final = STATISTICS
SEGMENT: Final = STATISTICS + 6
ACTIVE: Final = STATISTICS + 12
INACTIVE_SPLIT: Final = STATISTICS + 18
ALLOCATED_BYTES: Final = STATISTICS + 24
RESERVED_BYTES: Final = STATISTICS + 30
ACTIVE_BYTES: Final = STATISTICS + 36
INACTIVE_SPLIT_BYTES: Final = STATISTICS + 42
REQUESTED_BYTES: Final = STATISTICS + 48
OVERSIZE_ALLOCATIONS: Final = STATISTICS + 54
OVERSIZE_SEGMENTS: Final = STATISTICS + 60
CURRENT: Final = 0
PEAK: Final = 1
TOTAL: Final = 2
"""All increases since the start."""
PEAKS: Final = STATISTICS + 66
NUM_NUMBERS: Final = PEAKS + 11

# Fields of a block (`struct Block`); neighbours are those in the same segment.
NEXT: Final = 0
"""Neighbour behind it; of a spare record the next spare one."""
PREVIOUS: Final = 1
ADDRESS: Final = 2
SIZE: Final = 3
REQUESTED: Final = 4
STREAM: Final = 5
"""Of the allocation: a block serves no other, ever."""
POOL: Final = 6
STATUS: Final = 7
EVENT_COUNT: Final = 8
"""Events recorded behind it that have not passed."""
GC_COUNT_BASE: Final = 9
"""Searches of its pool before it became free."""
RESERVATION: Final = 10
"""Address of the expandable segment that it lies in; 0 outside of one."""
BLOCK_WORDS: Final = 11

# Fields of an event: it has passed once `stream` has finished `AWAITED` items.
NEXT_IN_QUEUE: Final = 0
EVENT_BLOCK: Final = 1
EVENT_STREAM: Final = 2
AWAITED: Final = 3
EVENT_WORDS: Final = 4

# A record of `trace`.
TRACE_WORDS: Final = 4

FIRST_ADDRESS: Final = 0x7F00_0000_0000
ALIGNMENT: Final = 2**21
"""Of an address that cudaMalloc or cuMemAddressReserve returns."""


def increase(state: State, kind: int, pool: int, amount: int) -> None:
    """`Stat::increase` of a pool and of both together."""
    at = kind + 3 * pool
    current = state[at] + amount
    state[at] = current
    state[at + TOTAL] += amount
    state[at + PEAK] = max(state[at + PEAK], current)
    both = current + state[kind + 3 - 3 * pool]
    peak = PEAKS + (kind - STATISTICS) // 6
    state[peak] = max(state[peak], both)


def decrease(state: State, kind: int, pool: int, amount: int) -> None:
    """`Stat::decrease`."""
    state[kind + 3 * pool] -= amount


def current_of(state: State, kind: int) -> int:
    """Of both pools."""
    return state[kind] + state[kind + 3]


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
    if state[RECORDING] == 0:
        return
    at = state[TRACE] + TRACE_WORDS * state[NUM_TRACED]
    state[at] = action
    state[at + 1] = address
    state[at + 2] = size
    state[at + 3] = stream
    state[NUM_TRACED] += 1
