"""The seven figures by which a run is held against its prediction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final, Literal, get_args

from zsim.figures.breakdown import break_down, phase_times_s
from zsim.figures.memory import HighWater, samples_of_first_rank
from zsim.figures.metrics import Metrics, collective_totals, spans_of_first_rank, step_bounds
from zsim.trace import Span, Trace

Name = Literal["step", "forward", "backward", "optimizer", "exposed_comm", "bytes", "memory"]
NAMES: Final[tuple[Name, ...]] = get_args(Name)
"""Seconds of a step and of its passes, seconds of communication that nothing computes beside, bytes a rank sends in a
step, bytes that a rank holds at most."""
EXPOSED: Final = ("exposed_all_gather", "exposed_reduce", "exposed_other_communication")
_PHASES: Final[dict[Name, str]] = {"forward": "forward", "backward": "backward", "optimizer": "step"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured figure: every step's value where it is known of each, else one value."""

    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """Median."""
        return median(self.values)

    @property
    def noise_pct(self) -> float | None:
        """± half the distance of the 10th from the 90th percentile, of the median; None of a single value."""
        if len(self.values) < 2 or not self.value:
            return None
        deciles = quantiles(self.values, n=10, method="inclusive")
        return 100 * (deciles[-1] - deciles[0]) / 2 / self.value


def of_metrics(metrics: Metrics) -> dict[Name, float]:
    """Those that the metrics of a run hold; bytes and memory are counted elsewhere."""
    seconds: dict[Name, float] = {name: metrics.phases_s[phase] for name, phase in _PHASES.items()}
    exposed_s = sum(metrics.breakdown_s[name] for name in EXPOSED)
    return {"step": metrics.step_time_s, **seconds, "exposed_comm": exposed_s}


def of_steps(trace: Trace) -> dict[Name, Sample]:
    """Seconds of each step of a trace's first rank; what lies between two steps belongs to neither."""
    spans = spans_of_first_rank(trace)
    ends_s = step_bounds(spans)
    by_step: dict[int, list[Span]] = {}
    for span in spans:
        by_step.setdefault(span.key.step, []).append(span)
    found: dict[Name, list[float]] = {name: [] for name in ("step", *_PHASES, "exposed_comm")}
    for (_, members), before_s, end_s in zip(sorted(by_step.items()), ends_s, ends_s[1:], strict=False):
        start_s = max(before_s, min(span.start_s for span in members))
        found["step"].append(end_s - start_s)
        phases_s = phase_times_s(members, start_s, end_s)
        for name, phase in _PHASES.items():
            found[name].append(phases_s[phase])
        causes_s = break_down(members, start_s, end_s)
        found["exposed_comm"].append(sum(causes_s[name] for name in EXPOSED))
    return {name: Sample(tuple(values)) for name, values in found.items()}


def of_phases(phases_s: Mapping[str, Sequence[float]]) -> dict[Name, Sample]:
    """Of passes that an engine has timed itself, step by step."""
    return {name: Sample(tuple(phases_s[phase])) for name, phase in _PHASES.items() if phases_s.get(phase)}


def payload_bytes(trace: Trace) -> float:
    """Payload of the collectives of one step of the first rank, as `CollectiveTotal` counts it."""
    spans = spans_of_first_rank(trace)
    return float(sum(row.bytes_per_gpu for row in collective_totals(spans, len(step_bounds(spans)) - 1)))


def peak_bytes(trace: Trace, categories: Iterable[str] | None = None) -> float:
    """What the first rank holds at most; of some categories only, where another book has no more."""
    if categories is None:
        return float(max((sample.allocated_bytes for sample in samples_of_first_rank(trace)), default=0))
    kept, high, allocated = frozenset(categories), HighWater(), 0
    for sample in samples_of_first_rank(trace):
        if sample.category in kept:
            allocated += sample.delta_bytes
            high.change(sample.category, sample.delta_bytes, allocated)
    return float(high.allocated_bytes)
