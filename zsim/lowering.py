"""Programs and prices into the instructions the engine runs: one an op, everything decided beforehand.

What can be known without time is settled here: the price of each op, the number of each lane, which collectives of
different roles are one and the same, and who takes part in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from zsim.errors import OwnCheckError
from zsim.ops import (
    Alloc,
    Collective,
    Compute,
    Copy,
    Free,
    HostTask,
    Key,
    LaneOp,
    Op,
    Program,
    Record,
    Sync,
    Wait,
    Work,
)

KERNEL, COLLECTIVE, WAIT, RECORD, SYNC, ALLOC, FREE, HOST_TASK = range(8)
"""Codes of instructions; those up to COLLECTIVE are queued on lanes."""

Price = Callable[[Op], Work]


class MismatchError(OwnCheckError):
    """Ranks of a group issue different collectives where they should meet, or price and links disagree."""


@dataclass(slots=True)
class Instruction:
    """One op, priced and resolved. Not frozen: tens of thousands are made, and freezing triples the time of that."""

    code: int
    op: Op
    key: Key
    host_s: float
    lane: int = -1
    number: int = -1
    """Of the collective or the event; -1: none."""
    kind: str = ""
    nbytes: int = 0
    group: str = ""
    """All three for its span."""
    launches: int = 0
    first_s: float = 0.0
    """Host time up to the first launch."""
    last_s: float = 0.0
    """Lane time of the last launch: what is left to do at the earliest when all have been issued."""
    alone_s: float = 0.0
    wake_s: float = 0.0
    """Of a sync: what a host pays on top if it really had to wait."""


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


@dataclass(frozen=True, slots=True)
class Executed:
    """One program with the ranks that execute it: all, or the one that stands for all."""

    program: Program
    ranks: tuple[int, ...]
    lanes: tuple[str, ...]
    instructions: list[Instruction]


@dataclass(frozen=True, slots=True)
class Lowered:
    """All programs, ready to run."""

    roles: tuple[Executed, ...]
    transfers: tuple[Transfer, ...]


def lower(
    programs: Sequence[Program],
    *,
    price: Price,
    groups: Mapping[str, tuple[int, ...]],
    link_capacities: Mapping[str, float],
    expand: bool,
) -> Lowered:
    """Instructions of every role and the collectives in which they meet."""
    ranks = {program.role: program.ranks if expand else (min(program.ranks),) for program in programs}
    executing = frozenset(rank for chosen in ranks.values() for rank in chosen)
    meetings = _Meetings(groups, executing, link_capacities)
    roles = tuple(_lower_role(program, ranks[program.role], price, meetings) for program in programs)
    return Lowered(roles, tuple(meetings.transfers))


class _Meetings:
    """Numbers collectives: the n-th of a group on a lane is the same one on all ranks."""

    def __init__(
        self, groups: Mapping[str, tuple[int, ...]], executing: frozenset[int], link_capacities: Mapping[str, float]
    ) -> None:
        self.transfers: list[Transfer] = []
        self._num_participants = {group: sum(rank in executing for rank in ranks) for group, ranks in groups.items()}
        self._link_capacities = link_capacities
        self._numbers: dict[tuple[str, str, int], int] = {}

    def number(self, role: str, op: Collective, index: int, work: Work) -> int:
        """The number of the `index`-th collective of its group and lane."""
        place = (op.group, op.lane, index)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self.transfers)
            self.transfers.append(self._transfer(op, work))
            return number
        first = self.transfers[number].op
        if (first.kind, first.nbytes) != (op.kind, op.nbytes):
            raise MismatchError(
                f"group {op.group}, lane {op.lane}, collective {index}: role {role} issues {op.kind} of {op.nbytes} "
                f"bytes, another role {first.kind} of {first.nbytes} bytes"
            )
        return number

    def _transfer(self, op: Collective, work: Work) -> Transfer:
        if op.group not in self._num_participants:
            raise MismatchError(f"{op.key}: unknown group {op.group!r}, known are {', '.join(self._num_participants)}")
        flow_s = work.alone_s - work.latency_s
        demands = tuple((link, nbytes / flow_s) for link, nbytes in work.link_bytes if nbytes > 0) if flow_s > 0 else ()
        for link, demand in demands:
            capacity = self._link_capacities.get(link)
            if capacity is None:
                raise MismatchError(f"{op.key}: unknown link {link!r}, known are {', '.join(self._link_capacities)}")
            if demand > capacity * (1 + 1e-9):
                raise MismatchError(f"{op.key}: alone it moves {demand:g} bytes/s over {link} of {capacity:g} bytes/s")
        if not 0.0 <= work.compute_share < 1.0:
            raise MismatchError(f"{op.key}: its compute share is {work.compute_share}, allowed is 0 <= share < 1")
        return Transfer(
            op=op,
            num_participants=self._num_participants[op.group],
            latency_s=min(work.latency_s, work.alone_s),
            flow_s=max(0.0, flow_s),
            demands=demands,
            compute_share=work.compute_share,
        )


def _lower_role(program: Program, ranks: tuple[int, ...], price: Price, meetings: _Meetings) -> Executed:
    lanes: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    instructions: list[Instruction] = []
    for op in program.ops:
        work = price(op)
        match op:
            case Compute() | Copy():
                kind = "compute" if isinstance(op, Compute) else "copy"
                instruction = _queued(KERNEL, op, work, lanes, kind)
            case Collective():
                index = counts.get((op.group, op.lane), 0)
                counts[op.group, op.lane] = index + 1
                instruction = _queued(COLLECTIVE, op, work, lanes, op.kind)
                instruction.group = op.group
                instruction.number = meetings.number(program.role, op, index, work)
            case Record() | Wait():
                code = RECORD if isinstance(op, Record) else WAIT
                instruction = Instruction(
                    code, op, op.key, work.host_s, lanes.setdefault(op.lane, len(lanes)), op.event
                )
            case Sync():
                number = -1 if op.event is None else op.event
                instruction = Instruction(SYNC, op, op.key, work.host_s, number=number, wake_s=work.latency_s)
            case Alloc():
                instruction = Instruction(ALLOC, op, op.key, work.host_s)
            case Free():
                instruction = Instruction(FREE, op, op.key, work.host_s)
            case HostTask():
                instruction = Instruction(HOST_TASK, op, op.key, work.host_s)
            case _:
                assert_never(op)
        instructions.append(instruction)
    return Executed(program, ranks, tuple(lanes), instructions)


def _queued(code: int, op: LaneOp, work: Work, lanes: dict[str, int], kind: str) -> Instruction:
    launches = max(1, work.num_launches)
    return Instruction(
        code=code,
        op=op,
        key=op.key,
        host_s=work.host_s,
        lane=lanes.setdefault(op.lane, len(lanes)),
        kind=kind,
        nbytes=op.nbytes,
        launches=launches,
        first_s=work.host_s / launches,
        last_s=work.alone_s / launches,
        alone_s=work.alone_s,
    )
