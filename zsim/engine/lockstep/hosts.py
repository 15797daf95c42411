"""Ranks of the second engine: each goes through its own events as far as these are certain."""

from math import inf

from zsim.engine.lockstep.compilation import compiled
from zsim.engine.lockstep.device import HOST, advance, begin, look_up, next_serial, ring
from zsim.engine.lockstep.memory import LACKING, STALLING, ask
from zsim.engine.lockstep.state import (
    BLOCKED,
    COLLECTIVE,
    ENDED,
    ENTERING,
    FLUSH,
    FULL,
    IDLE,
    MALLOC,
    RUNNING,
    SLEEPING,
    SPINNING,
    STEP,
    SYNC_EVENT,
    WAIT,
    Record,
    Records,
    State,
    Tables,
)


@compiled
def _await_lane(rank: Record, lane: Record, number: int) -> None:
    lane.host_number = number
    lane.host_order = next_serial(rank)
    lane.num_watchers += 1
    rank.awaited += 1


@compiled
def _wait_for_room(tables: Tables, rank: Record, lane: Record, launches: int) -> None:
    """Has the host go on when so few launches are pending on the lane that these fit the queue, or none."""
    pending = lane.pending
    number = lane.finished
    while number < lane.issued:
        instruction = tables.instructions[tables.items[lane.first_item + number]]
        number += 1
        pending -= tables.actions[instruction.action].launches
        if pending + launches <= tables.launch_queue_depth or pending == 0:
            break
    rank.stage = ENTERING
    rank.return_s = 0.0
    _await_lane(rank, lane, number)


@compiled
def _blocks(rank: Record, lanes: Records, instruction: Record, action: Record, now: float) -> bool:
    """Has the host wait until what was issued so far has finished; False if it has."""
    if action.code >= MALLOC:
        for which in range(rank.num_lanes):
            lane = lanes[which]
            if lane.finished < lane.awaited_items:
                _await_lane(rank, lane, lane.awaited_items)
    elif action.code == SYNC_EVENT:
        lane = lanes[action.lane]
        if lane.finished < instruction.number:
            _await_lane(rank, lane, instruction.number)
    else:
        for which in range(rank.num_lanes):
            lane = lanes[which]
            if lane.finished < lane.issued and (action.lanes >> which) & 1:
                _await_lane(rank, lane, lane.issued)
    if rank.awaited == 0:
        return False
    rank.flushing = action.code == FLUSH or action.code >= MALLOC
    rank.blocked_s = now
    rank.stage = BLOCKED
    wake_s = action.wake_s if action.code <= SYNC_EVENT else 0.0
    rank.return_s = (wake_s + rank.extra_s + instruction.sleep_s) * rank.scale
    rank.extra_s = 0.0
    return True


@compiled
def _push(tables: Tables, state: State, index: int, action: Record, now: float) -> None:
    """Puts an item at the tail of its lane, which is the head if the lane is idle."""
    which = action.lane
    lane = state.lanes[index, which]
    if action.code != WAIT:
        scale = state.ranks[index].scale
        slot = lane.ring + (lane.issued & lane.mask)
        state.ring[index, slot, 0] = now + action.first_s * scale + lane.latency_s
        state.ring[index, slot, 1] = now + action.host_s * scale + lane.latency_s + action.last_s
    lane.issued += 1
    lane.pending += action.launches
    if lane.head == IDLE and not begin(tables, state, index, which, now):
        advance(tables, state, index, which, now)


@compiled
def _end_step(state: State, index: int, now: float) -> None:
    """The host comes to the end of a step, or leaves it for another one."""
    column = state.ranks[index].column
    state.step_end_s[index, column] = max(now, state.step_end_s[index, column])


@compiled
def _issue(tables: Tables, state: State, index: int, instruction: Record, now: float) -> bool:
    """Does what an instruction says; False if the host has to wait, for this or for a larger ring."""
    rank, lanes = state.ranks[index], state.lanes[index]
    action = tables.actions[instruction.action]
    if action.code <= WAIT:
        lane = lanes[action.lane]
        full = lane.pending + action.launches > tables.launch_queue_depth and lane.pending > 0
        if full and action.code <= COLLECTIVE and rank.stage == RUNNING:
            _wait_for_room(tables, rank, lane, action.launches)
            return False
        if lane.issued - lane.finished > lane.mask:
            state.overflow[action.lane] = 1
            rank.due_s = now
            rank.stage = FULL
            return False
        rank.stage = RUNNING
        _push(tables, state, index, action, now)
    elif action.code < STEP:
        if _blocks(rank, lanes, instruction, action, now):
            rank.position += 1
            return False
    elif action.code >= MALLOC:
        answer = ask(tables, state, index, action.code, instruction.number)
        if answer == LACKING:
            state.overflow[len(state.overflow) - 1] = 1
            rank.due_s = now
            rank.stage = FULL
            return False
        rank.stage = RUNNING
        if answer == STALLING and _blocks(rank, lanes, instruction, action, now):
            rank.position += 1
            return False
    else:
        _end_step(state, index, now)
        rank.scale = tables.host_scale[index, tables.steps[instruction.number, 0]]
        rank.column = tables.steps[instruction.number, 1]
    rank.position += 1
    return True


@compiled
def _next_of_lanes(rank: Record, lanes: Records) -> float:
    due_s = inf
    for which in range(rank.num_lanes):
        due_s = min(due_s, lanes[which].due_s)
    return due_s


@compiled
def run_host(tables: Tables, state: State, index: int) -> None:
    """Issues one instruction after the other until a lane has an event before the next, or the host waits."""
    rank, lanes = state.ranks[index], state.lanes[index]
    now = rank.due_s
    rank.due_s = inf
    while True:
        if rank.position == rank.stop:
            rank.stage = ENDED
            _end_step(state, index, now)
            rank.now_s = now
            return
        instruction = tables.instructions[rank.position]
        if not _issue(tables, state, index, instruction, now):
            return
        end_s = now + (rank.extra_s + instruction.sleep_s) * rank.scale
        rank.extra_s = 0.0
        if end_s > now and end_s >= min(rank.bound_s, _next_of_lanes(rank, lanes)):
            rank.due_s = end_s
            rank.order = next_serial(rank)
            return
        now = end_s


@compiled
def advance_rank(tables: Tables, state: State, index: int, forced_s: float) -> int:
    """Lets a rank go through all events that are certain; returns how many there were."""
    rank, lanes = state.ranks[index], state.lanes[index]
    rank.bound_s = inf
    for which in range(rank.num_lanes):
        if lanes[which].head == SPINNING or lanes[which].head == SLEEPING:
            look_up(tables, state, index, lanes[which])
    num_events = 0
    while True:
        due_s, order, which = rank.due_s, rank.order, HOST
        for candidate in range(rank.num_lanes):
            lane = lanes[candidate]
            if lane.due_s < due_s or (lane.due_s == due_s and lane.order < order):
                due_s, order, which = lane.due_s, lane.order, candidate
        if due_s == inf or (due_s >= rank.bound_s and due_s > forced_s):
            break
        num_events += 1
        rank.now_s = due_s
        if which != HOST:
            ring(tables, state, index, which, due_s)
        else:
            run_host(tables, state, index)
            if rank.stage == FULL:
                break
    state.next_s[index] = due_s
    return num_events


@compiled
def advance_ranks(tables: Tables, state: State, begin_rank: int, end_rank: int) -> int:
    """Lets ranks go through all events that are certain; returns how many there were."""
    num_events = 0
    for index in range(begin_rank, end_rank):
        num_events += advance_rank(tables, state, index, state.forced_s[0])
    return num_events
