"""Where a step goes: every instant of rank 0's step is given to exactly one cause.

Causes are ordered by precedence. Useful work hides everything else, a running collective hides copies and the host, so
that "exposed" communication is what no compute covers. With U(k) the union of all intervals of the first k causes,
cause k owns |U(k)| - |U(k-1)|: the parts add up to the step by construction.

A visit of several kernels is one span even where the lane waits for the host between them. Those seconds are counted
as if they came last, behind the visit's kernels: the lane is idle in them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from zsim.ops import COMPUTE, HOST
from zsim.trace import FLUSH_NOTES, INLINE, Span

Intervals = NDArray[np.float64]
"""Disjoint [start, end] rows in order of time, shape (n, 2), seconds."""

Label = TypeVar("Label", bound=Hashable)

PRECEDENCE = (
    "compute",
    "optimizer",
    "exposed_all_gather",
    "exposed_reduce",
    "exposed_other_communication",
    "copies",
    "allocator",
    "sync",
)
REMAINDER = "host"
CAUSES = (*PRECEDENCE, REMAINDER)

LABELS = {
    "compute": "compute",
    "optimizer": "optimizer",
    "exposed_all_gather": "exposed all-gather",
    "exposed_reduce": "exposed reduce",
    "exposed_other_communication": "exposed other comm.",
    "copies": "copies",
    "allocator": "allocator flush",
    "sync": "sync",
    "host": "host",
}
"""What people read."""

COLLECTIVE_CAUSE: dict[str, str] = {
    "all_gather": "exposed_all_gather",
    "all_reduce": "exposed_reduce",
    "reduce_scatter": "exposed_reduce",
    "reduce": "exposed_reduce",
    "broadcast": "exposed_other_communication",
    "send_recv": "exposed_other_communication",
}
CAUSE_OF_KIND = {
    **COLLECTIVE_CAUSE,
    "sync": "sync",
    "queue": "sync",
    "host": REMAINDER,
    "launch": REMAINDER,
}
"""By kind of span; "queue" is the host waiting for room in the launch queue."""

PASSES = ("forward", "backward", "step")

BUBBLE_THRESHOLD_S = 1e-6
"""Shorter gaps of the compute lane are the space between kernels, not waiting."""


def cause(span: Span) -> str:
    """The cause that a span stands for while nothing of higher precedence runs."""
    if span.kind == "compute":
        return "optimizer" if span.key.phase == "step" else "compute"
    if span.kind == "copy":
        return _cause_of_copy(span)
    if span.note in FLUSH_NOTES:
        return "allocator"
    return CAUSE_OF_KIND.get(span.kind, REMAINDER)


def _cause_of_copy(span: Span) -> str:
    """A copy that serves a collective says so behind the colon of its key: ":all_gather.flatten"."""
    purpose = span.key.what.partition(":")[2]
    if purpose.startswith("all_gather"):
        return "exposed_all_gather"
    if purpose.startswith("reduce"):
        return "exposed_reduce"
    if span.key.phase == "step" and span.lane == COMPUTE:
        return "optimizer"
    return "copies"


def union(intervals: Sequence[tuple[float, float]] | Intervals) -> Intervals:
    """Merge overlapping and touching intervals; empty ones vanish."""
    rows = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    is_first = np.concatenate(([True], rows[1:, 0] > reach[:-1]))
    firsts = np.flatnonzero(is_first)
    lasts = np.concatenate((firsts[1:], [len(rows)])) - 1
    return np.column_stack((rows[firsts, 0], reach[lasts]))


def total_s(intervals: Intervals) -> float:
    """Length of disjoint intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def clip(intervals: Intervals, start_s: float, end_s: float) -> Intervals:
    """The part of the intervals inside a window."""
    clipped = np.clip(intervals, start_s, end_s)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def break_down(spans: Iterable[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of the window by cause; the sum is the window."""
    return partition(spans, cause, (*PRECEDENCE, REMAINDER), start_s, end_s)


def partition(
    spans: Iterable[Span], label: Callable[[Span], Label], order: Sequence[Label], start_s: float, end_s: float
) -> dict[Label, float]:
    """Seconds of the window by label: earlier labels hide later ones, the last has what the others leave."""
    by_label: dict[Label, list[tuple[float, float]]] = {name: [] for name in order}
    for span in spans:
        by_label[label(span)].append((span.start_s, span.end_s - span.stalled_s))
    seconds: dict[Label, float] = {}
    covered = union([])
    covered_s = 0.0
    for name in order[:-1]:
        covered = union(np.concatenate((covered, clip(union(by_label[name]), start_s, end_s))))
        now_covered_s = total_s(covered)
        seconds[name] = max(0.0, now_covered_s - covered_s)
        covered_s = now_covered_s
    seconds[order[-1]] = max(0.0, (end_s - start_s) - covered_s)
    return seconds


def idle_gaps_s(spans: Iterable[Span], start_s: float, end_s: float, lane: str = COMPUTE) -> NDArray[np.float64]:
    """Gaps of a lane within the window that are longer than the threshold, in order of time.

    The waits between the launches of one visit add up to one gap.
    """
    kernels = [(span.start_s, span.end_s - span.stalled_s) for span in spans if span.lane == lane]
    busy = clip(union(kernels), start_s, end_s)
    edges = np.concatenate(([start_s], busy.ravel(), [end_s])).reshape(-1, 2)
    gaps = edges[:, 1] - edges[:, 0]
    return gaps[gaps > BUBBLE_THRESHOLD_S]


def phase_times_s(spans: Iterable[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of the window by pass, as timers between device synchronisations show them; the sum is the window.

    A pass lasts from the end of the one before it, or from `start_s`, to its own last span on host or lanes. Backward
    holds recomputation. The passes of all micro-batches are added.
    """
    ends_s: dict[tuple[int, bool, int, bool], float] = {}
    for span in spans:
        step, micro, phase = span.key[:3]
        is_step = phase == "step"
        position = (step, is_step, 0 if is_step else micro, phase != "forward")
        ends_s[position] = max(span.end_s, ends_s.get(position, start_s))
    seconds = dict.fromkeys(PASSES, 0.0)
    reached_s = start_s
    for (_, is_step, _, is_backward), pass_end_s in sorted(ends_s.items()):
        name = "step" if is_step else "backward" if is_backward else "forward"
        until_s = min(max(pass_end_s, reached_s), end_s)
        seconds[name] += until_s - reached_s
        reached_s = until_s
    return seconds


def num_host_syncs(spans: Iterable[Span]) -> int:
    """How often the host blocked on its device; a CPU's host that computes is not blocked."""
    return sum(span.lane == HOST and span.kind == "sync" and span.note != INLINE for span in spans)
