"""What all ranks have seen, as the result of a run: the keys of `zsim run --json` and what only a run can know."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from reference.training.steps import Log, Schedule
from zsim.figures.memory import peak
from zsim.figures.metrics import SCHEMA, ModelWork, measure, provenance
from zsim.spec import ClusterSpec, Spec
from zsim.strategies import groups
from zsim.trace import Trace

RECORDING_BAR = 0.02
"""Share of a step that recording may cost."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def gathered(log: Log) -> list[Log]:
    """The logs of all ranks on rank 0, nothing on the others; all call it together."""
    logs: list[Any] | None = [None] * dist.get_world_size() if log.rank == 0 else None
    dist.gather_object((_machine_id(), log), logs)
    if logs is None:
        return []
    first_id, first = logs[0]
    return [_aligned(each, first.clock_s if machine == first_id else each.clock_s) for machine, each in logs]


def trace_of(spec: Spec, schedule: Schedule, logs: Sequence[Log]) -> Trace:
    """The recorded steps, counted from 0 as a simulation counts them."""
    first = schedule.first_recorded
    return Trace(
        origin="measured",
        spec=spec,
        versions=versions(),
        num_ranks=len(logs),
        spans=[span._replace(key=span.key._replace(step=span.key.step - first)) for log in logs for span in log.spans],
        memory=[sample for log in logs for sample in log.memory],
        groups=groups(spec),
        num_events=sum(log.num_events for log in logs),
    )


def result(trace: Trace, schedule: Schedule, logs: Sequence[Log], work: ModelWork) -> dict[str, Any]:
    """One JSON object, numbers in SI units; a step takes as long as on its slowest rank."""
    first_measured = schedule.first_measured - schedule.first
    first_recorded = schedule.first_recorded - schedule.first
    slowest_s = [max(times_s) for times_s in zip(*(log.step_times_s for log in logs), strict=True)]
    measured_s, recorded_s = slowest_s[first_measured:], slowest_s[first_recorded:]
    # A step that is recorded is timed only where there is no other; an engine may record nothing.
    timed_s = (slowest_s[first_measured:first_recorded] or recorded_s) if trace.spans else measured_s
    document = measure(trace, work, timed_s).to_json() if trace.spans else _throughput(trace, work, timed_s)
    document["warnings"] = [*document.get("warnings", trace.spec.warnings), *_elsewhere(trace.spec)]
    return {
        **document,
        "step_times_s": measured_s,
        "passes_s": _passes(logs[0].passes_s[first_measured:]),
        "noise": _noise(timed_s),
        "losses": [_mean(losses) for losses in zip(*(log.losses for log in logs), strict=True)],
        "skipped_steps": logs[0].skipped_steps,
        "steps": {
            "first": schedule.first,
            "first_measured": schedule.first_measured,
            "first_recorded": schedule.first_recorded,
            "end": schedule.end,
        },
        "recording": _recording(logs, recorded_s, median(timed_s)),
        "payload_bytes": {
            "step": [log.payload_bytes / len(measured_s) for log in logs],
            "run": [log.run_payload_bytes for log in logs],
        },
        "peak_memory_bytes": [peak(_of_rank(trace, log)).to_json() for log in logs],
        "process_peak_bytes": [log.process_peak_bytes for log in logs],
        "versions": versions(),
        "machine": machine(),
    }


def _throughput(trace: Trace, work: ModelWork, step_times_s: Sequence[float]) -> dict[str, Any]:
    """Of an engine that records nothing: what follows from the time of a step alone."""
    spec, step_time_s = trace.spec, median(step_times_s)
    samples = spec.train.micro_batch * spec.train.gradient_accumulation
    return {
        "schema": SCHEMA,
        "name": spec.name,
        "step_time_s": step_time_s,
        "step_time_interval_s": [min(step_times_s), max(step_times_s)],
        "samples_per_s": samples * trace.num_ranks / step_time_s,
        "tokens_per_s_per_gpu": samples * spec.train.seq_len / step_time_s,
        "model_tflops_per_gpu": work.model_flop_per_rank / step_time_s / 1e12,
        "hardware_tflops_per_gpu": work.hardware_flop_per_rank / step_time_s / 1e12,
        "mfu": work.model_flop_per_rank / step_time_s / spec.cluster.device.peak_flop_per_s,
        "hfu": work.hardware_flop_per_rank / step_time_s / spec.cluster.device.peak_flop_per_s,
        "provenance": provenance(trace, 0),
    }


def _passes(passes_s: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Pass -> its seconds in each measured step of the first rank; empty where spans say it."""
    return {name: [step[name] for step in passes_s] for name in (passes_s[0] if passes_s else ())}


def _noise(step_times_s: Sequence[float]) -> dict[str, float]:
    """How far apart the middle half of the steps that are timed is; 0 for a single one."""
    low_s, high_s = _quartiles(step_times_s)
    share = (high_s - low_s) / median(step_times_s)
    return {"num_steps": len(step_times_s), "interquartile_s": high_s - low_s, "share": share}


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _recording(logs: Sequence[Log], recorded_s: Sequence[float], step_time_s: float) -> dict[str, Any]:
    """What recording costs on the rank where it costs most: events times the measured cost of one."""
    num_events, event_s = max(
        ((log.num_events / len(recorded_s), log.event_cost_s) for log in logs), key=lambda cost: cost[0] * cost[1]
    )
    share = num_events * event_s / step_time_s
    return {
        "num_events": num_events,
        "event_s": event_s,
        "share": share,
        "within_bar": share <= RECORDING_BAR,
        "step_time_s": median(recorded_s),
    }


def _mean(losses: Sequence[float]) -> float | None:
    """Over all ranks; None for no number, which JSON cannot hold."""
    mean = sum(losses) / len(losses)
    return mean if abs(mean) < float("inf") else None


def _of_rank(trace: Trace, log: Log) -> Trace:
    return Trace(trace.origin, trace.spec, trace.versions, trace.num_ranks, [], log.memory)


def _aligned(log: Log, first_clock_s: float) -> Log:
    """On the clock of rank 0."""
    later_s = log.clock_s - first_clock_s
    log.spans = [
        span._replace(start_s=span.start_s + later_s, end_s=span.end_s + later_s, issued_s=span.issued_s + later_s)
        for span in log.spans
    ]
    log.memory = [sample._replace(time_s=sample.time_s + later_s) for sample in log.memory]
    return log


def _machine_id() -> str:
    """Processes with the same one share a clock."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else f"{platform.node()} {os.getpid()}"


def versions() -> dict[str, str]:
    """Of what ran."""
    return {"zsim": version("zsim"), "torch": torch.__version__, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """This machine, as the first rank sees it."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": gpus,
    }


def _processor() -> str:
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _elsewhere(spec: Spec) -> list[str]:
    """What of the result does not describe this machine."""
    if isinstance(spec.cluster, ClusterSpec) and not torch.cuda.is_available():
        return [f"measured on CPU cores: mfu, hfu, fits and cost are of {spec.cluster.device.name} all the same"]
    return []
