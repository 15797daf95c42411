"""What each step came to on each rank, out of spans and of what was noted where collectives met."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from zsim.engine.rendezvous import Waiting
from zsim.ops import HOST
from zsim.ranks import RankTimes
from zsim.trace import EMPTY_CACHE, FLUSH_NOTES, MemorySample, Span

OF_ALLOCATOR = (*FLUSH_NOTES, EMPTY_CACHE)
"""Notes of spans of a host that deals with the device about memory."""
AT_WORK = ("launch", "host")


def rank_times(
    ranks: Sequence[int],
    spans: Iterable[Span],
    memory: Iterable[MemorySample],
    waiting: Mapping[tuple[int, int], Waiting],
) -> RankTimes | None:
    """Of the executed ranks.

    Args:
        ranks: in the order of rows.
        spans: of all of them.
        memory: of all of them, by rank in order of time.
        waiting: by rank and step.

    Returns:
        None without a step.

    """
    ended: dict[tuple[int, int], list[float]] = {}
    """By rank and step, -1 for all before step 0: end, seconds at work, in the allocator."""
    for rank, lane, key, kind, start_s, end_s, _, _, _, _, _, note in spans:
        if lane != HOST:
            continue
        step = key.step if key.is_measured else -1
        row = ended.get((rank, step))
        if row is None:
            row = ended[rank, step] = [0.0, 0.0, 0.0]
        row[0] = max(row[0], end_s)
        if note in OF_ALLOCATOR:
            row[2] += end_s - start_s
        elif kind in AT_WORK:
            row[1] += end_s - start_s
    num_steps = 1 + max((step for _, step in ended), default=-1)
    if not num_steps:
        return None
    nothing, no_wait = [0.0, 0.0, 0.0], Waiting()
    flushes = _flushes(memory)
    rows = np.array([[ended.get((rank, step), nothing) for step in range(num_steps)] for rank in ranks])
    waits = [[waiting.get((rank, step), no_wait) for step in range(num_steps)] for rank in ranks]
    return RankTimes(
        ranks=tuple(ranks),
        start_s=np.array([ended.get((rank, -1), nothing)[0] for rank in ranks]),
        # A step in which a host did nothing ends with the one before.
        step_end_s=np.maximum.accumulate(rows[:, :, 0], axis=1),
        host_s=rows[:, :, 1],
        flush_s=rows[:, :, 2],
        num_flushes=np.array([[flushes.get((rank, step), 0) for step in range(num_steps)] for rank in ranks]),
        spinning_s=np.array([[wait.spinning_s for wait in row] for row in waits]),
        num_last=np.array([[wait.num_last for wait in row] for row in waits]),
        late_s=np.array([[wait.late_s for wait in row] for row in waits]),
    )


def _flushes(memory: Iterable[MemorySample]) -> dict[tuple[int, int], int]:
    """By rank and step, -1 for all before step 0; samples count them from the beginning of the run."""
    counts: dict[tuple[int, int], int] = {}
    before: dict[int, int] = {}
    for sample in memory:
        new = sample.num_alloc_retries - before.get(sample.rank, 0)
        if new and sample.key is not None:
            place = sample.rank, sample.key.step if sample.key.is_measured else -1
            counts[place] = counts.get(place, 0) + new
            before[sample.rank] = sample.num_alloc_retries
    return counts
