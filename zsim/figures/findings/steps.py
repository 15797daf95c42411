"""A step beside another: where each spends its time, and the single changes that lead from one to the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zsim.display import duration
from zsim.figures.breakdown import CAUSES, LABELS
from zsim.figures.comparison import Comparison
from zsim.figures.findings.labels import with_fit
from zsim.figures.metrics import Metrics

_RATES = ("hardware_tflops_per_gpu", "model_tflops_per_gpu")
"""Measurements that a picture of steps can show, the first that is stated."""
_EQUAL = 0.005
"""Relative difference of two steps that is called none."""


class MeasuredStep(NamedTuple):
    """What somebody measured of a step."""

    step_s: float
    tflops: float | None
    """Hardware TFLOPS per GPU as measured; None where another metric was."""


@dataclass(frozen=True, slots=True)
class StepBar:
    """One experiment's step."""

    label: str
    step_s: float
    seconds: Mapping[str, float]
    """By cause, in the order of `breakdown.CAUSES`; they add up to the step."""
    tflops: float
    """Hardware TFLOPS per GPU, recomputation counted."""
    measured: MeasuredStep | None = None


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two experiments, in the order in which they are told."""

    shared: str
    before: StepBar
    after: StepBar

    @property
    def causes(self) -> tuple[str, ...]:
        """Causes with time in either, in the order in which they are stacked."""
        bars = (self.before, self.after)
        return tuple(cause for cause in CAUSES if any(bar.seconds.get(cause, 0.0) > 0 for bar in bars))

    @property
    def saved_s(self) -> dict[str, float]:
        """Seconds that the second step is shorter, by cause."""
        return {name: self.before.seconds.get(name, 0.0) - self.after.seconds.get(name, 0.0) for name in self.causes}

    @property
    def headline(self) -> str:
        """What the two bars say."""
        before_s, after_s = self.before.step_s, self.after.step_s
        if abs(after_s / before_s - 1) < _EQUAL:
            return f"Both steps take {duration(after_s)}"
        faster = after_s < before_s
        cause, saved_s = max(self.saved_s.items(), key=lambda item: item[1] if faster else -item[1])
        ratio = before_s / after_s if faster else after_s / before_s
        return (
            f"{duration(before_s)} → {duration(after_s)} a step, {ratio:.2f} times as {'fast' if faster else 'slow'}: "
            f"{duration(abs(saved_s))} {'less' if faster else 'more'} {LABELS[cause]}"
        )


def step_bar(label: str, metrics: Metrics) -> StepBar:
    """A bar from the answer to an experiment."""
    return StepBar(
        label=with_fit(label, metrics.fits),
        step_s=metrics.step_time_s,
        seconds=metrics.breakdown_s,
        tflops=metrics.hardware_tflops_per_gpu,
        measured=_measured(metrics),
    )


def _measured(metrics: Metrics) -> MeasuredStep | None:
    stated: dict[str, Comparison] = {row.metric: row for row in metrics.measured}
    row = next((stated[name] for name in _RATES if name in stated), next(iter(metrics.measured), None))
    if row is None:
        return None
    tflops = row.measured if row.metric == _RATES[0] else None
    return MeasuredStep(metrics.step_time_s + row.missing_s, tflops)


class Rung(NamedTuple):
    """The run with one more change made."""

    what: str
    """The change in plain words."""
    step_s: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Ladder:
    """From one experiment to another by single changes, each on top of those before it."""

    shared: str
    start: StepBar
    rungs: tuple[Rung, ...]
    end: StepBar

    @property
    def gains_s(self) -> tuple[float, ...]:
        """Seconds that each rung takes off the step."""
        steps_s = [self.start.step_s, *(rung.step_s for rung in self.rungs)]
        return tuple(before - after for before, after in pairwise(steps_s))

    @property
    def gains_tflops(self) -> tuple[float, ...]:
        """TFLOPS per GPU that each rung adds."""
        rates = [self.start.tflops, *(rung.tflops for rung in self.rungs)]
        return tuple(after - before for before, after in pairwise(rates))

    def headline(self, unit: str) -> str:
        """What the ladder says, in "tflops" or "seconds"."""
        gains = self.gains_s if unit == "seconds" else self.gains_tflops
        if not gains:
            return f"Nothing tells {self.start.label} and {self.end.label} apart"
        best = max(range(len(gains)), key=gains.__getitem__)
        if unit == "seconds":
            ends, gain = f"{duration(self.start.step_s)} to {duration(self.end.step_s)} a step", duration(gains[best])
        else:
            ends = f"{self.start.tflops:.0f} to {self.end.tflops:.0f} TFLOPS per GPU"
            gain = f"{gains[best]:.0f}"
        if gains[best] <= 0:
            return f"From {ends}: no single change helps"
        return f"From {ends}: {gain} of it by “{self.rungs[best].what}”"
