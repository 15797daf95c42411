"""Static checks of programs: what is wrong in one is found before time exists.

A fault here is ours, not the user's: no experiment file may lead to a wrong program.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import assert_never

from zsim.errors import OwnCheckError
from zsim.ops import (
    HOST,
    Alloc,
    Collective,
    Compute,
    Copy,
    EmptyCache,
    Free,
    Groups,
    HostTask,
    Op,
    Partition,
    Program,
    Record,
    Sync,
    Wait,
    may_stay,
)


class ProgramError(OwnCheckError):
    """A program that no machine could run, or that would not mean what its strategy meant."""


def check(programs: Sequence[Program], groups: Groups) -> None:
    """Raises `ProgramError` with one line for the first fault found."""
    _check_roles(programs, groups)
    for program in programs:
        _RoleCheck(program, groups).run()
    _check_collectives(programs)


def _check_roles(programs: Sequence[Program], groups: Groups) -> None:
    role_of: dict[int, str] = {}
    names: set[str] = set()
    for program in programs:
        if program.role in names:
            raise ProgramError(f"role {program.role}: has two programs, one is allowed")
        names.add(program.role)
        if not program.ranks:
            raise ProgramError(f"role {program.role}: has no ranks, at least one is needed")
        for rank in program.ranks:
            if rank in role_of:
                raise ProgramError(f"rank {rank}: is in role {role_of[rank]} and again in role {program.role}")
            role_of[rank] = program.role
    for group, partition in groups.items():
        _check_partition(group, partition, role_of)


def _check_partition(group: str, partition: Partition, role_of: dict[int, str]) -> None:
    if not partition or not all(partition):
        raise ProgramError(f"group {group}: has no ranks, at least one is needed")
    if len({len(part) for part in partition}) > 1:
        raise ProgramError(f"group {group}: has parts of different sizes")
    ranks = [rank for part in partition for rank in part]
    if len(set(ranks)) != len(ranks):
        raise ProgramError(f"group {group}: names a rank twice")
    missing = [rank for rank in ranks if rank not in role_of]
    if missing:
        raise ProgramError(f"group {group}: rank {missing[0]} is in no role")


class _RoleCheck:
    """Walks one program in the order in which the host issues it."""

    def __init__(self, program: Program, groups: Groups) -> None:
        self._program = program
        self._groups = groups
        self._recorded: set[int] = set()
        self._live: dict[str, Alloc] = {}
        self._outside: dict[str, list[int]] = {}

    def run(self) -> None:
        for index, op in enumerate(self._program.ops):
            fault = self._fault(op)
            if fault:
                raise ProgramError(f"role {self._program.role}, op {index} ({one_line(op)}): {fault}")
        left = [alloc for alloc in self._live.values() if not may_stay(alloc)]
        if left:
            raise ProgramError(
                f"role {self._program.role}: {len(left)} buffers are never freed, the first is {one_line(left[0])}"
            )

    def _fault(self, op: Op) -> str:
        """What is wrong with the op at its place, or nothing."""
        match op:
            case Compute():
                gemms_positive = all(gemm.flop > 0 for gemm in op.gemms)
                if op.num_kernels < max(1, len(op.gemms)) or op.nbytes < 0 or not gemms_positive:
                    return "sizes must be positive, with a kernel for each GEMM"
                return _lane_fault(op.lane)
            case Copy():
                if op.nbytes <= 0 or op.num_kernels <= 0:
                    return "bytes and kernels must be positive"
                return _lane_fault(op.lane)
            case Collective():
                return self._collective_fault(op) or _lane_fault(op.lane)
            case HostTask():
                return "" if op.count > 0 else "count must be positive"
            case Alloc():
                return self._alloc_fault(op) or _lane_fault(op.lane)
            case Free():
                return self._free_fault(op)
            case EmptyCache():
                return ""
            case Record():
                return self._record_fault(op) or _lane_fault(op.lane)
            case Wait():
                return self._event_fault(op.event) or _lane_fault(op.lane)
            case Sync():
                return self._sync_fault(op)
            case _:
                assert_never(op)

    def _collective_fault(self, op: Collective) -> str:
        if op.group not in self._groups:
            return f"unknown group {op.group!r}, known are {', '.join(self._groups)}"
        if min(op.num_elements, op.element_bytes, op.num_tensors) <= 0:
            return "elements, their bytes and tensors must be positive"
        if op.group not in self._outside:
            self._outside[op.group] = sorted(set(self._program.ranks).difference(*self._groups[op.group]))
        outside = self._outside[op.group]
        return f"rank {outside[0]} of the role is not in the group" if outside else ""

    def _alloc_fault(self, op: Alloc) -> str:
        if op.nbytes <= 0:
            return "bytes must be positive"
        if op.buffer in self._live:
            return "the buffer is allocated already"
        self._live[op.buffer] = op
        return ""

    def _free_fault(self, op: Free) -> str:
        if op.buffer not in self._live:
            return "the buffer is not allocated"
        del self._live[op.buffer]
        return self._event_fault(op.event) if op.event is not None else ""

    def _record_fault(self, op: Record) -> str:
        if op.event in self._recorded:
            return "the event is recorded already"
        self._recorded.add(op.event)
        return ""

    def _event_fault(self, event: int) -> str:
        return "" if event in self._recorded else "the event has not been recorded before"

    def _sync_fault(self, op: Sync) -> str:
        if op.event is None:
            return next(filter(None, map(_lane_fault, op.lanes)), "")
        return "waits for an event or for lanes, not both" if op.lanes else self._event_fault(op.event)


def _lane_fault(lane: str) -> str:
    return "" if lane and lane != HOST else "needs the name of a lane"


def _check_collectives(programs: Sequence[Program]) -> None:
    """Ranks of a group must issue the same collectives in the same order, whichever role they play."""
    first: dict[str, tuple[str, list[Collective]]] = {}
    for program in programs:
        issued: dict[str, list[Collective]] = {}
        for op in program.ops:
            if isinstance(op, Collective):
                issued.setdefault(op.group, []).append(op)
        for group, mine in issued.items():
            role, theirs = first.setdefault(group, (program.role, mine))
            for index, (one, other) in enumerate(zip_longest(theirs, mine)):
                if one is None or other is None or (one.kind, one.nbytes) != (other.kind, other.nbytes):
                    raise ProgramError(
                        f"group {group}, collective {index}: role {role} issues {one_line(one)}, "
                        f"role {program.role} issues {one_line(other)}"
                    )


def one_line(op: Op | None) -> str:
    """An op as text without its columns."""
    return " ".join(str(op).split()) if op is not None else "nothing"
