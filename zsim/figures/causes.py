"""Where a step goes in more detail than `breakdown`: causes by pass, and the host by what it does.

The parts add up to the step for the same reason: causes are ordered, and each has what those before it leave uncovered.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from zsim.figures.breakdown import COLLECTIVE_CAUSE, PRECEDENCE, REMAINDER, cause, partition
from zsim.figures.metrics import PAYLOAD_FACTOR, spans_of_first_rank, step_bounds
from zsim.ops import HOST
from zsim.trace import Span, Trace

PHASES: Final = ("forward", "recompute", "backward", "step")
_OF_ALL_PHASES: Final = frozenset({"copies", "allocator", "sync"})

LAUNCHES, HOOKS, BOOKKEEPING, DEBUG, LISTS, EVENTS, ALLOCATOR, OPTIMIZER, PYTHON, NOTHING = (
    "launches",
    "hooks and module calls",
    "fetch and release decisions",
    "debug strings",
    "lists and views of tensors",
    "events and streams",
    "allocator",
    "optimizer and gradients",
    "other Python",
    "wake-ups and launch latency",
)
HOST_PARTS: Final = (LAUNCHES, HOOKS, BOOKKEEPING, DEBUG, LISTS, EVENTS, ALLOCATOR, OPTIMIZER, PYTHON, NOTHING)
"""Of the time in which the device waits for the host; the last is when the host too has nothing to do."""

_ACTIVITIES: Final = {
    **dict.fromkeys(
        ("module_call", "compiled_call", "visit", "visit_backward", "gradient_hook", "counted_parameter"), HOOKS
    ),
    **dict.fromkeys(("parameter", "decision", "decision_backward", "scan"), BOOKKEEPING),
    **dict.fromkeys(("string", "norm_string"), DEBUG),
    **dict.fromkeys(("narrow", "view", "grouped_tensor"), LISTS),
    **dict.fromkeys(("record", "wait", "event", "wait_stream"), EVENTS),
    **dict.fromkeys(("alloc", "free", "allocation"), ALLOCATOR),
    **dict.fromkeys(("optimizer_tensor", "partition_gradient", "item"), OPTIMIZER),
}


class Cause(NamedTuple):
    """What has a part of the step."""

    name: str
    """As in `breakdown.CAUSES`."""
    part: str
    """The pass; what the host does; nothing where neither is told apart."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a cause has of one step, and what ran under its name, covered or not."""

    seconds: float
    count: float
    """Spans: collectives, copies, syncs, host activities."""
    nbytes: float
    """Payload of collectives as `CollectiveTotal` counts it; bytes moved by copies."""
    running_s: float
    """Of spans, overlapping ones counted in full."""

    @property
    def hidden(self) -> float:
        """Part of the running time that other causes cover; 0 where nothing ran."""
        return min(1.0, max(0.0, 1 - self.seconds / self.running_s)) if self.running_s else 0.0


def _order() -> tuple[Cause, ...]:
    order = []
    for name in PRECEDENCE:
        order += [Cause(name, part) for part in (("",) if name in _OF_ALL_PHASES else PHASES)]
    return (*order, *(Cause(REMAINDER, part) for part in HOST_PARTS))


ORDER: Final = _order()


def cause_of(span: Span) -> Cause:
    """The cause that a span stands for while nothing of higher precedence runs."""
    name = cause(span)
    if name == REMAINDER:
        return Cause(name, LAUNCHES if span.kind == "launch" else _ACTIVITIES.get(span.note, PYTHON))
    return Cause(name, "" if name in _OF_ALL_PHASES else span.key.phase)


def shares(trace: Trace) -> dict[Cause, Share]:
    """All causes of one step of the first rank, in order of precedence; seconds add up to its mean step time."""
    spans = spans_of_first_rank(trace)
    bounds = step_bounds(spans)
    num_steps = len(bounds) - 1
    seconds = partition(spans, cause_of, ORDER, bounds[0], bounds[-1])
    found: dict[Cause, Share] = {}
    totals = _totals(spans)
    for name, owned_s in seconds.items():
        count, nbytes, running_s = totals[name]
        found[name] = Share(owned_s / num_steps, count / num_steps, nbytes / num_steps, running_s / num_steps)
    return found


def _totals(spans: Iterable[Span]) -> dict[Cause, list[float]]:
    """Count, bytes and running seconds. Copies for a collective are no further calls of it."""
    totals: dict[Cause, list[float]] = {name: [0, 0, 0.0] for name in ORDER}
    for span in spans:
        total = totals[cause_of(span)]
        total[2] += span.end_s - span.start_s - span.stalled_s
        is_own = span.kind in COLLECTIVE_CAUSE or cause(span) not in COLLECTIVE_CAUSE.values()
        if is_own and span.kind != "queue":
            total[0] += 1
            total[1] += PAYLOAD_FACTOR.get(span.kind, 1) * span.nbytes * (span.lane != HOST)
    return totals
