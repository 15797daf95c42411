"""Predicted against measured: one experiment simulated, a run of it, and both joined by key."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from zsim.comparing import quantities
from zsim.comparing.measured import Count, Measured, pooled, read
from zsim.comparing.quantities import NAMES, Name
from zsim.costs import pricer
from zsim.cpu_spec import CpuClusterSpec
from zsim.figures.breakdown import cause
from zsim.figures.diagnosis import Evidence, Finding, diagnose
from zsim.figures.key_shares import IDLE, Event, Share, shares
from zsim.figures.metrics import spans_of_first_rank
from zsim.ops import Collective
from zsim.pipeline import Result, programs, simulate
from zsim.spec import Spec
from zsim.strategies import groups
from zsim.trace import Span, Trace
from zsim.units import InputError

__all__ = ["Comparison", "EventDifference", "Measured", "compare", "over_loopback", "pooled", "read"]

SCHEMA: Final = "zsim-compare/1"
NUM_WORST: Final = 3
_UNITS: Final[dict[Name, str]] = {"bytes": "B", "memory": "B"}


@dataclass(frozen=True, slots=True)
class EventDifference:
    """What an event has of the predicted step and of the measured one."""

    event: Event
    predicted: Share
    measured: Share

    @property
    def difference_s(self) -> float:
        """What it adds to the error of the step, seconds; over all events these make it up."""
        return self.predicted.owned_s - self.measured.owned_s

    def to_json(self) -> dict[str, Any]:
        """As `worst_keys` of the interface has it."""
        return {
            "key": str(self.event),
            "predicted_s": self.predicted.owned_s,
            "measured_s": self.measured.owned_s,
            "difference_s": self.difference_s,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction beside a run."""

    result: Result
    measured: Measured
    predicted: Mapping[Name, float]
    events: tuple[EventDifference, ...]
    """Those that add most to the error first; empty where the run recorded no spans."""
    findings: tuple[Finding, ...] = ()
    """What the difference looks like."""

    def error_pct(self, name: Name) -> float | None:
        """Of the prediction, relative to the measurement; None where one is unknown or the measured is zero."""
        sample = self.measured.samples.get(name)
        if sample is None or name not in self.predicted or not sample.value:
            return None
        return 100 * (self.predicted[name] / sample.value - 1)

    @property
    def worst(self) -> tuple[EventDifference, ...]:
        """The events that add most to the error of the step."""
        return self.events[:NUM_WORST]

    def to_json(self) -> dict[str, Any]:
        """Names of the interface; seconds and bytes."""
        samples = self.measured.samples
        return {
            "schema": SCHEMA,
            "name": self.result.spec.name,
            "measured_from": self.measured.source,
            "measured_by": self.measured.description,
            "predicted": {name: self.predicted.get(name) for name in NAMES},
            "measured": {name: samples[name].value if name in samples else None for name in NAMES},
            "error_pct": {name: self.error_pct(name) for name in NAMES},
            "noise_pct": samples["step"].noise_pct,
            "noise_of_each_pct": {name: samples[name].noise_pct if name in samples else None for name in NAMES},
            "worst_keys": [row.to_json() for row in self.worst],
            "findings": [asdict(finding) for finding in self.findings],
        }


def compare(spec: Spec, measured: Measured, result: Result | None = None) -> Comparison:
    """Holds a run against the prediction of its experiment.

    Args:
        spec: the experiment.
        measured: what was measured of it.
        result: its prediction, if it has been made.

    Raises:
        InputError: the traces of both have no key in common, or those of other blocks or micro-batches.

    """
    if measured.over_loopback and spec != (spec := over_loopback(spec)):
        result = None
    result = result or simulate(spec)
    predicted = quantities.of_metrics(result.metrics)
    predicted["bytes"] = _bytes(result, measured.count)
    if measured.categories is None:
        predicted["memory"] = float(result.metrics.memory.peak_allocated)
    else:
        predicted["memory"] = quantities.peak_bytes(result.trace, measured.categories)
    events = _joined(result.trace, measured) if measured.trace is not None else ()
    return Comparison(result, measured, predicted, events, _diagnosis(result.trace, measured))


def over_loopback(spec: Spec) -> Spec:
    """The same ranks on one node of a cluster of CPUs, joined by loopback alone; one of GPUs as it is."""
    cluster = spec.cluster
    if not isinstance(cluster, CpuClusterSpec) or cluster.num_nodes == 1:
        return spec
    return replace(spec, cluster=replace(cluster, num_nodes=1, ranks_per_node=cluster.num_ranks))


def _diagnosis(predicted: Trace, measured: Measured) -> tuple[Finding, ...]:
    if measured.trace is None:
        return ()
    return diagnose(Evidence(predicted, measured.trace, measured.samples["step"].values))


def _bytes(result: Result, count: Count) -> float:
    if count == "payload":
        return quantities.payload_bytes(result.trace)
    return sent_bytes(result.spec)[count == "sent by a node"]


def sent_bytes(spec: Spec) -> tuple[float, float]:
    """Bytes that the first rank, and its node over its link, send in a step; headers and acknowledgements left out."""
    communicators = groups(spec)
    price = pricer(spec, communicators)
    by_rank = by_node = 0.0
    for op in programs(spec)[0].ops:
        if isinstance(op, Collective) and op.key.is_measured:
            for link, nbytes in price(op).link_bytes:
                if link.endswith("[0]"):
                    inside = not link.startswith("nic")
                    by_rank += nbytes / (spec.cluster.gpus_per_node if inside else 1)
                    by_node += 0.0 if inside else nbytes
    return by_rank / spec.noise.steps, by_node / spec.noise.steps


def _joined(predicted: Trace, measured: Measured) -> tuple[EventDifference, ...]:
    assert measured.trace is not None
    both = [spans_of_first_rank(trace) for trace in (predicted, measured.trace)]
    if not measured.has_keys:
        both = [[_by_cause(span) for span in spans] for spans in both]
    ours, theirs = (shares(spans) for spans in both)
    _check_joined(ours, theirs, f"--measured {measured.source}")
    nothing = Share("host")
    rows = [
        EventDifference(event, ours.get(event, nothing), theirs.get(event, nothing))
        for event in dict.fromkeys((*ours, *theirs))
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_s)))


def _by_cause(span: Span) -> Span:
    """Named by its pass and by what it is to a step, which a profiler knows too."""
    return span._replace(key=span.key._replace(layer=-1, what=cause(span)))


def _check_joined(ours: Mapping[Event, Share], theirs: Mapping[Event, Share], where: str) -> None:
    """Other blocks or micro-batches are another model or another batch."""
    if not (ours.keys() & theirs.keys()) - {Event(0, "", -1, IDLE)}:
        raise InputError(f"{where}: no key in common with the prediction; allowed: a run of this experiment")
    if _communicates(ours) and not _communicates(theirs):
        raise InputError(f"{where}: has no collectives, the prediction has; allowed: a run with as many ranks")
    for name, place in (("micro-batches", 0), ("blocks", 2)):
        predicted, measured = (
            {event[place] for event, share in side.items() if share.count and event.layer >= 0}
            for side in (ours, theirs)
        )
        # A profile without the modules of a model knows no blocks.
        if measured and predicted != measured:
            raise InputError(
                f"{where}: has {len(measured)} {name}, the prediction {len(predicted)}; allowed: a run of the same"
            )


def _communicates(side: Mapping[Event, Share]) -> bool:
    return any(share.count and share.cause in quantities.EXPOSED for share in side.values())
