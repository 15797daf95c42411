"""The same rules as machine code, for programs that numba compiles and for many allocators at once.

Importing this module makes every function of the allocator callable from `numba.njit` code, under its own name and from
its own module: `zsim.allocator.operations.malloc` serves the interpreter and compiled code alike.

*K allocators are K rows of one int64 matrix.* A row is the state of one allocator, all of it: `matrix[k]` goes where
the interpreter has its list.

    matrix = new_allocators(64, room, settings, capacity_bytes, device_bytes)

    @numba.njit
    def take(matrix, k, handle, nbytes, stream, finished):
        process_events(matrix[k], finished)                     # finished[stream], int64
        outcome = malloc(matrix[k], handle, nbytes, stream)     # HIT, GROWN, FLUSH, or FULL: no room in the row
        ...                                                     # on FLUSH wait for pending events, then
        outcome = flush_and_malloc(matrix[k], handle, nbytes, stream)      # GROWN, OOM or FULL

    record_stream(matrix[k], handle, stream, count); free(matrix[k], handle); empty_cache(matrix[k])

An operation that returns `FULL` has changed nothing: leave compiled code, `matrix = enlarged(matrix, room)` with more
`blocks` and `events`, and call it again. Handles and streams have to be within `room` from the start. What an allocator
has done is read at fixed places: `matrix[k, NUM_DEVICE_ALLOC]`, `NUM_DEVICE_FREE`, `NUM_OOMS`, `NUM_PENDING_EVENTS` of
`zsim.allocator.state`, bytes with `current_of(matrix[k], RESERVED_BYTES)`; the events to wait for with
`last_awaited(matrix[k], stream)`. An allocator that goes on from another's history is a copy of its row:
`matrix[i] = matrix[j]`; two that are equal behave alike. Nothing records a trace of events here.

Whoever keeps machine code (`cache=True`) has to know it by `SOURCES` too: numba compares the file of the outermost
function alone and would go on with rules that have changed since.
"""

from bisect import bisect_left, bisect_right
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.extending import overload, register_jitable

from zsim.allocator import blocks, events, expandable, layout, operations, segments, sets, sizes, state
from zsim.allocator.layout import Room, lay_out, new_state, numbers, words_of
from zsim.allocator_settings import AllocatorSettings

SOURCES: Final = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""Of all rules."""
Matrix = npt.NDArray[np.int64]

OPTIONS: Final = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
"""Without what Python would need to call each of them: that takes half of the time."""
MODULES: Final = (state, sets, sizes, blocks, expandable, segments, events, operations, layout)


def _register() -> None:
    """Makes the functions of the rules known to numba, under the modules that define them."""
    for module in MODULES:
        for function in vars(module).values():
            is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
            if is_own and function is not sets.move:
                register_jitable(**OPTIONS)(function)


@overload(bisect_left)
def _bisect_left(column: Any, wanted: Any, low: Any, high: Any) -> Any:  # noqa: ARG001
    def search(column: Any, wanted: Any, low: Any, high: Any) -> Any:
        while low < high:
            middle = (low + high) >> 1
            if column[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low

    return search


@overload(bisect_right)
def _bisect_right(column: Any, wanted: Any, low: Any, high: Any) -> Any:  # noqa: ARG001
    def search(column: Any, wanted: Any, low: Any, high: Any) -> Any:
        while low < high:
            middle = (low + high) >> 1
            if wanted < column[middle]:
                high = middle
            else:
                low = middle + 1
        return low

    return search


@overload(sets.move)
def _move(column: Any, source: Any, target: Any, length: Any) -> Any:  # noqa: ARG001
    """Without the copy in between that a slice makes."""

    def shift(column: Any, source: Any, target: Any, length: Any) -> None:
        # Unsigned, for numba looks at every signed index whether it counts from the end.
        here, there, left, one = np.uint64(source), np.uint64(target), np.uint64(length), np.uint64(1)
        if there > here:
            while left > 0:
                left -= one
                column[there + left] = column[here + left]
        else:
            done = np.uint64(0)
            while done < left:
                column[there + done] = column[here + done]
                done += one

    return shift


_register()


def new_allocators(
    number: int, room: Room, settings: AllocatorSettings, capacity_bytes: int, device_bytes: int
) -> Matrix:
    """Allocators that hold nothing, one a row; a capacity of its own is `matrix[k, CAPACITY] = ...`."""
    return np.tile(
        np.array(new_state(room, numbers(settings, capacity_bytes, device_bytes)), dtype=np.int64), (number, 1)
    )


def enlarged(matrix: Matrix, room: Room) -> Matrix:
    """The same allocators with more room; `room` names all of it, what there was included."""
    begin = matrix.shape[1]
    wider = np.zeros((matrix.shape[0], begin + words_of(room, matrix[0])), dtype=np.int64)
    wider[:, :begin] = matrix
    _lay_out_rows(wider, begin, room)
    return wider


@njit
def _lay_out_rows(matrix: Any, begin: int, room: Room) -> None:
    for row in range(matrix.shape[0]):
        lay_out(matrix[row], begin, room)
