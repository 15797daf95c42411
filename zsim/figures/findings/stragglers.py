"""What unequal ranks cost against their number, and what emptying all caches together does about it."""

from dataclasses import dataclass
from typing import NamedTuple

from zsim.figures.stragglers import Cause

CAUSES: tuple[Cause, ...] = ("host jitter", "allocator", "other")


class StragglerPoint(NamedTuple):
    """An experiment on a number of ranks, each with its own noise; seconds are those of a step."""

    num_ranks: int
    quiet_s: float
    """With equal ranks."""
    mean_s: float
    p95_s: float
    expected_s: float
    """Mean of steps in which all ranks are as slow as the slowest of so many draws."""
    late_s: dict[Cause, float]
    """How late the last ranks are behind the median ones."""
    flushes: float
    """Allocator flushes of one rank in a step."""
    flushing_steps: float
    """Share of steps in which at least one rank flushes."""

    @property
    def lost(self) -> float:
        """Share of the step of equal ranks that comes on top of it."""
        return self.mean_s / self.quiet_s - 1

    @property
    def expected(self) -> float:
        """The same by expectation."""
        return self.expected_s / self.quiet_s - 1

    @property
    def lost_p95(self) -> float:
        """The same of a step that 5 % of steps exceed."""
        return self.p95_s / self.quiet_s - 1


@dataclass(frozen=True, slots=True)
class StragglerLine:
    """One experiment on several numbers of ranks, in rising order, its batch per GPU unchanged."""

    label: str
    points: tuple[StragglerPoint, ...]

    def lines(self) -> list[str]:
        """A line a point."""
        return [
            self.label,
            *(
                f"  {point.num_ranks:,} ranks: lost {point.lost:.1%}, expected of the slowest {point.expected:.1%}, "
                f"5% of steps lose more than {point.lost_p95:.1%}; {_flushing(point)}"
                for point in self.points
            ),
        ]


def _flushing(point: StragglerPoint) -> str:
    if not point.flushes:
        return "no flushes"
    return f"{point.flushes:.2f} flushes a rank and step, some rank flushes in {point.flushing_steps:.0%} of steps"


@dataclass(frozen=True, slots=True)
class Straggling:
    """Experiments side by side."""

    shared: str
    host_jitter: float
    num_steps: int
    curves: tuple[StragglerLine, ...]
    stray_bytes: int = 0
    """Mean of what each rank holds beside its program."""

    @property
    def has_flushes(self) -> bool:
        """Whether any rank of any run flushes its cache."""
        return any(point.flushes > 0 for curve in self.curves for point in curve.points)

    @property
    def headline(self) -> str:
        """What the most ranks lose, and what the fewest do."""
        if len(self.curves) == 1:
            few, many = self.curves[0].points[0], self.curves[0].points[-1]
            if few is many:
                return f"{many.num_ranks:,} unequal ranks lose {many.lost:.1%} of a step"
            costs = f"{few.lost:.1%} of a step on {few.num_ranks:,} and {many.lost:.1%} on {many.num_ranks:,}"
            return f"Unequal ranks cost {costs}"
        order = sorted(self.curves, key=lambda curve: -curve.points[-1].lost)
        worst, best = order[0], order[-1]
        most = worst.points[-1].num_ranks
        return (
            f"On {most:,} ranks unequal hosts cost {worst.points[-1].lost:.1%} of a step ({worst.label}), "
            f"{best.points[-1].lost:.1%} ({best.label})"
        )


class CacheBar(NamedTuple):
    """A run in which all ranks empty their caches together."""

    every: int
    """k; 0 is never."""
    quiet_s: float
    """Step of the same run with equal ranks."""
    mean_s: float
    p95_s: float
    flushes: float
    """Of one rank in a step, besides."""
    flush_s: float
    """In which the mean rank deals with its device about memory."""
    fits: bool

    @property
    def name(self) -> str:
        """For an axis."""
        return "never" if not self.every else "each step" if self.every == 1 else f"every {self.every} steps"


@dataclass(frozen=True, slots=True)
class EmptyingCaches:
    """torch.cuda.empty_cache() on all ranks behind every k-th step, one experiment."""

    shared: str
    num_ranks: int
    num_steps: int
    bars: tuple[CacheBar, ...]
    """In rising order of k."""

    def won(self, bar: CacheBar) -> float:
        """Share of the step without emptying that is saved; below zero where it costs."""
        return 1 - bar.mean_s / self.bars[0].mean_s

    @property
    def headline(self) -> str:
        """Which k is best."""
        best = min(self.bars, key=lambda bar: bar.mean_s)
        if not best.every:
            least = min(self.bars[1:], key=lambda bar: bar.mean_s, default=best)
            return f"Emptying all caches together wins nothing: {-self.won(least):.1%} longer steps at best"
        return f"Emptying all caches together {best.name} saves {self.won(best):.1%} of a step"

    def lines(self) -> list[str]:
        """A line a run."""
        return [
            f"{bar.name}: {bar.mean_s:.4g} s a step ({0.0 - self.won(bar):+.1%}), "
            f"{bar.flushes:.2f} flushes a rank and step, {bar.flush_s:.3g} s in the allocator, "
            f"{bar.quiet_s:.4g} s with equal ranks"
            for bar in self.bars
        ]
