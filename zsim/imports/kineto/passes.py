"""Which pass of which micro-batch launched each activity: what autograd's marks on the host tell."""

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from zsim.imports.kineto.records import HostEvent, Profile
from zsim.imports.kineto.steps import Steps
from zsim.ops import Phase

_ENGINE: Final = "autograd::engine::evaluate_function"
_OPTIMIZER: Final = "Optimizer.step#"
_NAMED: Final = re.compile(r"[#\s]*(forward|backward|optimizer)(?: step)?[\s#]*\d*", re.IGNORECASE)
"""What people call their own annotations of the passes."""
_Mark = Literal["forward", "recompute", "backward", "step", "unmarked"]
_PASS_OF: Final[dict[str, _Mark]] = {"forward": "forward", "backward": "backward", "optimizer": "step"}


class Place(NamedTuple):
    """Where in the training something belongs."""

    step: int
    """Index of the step; -1 outside of all."""
    micro: int
    phase: Phase


def places(profile: Profile, steps: Steps, launches: Sequence[int]) -> tuple[Place, ...]:
    """Of each activity of a profile, by its launch.

    An operator that makes a node of autograd's graph is forward, what a node runs in backward is backward, and a new
    node within that is recomputation. What bears no mark (communication of a framework, casts, clipping) belongs to the
    pass around it: behind the last backward pass of a step it is the optimizer's.

    Args:
        profile: of one rank.
        steps: its steps.
        launches: index in `profile.host` of each activity's launch, -1 for none.

    """
    backward_threads = _backward_threads(profile)
    timed: list[tuple[float, int, _Mark]] = []
    for index, launch in enumerate(launches):
        if launch < 0:
            timed.append((profile.activities[index].start_s, index, "unmarked"))
        else:
            mark = _mark(profile.enclosing(launch), backward_threads)
            timed.append((profile.host[launch].start_s, index, mark))
    timed.sort()
    found = [Place(-1, 0, "forward")] * len(launches)
    for step in range(-1, steps.num_steps):
        own = [(index, mark) for time_s, index, mark in timed if steps.index(time_s) == step]
        for (index, _), (micro, phase) in zip(own, _passes([mark for _, mark in own]), strict=True):
            found[index] = Place(step, micro, phase)
    return tuple(found)


def _backward_threads(profile: Profile) -> frozenset[int]:
    """Threads of the autograd engine: with nodes of backward, without operators of forward."""
    backward = {event.thread for event in profile.host if event.name.startswith(_ENGINE)}
    forward = {
        event.thread
        for index, event in enumerate(profile.host)
        if event.kind == "operator" and event.sequence >= 0 and event.forward_thread == 0 and profile.parents[index] < 0
    }
    return frozenset(backward - forward)


def _mark(chain: Sequence[HostEvent], backward_threads: frozenset[int]) -> _Mark:
    """By what encloses a launch, from the innermost out."""
    made_node, named = False, None
    for event in chain:
        if event.kind == "annotation":
            if event.name.startswith(_OPTIMIZER):
                return "step"
            named = _NAMED.fullmatch(event.name) or named
        if event.kind != "operator":
            continue
        if event.forward_thread > 0 or event.name.startswith(_ENGINE):
            return "recompute" if made_node else "backward"
        made_node = made_node or event.sequence >= 0
    if made_node:
        return "forward"
    if named:
        return _PASS_OF[named[1].lower()]
    return "backward" if chain[0].thread in backward_threads else "unmarked"


def _passes(marks: Sequence[_Mark]) -> list[tuple[int, Phase]]:
    """(micro-batch, pass) of marks in order of time, all of one step."""
    following: list[_Mark] = []
    known: _Mark = "step"
    for mark in reversed(marks):
        known = known if mark == "unmarked" else mark
        following.append(known)
    found: list[tuple[int, Phase]] = []
    micro, before = 0, "forward"
    for mark, after in zip(marks, reversed(following), strict=True):
        phase: Phase = _between(before, after) if mark == "unmarked" else mark
        if phase == "forward" and before in {"backward", "recompute"}:
            micro += 1
        before = phase
        found.append((0 if phase == "step" else micro, phase))
    return found


def _between(before: str, after: _Mark) -> Phase:
    """Of what lies between two passes."""
    if after == "step":
        return "forward" if before == "forward" else "step"
    if after == "forward":
        return "forward"
    return "forward" if before == "forward" else "backward"
