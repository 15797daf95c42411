"""What the host pays, by the times at which it launches: from one launch to the next lies one operator."""

from collections.abc import Iterator
from typing import Final

from zsim.calibration.measured import Measured
from zsim.calibration.trace import weighted
from zsim.imports.kineto.passes import Place
from zsim.imports.kineto.records import HostEvent
from zsim.imports.kineto.spans import RankSpans

_LONGEST_CALL: Final = 10.0
"""Times the median of its kind; a call that takes longer waited for room in the launch queue, or for another thread."""
_FEWEST: Final = 20
"""Launches in a row, for their median to say something."""
_COSTS: Final = {"forward": "op_forward_s", "recompute": "op_forward_s", "backward": "op_backward_s"}


def host_costs(ranked: RankSpans, host_slowdown: float, source: str) -> tuple[dict[str, Measured], list[str]]:
    """`op_forward_s`, `op_backward_s` and `launch_latency_s`, and why one of them is not there.

    Args:
        ranked: launches, steps and passes of one rank.
        host_slowdown: of the cluster; host costs of a runtime are stated for a host without.
        source: of the numbers.

    """
    if ranked.profile.has_stacks:
        return {}, ["host costs: recorded with Python's functions (with_stack), which slow the host down"]
    samples: dict[str, list[float]] = {"op_forward_s": [], "op_backward_s": []}
    for phase, interval_s in _intervals(ranked):
        samples[_COSTS[phase]].append(interval_s / host_slowdown)
    sources = dict.fromkeys(samples, f"from one launch to the next under the profiler; {source}")
    samples["launch_latency_s"] = [latency_s / host_slowdown for latency_s in _latencies(ranked)]
    sources["launch_latency_s"] = f"from a launch's return to its kernel on an idle device; {source}"
    found: dict[str, Measured] = {}
    notes = []
    for name, values in samples.items():
        if len(values) < _FEWEST:
            notes.append(f"{name}: {len(values)} samples; at least {_FEWEST} are needed")
        else:
            found[name] = weighted.measured(((value, 1.0) for value in values), "s", sources[name])
    return found, notes


def _intervals(ranked: RankSpans) -> Iterator[tuple[str, float]]:
    """(pass, seconds) from each launch to the next one of the same thread and pass, nothing waited for between them."""
    profile = ranked.profile
    launched = {launch: ranked.places[index] for index, launch in enumerate(ranked.launches) if launch >= 0}
    longest_s = _LONGEST_CALL * _median_call_s([profile.host[launch] for launch in launched])
    before: tuple[HostEvent, Place] | None = None
    for index, event in enumerate(profile.host):
        if event.kind != "call":
            continue
        place = launched.get(index)
        is_prompt = place is not None and place.step >= 0 and event.duration_s <= longest_s
        if place is not None and is_prompt and before is not None and place.phase in _COSTS:
            earlier, earlier_place = before
            if earlier.thread == event.thread and earlier_place == place:
                yield place.phase, event.start_s - earlier.start_s
        if place is not None or event.duration_s > longest_s:
            before = (event, place) if place is not None and is_prompt else None


def _median_call_s(calls: list[HostEvent]) -> float:
    times = sorted(call.duration_s for call in calls)
    return times[len(times) // 2] if times else 0.0


def _latencies(ranked: RankSpans) -> Iterator[float]:
    """From the return of each launch that finds the whole device idle to the start of its kernel."""
    profile, busy_until_s = ranked.profile, float("-inf")
    for index, activity in enumerate(profile.activities):
        launch = ranked.launches[index]
        if launch >= 0 and activity.collective is None and ranked.places[index].step >= 0:
            call = profile.host[launch]
            if busy_until_s <= call.start_s:
                # A kernel may run before its call has returned.
                yield max(0.0, activity.start_s - call.end_s)
        busy_until_s = max(busy_until_s, activity.end_s)
