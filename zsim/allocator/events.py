"""Blocks that other streams may still use: `record_stream`, and the events that end it.

An event is recorded when the block is freed. Here it is "the `AWAITED`-th item of a stream": it has passed once that
many items of the stream have finished.
"""

from zsim.allocator.blocks import free_block
from zsim.allocator.state import (
    AWAITED,
    EVENT_BLOCK,
    EVENT_COUNT,
    EVENT_STREAM,
    GLOBAL_QUEUE,
    NEXT_EVENT,
    NEXT_IN_QUEUE,
    NONE,
    NUM_PENDING_EVENTS,
    NUM_SPARE_EVENTS,
    NUM_STREAMS,
    NUM_SYNC_ALL_STREAMS,
    PENDING,
    QUEUES,
    STATUS,
    State,
)


def insert_event(state: State, block: int, stream: int, count: int) -> None:
    """Queues an event behind a block; the caller has made sure of a spare record."""
    event = state[NEXT_EVENT]
    state[NEXT_EVENT] = state[event + NEXT_IN_QUEUE]
    state[NUM_SPARE_EVENTS] -= 1
    state[NUM_PENDING_EVENTS] += 1
    state[event + EVENT_BLOCK] = block
    state[event + EVENT_STREAM] = stream
    state[event + AWAITED] = count
    state[event + NEXT_IN_QUEUE] = NONE
    first = state[QUEUES] if state[GLOBAL_QUEUE] else state[QUEUES] + 2 * stream
    last = first + 1
    if state[first] == NONE:
        state[first] = event
    else:
        state[state[last] + NEXT_IN_QUEUE] = event
    state[last] = event
    state[block + EVENT_COUNT] += 1


def process_events(state: State, finished: list[int]) -> None:
    """Frees blocks whose events have passed; a queue ends at the first that has not.

    `finished[stream]` is the number of items that the stream has finished. One queue a stream; until 2022 one for all,
    in which an event that has not passed holds up those of other streams behind it.
    """
    if state[NUM_PENDING_EVENTS] == 0:
        return
    for queue in range(state[NUM_STREAMS]):
        first = state[QUEUES] + 2 * queue
        while state[first] != NONE and state[state[first] + AWAITED] <= finished[state[state[first] + EVENT_STREAM]]:
            pop(state, first)


def synchronize_and_free_events(state: State) -> None:
    """Frees all blocks that wait for events; the caller has waited for these."""
    state[NUM_SYNC_ALL_STREAMS] += 1
    for queue in range(state[NUM_STREAMS]):
        first = state[QUEUES] + 2 * queue
        while state[first] != NONE:
            pop(state, first)


def pop(state: State, first: int) -> None:
    """The first event of a queue has passed."""
    event = state[first]
    state[first] = state[event + NEXT_IN_QUEUE]
    state[event + NEXT_IN_QUEUE] = state[NEXT_EVENT]
    state[NEXT_EVENT] = event
    state[NUM_SPARE_EVENTS] += 1
    state[NUM_PENDING_EVENTS] -= 1
    block = state[event + EVENT_BLOCK]
    state[block + EVENT_COUNT] -= 1
    if state[block + EVENT_COUNT] == 0 and state[block + STATUS] == PENDING:
        free_block(state, block)


def last_awaited(state: State, stream: int) -> int:
    """The last event of a stream that has not been seen to pass, 0 for none: what a flush waits for there."""
    last = 0
    for queue in range(state[NUM_STREAMS]):
        event = state[state[QUEUES] + 2 * queue]
        while event != NONE:
            if state[event + EVENT_STREAM] == stream:
                last = max(last, state[event + AWAITED])
            event = state[event + NEXT_IN_QUEUE]
    return last
