"""The same collective on several ranks: how long it takes once its last rank has come.

A kernel of NCCL spins until all ranks are there, so that on one rank its duration is waiting and transfer together. The
last one to come does not wait; its kernel is the shortest. Clocks of different machines need not agree for this.
"""

from collections.abc import Sequence
from typing import Final

from zsim.imports.kineto.records import Activity, Profile

_Event = tuple[str, int]
_UNKNOWN_GROUP: Final = ""


def transfer_times_s(profiles: Sequence[Profile]) -> tuple[dict[int, float], ...]:
    """Seconds of each collective from its last rank's arrival, by index in `activities`, for each profile.

    The n-th collective of a process group on one rank is the n-th on another; groups of which the ranks disagree on
    number or kind are left as they are, and so is everything of a single rank.
    """
    own = [_by_group(profile) for profile in profiles]
    found: list[dict[int, float]] = [
        {index: profile.activities[index].duration_s for indices in groups.values() for index in indices}
        for profile, groups in zip(profiles, own, strict=True)
    ]
    for group in {group for groups in own for group in groups}:
        members = [rank for rank, groups in enumerate(own) if group in groups]
        rows = [[_called(profiles[rank].activities[index]) for index in own[rank][group]] for rank in members]
        if any(row != rows[0] for row in rows):
            continue
        for same in zip(*(own[rank][group] for rank in members), strict=True):
            shortest_s = min(found[rank][index] for rank, index in zip(members, same, strict=True))
            for rank, index in zip(members, same, strict=True):
                found[rank][index] = shortest_s
    return tuple(found)


def _by_group(profile: Profile) -> dict[str, list[int]]:
    """Indices of the collectives of each process group, in order of time."""
    found: dict[str, list[int]] = {}
    for index, activity in enumerate(profile.activities):
        if activity.collective is not None:
            found.setdefault(activity.collective.group or _UNKNOWN_GROUP, []).append(index)
    return found


def _called(activity: Activity) -> _Event:
    assert activity.collective is not None
    return activity.collective.kind, activity.collective.nbytes
