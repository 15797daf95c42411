"""Blocks that other streams may still use: `record_stream`, and the events that end it.

An event is recorded when the block is freed. Here it is "the `count`-th item of a stream": it has passed once that many
items of the stream have finished.
"""

from zsim.allocator.blocks import free_block
from zsim.allocator.state import (
    GLOBAL_QUEUE,
    NEXT_ITEM,
    NONE,
    NUM_ITEMS,
    NUM_SPARE_ITEMS,
    NUM_SYNC_ALL_STREAMS,
    PENDING,
    Column,
    State,
)


def insert_event(state: State, block: int, stream: int, count: int) -> None:
    """Queues an event behind a block; the caller has made sure of a spare row."""
    scalars, events = state.scalars, state.events
    item = scalars[NEXT_ITEM]
    scalars[NEXT_ITEM] = events.item_next[item]
    scalars[NUM_SPARE_ITEMS] -= 1
    scalars[NUM_ITEMS] += 1
    events.block[item] = block
    events.stream[item] = stream
    events.awaited[item] = count
    events.item_next[item] = NONE
    queue = 0 if state.settings[GLOBAL_QUEUE] else stream
    if events.first[queue] == NONE:
        events.first[queue] = item
    else:
        events.item_next[events.last[queue]] = item
    events.last[queue] = item
    state.blocks.num_events[block] += 1


def process_events(state: State, finished: Column) -> None:
    """Frees blocks whose events have passed; a queue ends at the first that has not.

    `finished[stream]` is the number of items that the stream has finished. One queue a stream; before PyTorch 1.11 one
    for all, in which an event that is not ready holds up those of other streams behind it.
    """
    if state.scalars[NUM_ITEMS] == 0:
        return
    events = state.events
    for queue in range(len(events.first)):
        item = events.first[queue]
        while item != NONE and events.awaited[item] <= finished[events.stream[item]]:
            pop(state, queue)
            item = events.first[queue]


def synchronize_and_free_events(state: State) -> None:
    """Frees all blocks that wait for events; the caller has waited for these."""
    state.scalars[NUM_SYNC_ALL_STREAMS] += 1
    events = state.events
    for queue in range(len(events.first)):
        while events.first[queue] != NONE:
            pop(state, queue)


def pop(state: State, queue: int) -> None:
    """The first event of a queue has passed."""
    scalars, events, blocks = state.scalars, state.events, state.blocks
    item = events.first[queue]
    events.first[queue] = events.item_next[item]
    events.item_next[item] = scalars[NEXT_ITEM]
    scalars[NEXT_ITEM] = item
    scalars[NUM_SPARE_ITEMS] += 1
    scalars[NUM_ITEMS] -= 1
    block = events.block[item]
    blocks.num_events[block] -= 1
    if blocks.num_events[block] == 0 and blocks.status[block] == PENDING:
        free_block(state, block)
