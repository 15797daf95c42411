"""Which event of a host thread lies within which, and what launched each activity of a device."""

from collections.abc import Sequence
from typing import Final

from zsim.imports.kineto.records import NO_CORRELATION, HostEvent, Profile

_ROUNDING_S: Final = 2e-9
"""Kineto writes nanoseconds, a start and a duration each rounded by itself."""


def parents_of(host: Sequence[HostEvent]) -> tuple[int, ...]:
    """Index of what encloses each event; -1 at the top. Events come by thread, then start, the longest first."""
    parents: list[int] = []
    stack: list[int] = []
    for index, event in enumerate(host):
        while stack and (host[stack[-1]].thread != event.thread or host[stack[-1]].end_s < event.end_s - _ROUNDING_S):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(index)
    return tuple(parents)


def launches(profile: Profile) -> tuple[int, ...]:
    """Index in `profile.host` of the call that launched each activity; -1 where the trace does not say."""
    calls = {
        event.correlation: index
        for index, event in enumerate(profile.host)
        if event.kind == "call" and event.correlation != NO_CORRELATION
    }
    return tuple(calls.get(activity.correlation, -1) for activity in profile.activities)
