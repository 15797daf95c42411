"""Shared links in the second engine: `engine.fabric` on arrays.

Flows that run at the same time divide links max-min fairly; see there.
"""

from math import inf

import numpy as np
from numpy.typing import NDArray

from zsim.engine.lockstep.compilation import allocating, compiled
from zsim.engine.lockstep.state import FLOWING, Record, State, Tables

TOLERANCE = 1e-12
"""Relative: a link is full, a flow unhindered, when it is this close; that of `engine.fabric`."""
RISING = -1.0
"""Speed of a flow that is not decided yet."""


@compiled
def _set_speed(place: Record, now: float, speed: float) -> None:
    place.remaining_s = max(0.0, place.remaining_s - (now - place.since_s) * place.speed)
    place.since_s = now
    place.speed = speed
    place.due_s = now + place.remaining_s / speed


@allocating
def _connected(tables: Tables, state: State, component: int, link: int, seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Places whose flows share a link with that one, or with a flow that does, and so on; marks their links."""
    first, stop = tables.first_of_component[component], tables.first_of_component[component + 1]
    found = np.empty(stop - first, np.int64)
    num_found = 0
    taken = np.full(stop - first, False)
    seen[link] = True
    grows = True
    while grows:
        grows = False
        for entry in range(first, stop):
            place = state.places[tables.of_component[entry]]
            if place.stage != FLOWING or taken[entry - first]:
                continue
            transfer = tables.transfers[place.transfer]
            for demand in range(transfer.first_demand, transfer.stop_demand):
                if seen[tables.demand_links[demand]]:
                    taken[entry - first] = True
            if taken[entry - first]:
                for demand in range(transfer.first_demand, transfer.stop_demand):
                    seen[tables.demand_links[demand]] = True
                found[num_found] = tables.of_component[entry]
                num_found += 1
                grows = True
    return found[:num_found]


@allocating
def share(tables: Tables, state: State, component: int, transfer_number: int, now: float) -> None:
    """Shares links anew among all flows that a transfer is, or was, connected with."""
    transfer = tables.transfers[transfer_number]
    seen = np.full(len(tables.capacities), False)
    for demand in range(transfer.first_demand, transfer.stop_demand):
        link = tables.demand_links[demand]
        if seen[link]:
            continue
        flows = _connected(tables, state, component, link, seen)
        # Alone a flow takes as long as it was priced.
        speeds = np.full(1, 1.0) if len(flows) == 1 else _max_min_speeds(tables, state, flows)
        for index in range(len(flows)):
            place = state.places[flows[index]]
            if speeds[index] != place.speed:
                _set_speed(place, now, speeds[index])


@compiled
def _peak(tables: Tables, transfer: Record) -> float:
    """Bytes per second over its busiest link at full speed, of each flow that it stands for."""
    peak = 0.0
    for demand in range(transfer.first_demand, transfer.stop_demand):
        peak = max(peak, tables.demands[demand] / transfer.num_flows)
    return peak


@compiled
def _uses(tables: Tables, transfer: Record, link: int) -> bool:
    found = False
    for demand in range(transfer.first_demand, transfer.stop_demand):
        found |= tables.demand_links[demand] == link
    return found


@compiled
def _slowest_rising(peaks: NDArray[np.float64], speeds: NDArray[np.float64]) -> int:
    slowest = -1
    for index in range(len(peaks)):
        if speeds[index] == RISING and (slowest < 0 or peaks[index] < peaks[slowest]):
            slowest = index
    return slowest


@allocating
def _max_min_speeds(tables: Tables, state: State, flows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The speed of each flow as a fraction of its full speed, by progressive filling; see `fabric.max_min_speeds`."""
    free = tables.capacities.copy()
    slopes = np.full(len(free), 0.0)
    num_rising = np.full(len(free), 0)
    peaks = np.full(len(flows), 0.0)
    for index in range(len(flows)):
        transfer = tables.transfers[state.places[flows[index]].transfer]
        peaks[index] = _peak(tables, transfer)
        for demand in range(transfer.first_demand, transfer.stop_demand):
            slopes[tables.demand_links[demand]] += tables.demands[demand] / peaks[index]
            num_rising[tables.demand_links[demand]] += 1
    speeds = np.full(len(flows), RISING)
    while True:
        slowest = _slowest_rising(peaks, speeds)
        if slowest < 0:
            return speeds
        full, level = -1, inf
        for link in range(len(free)):
            if num_rising[link] and free[link] / slopes[link] < level:
                full, level = link, free[link] / slopes[link]
        unhindered = peaks[slowest] <= level * (1 + TOLERANCE)
        if unhindered:
            level = peaks[slowest]
        for index in range(len(flows)):
            transfer = tables.transfers[state.places[flows[index]].transfer]
            stops = index == slowest if unhindered else _uses(tables, transfer, full)
            if not stops or speeds[index] != RISING:
                continue
            speeds[index] = min(1.0, level / peaks[index])
            for demand in range(transfer.first_demand, transfer.stop_demand):
                link = tables.demand_links[demand]
                free[link] -= tables.demands[demand] * speeds[index]
                slopes[link] -= tables.demands[demand] / peaks[index]
                num_rising[link] -= 1
