"""Allocators in the second engine: K histories, each made by whoever of its ranks comes first to a request.

Which block serves a request depends on the order of requests and, where freed blocks wait for events, on how far lanes
have come by then. A rank with a history of its own is exact; ranks that share one make the same calls to the device at
the same requests, and wait for lanes of their own.
"""

from typing import Any

import numpy as np

import zsim.allocator.compiled  # noqa: F401  makes the allocator's functions known to numba
from zsim.allocator.events import last_awaited, process_events
from zsim.allocator.operations import FLUSH as NEEDS_FLUSH
from zsim.allocator.operations import FULL as NO_ROOM
from zsim.allocator.operations import empty_cache, flush_and_malloc, free, malloc, record_stream
from zsim.allocator.state import NUM_DEVICE_ALLOC, NUM_DEVICE_FREE
from zsim.engine.lockstep.compilation import compiled
from zsim.engine.lockstep.state import EMPTY_CACHE, FREE, MALLOC, Record, Records, State, Tables

UNKNOWN = -1
SERVED, STALLING, LACKING = range(3)
"""Answers to a request: from the cache; not without the device; not before the allocator has more room."""
MALLOC_BITS = 7
"""Of an outcome: cudaMallocs below, one bit that tells a flush, cudaFrees above."""


@compiled
def _await_events(allocator: Any, rank: Record, lanes: Records) -> None:
    """Remembers what a flush of this rank has to wait for."""
    for which in range(rank.num_lanes):
        lanes[which].awaited_items = last_awaited(allocator, which)


@compiled
def _allocate(tables: Tables, state: State, index: int, request: Record) -> int:
    """Whether it took a flush, or that there is no room for it."""
    rank, lanes = state.ranks[index], state.lanes[index]
    allocator, finished = state.allocators[rank.history], state.finished[rank.history]
    for which in range(rank.num_lanes):
        finished[which] = lanes[which].finished
    process_events(allocator, finished)
    nbytes = request.nbytes
    if request.varies:
        nbytes = max(1, int(np.rint(nbytes * tables.stray_scale[index, request.column])))
    outcome = malloc(allocator, request.handle, nbytes, request.stream)
    if outcome == NO_ROOM:
        return NO_ROOM
    if outcome != NEEDS_FLUSH:
        return 0
    _await_events(allocator, rank, lanes)
    return NO_ROOM if flush_and_malloc(allocator, request.handle, nbytes, request.stream) == NO_ROOM else 1


@compiled
def _decide(tables: Tables, state: State, index: int, code: int, number: int) -> int:
    """Makes a request of the rank's history; `UNKNOWN` if its allocator needs more room first."""
    rank, lanes = state.ranks[index], state.lanes[index]
    history = rank.history
    allocator, request = state.allocators[history], tables.requests[number]
    flushes = 0
    if code == MALLOC:
        flushes = _allocate(tables, state, index, request)
        if flushes == NO_ROOM:
            return UNKNOWN
    elif code == FREE:
        if (
            request.used_lane >= 0
            and record_stream(allocator, request.handle, request.used_lane, request.used_items) == NO_ROOM
        ):
            return UNKNOWN
        free(allocator, request.handle)
    else:
        _await_events(allocator, rank, lanes)
        if empty_cache(allocator) == NO_ROOM:
            return UNKNOWN
    num_mallocs = allocator[NUM_DEVICE_ALLOC] - state.asked[history, 0]
    num_frees = allocator[NUM_DEVICE_FREE] - state.asked[history, 1]
    state.asked[history, 0] += num_mallocs
    state.asked[history, 1] += num_frees
    return num_mallocs | flushes << MALLOC_BITS | num_frees << (MALLOC_BITS + 1)  # type: ignore[no-any-return]


@compiled
def _note(tables: Tables, state: State, index: int, number: int, outcome: int) -> None:
    """Books what the device is asked on the rank."""
    rank = state.ranks[index]
    num_frees = outcome >> (MALLOC_BITS + 1)
    rank.extra_s = num_frees * tables.free_s + (outcome & (2**MALLOC_BITS - 1)) * tables.malloc_s
    state.flush_s[index, rank.column] += rank.extra_s * rank.scale
    state.num_flushes[index, rank.column] += outcome >> MALLOC_BITS & 1
    if not tables.requests[number].in_setup:
        state.num_frees[index] += num_frees


@compiled
def ask(tables: Tables, state: State, index: int, code: int, number: int) -> int:
    """Serves a request of a rank.

    If the device comes into it, `extra_s` of the rank tells what calls cost, `awaited_items` of its lanes what it has
    to wait for.
    """
    rank, lanes = state.ranks[index], state.lanes[index]
    outcome = UNKNOWN
    if rank.answers >= 0:
        outcome = state.outcomes[rank.answers, number]
        if outcome == 0 and code != EMPTY_CACHE:
            return SERVED
    for which in range(rank.num_lanes):
        lanes[which].awaited_items = 0
    if outcome == UNKNOWN:
        outcome = _decide(tables, state, index, code, number)
        if outcome == UNKNOWN:
            return LACKING
        if rank.answers >= 0:
            state.outcomes[rank.answers, number] = outcome
        if outcome == 0 and code != EMPTY_CACHE:
            return SERVED
    _note(tables, state, index, number, outcome)
    if outcome >> (MALLOC_BITS + 1):
        for which in range(rank.num_lanes):
            lanes[which].awaited_items = lanes[which].issued
    return STALLING
