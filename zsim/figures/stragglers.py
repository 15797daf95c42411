"""What ranks cost each other: the spread of step times, who waits for whom, and why the last one is late."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zsim.ranks import RankTimes

Seconds = NDArray[np.float64]
Cause = Literal["host jitter", "allocator", "other"]
NUM_LATEST = 3
"""Ranks that are named."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The distribution of step time over the steps of a run, on its first rank; percentiles interpolate linearly."""

    mean: float
    p05: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank for which others waited."""

    rank: int
    late_s: float
    """Behind the median rank, a step, added over the collectives in which it was the last."""
    num_last: float
    """Of these collectives a step."""
    cause: Cause
    """Of most of its lateness."""


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Ranks of one run against each other, seconds a step."""

    num_ranks: int
    num_steps: int
    step_time_s: StepTimes
    quiet_step_time_s: float | None
    """Of the same run with equal ranks; None if it was not made."""
    waiting_s: float
    """In which the median rank spins in collectives for the last one; compute may run beside it."""
    late_s: dict[Cause, float]
    """How late the last ranks are behind the median ones, added over collectives, by cause."""
    latest: tuple[LateRank, ...]
    """The ranks that are late by most, the worst first."""
    num_flushes: float
    """Allocator flushes of all ranks together, a step."""
    flushing_steps: float
    """Share of steps in which at least one rank flushes."""
    flush_s: float
    """In which the mean rank deals with its device about memory."""

    @property
    def lost_s(self) -> float | None:
        """What unequal ranks cost in a step; below zero where noise happens to be fast."""
        return None if self.quiet_step_time_s is None else self.step_time_s.mean - self.quiet_step_time_s

    def to_json(self) -> dict[str, Any]:
        """One JSON object; causes with underscores."""
        document = asdict(self)
        document["lost_s"] = self.lost_s
        document["late_s"] = {cause.replace(" ", "_"): seconds for cause, seconds in self.late_s.items()}
        document["latest"] = [asdict(row) | {"cause": row.cause.replace(" ", "_")} for row in self.latest]
        return document


def stragglers(times: RankTimes, quiet_step_time_s: float | None = None) -> Stragglers:
    """Reads what an engine noted by rank and step.

    Args:
        times: of all ranks.
        quiet_step_time_s: mean step of the same run with equal ranks.

    """
    num_ranks, num_steps = times.step_end_s.shape
    by_cause = late_by_cause(times)
    late_s = times.late_s.sum(axis=1)
    order = [int(row) for row in np.argsort(-late_s, kind="stable")[:NUM_LATEST] if late_s[row] > 0]
    return Stragglers(
        num_ranks=num_ranks,
        num_steps=num_steps,
        step_time_s=distribution(step_times_s(times)),
        quiet_step_time_s=quiet_step_time_s,
        waiting_s=float(np.median(times.spinning_s, axis=0).mean()),
        late_s={cause: float(seconds.sum()) / num_steps for cause, seconds in by_cause.items()},
        latest=tuple(
            LateRank(
                rank=times.ranks[row],
                late_s=float(late_s[row]) / num_steps,
                num_last=float(times.num_last[row].sum()) / num_steps,
                cause=max(by_cause, key=lambda cause: float(by_cause[cause][row].sum())),
            )
            for row in order
        ),
        num_flushes=float(times.num_flushes.sum()) / num_steps,
        flushing_steps=float((times.num_flushes > 0).any(axis=0).mean()),
        flush_s=float(times.flush_s.mean()),
    )


def step_times_s(times: RankTimes) -> Seconds:
    """Of the first rank, shape [step]; their sum is the run."""
    return np.diff(times.step_end_s[0], prepend=times.start_s[0])


def distribution(seconds: Seconds) -> StepTimes:
    """Mean, percentiles and maximum."""
    p05, p50, p95, p99 = (float(value) for value in np.percentile(seconds, (5, 50, 95, 99)))
    return StepTimes(float(seconds.mean()), p05, p50, p95, p99, float(seconds.max()))


def late_by_cause(times: RankTimes) -> dict[Cause, Seconds]:
    """`late_s` of each rank and step in parts that add up to it.

    First comes what the rank has above the median rank in seconds of host work, then what it spent in the allocator:
    ranks that all flush, but at different moments, are late one after the other. What is left belongs to the larger of
    the two: behind its delay a host has no lead, and others spin while its lane is idle between launches. A rank with
    neither is late for another reason: unequal network or compute, or what it was behind when the step began.
    """
    of_host = _above_median(times.host_s)
    host = np.minimum(times.late_s, of_host)
    allocator = np.minimum(times.late_s - host, times.flush_s)
    rest = times.late_s - host - allocator
    is_host = (of_host > 0) & (host >= allocator)
    is_allocator = (times.flush_s > 0) & ~is_host
    return {
        "host jitter": host + np.where(is_host, rest, 0.0),
        "allocator": allocator + np.where(is_allocator, rest, 0.0),
        "other": np.where(is_host | is_allocator, 0.0, rest),
    }


def _above_median(host_s: Seconds) -> Seconds:
    """What ranks have above the median rank, but for rounding in sums of thousands of spans."""
    above: Seconds = host_s - np.median(host_s, axis=0)
    return np.where(above > _ROUNDING * host_s, above, 0.0)
