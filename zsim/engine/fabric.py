"""Shared links: flows that run at the same time divide them max-min fairly.

A collective is one flow over the links of its group, not one flow per pair of ranks. Alone it runs at its own full
speed, which is a property of its algorithm; together flows share each link so that no flow can be made faster
without slowing one that is no faster (Bertsekas and Gallager, Data Networks, section 6.5.2). Rates are computed anew
only when a flow starts or ends, and only among the flows that share links with it, directly or through others.

The bandwidth of a flow is what it moves over its busiest link. What this leaves out: the ramp of a new flow,
unfairness of the transport between near and far peers, and loss.

A flow may stand for several equal ones over the same links, which end together. It carries the bytes of all of them
and gets the share of all of them: fairness is between the flows it stands for.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, cast

import simpy
from simpy.events import NORMAL as SIMPY_NORMAL

Demands = tuple[tuple[str, float], ...]
"""Links of a flow and what it moves over each of them at full speed, in bytes per second."""
FlowEnd = Callable[[float], None]
"""Called with the time when a flow has ended."""
Callbacks = list[Callable[[Any], None]]
"""What an alarm calls, each with itself."""
NORMAL = SIMPY_NORMAL
"""Priority of all events."""

TOLERANCE = 1e-12
"""Relative: a link is full, a flow unhindered, when it is this close."""


class Clock(simpy.Environment):
    """A SimPy environment whose events can be set for an absolute time, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.agenda = self._queue
        self.serial = self._eid

    def drain(self) -> None:
        """Processes all events: `Environment.run` with `step` in its loop, which saves a call an event.

        Of `step` it leaves out failed events, for nothing here fails otherwise than by an exception from a callback.
        """
        agenda = self.agenda
        while agenda:
            self._now, _, _, event = heappop(agenda)
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # SimPy's mark of a processed event
            for callback in callbacks:
                callback(event)

    def count_events(self) -> int:
        """Events scheduled so far, which is the number processed once the run has ended; ask once."""
        return next(self.serial)


class Alarm(simpy.Event):
    """A timeout for an absolute time, so that no rounding creeps in; once it has rung it can be set again."""

    _ok = True
    _value = None

    def __init__(self, clock: Clock, subject: Any = None) -> None:
        self.env = clock
        self.callbacks = []
        self.due_s = 0.0
        self.subject = subject
        """Whatever its callback needs to know."""

    def set(self, due_s: float, callbacks: Callbacks) -> None:
        """Makes it ring at a time, for callbacks that it may keep."""
        clock = cast("Clock", self.env)
        self.callbacks = callbacks
        self.due_s = due_s
        heappush(clock.agenda, (due_s, NORMAL, next(clock.serial), self))


def max_min_speeds(
    flows: Sequence[Demands], capacities: Mapping[str, float], num_flows: Sequence[int] | None = None
) -> list[float]:
    """The speed of each flow as a fraction of its full speed.

    Progressive filling: the bandwidths of all flows rise together; a flow stops when it is at full speed or when one
    of its links is full. The links of a stopped flow keep what it uses.

    Args:
        flows: demands of each flow, positive, at least one link each.
        capacities: bytes per second of each link.
        num_flows: how many equal flows each of them stands for; one by default.

    """
    counts = num_flows or [1] * len(flows)
    peaks = [max(demand for _, demand in demands) / num for demands, num in zip(flows, counts, strict=True)]
    free: dict[str, float] = {}
    slopes: dict[str, float] = {}
    users: dict[str, list[int]] = {}
    for flow, demands in enumerate(flows):
        for link, demand in demands:
            free[link] = capacities[link]
            slopes[link] = slopes.get(link, 0.0) + demand / peaks[flow]
            users.setdefault(link, []).append(flow)
    speeds = [-1.0] * len(flows)
    by_peak = sorted(range(len(flows)), key=peaks.__getitem__, reverse=True)
    while by_peak:
        # `free` holds what rising flows may still use in total, so the level is absolute, not an increment.
        full = min(slopes, key=lambda link: free[link] / slopes[link], default=None)
        level = free[full] / slopes[full] if full is not None else float("inf")
        slowest = by_peak[-1]
        if peaks[slowest] <= level * (1 + TOLERANCE):
            stopped = [slowest]
            level = peaks[slowest]
        else:
            stopped = [flow for flow in users[full] if speeds[flow] < 0.0] if full is not None else []
        for flow in stopped:
            speeds[flow] = min(1.0, level / peaks[flow])
            for link, demand in flows[flow]:
                free[link] -= demand * speeds[flow]
                slopes[link] -= demand / peaks[flow]
        _drop_idle(stopped, flows, speeds, users, slopes)
        while by_peak and speeds[by_peak[-1]] >= 0.0:
            by_peak.pop()
    return speeds


def _drop_idle(
    stopped: Sequence[int],
    flows: Sequence[Demands],
    speeds: Sequence[float],
    users: Mapping[str, list[int]],
    slopes: dict[str, float],
) -> None:
    """Forgets the links on which no flow rises any more; what is left of their slope is rounding."""
    for flow in stopped:
        for link, _ in flows[flow]:
            if link in slopes and all(speeds[user] >= 0.0 for user in users[link]):
                del slopes[link]


class Flow:
    """A transfer in progress."""

    __slots__ = ("alarm", "demands", "num_flows", "on_end", "remaining_s", "since_s", "speed")

    def __init__(self, demands: Demands, alone_s: float, on_end: FlowEnd, num_flows: int) -> None:
        self.demands = demands
        self.num_flows = num_flows
        self.on_end = on_end
        self.remaining_s = alone_s
        """Seconds it still needs at full speed, as of `since_s`."""
        self.since_s = 0.0
        self.speed = 0.0
        self.alarm: Alarm | None = None


class Fabric:
    """The links of a cluster and the flows on them."""

    def __init__(self, clock: Clock, capacities: Mapping[str, float]) -> None:
        self._clock = clock
        self._capacities = capacities
        self._flows: dict[str, dict[Flow, None]] = {link: {} for link in capacities}
        self._ringing: Callbacks = [self._ring]

    def start(self, now: float, demands: Demands, alone_s: float, on_end: FlowEnd, num_flows: int = 1) -> None:
        """Starts a flow, or several equal ones, that alone would take `alone_s`; `on_end` gets the time of its end."""
        flow = Flow(demands, alone_s, on_end, num_flows)
        flow.since_s = now
        alone = True
        for link, _ in demands:
            others = self._flows[link]
            alone = alone and not others
            others[flow] = None
        if alone:
            self._set_speed(now, flow, 1.0)
        else:
            self._share(now, flow)

    def _share(self, now: float, first: Flow) -> list[Flow]:
        """Shares links anew among a flow and all it is connected with; returns these."""
        flows = self._connected(first)
        # Alone a flow takes as long as it was priced.
        if len(flows) == 1:
            speeds = [1.0]
        else:
            demands, counts = [flow.demands for flow in flows], [flow.num_flows for flow in flows]
            speeds = max_min_speeds(demands, self._capacities, counts)
        for flow, speed in zip(flows, speeds, strict=True):
            if speed != flow.speed:
                self._set_speed(now, flow, speed)
        return flows

    def _connected(self, first: Flow) -> list[Flow]:
        """All flows that share a link with the first one, or with one that does, and so on."""
        queue = [first]
        found = {first: None}
        seen_links: dict[str, None] = {}
        for flow in queue:
            for link, _ in flow.demands:
                if link in seen_links:
                    continue
                seen_links[link] = None
                for other in self._flows[link]:
                    if other not in found:
                        found[other] = None
                        queue.append(other)
        return queue

    def _set_speed(self, now: float, flow: Flow, speed: float) -> None:
        flow.remaining_s = max(0.0, flow.remaining_s - (now - flow.since_s) * flow.speed)
        flow.since_s = now
        flow.speed = speed

        flow.alarm = Alarm(self._clock, flow)
        flow.alarm.set(now + flow.remaining_s / speed, self._ringing)

    def _ring(self, alarm: Alarm) -> None:
        flow: Flow = alarm.subject
        if alarm is not flow.alarm:
            return  # the speed has changed since
        flow.alarm = None  # they know each other
        now = alarm.due_s
        neighbours = []
        for link, _ in flow.demands:
            others = self._flows[link]
            del others[flow]
            if others:
                neighbours.append(next(iter(others)))
        shared: set[Flow] = set()
        for neighbour in neighbours:
            if neighbour not in shared:
                shared.update(self._share(now, neighbour))
        flow.on_end(now)
