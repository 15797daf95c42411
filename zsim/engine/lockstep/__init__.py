"""The second engine: every rank of every role, all at once, in compiled code. The same times as the first one.

Ranks meet only in collectives. So each goes through its own events alone, up to the earliest time at which one of the
collectives it takes part in could end; then all arrivals are looked at together, which tells starts and ends, and the
next round begins (conservative parallel simulation: Chandy and Misra 1979, with a barrier in place of messages). One
round is about one collective. Contention of links stays exact, because a flow ends only when no other can start before.

`folding` and `preparation` make tables of lowered programs, `history` runs the allocator, `hosts` and `device` are one
rank, `network` and `fabric` what lies between ranks, `rounds` all together. Nothing here draws a span: `replay` lets
the first engine execute the ranks that are to be looked at, with the times of their collectives given.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim import engine
from zsim.check import ProgramError, one_line
from zsim.engine import DeadlockError, Execution
from zsim.engine.lockstep.outcome import device_use, rank_times
from zsim.engine.lockstep.preparation import Prepared, prepare
from zsim.engine.lockstep.replay import Replay, chosen
from zsim.engine.lockstep.rounds import run_rounds
from zsim.engine.lockstep.state import ENTERING, IDLE, State
from zsim.engine.lowering import Lowered
from zsim.engine.memory import DeviceMemory
from zsim.errors import OwnCheckError
from zsim.ops import HOST, Collective
from zsim.ranks import HISTORIES, HISTORIES_OF_DRAWS

Progress = Callable[[int, int], None]
TOLERANCE = 1e-9
"""Relative difference between both engines at the end of a rank, which rounding alone may make."""


@engine.no_cycle_collection()
def run(
    lowered: Lowered,
    *,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    inline: str = "",
    host_scale: NDArray[np.float64] | None = None,
    stray_scale: NDArray[np.float64] | None = None,
    memory: DeviceMemory | None = None,
    num_histories: int | None = None,
    record: Sequence[int] = (),
    num_threads: int = 1,
    num_more_steps: int = 0,
    progress: Progress | None = None,
) -> Execution:
    """Executes lowered programs on all ranks that they name.

    Args:
        lowered: by `lowering.lower`, usually with `expand`.
        link_capacities: bytes per second of each link.
        launch_queue_depth: launches that may be pending on a lane before its host blocks.
        launch_latency_s: from a launch to its start on an idle lane.
        inline: the lane that the host thread executes itself, as on a CPU; none if empty.
        host_scale: factors on host seconds, shape [ranks, steps]; a step before 0 is counted from the end.
        stray_scale: factors on the bytes of allocations that vary, likewise.
        memory: of each rank's device, behind a caching allocator; without it memory has no end and no cache.
        num_histories: of allocators in each role, where they depend on time; ranks beyond share that of a neighbour,
            but for those that are recorded. By default as many as `zsim.ranks` says.
        record: ranks of which spans and memory samples are wanted.
        num_threads: at most; few ranks need no more than one.
        num_more_steps: like the last one of the programs, executed behind it; only the programs are recorded.
        progress: called now and then with the instructions issued so far and their total.

    Returns:
        Spans and memory samples of the recorded ranks alone; `ranks` has all of them.

    Raises:
        DeadlockError: ranks wait for one another.
        ProgramError: buffers are live at the end.
        StepsDifferError: more steps are asked for, but the last two of the programs are not alike.

    """
    queue = {"link_capacities": link_capacities, "launch_queue_depth": launch_queue_depth}
    shared: dict[str, Any] = queue | {"launch_latency_s": launch_latency_s, "inline": inline, "memory": memory}
    prepared = prepare(
        lowered,
        host_scale=_ones(lowered) if host_scale is None else host_scale,
        stray_scale=stray_scale,
        num_histories=num_histories or (HISTORIES if stray_scale is None else HISTORIES_OF_DRAWS),
        alone=frozenset(record),
        num_more_steps=num_more_steps,
        **shared,
    )
    state, _, num_events = run_rounds(
        prepared.tables, prepared.state, num_threads, partial(_report, prepared, progress)
    )
    _raise_if_stuck(prepared, state)
    _raise_if_live(prepared)
    recorded: Execution | None = None
    if record:
        recorded = engine.run_lowered(
            chosen(lowered, frozenset(record)),
            host_scale=_rows(host_scale, record),
            stray_scale=_rows(stray_scale, record),
            meeting=lambda clock: Replay(clock, lowered.transfers, state.start_s, state.end_s),
            **shared,
        )
        _raise_if_different(prepared, state, recorded, num_more_steps)
    device = device_use(prepared, state)
    return Execution(
        spans=recorded.spans if recorded else [],
        memory=recorded.memory if recorded else [],
        num_events=num_events,
        end_s=float(state.ranks["now_s"].max(initial=0.0)),
        ranks=rank_times(prepared, state, device),
        num_device_frees=device.num_frees,
        num_ooms=device.num_ooms,
        recording=recorded.recording if recorded else None,
    )


def _ones(lowered: Lowered) -> NDArray[np.float64]:
    steps = {key.step for role in lowered.roles for _, key, _, _ in role.instructions} or {0}
    num_ranks = 1 + max((rank for role in lowered.roles for rank in role.ranks), default=0)
    return np.ones((num_ranks, max(steps) + 1 - min(0, *steps)))


def _rows(scale: NDArray[np.float64] | None, ranks: Iterable[int]) -> dict[int, list[float]] | None:
    return None if scale is None else {rank: scale[rank].tolist() for rank in ranks}


def _report(prepared: Prepared, progress: Progress | None, state: State) -> None:
    if progress is not None:
        counts = np.array([len(role.instructions) for role in prepared.roles])
        starts = np.cumsum(counts) - counts
        roles = state.ranks["role"]
        progress(int((state.ranks["position"] - starts[roles]).sum()), int(counts[roles].sum()))


def _raise_if_different(prepared: Prepared, state: State, recorded: Execution, num_more_steps: int) -> None:
    """The first engine comes to the same end of each recorded rank, or of the last step that it executes."""
    ends_s: dict[int, float] = {}
    for span in recorded.spans:
        if span.lane == HOST or not num_more_steps:
            ends_s[span.rank] = max(span.end_s, ends_s.get(span.rank, 0.0))
    for rank, end_s in ends_s.items():
        index = prepared.ranks.index(rank)
        by_step_s, last = state.step_end_s[index], -1 - num_more_steps
        expected_s = float(by_step_s[last] if num_more_steps else state.ranks["now_s"][index])
        if not math.isclose(end_s, expected_s, rel_tol=TOLERANCE):
            raise OwnCheckError(f"rank {rank}: ends at {expected_s!r} s with all ranks, at {end_s!r} s when replayed")


def _raise_if_live(prepared: Prepared) -> None:
    for role in prepared.roles:
        if left := role.folded.history.live:
            rank = role.folded.role.ranks[0]
            raise ProgramError(f"rank {rank}: ends with {len(left)} live buffers, {one_line(left[0])}")


def _raise_if_stuck(prepared: Prepared, state: State) -> None:
    """No event is left, but ranks with work are: the time reached is no result."""
    stuck = []
    for index, rank in enumerate(prepared.ranks):
        places = _stuck_at(prepared, state, index)
        if places:
            stuck.append(f"rank {rank}: {'; '.join(places)}")
    if stuck:
        raise DeadlockError("deadlock: " + " | ".join(stuck))


def _stuck_at(prepared: Prepared, state: State, index: int) -> list[str]:
    host = state.ranks[index]
    role = prepared.roles[host["role"]]
    first = sum(len(other.instructions) for other in prepared.roles[: host["role"]])
    found = []
    if host["awaited"]:
        position = int(host["position"]) - first - (host["stage"] != ENTERING)
        found.append(f"host at {one_line(role.op(position))}")
    for name, lane in zip(role.folded.role.lanes, state.lanes[index], strict=False):
        if lane["head"] != IDLE:
            op = role.op(int(prepared.tables.items[lane["first_item"] + lane["finished"]]) - first)
            text = f"lane {name} at {one_line(op)}"
            if isinstance(op, Collective):
                place = state.places[prepared.tables.place_of[index, lane["other"]]]
                needed = prepared.tables.transfers[place["transfer"]]["num_participants"]
                text += f" ({needed - place['num_arrived']} ranks missing)"
            found.append(text)
    return found
