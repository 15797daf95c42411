"""Between rounds: who has arrived, which collectives begin and end, and until when no other can come between.

Ranks tell what they reached; from that follow lower bounds. A collective starts no earlier than each of its ranks can
arrive, which is no earlier than the next event of that rank. A flow ends for certain once nobody can start another one
on the same links before.
"""

from math import inf
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from zsim.engine.lockstep.compilation import allocating, compiled
from zsim.engine.lockstep.fabric import share
from zsim.engine.lockstep.state import EXHAUSTED, FLOWING, GATHERING, STARTING, Record, State, Tables
from zsim.ranks import TOGETHER

NONE: Final = cast("int", np.int64(-1))
"""No component. Functions would be compiled once more for a literal."""


@compiled
def _bound(tables: Tables, place: Record) -> None:
    """Lower bounds of what a collective does, from that of its start."""
    transfer = tables.transfers[place.transfer]
    flows = transfer.first_demand < transfer.stop_demand
    place.wake_lower_s = place.start_lower_s + (transfer.latency_s if flows else 0.0)
    place.end_lower_s = place.start_lower_s + transfer.latency_s + transfer.flow_s


@compiled
def _gather_next(tables: Tables, place: Record, now: float) -> None:
    """The place's next collective, to which nobody comes before the end of the last one."""
    place.position += 1
    place.latest_s = -1.0
    if place.position == place.stop:
        place.stage = EXHAUSTED
        place.start_lower_s = place.flow_lower_s = place.wake_lower_s = place.end_lower_s = inf
        return
    place.stage = GATHERING
    place.transfer = tables.sequence[place.position] + place.part
    place.start_lower_s = place.flow_lower_s = now
    _bound(tables, place)


@compiled
def _end(tables: Tables, state: State, which: int, now: float) -> None:
    """The end of a collective is certain; what was certain as long as it did not end no longer is."""
    place = state.places[which]
    place.ended = place.transfer
    place.end_s = now
    state.end_s[place.transfer] = now
    for member in range(place.first_member, place.stop_member):
        index = tables.member_ranks[member]
        state.arrivals[index, tables.member_slots[member]] = -1.0
        state.next_s[index] = min(state.next_s[index], now)
    _gather_next(tables, place, now)
    for entry in range(tables.first_touching[which], tables.first_touching[which + 1]):
        other = state.places[tables.touching[entry]]
        other.flow_lower_s = max(other.latest_s, min(other.flow_lower_s, now))


@compiled
def _smallest(values: NDArray[np.float64], number: int) -> float:
    """The value with so many before it in order, by Hoare's selection, which reorders them."""
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while pivot < values[right]:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if number <= right:
            high = right
        elif number >= left:
            low = left
        else:
            break
    return values[number]  # type: ignore[no-any-return]


@allocating
def _median_arrival_s(tables: Tables, state: State, place: Record) -> float:
    count = place.stop_member - place.first_member
    arrivals = np.empty(count)
    for member in range(count):
        entry = place.first_member + member
        arrivals[member] = state.arrivals[tables.member_ranks[entry], tables.member_slots[entry]]
    upper = _smallest(arrivals, count // 2)
    if count % 2:
        return upper
    # What comes before in order now also does in the array.
    lower = arrivals[0]
    for member in range(1, count // 2):
        lower = max(lower, arrivals[member])
    return (lower + upper) / 2  # type: ignore[no-any-return]


@compiled
def _last_rank(tables: Tables, state: State, place: Record) -> int:
    """The lowest of those that arrived together behind all others."""
    last = len(state.ranks)
    for member in range(place.first_member, place.stop_member):
        index = tables.member_ranks[member]
        arrival_s = state.arrivals[index, tables.member_slots[member]]
        if arrival_s >= place.latest_s - TOGETHER * place.latest_s and index < last:
            last = index
    return last


@allocating
def _start(tables: Tables, state: State, which: int) -> None:
    """The last rank has arrived."""
    place = state.places[which]
    transfer = tables.transfers[place.transfer]
    start_s = place.latest_s
    state.start_s[place.transfer] = start_s
    if transfer.num_participants > 1:
        last = _last_rank(tables, state, place)
        state.num_last[last, transfer.column] += 1
        state.late_s[last, transfer.column] += start_s - _median_arrival_s(tables, state, place)
    place.start_lower_s = start_s
    _bound(tables, place)
    place.wake_s = place.wake_lower_s
    place.woken = place.transfer
    if transfer.first_demand < transfer.stop_demand:
        place.stage = STARTING
        place.due_s = start_s + transfer.latency_s
    else:
        _end(tables, state, which, start_s + transfer.latency_s + transfer.flow_s)


@allocating
def _count_arrivals(tables: Tables, state: State) -> int:
    """Starts the collectives whose ranks are all there; returns how many there were."""
    for which in range(len(state.places)):
        state.places[which].num_arrived = 0
    for index in range(len(state.ranks)):
        for slot in range(state.ranks[index].num_slots):
            arrival_s = state.arrivals[index, slot]
            if arrival_s >= 0.0:
                place = state.places[tables.place_of[index, slot]]
                place.num_arrived += 1
                if place.stage == GATHERING:
                    place.latest_s = max(place.latest_s, arrival_s)
    num_started = 0
    for which in range(len(state.places)):
        place = state.places[which]
        if place.stage == GATHERING:
            if place.num_arrived == tables.transfers[place.transfer].num_participants:
                _start(tables, state, which)
                num_started += 1
            elif place.latest_s > place.start_lower_s:
                place.start_lower_s = place.latest_s
                _bound(tables, place)
    return num_started


@compiled
def _certain_until(tables: Tables, state: State, index: int, component: int) -> float:
    """No event of that rank comes earlier, but for ends of flows that the links of a component carry, if any."""
    certain_s: float = state.next_s[index]
    for slot in range(state.ranks[index].num_slots):
        if state.arrivals[index, slot] >= 0.0:
            place = state.places[tables.place_of[index, slot]]
            excepted = component >= 0 and place.component == component and place.stage != GATHERING
            if not excepted:
                certain_s = min(certain_s, place.end_lower_s)
    return certain_s


@compiled
def _bound_starts(tables: Tables, state: State) -> None:
    """Raises the lower bounds of collectives for which ranks are missing."""
    for which in range(len(state.places)):
        place = state.places[which]
        if place.stage == GATHERING:
            place.flow_lower_s = place.start_lower_s
    for index in range(len(state.ranks)):
        num_slots = state.ranks[index].num_slots
        certain_s = _certain_until(tables, state, index, NONE)
        for slot in range(num_slots):
            if state.arrivals[index, slot] < 0.0:
                place = state.places[tables.place_of[index, slot]]
                if place.stage == GATHERING:
                    place.start_lower_s = max(place.start_lower_s, certain_s)
                    if place.component >= 0:
                        conditional_s = _certain_until(tables, state, index, place.component)
                        place.flow_lower_s = max(place.flow_lower_s, conditional_s)
    for which in range(len(state.places)):
        if state.places[which].stage == GATHERING:
            _bound(tables, state.places[which])


@compiled
def _next_flow_event(tables: Tables, state: State, component: int) -> tuple[int, float, float]:
    """The place where a flow starts or ends next, when that is, and until when no other flow can come between."""
    which, due_s, horizon_s = -1, inf, inf
    for entry in range(tables.first_of_component[component], tables.first_of_component[component + 1]):
        candidate = tables.of_component[entry]
        place = state.places[candidate]
        if place.stage == GATHERING:
            transfer = tables.transfers[place.transfer]
            idle_s = transfer.latency_s
            if transfer.first_demand == transfer.stop_demand:
                idle_s += transfer.flow_s
            horizon_s = min(horizon_s, place.flow_lower_s + idle_s)
        elif place.stage != EXHAUSTED and place.due_s < due_s:
            which, due_s = candidate, place.due_s
    return which, due_s, horizon_s


@allocating
def _cross(tables: Tables, state: State, component: int, forced_s: float) -> int:
    """Starts and ends the flows of connected links as far as that is certain; returns how many."""
    num_events = 0
    which, due_s, horizon_s = _next_flow_event(tables, state, component)
    while which >= 0 and due_s <= max(horizon_s, forced_s):
        num_events += 1
        place = state.places[which]
        if place.stage == STARTING:
            place.stage = FLOWING
            place.since_s = due_s
            place.remaining_s = tables.transfers[place.transfer].flow_s
            place.speed = 0.0
            share(tables, state, component, place.transfer, due_s)
        else:
            ended = place.transfer
            _end(tables, state, which, due_s)
            share(tables, state, component, ended, due_s)
        which, due_s, horizon_s = _next_flow_event(tables, state, component)
    _bound_ends(tables, state, component, min(due_s, horizon_s))
    return num_events


@compiled
def _bound_ends(tables: Tables, state: State, component: int, until_s: float) -> None:
    """A flow is at no time faster than alone; until the component's next event its speed is known."""
    for entry in range(tables.first_of_component[component], tables.first_of_component[component + 1]):
        place = state.places[tables.of_component[entry]]
        if place.stage == FLOWING:
            known_s = max(place.since_s, until_s)
            left_s = max(0.0, place.remaining_s - (known_s - place.since_s) * place.speed)
            place.end_lower_s = max(place.end_lower_s, min(place.due_s, known_s + left_s))


@allocating
def resolve(tables: Tables, state: State) -> int:
    """What follows from where all ranks have come; returns how many collectives have started, flowed or ended."""
    num_events = _count_arrivals(tables, state)
    _bound_starts(tables, state)
    for component in range(len(tables.first_of_component) - 1):
        num_events += _cross(tables, state, component, state.forced_s[0])
    return num_events


@compiled
def earliest_s(state: State) -> float:
    """When the next event of all is; infinite if there is none."""
    due_s = inf
    for index in range(len(state.next_s)):
        due_s = min(due_s, state.next_s[index])
    for which in range(len(state.places)):
        place = state.places[which]
        if place.stage == STARTING or place.stage == FLOWING:  # noqa: PLR1714  a tuple would be slower
            due_s = min(due_s, place.due_s)
    return due_s
