"""The allocator as machine code does what the interpreter does, number by number."""

import numpy as np
import pytest
from allocator_traces import random_trace, run
from numba import njit

from zsim.allocator import FLUSH, GROWN, HIT, AllocatorSettings, CachingAllocator
from zsim.allocator.compiled import enlarged, new_allocators
from zsim.allocator.events import process_events
from zsim.allocator.layout import Room, new_state, numbers
from zsim.allocator.operations import FULL, empty_cache, flush_and_malloc, free, malloc, record_stream
from zsim.allocator.state import NUM_OOMS, RESERVED_BYTES, current_of

MIB = 2**20
MALLOC, FREE, RECORD, EMPTY = range(4)
ROOM = Room(blocks=512, events=128, streams=3, handles=64)


def rows_of(operations):
    """Operations as numbers: kind, handle, bytes or count, stream, and what has finished by then."""
    rows, finished = [], [0, 0, 0]
    for operation in operations:
        match operation:
            case ("malloc", handle, nbytes, stream):
                rows.append((MALLOC, handle, nbytes, stream, *finished))
            case ("free", handle, uses):
                rows += [(RECORD, handle, count, stream, *finished) for stream, count in uses]
                rows.append((FREE, handle, 0, 0, *finished))
            case ("finish", finished):
                pass
            case ("empty",):
                rows.append((EMPTY, 0, 0, 0, *finished))
    return np.array(rows, dtype=np.int64)


def run_rows(state, rows):
    for at in range(len(rows)):
        kind, handle, number, stream = rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3]
        if kind == MALLOC:
            process_events(state, rows[at, 4:])
            if malloc(state, handle, number, stream) == FLUSH:
                flush_and_malloc(state, handle, number, stream)
        elif kind == FREE:
            free(state, handle)
        elif kind == RECORD:
            record_stream(state, handle, stream, number)
        else:
            empty_cache(state)


# Not kept: numba would not see a change of the rules.
compiled_run_rows = njit(run_rows)


def test_every_number_of_the_state_is_the_interpreter_s():
    for seed in range(400):
        settings, capacity, operations = random_trace(seed)
        rows = rows_of(operations)
        (compiled,) = new_allocators(1, ROOM, settings, capacity, capacity)
        compiled_run_rows(compiled, rows)
        interpreted = new_state(ROOM, numbers(settings, capacity, capacity))
        run_rows(interpreted, np.array(rows, dtype=object))
        assert compiled.tolist() == interpreted, seed


def test_the_python_face_is_the_same_allocator():
    for seed in range(50):
        settings, capacity, operations = random_trace(seed)
        made = CachingAllocator(settings, capacity)
        run(made, operations)
        (state,) = new_allocators(1, ROOM, settings, capacity, capacity)
        compiled_run_rows(state, rows_of(operations))
        assert (current_of(state, RESERVED_BYTES), state[NUM_OOMS]) == (made.reserved_bytes, made.num_ooms)


@njit
def take_until_full(matrix, row, handle):
    while True:
        outcome = malloc(matrix[row], handle, 512, 0)
        if outcome == FULL:
            return handle
        handle += 1


def test_rows_are_allocators_of_their_own_that_can_be_copied_and_enlarged():
    room = Room(blocks=32, events=4, streams=1, handles=200)
    matrix = new_allocators(3, room, AllocatorSettings(), 64 * MIB, 64 * MIB)
    assert take_until_full(matrix, 1, 0) == 28
    assert matrix[0].tolist() != matrix[1].tolist()
    matrix[2] = matrix[1]
    before = matrix.copy()
    assert take_until_full(matrix, 2, 28) == 28
    assert (matrix == before).all()  # FULL has changed nothing
    wider = enlarged(matrix, room._replace(blocks=64, events=8))
    assert take_until_full(wider, 2, 28) == 60
    assert [current_of(wider[row], RESERVED_BYTES) for row in range(3)] == [0, 2 * MIB, 2 * MIB]
    for handle in range(60):
        free(wider[2], handle)
    assert malloc(wider[2], 0, MIB, 0) == HIT
    assert malloc(wider[0], 0, MIB, 0) == GROWN


@pytest.mark.parametrize("expandable", [False, True])
def test_a_state_that_grows_goes_on_as_one_that_was_large_enough(expandable):
    settings = AllocatorSettings(expandable_segments=expandable)
    made = CachingAllocator(settings, 400 * MIB)
    large = new_state(Room(4096, 4096, 3, 4096), numbers(settings, 400 * MIB, 400 * MIB))
    for handle in range(1500):
        nbytes, stream = 700 * (handle % 97) + 1, handle % 3
        assert made.malloc(handle, nbytes, stream) == malloc(large, handle, nbytes, stream)
        if handle % 3 == 2:
            made.free_behind(handle - 1, 0, handle)
            record_stream(large, handle - 1, 0, handle)
            free(large, handle - 1)
    finished = [10_000] * 3
    made.process_events(finished)
    process_events(large, finished)
    assert made.memory_stats()["active.all.current"] == 1000
    assert (made.reserved_bytes, made.active_bytes) == tuple(
        current_of(large, kind) for kind in (RESERVED_BYTES, RESERVED_BYTES + 6)
    )
