"""Rounds of the second engine: all ranks as far as they are certain, then what follows from it.

The only function that Python calls lies here, so that all machine code is one piece, made once and kept beside this
file.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np

from zsim.allocator.compiled import enlarged
from zsim.allocator.layout import Room
from zsim.allocator.state import NUM_BLOCKS, NUM_EVENTS, NUM_HANDLES, NUM_STREAMS
from zsim.engine.lockstep.compilation import SOURCES, Rounds, allocating, entry
from zsim.engine.lockstep.hosts import advance_ranks
from zsim.engine.lockstep.network import earliest_s, resolve
from zsim.engine.lockstep.state import State, Tables

ONGOING, GROW, DONE = range(3)
"""How rounds end: after as many as were asked for, because a ring is too small, because nothing is left to happen."""
CHUNKS_PER_THREAD = 4
"""Pieces of the ranks, so that a thread that is held up leaves more to the others."""
RANKS_PER_THREAD = 512
"""Fewer are done before another thread has been woken."""
ROUNDS_PER_REPORT = 256


@allocating
def _conclude(tables: Tables, state: State, num_events: int) -> int:
    """Ends a round in which ranks had so many events; returns how it goes on."""
    for lane in range(len(state.overflow)):
        if state.overflow[lane]:
            return GROW
    num_events += resolve(tables, state)
    state.forced_s[0] = -1.0
    if num_events == 0:
        # Nobody can tell what comes next, so it is what comes first.
        state.forced_s[0] = earliest_s(state)
        if state.forced_s[0] == inf:
            return DONE
    return ONGOING


def _entry(sources: int) -> Rounds:
    """Compiled anew when any of the sources has changed: their digest is part of what kept code is known by."""

    @entry
    def rounds(tables: Tables, state: State, begin: int, end: int, num_rounds: int) -> tuple[int, int, int]:
        """Runs rounds of ranks `begin` up to `end`.

        Args:
            tables: of the run.
            state: which is changed.
            begin: first rank by index.
            end: behind the last one.
            num_rounds: whole rounds, of all ranks; 0 for these ranks' part of one; -n for the end of one in which all
                ranks have had n - 1 events.

        Returns:
            How they ended, how many there were, events of the ranks.

        """
        num_events = done = 0
        if num_rounds < 0:
            return _conclude(tables, state, -1 - num_rounds), 1, 0
        status = ONGOING if sources else DONE
        while status == ONGOING:
            num_new = advance_ranks(tables, state, begin, end)
            num_events += num_new
            if num_rounds == 0:
                break
            status = _conclude(tables, state, num_new)
            done += 1
            if done == num_rounds:
                break
        return status, done, num_events

    return rounds


rounds = _entry(SOURCES)


def run_rounds(
    tables: Tables, state: State, num_threads: int, report: Callable[[State], None]
) -> tuple[State, int, int]:
    """Runs until nothing is left to happen; returns the last state, rounds and events."""
    num_threads = max(1, min(num_threads, len(state.ranks) // RANKS_PER_THREAD))
    bounds = _bounds(state, num_threads * CHUNKS_PER_THREAD)
    num_rounds = num_events = 0
    with ThreadPoolExecutor(num_threads) as pool:
        status = ONGOING
        while status != DONE:
            if num_threads > 1:
                status, events = _shared_round(tables, state, pool, bounds)
                done = 1
            else:
                status, done, events = rounds(tables, state, 0, len(state.ranks), ROUNDS_PER_REPORT)
            num_events += events
            if (num_rounds + done) // ROUNDS_PER_REPORT > num_rounds // ROUNDS_PER_REPORT:
                report(state)
            num_rounds += done
            if status == GROW:
                state = _grown(state)
    report(state)
    return state, num_rounds, num_events


def _shared_round(tables: Tables, state: State, pool: ThreadPoolExecutor, bounds: list[int]) -> tuple[int, int]:
    """One round whose ranks are done by several threads."""
    parts = pool.map(lambda begin, end: rounds(tables, state, begin, end, 0), bounds, bounds[1:])
    num_events = sum(events for _, _, events in parts)
    status, _, _ = rounds(tables, state, 0, 0, -1 - num_events)
    return status, num_events


def _bounds(state: State, number: int) -> list[int]:
    """Pieces of the ranks between which no history of an allocator is shared."""
    histories = state.ranks["history"]
    last = {history: index for index, history in enumerate(histories.tolist())}
    reach = np.maximum.accumulate([last[history] for history in histories.tolist()])
    cuts = np.flatnonzero(reach == np.arange(len(histories))) + 1
    wanted = np.linspace(0, len(histories), number + 1)[1:-1]
    return sorted({0, *cuts[np.searchsorted(cuts, wanted)].tolist(), len(histories)})


def _grown(state: State) -> State:
    """Twice the room for issue times on the lanes that need it: an item goes to one of two places, so both get it."""
    if state.overflow[-1]:
        now = Room(*(int(state.allocators[0, place]) for place in (NUM_BLOCKS, NUM_EVENTS, NUM_STREAMS, NUM_HANDLES)))
        larger = now._replace(blocks=2 * now.blocks, events=2 * now.events)
        state = state._replace(allocators=enlarged(state.allocators, larger))
    for which in np.flatnonzero(state.overflow[:-1]).tolist():
        lanes = state.lanes
        first, capacity = int(lanes[0, which]["ring"]), int(lanes[0, which]["mask"]) + 1
        own = state.ring[:, first : first + capacity]
        ring = np.concatenate((state.ring[:, : first + capacity], own, state.ring[:, first + capacity :]), axis=1)
        lanes["mask"][:, which] = 2 * capacity - 1
        lanes["ring"][:, which + 1 :] += capacity
        state = state._replace(ring=ring)
    state.overflow[:] = 0
    return state
