"""Operations of the caching allocator in a second: `python -m benchmarks.allocator`.

They are those of a program: every malloc and free of one step of the 10-billion model under ZeRO-3 as DeepSpeed 0.5.4
runs it, with model construction and set-up before; thousands of tensors on several streams, whose blocks are split,
merged and wait for other streams. A wait is over once the host has gone on by `BEHIND` operations. Compiled they run
from within machine code, as the engine of many ranks has it; interpreted through `CachingAllocator`. The bar is for the
compiled form.
"""

import statistics
import sys
import time
from functools import cache

import numpy as np
from numba import njit

from benchmarks import EXPERIMENTS, Bar, table
from zsim import pipeline
from zsim.allocator import FLUSH, AllocatorSettings, CachingAllocator
from zsim.allocator.compiled import new_allocators
from zsim.allocator.events import process_events
from zsim.allocator.layout import Room
from zsim.allocator.operations import flush_and_malloc, free, malloc, record_stream
from zsim.ops import Alloc, Free

EXPERIMENT = "roberta_10b_p4d_before"
BAR = 2e6
GIB = 2**30
CAPACITY = 36 * GIB
BEHIND = 200
SETTINGS = {
    "as PyTorch has it": AllocatorSettings(),
    "expandable_segments:True": AllocatorSettings(expandable_segments=True),
}
MALLOC, FREE, FREE_BEHIND = 0, 1, 2


@cache
def operations() -> np.ndarray:
    """Rows of kind, handle, bytes and stream; blocks of side streams wait for the compute stream, as those of it do.

    What the program holds at its end is freed, so that it can be run again.
    """
    program = pipeline.programs(EXPERIMENTS / f"{EXPERIMENT}.yaml")[0]
    rows: list[tuple[int, int, int, int]] = []
    live: dict[str, tuple[int, int]] = {}
    spare: list[int] = []
    streams: dict[str, int] = {"compute": 0}
    num_handles = 0
    for op in program.ops:
        if isinstance(op, Alloc) and op.category != "context":
            handle, stream = spare.pop() if spare else num_handles, streams.setdefault(op.lane, len(streams))
            num_handles = max(num_handles, handle + 1)
            live[op.buffer] = handle, stream
            rows.append((MALLOC, handle, op.nbytes, stream))
        elif isinstance(op, Free) and op.buffer in live:
            handle, stream = live.pop(op.buffer)
            spare.append(handle)
            rows.append((FREE, handle, 0, 0) if op.event is None else (FREE_BEHIND, handle, 0, int(stream == 0)))
    rows += [(FREE, handle, 0, 0) for handle, _ in live.values()]
    return np.array(rows, dtype=np.int64)


@njit
def run_compiled(state, rows, finished, first):
    """Runs all operations, of which the first is the `first` one; how many flushes there were."""
    flushes = 0
    for at in range(rows.shape[0]):
        kind, handle = rows[at, 0], rows[at, 1]
        if kind == MALLOC:
            finished[:] = max(first + at - BEHIND, 0)
            process_events(state, finished)
            if malloc(state, handle, rows[at, 2], rows[at, 3]) == FLUSH:
                flush_and_malloc(state, handle, rows[at, 2], rows[at, 3])
                flushes += 1
        elif kind == FREE:
            free(state, handle)
        else:
            record_stream(state, handle, rows[at, 3], first + at)
            free(state, handle)
    return flushes


def run_interpreted(made: CachingAllocator, rows: list[list[int]], num_streams: int, first: int) -> None:
    """The same through the Python face."""
    for at, (kind, handle, nbytes, stream) in enumerate(rows):
        if kind == MALLOC:
            made.process_events([max(first + at - BEHIND, 0)] * num_streams)
            if made.malloc(handle, nbytes, stream) == FLUSH:
                made.flush_and_malloc(handle, nbytes, stream)
        elif kind == FREE:
            made.free(handle)
        else:
            made.free_behind(handle, stream, first + at)


@cache
def compiled_rate(name: str) -> float:
    """Operations in a second of processor time, the median of twenty runs behind a first one."""
    rows = operations()
    num_streams = int(rows[:, 3].max()) + 1
    room = Room(blocks=1 << 14, events=1 << 13, streams=num_streams, handles=int(rows[:, 1].max()) + 1)
    state = new_allocators(1, room, SETTINGS[name], CAPACITY, 40 * GIB)[0]
    finished = np.zeros(num_streams, dtype=np.int64)
    times = []
    for turn in range(21):
        begin = time.process_time()
        run_compiled(state, rows, finished, turn * len(rows))
        times.append(time.process_time() - begin)
    return len(rows) / statistics.median(times[1:])


@cache
def interpreted_rate(name: str) -> float:
    """The same of the interpreter, the median of three."""
    rows = operations().tolist()
    num_streams = max(row[3] for row in rows) + 1
    made = CachingAllocator(SETTINGS[name], CAPACITY, device_bytes=40 * GIB)
    times = []
    for turn in range(4):
        begin = time.process_time()
        run_interpreted(made, rows, num_streams, turn * len(rows))
        times.append(time.process_time() - begin)
    return len(rows) / statistics.median(times[1:])


def report() -> str:
    """Both forms under both kinds of segments."""
    lines = [
        (name, f"{compiled_rate(name) / 1e6:.1f} million", f"{interpreted_rate(name) / 1e3:.0f} thousand")
        for name in SETTINGS
    ]
    heading = f"{len(operations()):,} operations of one program. In a second of processor time:"
    return f"{heading}\n\n{table(['settings', 'compiled', 'interpreted'], lines)}"


def bars() -> list[Bar]:
    """The compiled form reaches two million."""
    return [
        Bar(
            f"allocator, compiled, {name}",
            f"{compiled_rate(name) / 1e6:.1f} million operations/s",
            f"≥ {BAR / 1e6:.0f} million",
            compiled_rate(name) >= BAR,
        )
        for name in SETTINGS
    ]


def main() -> int:
    """0 if the bar is reached."""
    print(report())
    return int(not all(bar.met for bar in bars()))


if __name__ == "__main__":
    sys.exit(main())
