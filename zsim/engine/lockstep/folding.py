"""Instructions of a role, without those that need no lane.

What only takes host time lengthens the sleep behind the instruction before: host tasks, events recorded, and what an
op costs that acts when it has been paid for. An event becomes a lane and the number of its items that must have
finished, which program order tells.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from zsim.engine import lowering
from zsim.engine.lockstep.history import DeviceCalls, History, history
from zsim.engine.lockstep.state import (
    COLLECTIVE,
    EMPTY_CACHE,
    FLUSH,
    FREE,
    KERNEL,
    MALLOC,
    STEP,
    SYNC,
    SYNC_EVENT,
    WAIT,
)
from zsim.engine.lowering import Action, Executed
from zsim.engine.memory import DeviceMemory
from zsim.ops import OUTSIDE, SETUP, Alloc, Collective, Free, Key, Op, Sync


@dataclass(slots=True, eq=False)
class Kind:
    """Collectives of one group on one lane: a place for each part of the group."""

    number: int
    """Of the kinds."""
    transfers: list[int] = field(default_factory=list)
    """Of its first part, in order."""


class Row(NamedTuple):
    """A folded instruction; see `state.INSTRUCTION`."""

    action: int
    number: int
    origin: int
    """Index of the instruction it comes from."""


class Request(NamedTuple):
    """What a role asks of an allocator whose history depends on time; see `state.REQUEST`."""

    origin: int
    """Index of the instruction."""
    nbytes: int = 0
    used_items: int = 0
    used_lane: int = -1
    handle: int = -1
    stream: int = 0
    varies: bool = False
    scale: int = 0
    in_setup: bool = False


class Step(NamedTuple):
    """A stretch of instructions."""

    scale: int
    """Column of `host_scale`: steps before 0 count from its end."""
    column: int
    """Of arrays by step: 0 for all that comes before step 0."""


@dataclass(slots=True)
class Folded:
    """The instructions of one role."""

    role: Executed
    history: History
    rows: list[Row] = field(default_factory=list)
    sleeps_s: list[float] = field(default_factory=list)
    items: list[list[int]] = field(default_factory=list)
    """By lane: rows that are queued there."""
    kinds: list[Kind] = field(default_factory=list)
    """Of the places at which its collectives meet, by slot."""
    work_s: dict[Step, float] = field(default_factory=dict)
    """Host seconds at work."""
    device_s: dict[Step, float] = field(default_factory=dict)
    """Host seconds of the allocator's calls, without waits."""

    requests: list[Request] = field(default_factory=list)
    num_handles: int = 0

    def op(self, row: int) -> Op:
        """What a row comes from, for messages."""
        return self.role.instructions[self.rows[row].origin][3]


def column_of(key: Key) -> int:
    """Of arrays by step: 0 for all that comes before step 0."""
    return key.step + 1 if key.is_measured else 0


class Folding:
    """Folds roles, which share actions, steps and kinds of places."""

    def __init__(self, num_scales: int, memory: DeviceMemory | None, *, by_time: bool) -> None:
        """`by_time` tells whether histories of allocators depend on time."""
        self._num_scales = num_scales
        self.memory = memory
        self.by_time = by_time
        self.num_requests = 0
        self.kinds: dict[tuple[str, str], Kind] = {}
        self.steps: dict[Step, int] = {}
        """Their numbers."""
        self.actions: list[tuple[Action, int, int, int]] = []
        """Action, code, other lane or slot, bits of lanes."""
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        """Of the same, with the action's identity."""

    def fold(self, role: Executed) -> Folded:
        """Folds one role."""
        folded = Folded(role, history(role, None if self.by_time else self.memory), items=[[] for _ in role.lanes])
        return _RoleFolding(self, folded).fold()

    def number(self, action: Action, code: int, other: int = -1, lanes: int = 0) -> int:
        """Of an action with what else is known of it."""
        number = self._numbers.setdefault((id(action), code, other, lanes), len(self.actions))
        if number == len(self.actions):
            self.actions.append((action, code, other, lanes))
        return number

    def step(self, key: Key) -> Step:
        """The stretch to which an op belongs."""
        return Step(key.step % self._num_scales, column_of(key))


class _RoleFolding:
    """Walks through the instructions of one role."""

    def __init__(self, folding: Folding, folded: Folded) -> None:
        self._folding = folding
        self._folded = folded
        self._events: dict[int, tuple[int, int]] = {}
        """Recorded so far: a lane, and how many of its items come before."""
        self._counts: dict[int, int] = {}
        """Collectives so far, by kind."""
        self._slots: dict[int, int] = {}
        self._step: Step | None = None
        self._key: tuple[int, str] | None = None
        self._handles: dict[str, int] = {}
        self._spare_handles: list[int] = []
        self._index = 0

    def fold(self) -> Folded:
        folded, calls = self._folded, self._folded.history.calls
        for self._index, (action, key, number, op) in enumerate(folded.role.instructions):
            if (key.step, key.phase) != self._key:
                self._key = key.step, key.phase
                self._begin_step(action, key)
            self._put_instruction(action, number, op)
            if self._index in calls:
                self._put_calls(action, calls[self._index])
        return folded

    def _begin_step(self, action: Action, key: Key) -> None:
        step = self._folding.step(key)
        if step != self._step:
            self._step = step
            number = self._folding.steps.setdefault(step, len(self._folding.steps))
            self._put(self._folding.number(action, STEP), number)
            for seconds in (self._folded.work_s, self._folded.device_s):
                seconds.setdefault(step, 0.0)

    def _put_instruction(self, action: Action, number: int, op: Op) -> None:
        folding, folded = self._folding, self._folded
        code, host_s = action.code, action.host_s
        assert self._step is not None
        if code == lowering.SYNC:
            self._put_sync(action, op)
            return
        seconds = folded.device_s if code == lowering.EMPTY_CACHE else folded.work_s
        seconds[self._step] += host_s
        if code == lowering.KERNEL:
            self._put(folding.number(action, KERNEL), -1, host_s, action.lane)
        elif code == lowering.COLLECTIVE:
            self._put(folding.number(action, COLLECTIVE, self._slot(op, number)), number, host_s, action.lane)
        else:
            # They act when they have been paid for.
            folded.sleeps_s[-1] += host_s
            if code == lowering.WAIT:
                lane, count = self._events[number]
                self._put(folding.number(action, WAIT, lane), count, lane=action.lane)
            elif code == lowering.RECORD:
                self._events[number] = action.lane, len(folded.items[action.lane])
            elif folding.by_time and code != lowering.HOST_TASK:
                self._put_request(action, number, op)

    def _put(self, action: int, number: int, sleep_s: float = 0.0, lane: int = -1) -> None:
        folded = self._folded
        if lane >= 0:
            folded.items[lane].append(len(folded.rows))
        folded.rows.append(Row(action, number, self._index))
        folded.sleeps_s.append(sleep_s)

    def _put_request(self, action: Action, event: int, op: Op) -> None:
        """Of the caching allocator; what lies outside of it lowers its capacity from the start."""
        folding = self._folding
        if isinstance(op, Alloc):
            if op.category == OUTSIDE:
                return
            if not self._spare_handles:
                self._spare_handles.append(self._folded.num_handles)
                self._folded.num_handles += 1
            # The lowest one: so steps in which the same is live also use the same ones.
            handle = self._handles[op.buffer] = heappop(self._spare_handles)
            code, request = MALLOC, Request(self._index, op.nbytes, 0, -1, handle, action.lane, op.varies)
        elif isinstance(op, Free):
            if op.buffer not in self._handles:
                return
            handle = self._handles.pop(op.buffer)
            heappush(self._spare_handles, handle)
            used_lane, used_items = self._events[event] if event >= 0 else (-1, 0)
            code, request = FREE, Request(self._index, 0, used_items, used_lane, handle)
        else:
            code, request = EMPTY_CACHE, Request(self._index)
        assert self._step is not None
        self._put(folding.number(action, code), folding.num_requests)
        folding.num_requests += 1
        in_setup = self._folded.role.instructions[self._index][1].phase in SETUP
        self._folded.requests.append(request._replace(scale=self._step.scale, in_setup=in_setup))

    def _put_sync(self, action: Action, op: Op) -> None:
        assert isinstance(op, Sync)
        if op.event is not None:
            lane, count = self._events[op.event]
            self._put(self._folding.number(action, SYNC_EVENT, lane), count, action.host_s)
        else:
            lanes = self._folded.role.lanes
            bits = sum(1 << lane for lane, name in enumerate(lanes) if not op.lanes or name in op.lanes)
            self._put(self._folding.number(action, SYNC, lanes=bits), -1, action.host_s)

    def _put_calls(self, action: Action, calls: DeviceCalls) -> None:
        """Of the allocator; cudaFree waits for the whole device first."""
        folded, memory = self._folded, self._folding.memory
        assert memory is not None
        assert self._step is not None
        if calls.num_frees:
            bits = (1 << len(folded.items)) - 1
            self._put(self._folding.number(action, FLUSH, lanes=bits), -1)
        seconds = calls.num_frees * memory.free_s + calls.num_mallocs * memory.malloc_s
        folded.sleeps_s[-1] += seconds
        folded.device_s[self._step] += seconds

    def _slot(self, op: Op, transfer: int) -> int:
        """Which of the rank's places that is; notes the transfer as the next one there."""
        assert isinstance(op, Collective)
        kinds = self._folding.kinds
        kind = kinds.setdefault((op.group, op.lane), Kind(len(kinds)))
        count = self._counts.get(kind.number, 0)
        self._counts[kind.number] = count + 1
        if count == len(kind.transfers):
            kind.transfers.append(transfer)
        slot = self._slots.setdefault(kind.number, len(self._slots))
        if slot == len(self._folded.kinds):
            self._folded.kinds.append(kind)
        return slot
