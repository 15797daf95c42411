"""What was measured of an experiment: a folder or result of `zsim measure` and `zsim lab run`, or a trace."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from zsim.comparing import own_trace
from zsim.comparing.quantities import Name, Sample, of_phases, of_steps, payload_bytes, peak_bytes
from zsim.figures.metrics import SCHEMA, spans_of_first_rank
from zsim.imports import kineto
from zsim.imports.kineto.spans import measured_trace
from zsim.spec import Spec
from zsim.trace import Trace
from zsim.units import InputError

Count = Literal["sent", "sent by a node", "payload"]
"""What bytes are: payload that a rank or a node puts on the wire, or sizes of tensors that collectives move."""
RESULT: Final = "result.json"
LAB_RESULT: Final = "lab.json"
"""Beside it, of a run in the lab."""
_MOST_RANKS: Final = 16
"""Whose traces are read: who is slow shows among them, and a file of a large model takes a second."""
_GZIP: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, as far as it was recorded."""

    source: str
    """File or folder."""
    samples: Mapping[Name, Sample]
    """What is not known is not there."""
    trace: Trace | None = None
    """Of the first ranks."""
    count: Count = "payload"
    categories: tuple[str, ...] | None = None
    """Of memory that the run has kept books of; None where it is all that the process took."""
    over_loopback: bool = False
    """Whether the ranks of a CPU cluster had no links between them but loopback."""
    description: str = ""
    """Engine, machine, number of steps."""
    has_keys: bool = True
    """Whether events are named as the prediction names them; a profiler knows operators, not what they are for."""

    @property
    def step_time_s(self) -> float:
        """Median."""
        return self.samples["step"].value


def read(path: Path, spec: Spec) -> Measured:
    """What a file or folder says of the experiment.

    Raises:
        InputError: it cannot be read, holds no measurement, or is one of another model, stage or number of ranks.

    """
    if path.is_dir():
        path = path / RESULT
    document = _document(path)
    if document.get("schema") == SCHEMA:
        return _of_result(document, spec, path)
    if "traceEvents" not in document:
        raise InputError(
            f"--measured {path}: neither a result of zsim measure nor a trace; allowed: a folder that zsim measure or "
            f"zsim lab run has written, its {RESULT}, or a trace of it or of torch's profiler"
        )
    beside = path.parent / RESULT
    if not own_trace.is_own(document):
        return _of_profile(spec, path)
    if path.name.startswith("trace.rank_") and beside.exists():
        return _of_result(_document(beside), spec, path, document)
    return _of_trace(own_trace.trace_of(document, spec, f"--measured {path}"), spec, path)


def pooled(runs: Iterable[Measured]) -> Measured:
    """Several launches of one run: all their steps together, the first one's trace."""
    first, *others = runs
    samples = {
        name: Sample(tuple(value for run in (first, *others) for value in run.samples[name].values))
        for name in first.samples
    }
    return replace(first, samples=samples)


def _document(path: Path) -> dict[str, Any]:
    """A JSON object, compressed or not."""
    where = f"--measured {path}"
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        document = json.loads(content)
    except OSError as error:
        said = error.strerror or "is no whole gzip file"
        raise InputError(f"{where}: {said}; allowed: a readable file") from None
    except (EOFError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise InputError(f"{where}: no JSON ({said}); allowed: a whole JSON file, compressed by gzip or not") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: given JSON without an object; allowed: one object")
    return document


def _of_result(document: dict[str, Any], spec: Spec, path: Path, events: dict[str, Any] | None = None) -> Measured:
    """A result, and the trace of its first rank beside it."""
    where = f"--measured {path}"
    if document.get("provenance", {}).get("origin") == "simulated":
        raise InputError(f"{where}: is a prediction of zsim run; allowed: a result of zsim measure or zsim lab run")
    try:
        _check_same(document, spec, where)
        samples: dict[Name, Sample] = {"step": Sample(_timed_steps_s(document))}
        samples |= of_phases(document.get("passes_s", {}))
        memory = document["peak_memory_bytes"][0]["peak_allocated"]
        peak = max(document["process_peak_bytes"])
        engine, machine = document["engine"], document["machine"]["processor"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: lacks {error}; allowed: a whole result of zsim measure or zsim lab run") from None
    trace = _trace_beside(path, spec, events)
    if trace is not None:
        samples |= {name: sample for name, sample in of_steps(trace).items() if name != "step"}
    categories = tuple(sorted({sample.category for sample in trace.memory})) if trace and memory else None
    samples["memory"] = Sample((float(memory if categories else peak),))
    lab = document.get("lab") or _lab_beside(path)
    count = _sent(document, lab, samples)
    steps = f"{len(samples['step'].values)} steps"
    return Measured(
        str(path),
        samples,
        trace,
        count,
        categories,
        over_loopback=not lab,
        description=f"engine {engine} on {machine}, {steps}",
    )


def _timed_steps_s(document: dict[str, Any]) -> tuple[float, ...]:
    """Those that were not recorded, where there are some."""
    steps, times_s = document["steps"], tuple(float(value) for value in document["step_times_s"])
    timed = times_s[: steps["first_recorded"] - steps["first_measured"]]
    return timed if timed and document.get("breakdown_s") else times_s


def _lab_beside(path: Path) -> dict[str, Any]:
    """What `zsim lab run` has noted of the links; nothing of a run over loopback."""
    beside = path.parent / LAB_RESULT
    return _document(beside) if beside.exists() else {}


def _sent(document: dict[str, Any], lab: dict[str, Any], samples: dict[Name, Sample]) -> Count:
    """Bytes that went over the wire: by the counters of the first node's link, else by the engine's own count."""
    if nodes := lab.get("steps"):
        samples["bytes"] = Sample((float(nodes[0]["payload_bytes_per_step"]),))
        return "sent by a node"
    if own := document["payload_bytes"]["step"][0]:
        samples["bytes"] = Sample((float(own),))
    return "sent"


def _trace_beside(path: Path, spec: Spec, events: dict[str, Any] | None) -> Trace | None:
    """Of the given events, else of the first ranks; None where the engine has recorded nothing."""
    if events is not None:
        return own_trace.trace_of(events, spec, f"--measured {path}")
    found: list[Trace] = []
    for rank in range(min(spec.cluster.num_ranks, _MOST_RANKS)):
        for name in (f"trace.rank_{rank}.json", f"trace.rank_{rank}.json.gz"):
            beside = path.parent / name
            if beside.exists() and own_trace.is_own(document := _document(beside)):
                found.append(own_trace.trace_of(document, spec, f"--measured {beside}"))
    if not found:
        return None
    spans = [span for trace in found for span in trace.spans]
    return replace(found[0], spans=spans, memory=[sample for trace in found for sample in trace.memory])


def _of_trace(trace: Trace, spec: Spec, path: Path) -> Measured:
    """A trace alone."""
    where = f"--measured {path}"
    if trace.origin == "simulated":
        raise InputError(f"{where}: is a simulated trace; allowed: a measured one")
    if trace.num_ranks != spec.cluster.num_ranks:
        raise InputError(_other(where, "ranks", trace.num_ranks, spec.cluster.num_ranks))
    samples = dict(of_steps(trace))
    samples["bytes"] = Sample((payload_bytes(trace),))
    # A profiler knows totals and no categories.
    categories = tuple(sorted({sample.category for sample in trace.memory} - {"", "unknown"}))
    if trace.memory:
        samples["memory"] = Sample((peak_bytes(trace),))
    steps = f"{len(samples['step'].values)} steps"
    return Measured(str(path), samples, trace, "payload", categories or None, description=steps)


def _of_profile(spec: Spec, path: Path) -> Measured:
    """A trace of torch's profiler, of one rank on a GPU."""
    where = f"--measured {path}"
    profile = kineto.read(path)
    trace = measured_trace((profile,), spec)
    if profile.world_size and profile.world_size != spec.cluster.num_ranks:
        raise InputError(_other(where, "ranks", profile.world_size, spec.cluster.num_ranks))
    spans = spans_of_first_rank(trace)
    num_micros = 1 + max(span.key.micro for span in spans)
    if num_micros != spec.train.gradient_accumulation:
        raise InputError(_other(where, "micro-batches", num_micros, spec.train.gradient_accumulation))
    samples = dict(of_steps(trace))
    samples["bytes"] = Sample((payload_bytes(trace),))
    if trace.memory:
        samples["memory"] = Sample((peak_bytes(trace),))
    device = profile.devices[0].name if profile.devices else "a GPU"
    steps = f"torch's profiler on {device}, rank {profile.rank}, {len(samples['step'].values)} steps"
    return Measured(str(path), samples, trace, "payload", description=steps, has_keys=False)


def _check_same(document: dict[str, Any], spec: Spec, where: str) -> None:
    """The same model, stage and ranks."""
    asked = {"num_ranks": spec.cluster.num_ranks, "model": spec.model.name, "stage": spec.zero.stage}
    found = document.get("provenance") or {"num_ranks": len(document["process_peak_bytes"])}
    for name, expected in asked.items():
        if name in found and found[name] != expected:
            raise InputError(_other(where, name.removeprefix("num_"), found[name], expected))


def _other(where: str, what: str, found: object, expected: object) -> str:
    return f"{where}: is a run of {what} {found}, the experiment has {expected}; allowed: a run of the same"
