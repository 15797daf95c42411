"""Folded programs into the tables and the first state of the second engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from zsim.allocator.compiled import new_allocators
from zsim.allocator.layout import Room
from zsim.engine import StepsDifferError
from zsim.engine.lockstep.folding import Folded, Folding, Step
from zsim.engine.lockstep.history import depends_on_time
from zsim.engine.lockstep.memory import UNKNOWN
from zsim.engine.lockstep.state import (
    ACTION,
    FLUSH,
    GATHERING,
    LANE,
    PLACE,
    RANK,
    TRANSFER,
    Records,
    State,
    Tables,
)
from zsim.engine.lockstep.tables import RoleTables, repeated, role_tables
from zsim.engine.lowering import Lowered, Transfer
from zsim.engine.memory import ENDLESS, DeviceMemory

FIRST_CAPACITY = 64
"""Items that a lane can hold at first; a power of two."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Ready to run, and what the numbers stand for."""

    tables: Tables
    state: State
    roles: list[RoleTables]
    ranks: list[int]
    """Those that execute, in order; elsewhere they go by their index here."""
    steps: list[Step]


def prepare(
    lowered: Lowered,
    *,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    inline: str,
    host_scale: NDArray[np.float64],
    stray_scale: NDArray[np.float64] | None,
    memory: DeviceMemory | None,
    num_histories: int,
    alone: frozenset[int],
    num_more_steps: int,
) -> Prepared:
    """Tables and first state; arguments as for `lockstep.run`, `host_scale` of every rank.

    Ranks that are `alone` share the history of their allocator with no other.
    """
    known = stray_scale is None and not num_more_steps and not any(map(depends_on_time, lowered.roles))
    by_time = memory is not None and not known
    folding = Folding(host_scale.shape[1], memory, by_time=by_time)
    folded_roles = [folding.fold(role) for role in lowered.roles]
    ranks = sorted(rank for folded in folded_roles for rank in folded.role.ranks)
    links = {link: index for index, link in enumerate(link_capacities)}
    demands = [(links[link], demand) for transfer in lowered.transfers for link, demand in transfer.demands]
    actions, transfers = _actions(folding), _transfers(lowered.transfers)
    roles, transfers = _with_more_steps(folding, folded_roles, actions, transfers, demands, num_more_steps)
    places = _Places(folding, folded_roles, ranks, lowered.transfers, links)
    tables = Tables(
        actions=actions,
        instructions=np.concatenate([role.instructions for role in roles]),
        items=_items(roles),
        transfers=transfers,
        demand_links=np.array([link for link, _ in demands], np.int32),
        demands=np.array([demand for _, demand in demands], np.float64),
        capacities=np.array(list(link_capacities.values()), np.float64),
        sequence=_joined(kind.transfers for kind in folding.kinds.values()),
        member_ranks=_joined(places.member_ranks),
        member_slots=_joined(places.member_slots),
        first_touching=_starts(places.touching),
        touching=_joined(places.touching),
        first_of_component=_starts(places.components),
        of_component=_joined(places.components),
        place_of=places.place_of,
        host_scale=np.ascontiguousarray(host_scale[ranks]),
        steps=np.array(list(folding.steps) or [Step(0, 0)], np.int32),
        launch_queue_depth=min(launch_queue_depth, 2**31),
        requests=np.concatenate([role.requests for role in roles]),
        stray_scale=np.ones((len(ranks), host_scale.shape[1])) if stray_scale is None else stray_scale[ranks],
        malloc_s=memory.malloc_s if memory else 0.0,
        free_s=memory.free_s if memory else 0.0,
    )
    records = _ranks(roles, ranks)
    used = memory if by_time else None
    allocators = _allocators(folded_roles, ranks, records, memory=used, num_histories=num_histories, alone=alone)
    lanes = _lanes(roles, ranks, launch_latency_s, inline)
    state = _state(tables, records, lanes, places.records(), allocators)
    return Prepared(tables, state, roles, ranks, list(folding.steps))


def _state(tables: Tables, ranks: Records, lanes: Records, places: Records, allocators: NDArray[np.int64]) -> State:
    """Before anything has happened."""
    num_ranks, num_lanes = lanes.shape
    nothing = np.zeros((num_ranks, 1 + int(tables.steps[:, 1].max())))
    return State(
        ranks=ranks,
        lanes=lanes,
        ring=np.zeros((num_ranks, num_lanes * FIRST_CAPACITY, 2)),
        arrivals=np.full(tables.place_of.shape, -1.0),
        next_s=np.zeros(num_ranks),
        places=places,
        overflow=np.zeros(num_lanes + 1, np.int64),
        forced_s=np.full(1, -1.0),
        start_s=np.full(len(tables.transfers), inf),
        end_s=np.full(len(tables.transfers), inf),
        step_end_s=nothing.copy(),
        spinning_s=nothing.copy(),
        flush_wait_s=nothing.copy(),
        late_s=nothing.copy(),
        num_last=nothing.astype(np.int64),
        flush_s=nothing.copy(),
        num_flushes=nothing.astype(np.int64),
        num_frees=np.zeros(num_ranks, np.int64),
        allocators=allocators,
        outcomes=np.full((1 + int(ranks["answers"].max(initial=-1)), len(tables.requests)), UNKNOWN, np.int32),
        asked=np.zeros((len(allocators), 2), np.int64),
        finished=np.zeros((len(allocators), num_lanes), np.int64),
    )


def _with_more_steps(  # noqa: PLR0917  as `repeated`
    folding: Folding,
    folded_roles: Sequence[Folded],
    actions: Records,
    transfers: Records,
    demands: Sequence[tuple[int, float]],
    num_more_steps: int,
) -> tuple[list[RoleTables], Records]:
    """Roles and transfers, steps like the last one repeated."""
    roles = [role_tables(folded) for folded in folded_roles]
    if not num_more_steps:
        return roles, transfers
    if len(roles) != 1:
        raise StepsDifferError(f"{len(roles)} roles, whose steps were not compared")
    more, transfers = repeated(roles[0], folding, actions, transfers, demands, num_more_steps)
    return [more], transfers


def _actions(folding: Folding) -> Records:
    return np.array(
        [
            (
                action.host_s,
                action.first_s,
                action.last_s,
                action.alone_s,
                action.wake_s if code != FLUSH else 0.0,
                action.launches,
                lanes,
                # Of an event that the host waits for, its lane.
                action.lane if action.lane >= 0 else other,
                other,
                code,
            )
            for action, code, other, lanes in folding.actions
        ],
        ACTION,
    )


def _items(roles: Sequence[RoleTables]) -> NDArray[np.int32]:
    """Of all lanes, counted from the first instruction of all roles."""
    firsts = np.cumsum([0, *(len(role.instructions) for role in roles)])
    shifted = [items + first for role, first in zip(roles, firsts, strict=False) for items in role.items]
    return np.concatenate([np.zeros(0, np.int32), *shifted]).astype(np.int32)


def _transfers(transfers: Sequence[Transfer]) -> Records:
    stops = np.cumsum([len(transfer.demands) for transfer in transfers], dtype=np.int64).tolist()
    return np.array(
        [
            (
                transfer.latency_s,
                transfer.flow_s,
                transfer.compute_share,
                transfer.num_flows,
                stop - len(transfer.demands),
                stop,
                transfer.num_participants,
                max(0, transfer.op.key.step + 1),
                transfer.sleeps,
            )
            for transfer, stop in zip(transfers, stops, strict=True)
        ],
        TRANSFER,
    )


def _ranks(roles: Sequence[RoleTables], ranks: Sequence[int]) -> Records:
    records = np.zeros(len(ranks), RANK)
    records["scale"] = records["rate"] = 1.0
    first = 0
    for number, role in enumerate(roles):
        folded = role.folded
        chosen = np.searchsorted(ranks, folded.role.ranks)
        records["role"][chosen] = number
        records["position"][chosen] = first
        first += len(role.instructions)
        records["stop"][chosen] = first
        records["num_lanes"][chosen] = len(folded.items)
        records["num_slots"][chosen] = len(folded.kinds)
    return records


def _allocators(
    roles: Sequence[Folded],
    ranks: Sequence[int],
    records: Records,
    *,
    memory: DeviceMemory | None,
    num_histories: int,
    alone: frozenset[int],
) -> NDArray[np.int64]:
    """Histories, and which rank follows which: neighbours share one where there are more ranks than histories."""
    records["history"] = np.arange(len(ranks))
    records["answers"] = -1
    if memory is None:
        return np.zeros((1, 1), np.int64)
    device_bytes = int(min(memory.capacity_bytes, ENDLESS))
    room = Room(
        streams=max(len(folded.items) for folded in roles) + 1,
        handles=max(folded.num_handles for folded in roles) + 1,
    )
    num_rows = num_shared = 0
    rows = []
    for folded in roles:
        indices = np.searchsorted(ranks, folded.role.ranks).tolist()
        shared = [index for index in indices if ranks[index] not in alone]
        size = -(-len(shared) // num_histories) or 1
        blocks = [[index] for index in indices if ranks[index] in alone]
        blocks += [shared[begin : begin + size] for begin in range(0, len(shared), size)]
        for block in blocks:
            records["history"][block] = num_rows
            num_rows += 1
            if len(block) > 1:
                records["answers"][block] = num_shared
                num_shared += 1
        capacity = max(0, device_bytes - folded.role.outside_bytes)
        rows.append(new_allocators(len(blocks), room, memory.settings, capacity, capacity))
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def _lanes(roles: Sequence[RoleTables], ranks: Sequence[int], launch_latency_s: float, inline: str) -> Records:
    num_lanes = max((len(role.items) for role in roles), default=0)
    records = np.zeros((len(ranks), num_lanes), LANE)
    records["due_s"] = inf
    records["rate"] = 1.0
    records["host_number"] = -1
    records["mask"] = FIRST_CAPACITY - 1
    records["ring"] = np.arange(num_lanes) * FIRST_CAPACITY
    first_item = 0
    for role in roles:
        chosen = np.searchsorted(ranks, role.folded.role.ranks)
        for lane, (name, items) in enumerate(zip(role.folded.role.lanes, role.items, strict=True)):
            records["latency_s"][chosen, lane] = 0.0 if name == inline else launch_latency_s
            records["first_item"][chosen, lane] = first_item
            first_item += len(items)
    return records


class _Places:
    """Where collectives meet: one place for each lane of each part of a group."""

    def __init__(
        self,
        folding: Folding,
        roles: Sequence[Folded],
        ranks: Sequence[int],
        transfers: Sequence[Transfer],
        links: Mapping[str, int],
    ) -> None:
        self._rows: list[tuple[int, int, int]] = []
        """First and last of its kind in the sequence, part."""
        self._first_transfers: list[int] = []
        first_of_kind: list[int] = []
        first = 0
        used: list[set[int]] = []
        for kind in folding.kinds.values():
            first_of_kind.append(len(self._rows))
            stop = first + len(kind.transfers)
            for part in range(1 + max(transfers[kind.transfers[0]].offsets.values(), default=0)):
                # Repetitions use the links of what they repeat.
                own = (transfers[number + part] for number in kind.transfers if number < len(transfers))
                used.append({links[link] for transfer in own for link, _ in transfer.demands})
                self._rows.append((first, stop, part))
                self._first_transfers.append(kind.transfers[0] + part)
            first = stop
        self._component_of = _connected(used)
        num_components = max(self._component_of, default=-1) + 1
        self.components: list[list[int]] = [[] for _ in range(num_components)]
        for place, component in enumerate(self._component_of):
            if component >= 0:
                self.components[component].append(place)
        self.place_of = np.full((len(ranks), max((len(folded.kinds) for folded in roles), default=0)), -1, np.int32)
        self.member_ranks: list[list[int]] = [[] for _ in self._rows]
        self.member_slots: list[list[int]] = [[] for _ in self._rows]
        for folded in roles:
            for slot, kind in enumerate(folded.kinds):
                offsets = transfers[kind.transfers[0]].offsets
                for rank, index in zip(folded.role.ranks, np.searchsorted(ranks, folded.role.ranks), strict=True):
                    place = first_of_kind[kind.number] + offsets.get(rank, 0)
                    self.place_of[index, slot] = place
                    self.member_ranks[place].append(int(index))
                    self.member_slots[place].append(slot)
        self.touching = self._touching()

    def _touching(self) -> list[list[int]]:
        """Other places with links in common, by place, that share ranks with it."""
        found: list[set[int]] = [set() for _ in self._rows]
        for row in {tuple(row) for row in self.place_of.tolist()}:
            present = [place for place in row if place >= 0]
            for place in present:
                found[place].update(present)
        return [
            sorted(
                other
                for other in others
                if other != place and self._component_of[other] == self._component_of[place] != -1
            )
            for place, others in enumerate(found)
        ]

    def records(self) -> Records:
        """Before the first collective of each."""
        records = np.zeros(len(self._rows), PLACE)
        stops = np.cumsum([len(members) for members in self.member_ranks], dtype=np.int64)
        for place, (first, stop, part) in enumerate(self._rows):
            record = records[place]
            record["position"], record["stop"], record["part"] = first, stop, part
            record["transfer"] = self._first_transfers[place]
            record["woken"] = record["ended"] = -1
            record["latest_s"] = -1.0
            record["stage"] = GATHERING
            record["component"] = self._component_of[place]
            record["stop_member"] = stops[place]
            record["first_member"] = stops[place] - len(self.member_ranks[place])
        return records


def _connected(used: Sequence[set[int]]) -> list[int]:
    """The number of each place's component: places that share links, directly or through others; -1 without links."""
    groups: list[set[int]] = []
    for links in used:
        if links:
            joined = links.union(*(group for group in groups if group & links))
            groups = [group for group in groups if not group & links]
            groups.append(joined)
    return [next((number for number, group in enumerate(groups) if group & links), -1) for links in used]


def _starts(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.array([0, *np.cumsum([len(row) for row in rows], dtype=np.int64)], np.int32)


def _joined(rows: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    return np.array([value for row in rows for value in row], np.int32)
