"""The single switches that lead from one runtime to another, thrown one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zsim.figures.findings.labels import tell_apart
from zsim.figures.findings.steps import Ladder, Rung, step_bar
from zsim.figures.metrics import Metrics
from zsim.spec import Optimisations, Spec
from zsim.studies.runs import Progress, Source, predict_all
from zsim.units import InputError

_SAME_STEP = 1e-9
"""Relative difference of steps that is rounding."""


@dataclass(frozen=True, slots=True)
class Change:
    """Switches of the runtime that are thrown together."""

    what: str
    """In plain words."""
    throws: tuple[tuple[str, Any], ...]
    """Field of `spec.Optimisations`, and what it becomes."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """As for `--set`."""
        return tuple(f"optimisations.{name}={str(value).lower()}" for name, value in self.throws)


LADDER = (
    Change("no norms in debug strings", (("debug_norms", False),)),
    Change("fetch and release decisions cached", (("cached_decisions", True),)),
    Change("all-gather straight into one tensor", (("all_gather_form", "base"),)),
    Change("reduce-scatter straight from one tensor", (("reduce_scatter_form", "base"),)),
    Change("one collective for several tensors", (("coalesced_collectives", True),)),
    Change("all-gathers ordered by events, no device sync", (("all_gather_sync", "stream"), ("limiter_depth", 2))),
    Change("gradients on a communicator of their own", (("separate_communicators", True),)),
    Change("reductions ordered by events", (("reduce_sync", "stream"),)),
    Change("module trace repaired: prefetch and reuse", (("broken_trace", False),)),
    Change("buffers allocated once, contiguous", (("preallocated_buffers", True), ("defragmentation", True))),
    Change("one read for overflow and norm", (("fused_gradient_norm", True),)),
)
"""From deepspeed-0.5.4 to deepspeed-0.6.0 (DeepSpeed PR #1453). The order is ours: what a switch gains depends on those
thrown before it."""


def changes(before: Optimisations, after: Optimisations) -> tuple[Change, ...]:
    """What leads from one set of switches to the other: in the ladder's order and words where it has them."""
    different = {
        field.name: getattr(after, field.name)
        for field in fields(Optimisations)
        if getattr(before, field.name) != getattr(after, field.name)
    }
    found = []
    for rung in LADDER:
        throws = tuple((name, different.pop(name)) for name, _ in rung.throws if name in different)
        if throws:
            found.append(rung if throws == rung.throws else Change(_in_words(throws), throws))
    return (*found, *(Change(_in_words((throw,)), (throw,)) for throw in different.items()))


def _in_words(throws: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {str(value).lower().replace('_', ' ')}" for name, value in throws)


def thrown(spec: Spec, steps: Sequence[Change]) -> list[Spec]:
    """The experiment after each change, those before it kept."""
    found = []
    for change in steps:
        optimisations = replace(spec.runtime.optimisations, **dict(change.throws))
        spec = replace(spec, runtime=replace(spec.runtime, optimisations=optimisations), measured=())
        found.append(spec)
    return found


def ablation(before: Source, after: Source, progress: Progress | None = None) -> Ladder:
    """The gain of each switch on top of those before it, from one experiment to the other.

    What else tells the experiments apart is the last rung, where it changes the step.

    Raises:
        InputError: a ValueError: an experiment is wrong, or no switch differs.

    """
    start, end = before.spec(), after.spec()
    steps = changes(start.runtime.optimisations, end.runtime.optimisations)
    if not steps:
        raise InputError(
            f"{before.file} and {after.file}: both run with the same optimisations ({start.runtime.name},"
            f" {end.runtime.name}); allowed: runtimes or an optimisations section that differ in a switch"
        )
    first, *metrics, last = predict_all([start, *thrown(start, steps), end], progress)
    rungs = [_rung(change.what, found) for change, found in zip(steps, metrics, strict=True)]
    if abs(rungs[-1].step_s - last.step_time_s) > _SAME_STEP * last.step_time_s:
        rungs.append(_rung(_all_else(start, end), last))
    labels = tell_apart([start, end])
    return Ladder(labels.shared, step_bar(labels.each[0], first), tuple(rungs), step_bar(labels.each[1], last))


def _rung(what: str, metrics: Metrics) -> Rung:
    return Rung(what, metrics.step_time_s, metrics.hardware_tflops_per_gpu)


def _all_else(start: Spec, end: Spec) -> str:
    """Names the parts of the experiment that differ beside the switches."""
    parts = {
        "model": (start.model, end.model),
        "cluster": (start.cluster, end.cluster),
        "host costs": (start.runtime.host, end.runtime.host),
        "software stack": (start.runtime.stack, end.runtime.stack),
        "ZeRO configuration": (start.zero, end.zero),
        "batch and precision": (start.train, end.train),
    }
    return f"all else: {', '.join(name for name, (one, other) in parts.items() if one != other) or 'runtime'}"
