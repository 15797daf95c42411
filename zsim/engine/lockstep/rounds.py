"""Rounds of the second engine: all ranks as far as they are certain, then what follows from it.

The only function that Python calls lies here, so that all machine code is one piece, made once and kept beside this
file.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
from numpy.typing import NDArray

from zsim.allocator.compiled import enlarged
from zsim.allocator.layout import Room
from zsim.allocator.state import NUM_BLOCKS, NUM_EVENTS, NUM_HANDLES, NUM_STREAMS
from zsim.engine.lockstep.addresses import address_of
from zsim.engine.lockstep.compilation import SOURCES, Rounds, allocating, entry
from zsim.engine.lockstep.hosts import advance_ranks
from zsim.engine.lockstep.network import earliest_s, resolve
from zsim.engine.lockstep.shared import add, exchange, give_way, read, write
from zsim.engine.lockstep.state import State, Tables

ONGOING, GROW, DONE = range(3)
"""How rounds end: after as many as were asked for, because a ring is too small, because nothing is left to happen."""
RANKS_PER_THREAD = 8
"""For fewer the others are not called."""
PIECES_PER_THREAD = 8
"""Of the ranks: whoever is through with one takes the next, so that a thread that is held up leaves more to others."""
ROUNDS_PER_REPORT = 256
LOOKS_BEFORE_GIVING_WAY = 1000

NEXT_PIECE, NUM_THROUGH, NEW_EVENTS, STATUS, NUM_ROUNDS, ALL_EVENTS, NUM_SHARED = range(7)
"""What threads share: the round and in it the piece that nobody has taken yet; pieces of the round that are done,
events in them; how the rounds end, how many there were, all their events."""
MAX_PIECES = 2**16
"""The next piece is that of round n plus n times this."""


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


@allocating
def _end_round(tables: Tables, state: State, shared: NDArray[np.int64]) -> None:
    """By the thread that does the last piece; others find work when the number of the round has changed."""
    shared[STATUS] = _conclude(tables, state, shared[NEW_EVENTS])
    shared[ALL_EVENTS] += shared[NEW_EVENTS]
    shared[NUM_ROUNDS] += 1
    shared[NUM_THROUGH] = shared[NEW_EVENTS] = 0
    write(shared, NEXT_PIECE, shared[NUM_ROUNDS] * MAX_PIECES)


def _entry(sources: int) -> Rounds:
    """Compiled anew when any of the sources has changed: their digest is part of what kept code is known by."""

    @entry
    def rounds(
        tables: Tables,
        state: State,
        bounds: NDArray[np.int64],
        shared: NDArray[np.int64],
        num_rounds: int,
    ) -> None:
        """Runs rounds, in one of several threads that call it alike.

        Args:
            tables: of the run.
            state: which is changed.
            bounds: first ranks by index of the pieces, and behind the last one the number of ranks.
            shared: by all threads; zeros at first.
            num_rounds: at most.

        """
        num_pieces, num_looks = len(bounds) - 1, 0
        fixed, present = address_of(tables), address_of(state)
        while sources:
            following = read(shared, NEXT_PIECE)
            turn, piece = following // MAX_PIECES, following % MAX_PIECES
            if turn == num_rounds or (piece == 0 and read(shared, STATUS) != ONGOING):
                break
            if piece == num_pieces:
                # A thread that is held up keeps others waiting only while it has a piece.
                num_looks += 1
                if num_looks > LOOKS_BEFORE_GIVING_WAY:
                    give_way()
            elif exchange(shared, NEXT_PIECE, following, following + 1):
                num_looks = 0
                add(shared, NEW_EVENTS, advance_ranks(fixed, present, bounds[piece], bounds[piece + 1]))
                if add(shared, NUM_THROUGH, 1) == num_pieces - 1:
                    _end_round(fixed, present, shared)

    return rounds


rounds = _entry(SOURCES)


def run_rounds(
    tables: Tables, state: State, num_threads: int, report: Callable[[State], None]
) -> tuple[State, int, int]:
    """Runs until nothing is left to happen; returns the last state, rounds and events."""
    num_threads = max(1, min(num_threads, len(state.ranks) // RANKS_PER_THREAD))
    bounds = _bounds(state, num_threads * PIECES_PER_THREAD if num_threads > 1 else 1)
    num_rounds = num_events = 0
    with ThreadPoolExecutor(num_threads) as pool:
        status = ONGOING
        while status != DONE:
            shared = np.zeros(NUM_SHARED, np.int64)
            parts = (tables, state, bounds, shared, ROUNDS_PER_REPORT)
            for running in [pool.submit(rounds, *parts) for _ in range(num_threads)]:
                running.result()
            status = int(shared[STATUS])
            num_rounds += int(shared[NUM_ROUNDS])
            num_events += int(shared[ALL_EVENTS])
            report(state)
            if status == GROW:
                state = _grown(state)
    return state, num_rounds, num_events


def _bounds(state: State, number: int) -> NDArray[np.int64]:
    """Pieces of the ranks between which no history of an allocator is shared."""
    histories = state.ranks["history"]
    last = {history: index for index, history in enumerate(histories.tolist())}
    reach = np.maximum.accumulate([last[history] for history in histories.tolist()])
    cuts = np.flatnonzero(reach == np.arange(len(histories))) + 1
    wanted = np.linspace(0, len(histories), number + 1)[1:-1]
    return np.unique([0, *cuts[np.searchsorted(cuts, wanted)].tolist(), len(histories)])


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
