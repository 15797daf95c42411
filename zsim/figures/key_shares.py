"""Which event has each instant of a step: what a prediction and a measurement are held against each other by.

Every instant goes to exactly one key, by the precedence of `breakdown`: of what runs at once, useful work before
collectives, these before copies, and the host last; of equals the one that began first. So the seconds of all keys add
up to the step, and their differences to the difference of the steps. A collective that computation hides owns nothing.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zsim.figures.breakdown import CAUSES, cause
from zsim.figures.metrics import step_bounds
from zsim.ops import HOST, Key
from zsim.trace import Span

IDLE = "nothing"
"""Where neither host nor lanes have anything to do, as far as the trace knows."""
_RANK = {name: place for place, name in enumerate(CAUSES)}


class Event(NamedTuple):
    """A key without its step: the same event of every step."""

    micro: int
    phase: str
    layer: int
    what: str

    @classmethod
    def of(cls, key: Key) -> "Event":
        """That a key names in its step."""
        return cls(key.micro, key.phase, key.layer, key.what)

    def __str__(self) -> str:
        return self.what if self.what == IDLE else f"{self.micro}/{self.phase}/{self.layer}/{self.what}"


@dataclass(slots=True)
class Share:
    """What an event has of one step."""

    cause: str
    """As in `breakdown.CAUSES`."""
    owned_s: float = 0.0
    """Of the step."""
    running_s: float = 0.0
    """Of its spans, hidden behind others or not."""
    count: float = 0.0
    """Spans."""


def shares(spans: Sequence[Span]) -> dict[Event, Share]:
    """Of each event in one step, mean over the steps of one rank's spans."""
    bounds = step_bounds(spans)
    num_steps = len(bounds) - 1
    found: dict[Event, Share] = {}
    for span in spans:
        share = found.setdefault(Event.of(span.key), Share(cause(span)))
        if _RANK[cause(span)] < _RANK[share.cause]:
            share.cause = cause(span)
        if span.lane != HOST:
            share.running_s += (span.end_s - span.start_s - span.stalled_s) / num_steps
            share.count += 1 / num_steps
    for event, seconds in owned_s(spans, bounds[0], bounds[-1]).items():
        found.setdefault(event, Share(CAUSES[-1])).owned_s = seconds / num_steps
    return found


def owned_s(spans: Iterable[Span], start_s: float, end_s: float) -> dict[Event, float]:
    """Seconds of a window by event; the sum is the window."""
    arriving = sorted(
        (max(span.start_s, start_s), _RANK[cause(span)], min(span.end_s - span.stalled_s, end_s), Event.of(span.key))
        for span in spans
    )
    edges = sorted({start_s, end_s, *(edge for begin_s, _, until_s, _ in arriving for edge in (begin_s, until_s))})
    seconds: dict[Event, float] = {}
    running: list[tuple[int, float, float, Event]] = []
    following = 0
    for edge_s, next_s in pairwise(edges):
        while following < len(arriving) and arriving[following][0] <= edge_s:
            begin_s, rank, until_s, event = arriving[following]
            heapq.heappush(running, (rank, begin_s, until_s, event))
            following += 1
        while running and running[0][2] <= edge_s:
            heapq.heappop(running)
        owner = running[0][3] if running else _IDLE_EVENT
        seconds[owner] = seconds.get(owner, 0.0) + next_s - edge_s
    return seconds


_IDLE_EVENT = Event(0, "", -1, IDLE)
