"""One device in the second engine: its lanes and how kernels share it, event by event as `engine.lanes` does.

Each function is the counterpart of a method there and follows it line by line.
"""

from math import inf
from typing import Final, cast

import numpy as np

from zsim.engine.lockstep.compilation import compiled
from zsim.engine.lockstep.state import (
    ARRIVING,
    BLOCKED,
    BUSY,
    COLLECTIVE,
    ENDING,
    IDLE,
    KERNEL,
    PENDING,
    RUNNING,
    SLEEPING,
    SPINNING,
    UNSET,
    WAITING,
    WORKING,
    Record,
    Records,
    State,
    Tables,
)

NOBODY: Final = cast("int", np.int64(-2))
HOST: Final = cast("int", np.int64(-1))
"""Who waits for a lane, or has an event, beside other lanes. Functions would be compiled once more for a literal."""


@compiled
def next_serial(rank: Record) -> int:
    """Orders events of a rank at the same time by when they were set."""
    rank.serial += 1
    return rank.serial  # type: ignore[no-any-return]


@compiled
def set_alarm(rank: Record, lane: Record, stage: int, due_s: float) -> None:
    """Replaces the alarm of a busy lane."""
    lane.stage = stage
    lane.due_s = due_s
    lane.order = next_serial(rank)


@compiled
def _run_alone(rank: Record, lane: Record) -> None:
    rate = rank.rate
    if lane.stage != ENDING or (lane.rate != rate and lane.remaining_s > 0.0):
        lane.rate = rate
        if lane.remaining_s > 0.0:
            lane.done_s = lane.since_s + lane.remaining_s / rate
        set_alarm(rank, lane, ENDING, max(lane.done_s, lane.floor_s))


@compiled
def _retime_lane(rank: Record, lane: Record, rate: float, now: float) -> None:
    if lane.since_s > now:
        if lane.stage != PENDING:
            set_alarm(rank, lane, PENDING, lane.since_s)
    elif lane.remaining_s > 0.0:
        if lane.stage <= PENDING or lane.rate != rate:
            lane.rate = rate
            lane.done_s = now + lane.remaining_s / rate
            set_alarm(rank, lane, ENDING if lane.done_s >= lane.floor_s else WORKING, lane.done_s)
    elif lane.stage != ENDING:
        set_alarm(rank, lane, ENDING, max(now, lane.floor_s))


@compiled
def retime(rank: Record, lanes: Records, now: float) -> None:
    """Gives every running kernel its present rate, and a new alarm where that has changed."""
    num_working = 0
    only = 0
    for index in range(rank.num_lanes):
        lane = lanes[index]
        if lane.head == BUSY:
            only = index
            if lane.since_s <= now:
                lane.remaining_s = max(0.0, lane.remaining_s - (now - lane.since_s) * lane.rate)
                lane.since_s = now
                if lane.remaining_s > 0.0:
                    num_working += 1
    if rank.num_busy == 1:
        _run_alone(rank, lanes[only])
        return
    rate = rank.rate / max(1, num_working)
    for index in range(rank.num_lanes):
        if lanes[index].head == BUSY:
            _retime_lane(rank, lanes[index], rate, now)


@compiled
def set_rate(rank: Record, lanes: Records, now: float) -> None:
    """Compute gets what the greediest communication kernel leaves."""
    share = 0.0
    for index in range(rank.num_lanes):
        share = max(share, lanes[index].share)
    rate = 1.0 - share
    if rate != rank.rate:
        rank.rate = rate
        if rank.num_busy:
            retime(rank, lanes, now)


@compiled
def arrive(tables: Tables, state: State, index: int, lane: Record, now: float) -> None:
    """A communication kernel is at the head of its lane; when it ends is uncertain from a certain time on."""
    rank = state.ranks[index]
    place = state.places[tables.place_of[index, lane.other]]
    lane.number = place.transfer
    transfer = tables.transfers[place.transfer]
    lane.arrival_s = now
    lane.due_s = inf
    lane.order = next_serial(rank)
    state.arrivals[index, lane.other] = now
    if transfer.sleeps and transfer.share > 0.0:
        lane.head = SLEEPING
        wake_s = now + transfer.latency_s if transfer.first_demand < transfer.stop_demand else now
        rank.bound_s = min(rank.bound_s, max(wake_s, place.wake_lower_s))
        return
    lane.head = SPINNING
    rank.bound_s = min(rank.bound_s, max(now + transfer.latency_s + transfer.flow_s, place.end_lower_s))
    if transfer.share > 0.0:
        lane.share = transfer.share
        set_rate(rank, state.lanes[index], now)


@compiled
def look_up(tables: Tables, state: State, index: int, lane: Record) -> None:
    """What is known by now of the collective at the head of a lane: its next event, or until when there is none."""
    rank = state.ranks[index]
    place = state.places[tables.place_of[index, lane.other]]
    if lane.head == SLEEPING:
        if place.woken == lane.number:
            lane.due_s = place.wake_s
        else:
            rank.bound_s = min(rank.bound_s, place.wake_lower_s)
    elif place.ended == lane.number:
        lane.due_s = place.end_s
    else:
        lane.due_s = inf
        rank.bound_s = min(rank.bound_s, place.end_lower_s)


@compiled
def begin(tables: Tables, state: State, index: int, which: int, now: float) -> bool:
    """Begins the item at the head; False if it is a wait for something past."""
    rank, lanes = state.ranks[index], state.lanes[index]
    lane = lanes[which]
    instruction = tables.instructions[tables.items[lane.first_item + lane.finished]]
    action = tables.actions[instruction.action]
    slot = lane.ring + (lane.finished & lane.mask)
    lane.launches = action.launches
    if action.code == KERNEL:
        start_s = max(now, state.ring[index, slot, 0])
        lane.head = BUSY
        lane.since_s = start_s
        lane.remaining_s = action.alone_s
        lane.floor_s = state.ring[index, slot, 1]
        rank.num_busy += 1
        if rank.num_busy > 1:
            lane.stage = UNSET
            lane.done_s = start_s
            retime(rank, lanes, now)
        else:
            lane.rate = rank.rate
            lane.done_s = start_s + action.alone_s / rank.rate
            set_alarm(rank, lane, ENDING, max(lane.done_s, lane.floor_s))
        return True
    lane.other = action.other
    if action.code == COLLECTIVE:
        ready_s = state.ring[index, slot, 0]
        if ready_s > now:
            lane.head = ARRIVING
            lane.due_s = ready_s
            lane.order = next_serial(rank)
        else:
            arrive(tables, state, index, lane, now)
        return True
    if lanes[action.other].finished >= instruction.number:
        return False
    lane.head = WAITING
    lane.number = instruction.number
    lane.due_s = inf
    lane.waiting_order = next_serial(rank)
    lanes[action.other].num_watchers += 1
    return True


@compiled
def _first_watcher(rank: Record, lanes: Records, which: int) -> int:
    """Who waits for no more than the lane has finished: fewest items first, then who came first."""
    lane = lanes[which]
    found = NOBODY
    number = order = 0
    if 0 <= lane.host_number <= lane.finished:
        found, number, order = HOST, lane.host_number, lane.host_order
    for index in range(rank.num_lanes):
        other = lanes[index]
        if other.head == WAITING and other.other == which and other.number <= lane.finished:
            sooner = other.number < number or (other.number == number and other.waiting_order < order)
            if found == NOBODY or sooner:
                found, number, order = index, other.number, other.waiting_order
    return found


@compiled
def release(state: State, index: int, lane: Record, now: float) -> None:
    """One of the lanes that the host awaits has come so far."""
    rank = state.ranks[index]
    lane.host_number = -1
    lane.num_watchers -= 1
    rank.awaited -= 1
    if rank.awaited == 0:
        if rank.stage == BLOCKED:
            rank.stage = RUNNING
        if rank.flushing:
            state.flush_wait_s[index, rank.column] += now - rank.blocked_s
            rank.flushing = 0
        rank.due_s = now + rank.return_s
        rank.order = next_serial(rank)


@compiled
def _complete(lane: Record) -> None:
    lane.pending -= lane.launches
    lane.finished += 1
    lane.head = IDLE
    lane.due_s = inf


@compiled
def advance(tables: Tables, state: State, index: int, first: int, now: float) -> None:
    """The head of a lane has finished: wakes who waited for it and begins what can begin.

    A lane that was waiting comes to its next item before the one it waited for does, as nested calls would have it.
    """
    rank, lanes = state.ranks[index], state.lanes[index]
    which = first
    lanes[which].caller = HOST
    _complete(lanes[which])
    while which >= 0:
        lane = lanes[which]
        watcher = _first_watcher(rank, lanes, which) if lane.num_watchers else NOBODY
        if watcher == HOST:
            release(state, index, lane, now)
        elif watcher >= 0:
            lane.num_watchers -= 1
            lanes[watcher].caller = which
            which = watcher
            _complete(lanes[which])
        elif lane.finished == lane.issued or begin(tables, state, index, which, now):
            which = lane.caller
        else:
            _complete(lane)


@compiled
def ring(tables: Tables, state: State, index: int, which: int, now: float) -> None:
    """The event of a lane: a kernel starts, has done its work or ends; a collective arrives, wakes or ends."""
    rank, lanes = state.ranks[index], state.lanes[index]
    lane = lanes[which]
    if lane.head == BUSY:
        if lane.stage == ENDING:
            rank.num_busy -= 1
            advance(tables, state, index, which, now)
            if rank.num_busy and lane.head != BUSY:
                retime(rank, lanes, now)
            return
        if lane.stage == WORKING:
            lane.remaining_s = 0.0
        lane.since_s = now
        lane.stage = UNSET
        lane.due_s = inf
        retime(rank, lanes, now)
    elif lane.head == ARRIVING:
        arrive(tables, state, index, lane, now)
    elif lane.head == SLEEPING:
        lane.head = SPINNING
        lane.order = next_serial(rank)
        look_up(tables, state, index, lane)
        lane.share = tables.transfers[lane.number].share
        set_rate(rank, lanes, now)
    else:
        transfer = tables.transfers[lane.number]
        if transfer.num_participants > 1:
            state.spinning_s[index, transfer.column] += state.start_s[lane.number] - lane.arrival_s
        if lane.share > 0.0:
            lane.share = 0.0
            set_rate(rank, lanes, now)
        advance(tables, state, index, which, now)
