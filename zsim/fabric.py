"""Shared links: flows that run at the same time divide them max-min fairly.

A collective is one flow over the links of its group, not one flow per pair of ranks. Alone it runs at its own full
speed, which is a property of its algorithm; together flows share each link so that no flow can be made faster
without slowing one that is no faster (Bertsekas and Gallager, Data Networks, section 6.5.2). Rates are computed anew
only when a flow starts or ends, and only among the flows that share links with it, directly or through others.

The bandwidth of a flow is what it moves over its busiest link. What this leaves out: the ramp of a new flow,
unfairness of the transport between near and far peers, and loss.
"""

from collections.abc import Callable, Mapping, Sequence

import simpy

Demands = tuple[tuple[str, float], ...]
"""Links of a flow and what it moves over each of them at full speed, in bytes per second."""
FlowEnd = Callable[[float, int], None]
"""Called with the time and the number of a flow that has ended."""
Timer = simpy.Timeout
Gate = simpy.Event

TOLERANCE = 1e-12
"""Relative: a link is full, a flow unhindered, when it is this close."""


class Clock(simpy.Environment):
    """A SimPy environment that can say how many events were scheduled in it."""

    @property
    def num_events(self) -> int:
        """Events scheduled so far. Once the run has ended this is the number processed."""
        return int(repr(self._eid)[len("count(") : -1])


def max_min_speeds(flows: Sequence[Demands], capacities: Mapping[str, float]) -> list[float]:
    """The speed of each flow as a fraction of its full speed.

    Progressive filling: the bandwidths of all flows rise together; a flow stops when it is at full speed or when one
    of its links is full. The links of a stopped flow keep what it uses.

    Args:
        flows: demands of each flow, positive, at least one link each.
        capacities: bytes per second of each link.
    """
    peaks = [max(demand for _, demand in demands) for demands in flows]
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

    __slots__ = ("demands", "number", "on_end", "remaining_s", "since_s", "speed", "timer")

    def __init__(self, demands: Demands, alone_s: float, number: int, on_end: FlowEnd) -> None:
        self.demands = demands
        self.remaining_s = alone_s
        """Seconds it still needs at full speed."""
        self.number = number
        self.on_end = on_end
        self.since_s = 0.0
        self.speed = 0.0
        self.timer: Timer | None = None


class Fabric:
    """The links of a cluster and the flows on them."""

    def __init__(self, clock: Clock, capacities: Mapping[str, float]) -> None:
        self._clock = clock
        self._capacities = capacities
        self._flows: dict[str, dict[Flow, None]] = {link: {} for link in capacities}

    def start(self, demands: Demands, alone_s: float, number: int, on_end: FlowEnd) -> None:
        """Starts a flow that alone would take `alone_s`; `on_end` gets the time of its end and its number."""
        flow = Flow(demands, alone_s, number, on_end)
        flow.since_s = self._clock.now
        for link, _ in demands:
            self._flows[link][flow] = None
        self._share(flow)

    def _share(self, first: Flow) -> list[Flow]:
        """Shares links anew among a flow and all it is connected with; returns these."""
        flows = self._connected(first)
        if len(flows) == 1:
            self._set_speed(first, 1.0)
            return flows
        for flow, speed in zip(flows, max_min_speeds([flow.demands for flow in flows], self._capacities), strict=True):
            if speed != flow.speed:
                self._set_speed(flow, speed)
        return flows

    def _connected(self, first: Flow) -> list[Flow]:
        """All flows that share a link with the first one, or with one that does, and so on."""
        found = {first: None}
        queue = [first]
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

    def _set_speed(self, flow: Flow, speed: float) -> None:
        now = self._clock.now
        flow.remaining_s = max(0.0, flow.remaining_s - (now - flow.since_s) * flow.speed)
        flow.since_s = now
        flow.speed = speed
        timer = self._clock.timeout(flow.remaining_s / speed, flow)
        timer.callbacks.append(self._on_timer)
        flow.timer = timer

    def _on_timer(self, timer: Timer) -> None:
        flow = timer.value
        assert isinstance(flow, Flow)
        if timer is not flow.timer:
            return  # the speed has changed since this timer was set
        for link, _ in flow.demands:
            del self._flows[link][flow]
        shared: dict[Flow, None] = {}
        for link, _ in flow.demands:
            neighbour = next(iter(self._flows[link]), None)
            if neighbour is not None and neighbour not in shared:
                shared |= dict.fromkeys(self._share(neighbour))
        flow.on_end(self._clock.now, flow.number)
