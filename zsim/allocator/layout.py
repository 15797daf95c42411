"""A state made and enlarged: columns behind the numbers, records of blocks and events behind these."""

from typing import Final, NamedTuple

from zsim.allocator.state import (
    ADDRESS_SPACE,
    ALLOWED,
    BLOCK_WORDS,
    CAPACITY,
    DIVISIONS,
    EVENT_WORDS,
    EXPANDABLE,
    FIRST_ADDRESS,
    GC_BYTES,
    GLOBAL_QUEUE,
    HANDLES,
    KEYS,
    KEYS_END,
    LARGE_SEGMENT,
    MAX_NON_SPLIT_ROUNDING,
    MAX_SPLIT,
    NEXT_ADDRESS,
    NEXT_BLOCK,
    NEXT_EVENT,
    NONE,
    NUM_BLOCKS,
    NUM_EVENTS,
    NUM_NUMBERS,
    QUEUES,
    RECORDING,
    TO_MEMBER,
    TRACE,
    TRACE_WORDS,
    State,
)
from zsim.allocator_settings import NUM_INTERVALS, UNLIMITED, AllocatorSettings

_MOST_ADDRESS_SPACE: Final = 2**50
"""Of a device without end: addresses stay within int64."""


class Room(NamedTuple):
    """How many of each a state has room for; 32 bytes a handle and stream, some 100 a block."""

    blocks: int = 256
    """In use at a time, free ones and reserved address space among them."""
    events: int = 256
    streams: int = 4
    handles: int = 256


def numbers(settings: AllocatorSettings, capacity_bytes: int, device_bytes: int, *, records: bool = False) -> State:
    """The begin of a state that holds nothing and has room for nothing, `lay_out` to follow."""
    fraction = settings.per_process_memory_fraction
    allowed = int(fraction * device_bytes) if fraction > 0 else UNLIMITED
    collects = fraction > 0 and settings.garbage_collection_threshold > 0
    state = [0] * NUM_NUMBERS
    state[LARGE_SEGMENT] = settings.large_segment_bytes
    state[MAX_SPLIT] = settings.max_split_bytes
    state[MAX_NON_SPLIT_ROUNDING] = settings.max_non_split_rounding_bytes
    state[GC_BYTES] = max(int(settings.garbage_collection_threshold * allowed), 1) if collects else 0
    state[EXPANDABLE] = int(settings.expandable_segments)
    state[GLOBAL_QUEUE] = int(settings.one_event_queue)
    state[ADDRESS_SPACE] = min(device_bytes + device_bytes // 8, _MOST_ADDRESS_SPACE)
    state[ALLOWED] = allowed
    state[DIVISIONS : DIVISIONS + NUM_INTERVALS] = settings.roundup_power2_divisions
    state[CAPACITY] = capacity_bytes
    state[NEXT_ADDRESS] = FIRST_ADDRESS
    state[NEXT_BLOCK] = state[NEXT_EVENT] = NONE
    state[RECORDING] = int(records)
    return state


def new_state(room: Room, start: State) -> State:
    """A list that begins with the numbers of `start`."""
    state = start + [0] * words_of(room, start)
    lay_out(state, len(start), room)
    return state


def enlarge(state: State, room: Room) -> None:
    """More room in a state that is a list; `room` names all of it, what there was included."""
    begin = len(state)
    state.extend([0] * words_of(room, state))
    lay_out(state, begin, room)


def words_of(room: Room, state: State) -> int:
    """Numbers that `lay_out` needs behind a state: all columns anew, and the records that there are not yet."""
    columns = room.handles + 2 * room.streams + 2 * room.blocks + trace_words(state, room)
    new_blocks, new_events = room.blocks - state[NUM_BLOCKS], room.events - state[NUM_EVENTS]
    return columns + BLOCK_WORDS * new_blocks + EVENT_WORDS * new_events


def trace_words(state: State, room: Room) -> int:
    """No operation notes more than two events a block and one an event of a queue."""
    return TRACE_WORDS * (2 * room.blocks + room.events) if state[RECORDING] else 0


def lay_out(state: State, begin: int, room: Room) -> None:
    """Moves the columns to `begin` and behind, longer now, and adds records; nothing else moves."""
    begin = move_column(state, HANDLES, begin, 1, room.handles)
    begin = move_column(state, QUEUES, begin, 2, room.streams)
    old, length = state[KEYS], state[KEYS_END] - state[KEYS]
    for at in range(length):
        state[begin + at] = state[old + at]
        state[begin + room.blocks + at] = state[old + state[TO_MEMBER] + at]
    state[KEYS] = begin
    state[KEYS_END] = begin + length
    state[TO_MEMBER] = room.blocks
    state[TRACE] = begin + 2 * room.blocks
    begin = state[TRACE] + trace_words(state, room)
    begin = add_records(state, NEXT_BLOCK, begin, BLOCK_WORDS, room.blocks - state[NUM_BLOCKS])
    add_records(state, NEXT_EVENT, begin, EVENT_WORDS, room.events - state[NUM_EVENTS])
    state[NUM_BLOCKS] = room.blocks
    state[NUM_EVENTS] = room.events


def move_column(state: State, column: int, begin: int, words: int, length: int) -> int:
    """Handles or queues, the new ones `NONE`; where the next column begins. Behind `column` stands its length."""
    old, old_length = state[column], state[column + 1]
    for at in range(words * length):
        state[begin + at] = state[old + at] if at < words * old_length else NONE
    state[column] = begin
    state[column + 1] = length
    return begin + words * length


def add_records(state: State, first: int, begin: int, words: int, number: int) -> int:
    """Chains new records in front of the spare ones, whose number stands behind `first`; where they end."""
    for record in range(number - 1, -1, -1):
        state[begin + words * record] = state[first]
        state[first] = begin + words * record
    state[first + 1] += number
    return begin + words * number
