"""Programs and prices into the instructions the engine runs: one flat tuple an op, everything decided beforehand.

What can be known without time is settled here: the price of each op, the number of each lane, which collectives of
different roles are one and the same, and who takes part in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zsim.errors import OwnCheckError
from zsim.ops import Alloc, Collective, Compute, Copy, Free, HostTask, Op, Program, Record, Sync, Wait, Work

KERNEL, COLLECTIVE, WAIT, RECORD, SYNC, ALLOC, FREE, HOST_TASK = range(8)
"""Codes of instructions; those up to COLLECTIVE are queued on lanes."""

Instruction = tuple[int, float, int, int, float, int, Op]
"""Code; host seconds; lane; number of the collective or event (-1: none); seconds alone (of a sync: added to its
return if it had to wait); launches; the op itself."""

Price = Callable[[Op], Work]


class MismatchError(OwnCheckError):
    """Ranks of a group issue different collectives where they should meet, or price and links disagree."""


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
        code, lane, number, launches, lane_s = HOST_TASK, -1, -1, 0, 0.0
        match op:
            case Compute() | Copy():
                code, lane_s, launches = KERNEL, work.alone_s, max(1, work.num_launches)
                lane = lanes.setdefault(op.lane, len(lanes))
            case Collective():
                code, launches = COLLECTIVE, max(1, work.num_launches)
                lane = lanes.setdefault(op.lane, len(lanes))
                index = counts.get((op.group, op.lane), 0)
                counts[op.group, op.lane] = index + 1
                number = meetings.number(program.role, op, index, work)
            case Record() | Wait():
                code, number = RECORD if isinstance(op, Record) else WAIT, op.event
                lane = lanes.setdefault(op.lane, len(lanes))
            case Sync():
                # Work counts a sync's latency apart: only a host that really waited pays for waking up.
                code, number, lane_s = SYNC, -1 if op.event is None else op.event, work.latency_s
            case Alloc() | Free():
                code = ALLOC if isinstance(op, Alloc) else FREE
            case HostTask():
                pass
        instructions.append((code, work.host_s, lane, number, lane_s, launches, op))
    return Executed(program, ranks, tuple(lanes), instructions)
