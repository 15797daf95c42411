"""Programs and prices into the instructions the engine runs: one an op, everything decided beforehand.

What can be known without time is settled here: the price of each op, the number of each lane, which collectives of
different roles are one and the same, and who takes part in them. A collective of a group that is a partition of ranks
is one transfer for each part with an executing rank: of representatives, which stand for all ranks of their role, one
that stands for all parts; of all ranks, one for each.

A device may execute one lane on the host thread itself, as a CPU does: what is issued there is then waited for at once,
and a wait of that lane is one of the host.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol, assert_never

from zsim.errors import OwnCheckError
from zsim.ops import (
    OUTSIDE,
    SETUP,
    Alloc,
    Collective,
    Compute,
    Copy,
    EmptyCache,
    Free,
    Groups,
    HostTask,
    Key,
    Op,
    Program,
    Record,
    Sync,
    Wait,
    Work,
)
from zsim.trace import EMPTY_CACHE as EMPTY_CACHE_NOTE
from zsim.trace import INLINE

KERNEL, COLLECTIVE, WAIT, RECORD, SYNC, ALLOC, FREE, HOST_TASK, EMPTY_CACHE = range(9)
"""Codes of instructions; those up to COLLECTIVE are queued on lanes."""

_NO_WORK: Final = Work(0.0, 0.0)
_ONE_FOR_ALL: Final[Mapping[int, int]] = MappingProxyType({})


class Price(Protocol):
    """What an op takes."""

    def __call__(self, op: Op, part: int | None = None, /) -> Work:
        """Of a collective: alone among the ranks of that part of its group, or standing for all parts at once."""


class MismatchError(OwnCheckError):
    """Ranks of a group issue different collectives where they should meet, or price and links disagree."""


@dataclass(frozen=True, slots=True)
class Action:
    """What an op does, but for its name: a program of 50,000 ops has some hundred of them, and shares them."""

    code: int
    lane: int
    """-1: none."""
    kind: str
    nbytes: int
    group: str
    element_bytes: int
    note: str
    """All five for its span."""
    host_s: float
    alone_s: float
    launches: int
    first_s: float
    """Host time up to the first launch."""
    last_s: float
    """Lane time of the last launch: what is left to do at the earliest when all have been issued."""
    wake_s: float
    """Of a sync: what a host pays on top if it really had to wait."""


Instruction = tuple[Action, Key, int, Op]
"""What to do; for whom; the number of the collective or event (-1: none); the op, for messages."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective as the network sees it: who meets, how long nothing flows, what flows for how long."""

    op: Collective
    num_participants: int
    latency_s: float
    flow_s: float
    """Seconds at full speed, after the latency."""
    demands: tuple[tuple[str, float], ...]
    """Bytes per second over each link at full speed."""
    compute_share: float
    sleeps: bool
    """Takes its share only while bytes flow."""
    num_flows: int
    """Equal ones that it stands for."""
    offsets: Mapping[int, int]
    """Rank -> how many numbers further its own part meets; empty where all meet here."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One program with the ranks that execute it: all, or the one that stands for all."""

    program: Program
    ranks: tuple[int, ...]
    lanes: tuple[str, ...]
    instructions: list[Instruction]
    outside_bytes: int
    """That its device holds beside the caching allocator."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """All programs, ready to run."""

    roles: tuple[Executed, ...]
    transfers: tuple[Transfer, ...]


def lower(
    programs: Sequence[Program],
    *,
    price: Price,
    groups: Groups,
    link_capacities: Mapping[str, float],
    expand: bool,
    inline: str = "",
) -> Lowered:
    """Instructions of every role and the collectives in which they meet; `inline` is a lane that the host executes."""
    ranks = {program.role: program.ranks if expand else (min(program.ranks),) for program in programs}
    executing = frozenset(rank for chosen in ranks.values() for rank in chosen)
    each = price if expand and any(len(partition) > 1 for partition in groups.values()) else None
    meetings = _Meetings(groups, executing, link_capacities, each)
    roles = tuple(_lower_role(program, ranks[program.role], price, meetings, inline) for program in programs)
    return Lowered(roles, tuple(meetings.transfers))


def renumbered(lowered: Lowered, growth: int) -> Lowered:
    """With so much added to the numbers of steps; what comes before the first one stays."""

    def moved(key: Key) -> Key:
        return key if key.phase in SETUP else Key(key.step + growth, *key[1:])

    roles = [
        replace(role, instructions=[(action, moved(key), number, op) for action, key, number, op in role.instructions])
        for role in lowered.roles
    ]
    transfers = [replace(each, op=replace(each.op, key=moved(each.op.key))) for each in lowered.transfers]
    return Lowered(tuple(roles), tuple(transfers))


class _Meetings:
    """Numbers collectives: the n-th of a group on a lane is the same one on all ranks."""

    def __init__(
        self, groups: Groups, executing: frozenset[int], link_capacities: Mapping[str, float], each: Price | None
    ) -> None:
        self.transfers: list[Transfer] = []
        self._parts = {
            group: [
                (index, present)
                for index, part in enumerate(partition)
                if (present := tuple(rank for rank in part if rank in executing))
            ]
            for group, partition in groups.items()
        }
        self._offsets: dict[str, Mapping[int, int]] = {
            group: {rank: offset for offset, (_, present) in enumerate(parts) for rank in present}
            if len(parts) > 1
            else _ONE_FOR_ALL
            for group, parts in self._parts.items()
        }
        self._link_capacities = link_capacities
        self._each = each
        """Prices the parts of a group one by one; None where one of them stands for all."""
        self._numbers: dict[tuple[str, str, int], int] = {}

    def number(self, role: str, op: Collective, index: int, work: Work) -> int:
        """The number of the `index`-th collective of its group and lane."""
        place = (op.group, op.lane, index)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self.transfers)
            if op.group not in self._parts:
                raise MismatchError(f"{op.key}: unknown group {op.group!r}, known are {', '.join(self._parts)}")
            for part, present in self._parts[op.group]:
                own = self._each(op, part) if self._each else work
                self.transfers.append(self._transfer(op, own, len(present)))
            return number
        first = self.transfers[number].op
        if (first.kind, first.nbytes) != (op.kind, op.nbytes):
            raise MismatchError(
                f"group {op.group}, lane {op.lane}, collective {index}: role {role} issues {op.kind} of {op.nbytes} "
                f"bytes, another role {first.kind} of {first.nbytes} bytes"
            )
        return number

    def _transfer(self, op: Collective, work: Work, num_participants: int) -> Transfer:
        flow_s = work.alone_s - work.latency_s
        demands = tuple((link, nbytes / flow_s) for link, nbytes in work.link_bytes if nbytes > 0) if flow_s > 0 else ()
        for link, demand in demands:
            capacity = self._link_capacities.get(link)
            if capacity is None:
                raise MismatchError(f"{op.key}: unknown link {link!r}, known are {', '.join(self._link_capacities)}")
            rounding = 4 * sys.float_info.epsilon * work.alone_s / flow_s
            if demand > capacity * (1 + 1e-9 + rounding):
                raise MismatchError(f"{op.key}: alone it moves {demand:g} bytes/s over {link} of {capacity:g} bytes/s")
        if not 0.0 <= work.compute_share < 1.0:
            raise MismatchError(f"{op.key}: its compute share is {work.compute_share}, allowed is 0 <= share < 1")
        return Transfer(
            op=op,
            num_participants=num_participants,
            latency_s=min(work.latency_s, work.alone_s),
            flow_s=max(0.0, flow_s),
            demands=demands,
            compute_share=work.compute_share,
            sleeps=work.sleeps,
            num_flows=work.num_flows,
            offsets=self._offsets[op.group],
        )


def _lower_role(program: Program, ranks: tuple[int, ...], price: Price, meetings: _Meetings, inline: str) -> Executed:
    actions = _Actions()
    counts: dict[tuple[str, str], int] = {}
    instructions: list[Instruction] = []
    for given in program.ops:
        op = Sync(given.key, event=given.event) if isinstance(given, Wait) and given.lane == inline else given
        work = price(op)
        number = -1
        match op:
            case Compute():
                action = actions.of(KERNEL, work, op.lane, kind="compute", nbytes=op.nbytes)
            case Copy():
                action = actions.of(KERNEL, work, op.lane, kind="copy", nbytes=op.nbytes)
            case Collective():
                index = counts.get((op.group, op.lane), 0)
                counts[op.group, op.lane] = index + 1
                action = actions.of(
                    COLLECTIVE,
                    work,
                    op.lane,
                    kind=op.kind,
                    nbytes=op.nbytes,
                    group=op.group,
                    element_bytes=op.element_bytes,
                    note=work.algorithm,
                )
                number = meetings.number(program.role, op, index, work)
            case Record():
                action, number = actions.of(RECORD, work, op.lane, note="record"), op.event
            case Wait():
                action, number = actions.of(WAIT, work, op.lane, note="wait"), op.event
            case Sync():
                awaited = "event" if op.event is not None else "stream" if op.lanes else "device"
                action, number = actions.of(SYNC, work, note=awaited), -1 if op.event is None else op.event
            case Alloc():
                action = actions.of(ALLOC, work, op.lane, note="alloc")
            case Free():
                action, number = actions.of(FREE, work, note="free"), -1 if op.event is None else op.event
            case EmptyCache():
                action = actions.of(EMPTY_CACHE, work, note=EMPTY_CACHE_NOTE)
            case HostTask():
                action = actions.of(HOST_TASK, work, note=op.activity)
            case _:
                assert_never(op)
        instructions.append((action, op.key, number, op))
        if action.code <= COLLECTIVE and inline and action.lane == actions.lanes.get(inline):
            instructions.append((actions.of(SYNC, _NO_WORK, note=INLINE), op.key, -1, Sync(op.key, (inline,))))
    outside_bytes = sum(op.nbytes for op in program.ops if isinstance(op, Alloc) and op.category == OUTSIDE)
    return Executed(program, ranks, tuple(actions.lanes), instructions, outside_bytes)


class _Actions:
    """The distinct actions of a program, and its lanes by order of first use."""

    def __init__(self) -> None:
        self.lanes: dict[str, int] = {}
        self._actions: dict[tuple[int, Work, str, str, int, str, int, str], Action] = {}

    def of(
        self,
        code: int,
        work: Work,
        lane: str = "",
        *,
        kind: str = "",
        nbytes: int = 0,
        group: str = "",
        element_bytes: int = 0,
        note: str = "",
    ) -> Action:
        """The action of that description, made when it is first asked for."""
        description = (code, work, lane, kind, nbytes, group, element_bytes, note)
        action = self._actions.get(description)
        if action is None:
            launches = max(1, work.num_launches) if code <= COLLECTIVE else 0
            action = self._actions[description] = Action(
                code=code,
                lane=self.lanes.setdefault(lane, len(self.lanes)) if lane else -1,
                kind=kind,
                nbytes=nbytes,
                group=group,
                element_bytes=element_bytes,
                note=note,
                host_s=work.host_s,
                alone_s=work.alone_s,
                launches=launches,
                first_s=work.host_s / max(1, launches),
                last_s=work.alone_s / max(1, launches),
                wake_s=work.latency_s,
            )
        return action
