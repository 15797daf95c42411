"""A trace in numbers: throughput, where the step goes, bubbles, memory at its peak, collectives, money.

Everything is read from the trace of rank 0, which also stands for the ranks folded into it. The initialisation of
the run (phases "load" and "init") counts for memory alone.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from zsim.errors import ImpossibleResultError
from zsim.figures.breakdown import COLLECTIVE_CAUSE, break_down, idle_gaps_s, num_host_syncs, phase_times_s
from zsim.figures.comparison import Comparison, compare
from zsim.figures.kernels import launch_s
from zsim.figures.memory import MemoryPeak, fit_warnings, num_alloc_retries, peak
from zsim.figures.planner import bill
from zsim.figures.states import Counts
from zsim.figures.stragglers import Stragglers, stragglers
from zsim.figures.stragglers import step_times_s as times_of_steps_s
from zsim.figures.streams import DeviceTime, StreamTime, device_time, stream_times
from zsim.spec import Spec
from zsim.trace import Span, Trace

SCHEMA = "zsim-run/1"
TERA = 1e12

STEPS = "steps"
"""What an interval is of, where the steps of a run differ."""
PAYLOAD_FACTOR = {"all_reduce": 2}
"""Elements moved per rank over the size S of the tensor, as the ZeRO paper counts them (section 7): an all-reduce is
a reduce-scatter and an all-gather, everything else moves S once."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What the program asks of one rank in one optimizer step, known without running it."""

    model_flop_per_rank: float
    """GEMM FLOP without recomputation."""
    hardware_flop_per_rank: float
    """GEMM FLOP of all passes, recomputation included."""
    executed_flop_per_rank: float
    """What kernels really do: less where causal ones skip, more where they repeat within (`ops.Attention`)."""
    num_parameters: int
    """Ψ, of the whole model."""
    num_trained_parameters: int
    """Those of them with gradients and optimizer states."""
    num_active_parameters: int
    """Those of them that one token meets: of experts only the ones that it is sent to."""

    @property
    def counts(self) -> Counts:
        """Both, as the formulas of the states take them."""
        return Counts(self.num_parameters, self.num_trained_parameters)


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Collectives of one kind and phase in one step of one rank."""

    kind: str
    phase: str
    count: int
    bytes_per_gpu: int
    """Payload moved: all-reduce 2 S, everything else S, with S the size of the whole tensor."""
    seconds: float
    """From the arrival of the last rank to the end, overlapping ones counted in full."""

    @property
    def mean_size_bytes(self) -> float:
        """Mean S."""
        return self.bytes_per_gpu / PAYLOAD_FACTOR.get(self.kind, 1) / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Gaps of the compute lane in one step."""

    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The answer to an experiment; `to_json` gives it under the names of the interface."""

    name: str
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    """Shortest and longest step, equal for a single one; under noise the 5th and the 95th percentile of the steps; what
    measured constants leave open, the 10th and the 90th (`with_interval`)."""
    samples_per_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    """Without recomputation."""
    hardware_tflops_per_gpu: float
    """With recomputation."""
    mfu: float
    hfu: float
    """As MFU over the data sheet's peak, by the field's FLOP: long causal sequences may come out above 1."""
    fits: bool
    breakdown_s: dict[str, float]
    phases_s: dict[str, float]
    """Forward, backward with recomputation, and optimizer step, as `phase_times_s` tells them apart."""
    num_syncs: int
    """How often the host waits for its device in one step."""
    num_alloc_retries: int
    """How often in one step the allocator flushes: gives its cache back to the device, to get what it could not."""
    bubbles: Bubbles
    overlap_pct: float
    """Part of the communication beside which the device computes; with `device` and `streams` as HTA defines them."""
    device: DeviceTime
    streams: tuple[StreamTime, ...]
    memory: MemoryPeak
    collectives: tuple[CollectiveTotal, ...]
    days: float | None
    gpu_hours: float | None
    cost: float | None
    days_interval: tuple[float, float] | None
    """As `step_time_interval_s`; None where that is no wider than a point."""
    cost_interval: tuple[float, float] | None
    samples_per_s_interval: tuple[float, float] | None
    tokens_per_s_per_gpu_interval: tuple[float, float] | None
    stragglers: Stragglers | None
    """Ranks against each other, where each was executed by itself."""
    measured: tuple[Comparison, ...]
    """Against what somebody measured, where the experiment states it."""
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    work: ModelWork

    def to_json(self) -> dict[str, Any]:
        """One JSON object, numbers in SI units."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for field in fields(self):
            value = getattr(self, field.name)
            match field.name:
                case "memory":
                    document["memory_bytes"] = value.to_json()
                case "bubbles":
                    document["bubbles"] = asdict(value)
                case "stragglers":
                    document["stragglers"] = None if value is None else value.to_json()
                case "device":
                    document["device_s"] = value.to_json()
                case "streams":
                    document["streams"] = [row.to_json() for row in value]
                case "collectives" | "measured":
                    document[field.name] = [asdict(row) for row in value]
                case name if name.endswith("_interval") or name in {"step_time_interval_s", "warnings"}:
                    document[field.name] = None if value is None else list(value)
                case "work":
                    document["work"] = asdict(value)
                    document["parameters"] = {
                        "total": value.num_parameters,
                        "trained": value.num_trained_parameters,
                        "active": value.num_active_parameters,
                    }
                case _:
                    document[field.name] = value
        return document


def measure(
    trace: Trace,
    work: ModelWork,
    step_times_s: Sequence[float] = (),
    quiet_step_time_s: float | None = None,
) -> Metrics:
    """All metrics of a trace.

    Args:
        trace: of at least one whole step.
        work: of its model.
        step_times_s: of steps that were timed without being recorded; throughput then follows from their median, while
            what a step is made of stays as the trace has it. By default the steps of the trace.
        quiet_step_time_s: of the same run with equal ranks, where noise makes them differ.

    Raises:
        ImpossibleResultError: what no machine can do.

    """
    spec = trace.spec
    spans = spans_of_first_rank(trace)
    bounds = step_bounds(spans)
    num_steps = len(bounds) - 1
    start_s, *_, end_s = bounds
    step_time_s, step_times_s = _step_times(trace, bounds, step_times_s)
    _check_duration(step_time_s)
    samples_per_rank = spec.train.micro_batch * spec.train.gradient_accumulation
    seq_len = spec.noise.mean_seq_len(spec.train.gradient_accumulation, spec.train.seq_len)
    tokens_per_s_per_gpu = samples_per_rank * seq_len / step_time_s
    model_flop_per_s = work.model_flop_per_rank / step_time_s
    hardware_flop_per_s = work.hardware_flop_per_rank / step_time_s
    memory_peak, num_retries = peak(trace), round(num_alloc_retries(trace) / num_steps)
    device = device_time(spans, num_steps)
    step_time_interval_s = min(step_times_s), max(step_times_s)
    ranks = stragglers(trace.ranks, quiet_step_time_s) if trace.ranks and len(trace.ranks.ranks) > 1 else None
    if ranks is not None and spec.noise.differs:
        step_time_interval_s = ranks.step_time_s.p05, ranks.step_time_s.p95
    whole = bill(spec, step_time_s, step_time_interval_s)
    metrics = Metrics(
        name=spec.name,
        step_time_s=step_time_s,
        step_time_interval_s=step_time_interval_s,
        samples_per_s=samples_per_rank * trace.num_ranks / step_time_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        model_tflops_per_gpu=model_flop_per_s / TERA,
        hardware_tflops_per_gpu=hardware_flop_per_s / TERA,
        mfu=model_flop_per_s / spec.cluster.device.peak_flop_per_s,
        hfu=hardware_flop_per_s / spec.cluster.device.peak_flop_per_s,
        fits=memory_peak.fits,
        breakdown_s={name: s / num_steps for name, s in break_down(spans, start_s, end_s).items()},
        phases_s={name: s / num_steps for name, s in phase_times_s(spans, start_s, end_s).items()},
        num_syncs=round(num_host_syncs(spans) / num_steps),
        num_alloc_retries=num_retries,
        bubbles=_bubbles(spans, start_s, end_s, num_steps),
        overlap_pct=device.overlap_pct,
        device=device,
        streams=stream_times(spans, num_steps, launch_s(spec)),
        memory=memory_peak,
        collectives=collective_totals(spans, num_steps),
        days=whole.days,
        gpu_hours=whole.gpu_hours,
        cost=whole.cost,
        days_interval=None,
        cost_interval=None,
        samples_per_s_interval=None,
        tokens_per_s_per_gpu_interval=None,
        stragglers=ranks,
        measured=(),
        warnings=(*spec.warnings, *fit_warnings(spec, memory_peak, work.counts, num_retries)),
        provenance=provenance(trace, num_steps),
        work=work,
    )
    metrics = with_interval(metrics, spec, step_time_interval_s, STEPS)
    _check_numbers(metrics)
    if trace.origin == "simulated":
        # A machine may be faster than the experiment says.
        _check_peak(metrics, spec)
    predicted = {measurement.metric: getattr(metrics, measurement.metric) for measurement in spec.measured}
    return replace(metrics, measured=compare(spec.measured, {"step_time_s": step_time_s, **predicted}))


def _step_times(trace: Trace, bounds: Sequence[float], given_s: Sequence[float]) -> tuple[float, Sequence[float]]:
    """The step, and those that it is taken from: timed ones, those of the trace, or all that a run with noise made."""
    num_steps = len(bounds) - 1
    if trace.ranks is not None and trace.ranks.step_end_s.shape[1] > num_steps:  # the first ones are recorded
        times_s = times_of_steps_s(trace.ranks).tolist()
        return fmean(times_s), times_s
    if given_s:
        return median(given_s), given_s
    return (bounds[-1] - bounds[0]) / num_steps, [later - earlier for earlier, later in pairwise(bounds)]


def with_interval(metrics: Metrics, spec: Spec, step_time_interval_s: tuple[float, float], of: str) -> Metrics:
    """The metrics with another interval of the step, carried to throughput, days and cost.

    Args:
        metrics: of a run.
        spec: its experiment.
        step_time_interval_s: least and most; of equal ones the others have no interval.
        of: what makes the difference, for `provenance`.

    """
    shortest_s, longest_s = step_time_interval_s
    whole = bill(spec, metrics.step_time_s, step_time_interval_s)

    def rates(rate: float) -> tuple[float, float] | None:
        is_point = shortest_s == longest_s or shortest_s <= 0
        return None if is_point else (rate * metrics.step_time_s / longest_s, rate * metrics.step_time_s / shortest_s)

    return replace(
        metrics,
        step_time_interval_s=step_time_interval_s,
        provenance=metrics.provenance | {"interval_of": of if shortest_s < longest_s else None},
        samples_per_s_interval=rates(metrics.samples_per_s),
        tokens_per_s_per_gpu_interval=rates(metrics.tokens_per_s_per_gpu),
        days_interval=whole.days_interval,
        cost_interval=whole.cost_interval,
    )


def collective_totals(spans: Sequence[Span], num_steps: int) -> tuple[CollectiveTotal, ...]:
    """Collectives of one step by kind and phase, in order of first appearance."""
    rows: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        if span.kind in COLLECTIVE_CAUSE:
            row = rows.setdefault((span.kind, span.key.phase), [0, 0, 0.0])
            row[0] += 1
            row[1] += PAYLOAD_FACTOR.get(span.kind, 1) * span.nbytes
            row[2] += span.end_s - span.start_s
    return tuple(
        CollectiveTotal(kind, phase, round(count / num_steps), round(nbytes / num_steps), seconds / num_steps)
        for (kind, phase), (count, nbytes, seconds) in rows.items()
    )


def _bubbles(spans: Sequence[Span], start_s: float, end_s: float, num_steps: int) -> Bubbles:
    gaps_s = idle_gaps_s(spans, start_s, end_s)
    return Bubbles(
        count=round(len(gaps_s) / num_steps),
        total_s=float(gaps_s.sum()) / num_steps,
        longest_s=float(gaps_s.max(initial=0.0)),
    )


def spans_of_first_rank(trace: Trace) -> list[Span]:
    """Without the initialisation and the steps that warm up."""
    if not trace.spans:
        raise ImpossibleResultError("trace: no spans, nothing ran")
    first = min(span.rank for span in trace.spans)
    spans = [span for span in trace.spans if span.rank == first and span.key.is_measured]
    if not spans:
        raise ImpossibleResultError("trace: nothing ran after the initialisation")
    return spans


def step_bounds(spans: Sequence[Span]) -> list[float]:
    """Start of the first step and the end of each; a step ends with its last span on any lane."""
    ends_s: dict[int, float] = {}
    for span in spans:
        ends_s[span.key.step] = max(span.end_s, ends_s.get(span.key.step, -math.inf))
    return [min(span.start_s for span in spans), *(ends_s[step] for step in sorted(ends_s))]


def _check_duration(step_time_s: float) -> None:
    if not (math.isfinite(step_time_s) and step_time_s > 0):
        raise ImpossibleResultError(f"step_time_s: {step_time_s!r} came out, a step takes a finite time above 0")


def provenance(trace: Trace, num_recorded_steps: int) -> dict[str, Any]:
    """What ran, and what its figures rest on."""
    spec = trace.spec
    assumed = [constant.path for constant in spec.constants if constant.origin == "assumed"]
    return {
        "version": _package_version(),
        "schema": trace.schema,
        "origin": trace.origin,
        "question": spec.question,
        "topology": spec.cluster.topology,
        "num_nodes": spec.cluster.num_nodes,
        "num_ranks": trace.num_ranks,
        "runtime": spec.runtime.name,
        "model": spec.model.name,
        "stage": spec.zero.stage,
        "seed": spec.noise.seed,
        "num_steps": spec.noise.steps,
        "num_recorded_steps": num_recorded_steps,
        "num_constants": len(spec.constants),
        "num_assumed": len(assumed),
        "assumed": assumed,
        "num_events": trace.num_events,
        "auto": {item.path: {"value": item.value, "rule": item.rule} for item in spec.autos},
        "versions": dict(sorted(trace.versions.items())),
    }


def _package_version() -> str:
    try:
        return version("zsim")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "uninstalled"


def _check_numbers(metrics: Metrics) -> None:
    """No result that is negative or not a number."""
    numbers: dict[str, float] = {
        field.name: value
        for field in fields(metrics)
        if isinstance(value := getattr(metrics, field.name), float | int) and not isinstance(value, bool)
    }
    numbers |= {f"breakdown_s.{name}": seconds for name, seconds in metrics.breakdown_s.items()}
    numbers |= {f"device_s.{name}": seconds for name, seconds in metrics.device.to_json().items()}
    numbers |= {f"phases_s.{name}": seconds for name, seconds in metrics.phases_s.items()}
    numbers |= {f"memory_bytes.{name}": value for name, value in metrics.memory.to_json().items()}
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ImpossibleResultError(f"{name}: {value!r} came out, allowed is a finite number from 0 up")


def _check_peak(metrics: Metrics, spec: Spec) -> None:
    """No result above the hardware's peak."""
    executed, peak_tflops = (
        flop_per_s / TERA
        for flop_per_s in (
            metrics.work.executed_flop_per_rank / metrics.step_time_s,
            spec.cluster.device.peak_flop_per_s,
        )
    )
    if executed > peak_tflops:
        raise ImpossibleResultError(
            f"executed_flop_per_rank: {executed:.1f} TFLOPS came out, above the peak of {peak_tflops:.1f} of "
            f"{spec.cluster.device.name}"
        )
