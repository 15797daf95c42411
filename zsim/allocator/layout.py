"""Columns made and extended: lists for the interpreter."""

from typing import NamedTuple

from zsim.allocator import state
from zsim.allocator.state import NONE, Blocks, Column, Events, OrderedSet, State, Trace
from zsim.allocator_settings import UNLIMITED, AllocatorSettings


class Rows(NamedTuple):
    """How many of each the columns have room for."""

    blocks: int = 256
    items: int = 256
    streams: int = 4
    handles: int = 256


def settings_column(settings: AllocatorSettings, device_bytes: int) -> Column:
    """The settings as the rules read them."""
    fraction = settings.per_process_memory_fraction
    allowed = UNLIMITED if fraction is None else int(fraction * device_bytes)
    threshold = settings.garbage_collection_threshold
    column = [0] * state.NUM_SETTINGS
    column[state.LARGE_SEGMENT] = settings.large_segment_bytes
    column[state.MAX_SPLIT] = settings.max_split_bytes
    column[state.MAX_NON_SPLIT_ROUNDING] = settings.max_non_split_rounding_bytes
    column[state.GC_BYTES] = 0 if fraction is None else int(threshold * allowed)
    column[state.EXPANDABLE] = int(settings.expandable_segments)
    column[state.GLOBAL_QUEUE] = int(settings.event_queue == "global")
    column[state.ADDRESS_SPACE] = device_bytes + device_bytes // 8
    column[state.ALLOWED] = allowed
    column[state.DIVISIONS :] = settings.roundup_power2_divisions
    return column


def new_state(
    rows: Rows, settings: AllocatorSettings, capacity_bytes: int, device_bytes: int, *, records: bool
) -> State:
    """An allocator that holds nothing yet."""
    scalars = [0] * state.NUM_SCALARS
    scalars[state.CAPACITY] = capacity_bytes
    scalars[state.NEXT_ADDRESS] = state.FIRST_ADDRESS
    scalars[state.NEXT_BLOCK] = scalars[state.NEXT_ITEM] = NONE
    scalars[state.RECORDING] = int(records)
    made = State(
        settings=settings_column(settings, device_bytes),
        scalars=scalars,
        statistics=[0] * state.NUM_STATISTICS,
        blocks=Blocks(*([] for _ in Blocks._fields)),
        free=(_ordered_set(), _ordered_set()),
        unmapped=(_ordered_set(), _ordered_set()),
        events=Events([NONE] * rows.streams, [NONE] * rows.streams, [], [], [], []),
        block_of=[NONE] * rows.handles,
        trace=Trace([], [], [], []),
    )
    _extend(made, rows.blocks, rows.items)
    return made


def grow(made: State, rows: Rows) -> Rows:
    """Twice the rows of blocks and events."""
    _extend(made, rows.blocks, rows.items)
    return rows._replace(blocks=2 * rows.blocks, items=2 * rows.items)


def _ordered_set() -> OrderedSet:
    return OrderedSet([], [], [], [0])


def _extend(made: State, num_blocks: int, num_items: int) -> None:
    scalars, blocks, events = made.scalars, made.blocks, made.events
    first = len(blocks.address)
    for column in blocks:
        column.extend([0] * num_blocks)
    blocks.status[first:] = [state.SPARE] * num_blocks
    blocks.next[first:] = [*range(first + 1, first + num_blocks), scalars[state.NEXT_BLOCK]]
    scalars[state.NEXT_BLOCK] = first
    scalars[state.NUM_SPARE_BLOCKS] += num_blocks
    for members in (*made.free, *made.unmapped):
        for column in members[:3]:
            column.extend([0] * num_blocks)
    first = len(events.block)
    for column in events[2:]:
        column.extend([0] * num_items)
    events.item_next[first:] = [*range(first + 1, first + num_items), scalars[state.NEXT_ITEM]]
    scalars[state.NEXT_ITEM] = first
    scalars[state.NUM_SPARE_ITEMS] += num_items
    if scalars[state.RECORDING]:
        # No operation notes more than two events a block and one an item of a queue.
        for column in made.trace:
            column.extend([0] * (2 * num_blocks + num_items))
