"""Optimizer steps of a trace, by the annotations of torch.profiler and of torch.optim."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from zsim.imports.kineto.records import HostEvent, Profile
from zsim.units import InputError

_PROFILER_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
"""`profiler.step()` ends one and begins the next."""
_OPTIMIZER_STEP: Final = "Optimizer.step#"
"""Every torch.optim.Optimizer is in such an annotation while it steps, those of DeepSpeed and apex too."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Windows of the host's time, in order; what was launched in one belongs to it."""

    windows: tuple[tuple[float, float], ...]
    """Seconds; they follow each other without a gap where they are by `profiler.step()`."""
    told_by: Literal["ProfilerStep", "Optimizer.step", "whole trace"]

    @property
    def num_steps(self) -> int:
        """At least one."""
        return len(self.windows)

    @property
    def duration_s(self) -> float:
        """Of all steps together, gaps left out."""
        return sum(end_s - start_s for start_s, end_s in self.windows)

    def index(self, time_s: float) -> int:
        """Which step an instant of the host belongs to; -1 for none."""
        return next((place for place, (start_s, end_s) in enumerate(self.windows) if start_s <= time_s < end_s), -1)


def steps_of(profile: Profile) -> Steps:
    """The whole optimizer steps in a trace.

    Profiler steps without an optimizer step are micro-batches: they belong to the next one that has it. Without any
    profiler step a step lasts from the end of one optimizer step to the end of the next, and of the first one it is
    not known whether it is whole. Where neither was annotated the whole trace is one step.

    Raises:
        InputError: the trace has profiler steps, and ends before the first optimizer step.

    """
    annotations = sorted(
        (event for event in profile.host if event.kind == "annotation"), key=lambda event: event.start_s
    )
    optimizer = [event for event in annotations if event.name.startswith(_OPTIMIZER_STEP)]
    marked = _marked(annotations)
    if marked:
        return Steps(_joined(marked, optimizer) if optimizer else marked, "ProfilerStep")
    if optimizer and (windows := _between(optimizer, profile)):
        return Steps(windows, "Optimizer.step")
    return Steps((_whole(profile),), "whole trace")


def _marked(annotations: Iterable[HostEvent]) -> tuple[tuple[float, float], ...]:
    """Profiler steps; each reaches to the next, so that nothing falls between them."""
    found = [(event.start_s, event.end_s) for event in annotations if _PROFILER_STEP.fullmatch(event.name)]
    following = [start_s for start_s, _ in found[1:]]
    ends = [*following, *(end_s for _, end_s in found[-1:])]
    return tuple((start_s, end_s) for (start_s, _), end_s in zip(found, ends, strict=True))


def _joined(marked: tuple[tuple[float, float], ...], optimizer: Iterable[HostEvent]) -> tuple[tuple[float, float], ...]:
    """Micro-batches in front of an optimizer step belong to it; those behind the last one are no whole step."""
    stepped = [event.start_s for event in optimizer]
    windows: list[tuple[float, float]] = []
    begun_s: float | None = None
    for start_s, end_s in marked:
        begun_s = start_s if begun_s is None else begun_s
        if any(start_s <= time_s < end_s for time_s in stepped):
            windows.append((begun_s, end_s))
            begun_s = None
    return tuple(windows) or ((marked[0][0], marked[-1][1]),)


def _between(optimizer: list[HostEvent], profile: Profile) -> tuple[tuple[float, float], ...]:
    """From the end of each optimizer step to that of the next; steps in a row, of sub-groups, are one."""
    forward = sorted(event.start_s for event in profile.host if event.kind == "operator" and _is_graded(event))
    ends: list[float] = []
    position = 0
    for event in optimizer:
        while position < len(forward) and forward[position] < event.start_s:
            position += 1
        is_next = not ends or any(ends[-1] <= time_s for time_s in forward[:position][-1:])
        if is_next:
            ends.append(event.end_s)
        else:
            ends[-1] = event.end_s
    first_s = _whole(profile)[0]
    starts = [first_s, *ends[:-1]]
    windows = tuple(zip(starts, ends, strict=True))
    # The first one may have been cut; it is left out where there are others.
    return windows[1:] if len(windows) > 1 else windows


def _is_graded(event: HostEvent) -> bool:
    """Whether it made a node of autograd's graph: forward."""
    return event.sequence >= 0 and event.forward_thread == 0


def _whole(profile: Profile) -> tuple[float, float]:
    times = [(event.start_s, event.end_s) for event in profile.host]
    times += [(activity.start_s, activity.end_s) for activity in profile.activities]
    if not times:
        raise InputError(f"{profile.name}: no events; allowed: a trace of at least one step")
    return min(start_s for start_s, _ in times), max(end_s for _, end_s in times)
