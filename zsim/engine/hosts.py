"""Host threads: each issues its ops one after the other, and pays for every one of them.

A thread is a generator, as SimPy's processes are, but one that its single alarm resumes: a process would make and
subscribe to a new event for each op, at a tenth of the engine's time.

A host blocks only in a sync, on a full launch queue, or in an allocator that waits for memory that lanes still use. Its
time is covered by spans without a gap: "launch" while it issues work for a lane, "host" for all other ops, "sync" and
"queue" while it is blocked.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from heapq import heappush
from math import inf

from zsim.engine.fabric import NORMAL, Alarm, Callbacks
from zsim.engine.lanes import Device, Lane
from zsim.engine.lowering import ALLOC, COLLECTIVE, HOST_TASK, RECORD, SYNC, WAIT, Executed
from zsim.ops import HOST, Alloc, Free, Op, Sync
from zsim.trace import RETRY, MemorySample, Span

Report = Callable[[int], None]
"""Called with a number of ops that have been issued."""

KINDS = ("launch", "launch", "host", "host", "sync", "host", "host", "host", "host")
"""What the host does, by code of instruction."""
CHUNK = 1024
"""Ops between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """What the caching allocator of a rank has, and what it costs to get more."""

    capacity_bytes: float = inf
    segment_s: float = 0.0
    """Of one segment given back to the device and taken anew."""


class Pool:
    """Memory of one stream: its free blocks serve no other (`get_free_block` of CUDACachingAllocator.cpp)."""

    __slots__ = ("allocated", "reserved")

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0


class Host:
    """The thread of one rank."""

    def __init__(
        self,
        role: Executed,
        device: Device,
        *,
        launch_queue_depth: int,
        scales: Sequence[float] | None,
        allocator: Allocator,
    ) -> None:
        self.rank = device.rank
        self.device = device
        self.lanes = [Lane(name, device) for name in role.lanes]
        self.memory: list[MemorySample] = []
        self.blocked_at: Op | None = None
        self._ends: list[float] = []
        """When each op had been issued, which is when the next one begins."""
        self._released: dict[int, float] = {}
        """By index of the op: until when it waited for room in a launch queue,"""
        self._retried: dict[int, float] = {}
        """or for memory that lanes still used."""
        self._instructions = role.instructions
        self._depth = launch_queue_depth
        self._scales = scales
        self._scale = 1.0
        """Of the present step."""
        self._alarm = Alarm(device.clock)
        self._resuming: Callbacks = []
        self._num_awaited = 0
        """Lanes that must come further before the thread resumes,"""
        self._return_s = 0.0
        """and the time it takes for that."""
        self._allocated = 0
        self._reserved = 0
        self._pools = {lane.name: Pool() for lane in self.lanes}
        self._allocator = allocator
        self._recorded: list[tuple[Lane, int, Pool, int]] = []
        """Freed blocks that a lane still uses: the lane, how many of its items must have finished, pool, bytes."""
        self.live: dict[str, Alloc] = {}

    def start(self, report: Report) -> None:
        """Begins the thread, at time 0."""
        thread = self._thread(report)
        self._resuming.append(thread.send)
        next(thread)

    def _thread(self, report: Report) -> Generator[None, Alarm, None]:  # noqa: PLR0915  see below
        """Sets the alarm that resumes it, then yields; suspended for ever at the end.

        One function and inlined alarms, for a call would be paid once an op.
        """
        clock = self.device.clock
        lanes, events, ends = self.lanes, self.device.events, self._ends
        depth, scales, resuming = self._depth, self._scales, self._resuming
        step, scale = None, 1.0
        agenda, serial, alarm = clock.agenda, clock.serial, self._alarm
        now = 0.0
        for begin in range(0, len(self._instructions), CHUNK):
            chunk = self._instructions[begin : begin + CHUNK]
            for instruction in chunk:
                action, key, number, op = instruction
                code = action.code
                if scales is not None and key[0] != step:
                    step = key[0]
                    self._scale = scale = scales[step]
                end_s = now + action.host_s * scale
                if code <= COLLECTIVE:
                    lane = lanes[action.lane]
                    if lane.pending + action.launches > depth and lane.pending:
                        self._wait_for_room(lane, action.launches, op)
                        yield
                        self._released[len(ends)] = now = alarm.due_s
                        end_s = now + action.host_s * scale
                    latency_s = lane.latency_s
                    ready_s = now + action.first_s * scale + latency_s
                    lane.push(now, (instruction, ready_s, end_s + latency_s + action.last_s))
                    if end_s > now:
                        alarm.callbacks = resuming
                        heappush(agenda, (end_s, NORMAL, next(serial), alarm))
                        yield
                elif code == SYNC:
                    if self._wait(op, end_s - now, action.wake_s * scale):
                        yield
                        end_s = alarm.due_s
                    elif end_s > now:
                        alarm.set(end_s, resuming)
                        yield
                else:
                    if end_s > now:
                        alarm.callbacks = resuming
                        heappush(agenda, (end_s, NORMAL, next(serial), alarm))
                        yield
                    if code == RECORD:
                        events[number] = (lanes[action.lane], lanes[action.lane].issued)
                    elif code == WAIT:
                        lanes[action.lane].push(end_s, (instruction, end_s, end_s))
                    elif code < HOST_TASK:
                        if code == ALLOC and self._recorded and self._must_retry(op):
                            yield
                            self._retried[len(ends)] = end_s = alarm.due_s
                        self._account(end_s, code, op)
                ends.append(end_s)
                now = end_s
            report(len(chunk))
        yield

    def spans(self) -> list[Span]:
        """What the thread did: first its waits for room in a queue, then all else, each by start."""
        new, rank = tuple.__new__, self.rank  # a call less than `Span(...)`
        starts = [0.0, *self._ends]
        spans: list[Span] = []
        waits = (("queue", "", self._released), ("sync", RETRY, self._retried))
        for kind, note, ends in waits:
            for index, end_s in ends.items():
                key, start_s = self._instructions[index][1], starts[index]
                spans.append(Span(rank, HOST, key, kind, start_s, end_s, 0, start_s, note=note))
                starts[index] = end_s
        spans += [
            new(Span, (rank, HOST, key, KINDS[action.code], start_s, end_s, 0, start_s, "", 0.0, 0, action.note))
            for (action, key, _, _), start_s, end_s in zip(self._instructions, starts, self._ends, strict=False)
            if end_s > start_s
        ]
        return spans

    def forget(self) -> None:
        """Drops all records. Thread, host and lanes know each other, so only the cycle collector would."""
        self._ends.clear()
        self.memory.clear()
        self.device.events.clear()
        for lane in self.lanes:
            lane.log.clear()

    def _wait_for_room(self, lane: Lane, launches: int, op: Op) -> None:
        """Has the thread resumed when so few launches are pending on the lane that these fit the queue, or none."""
        pending = lane.pending
        num_finished = lane.finished
        for item in (lane.head, *lane.queue):
            assert item is not None
            num_finished += 1
            pending -= item[0][0].launches
            if pending + launches <= self._depth or not pending:
                break
        self.blocked_at = op
        self._num_awaited = 1
        self._return_s = 0.0
        lane.watch(num_finished, self._release)

    def _wait(self, op: Op, return_s: float, wake_s: float) -> bool:
        """Has the thread resumed when what was issued so far has finished and waking up is paid; False if it has."""
        assert isinstance(op, Sync)
        num_awaited = 0
        if op.event is not None:
            lane, num_finished = self.device.events[op.event]
            if lane.finished < num_finished:
                lane.watch(num_finished, self._release)
                num_awaited = 1
        else:
            for lane in self.lanes:
                if lane.finished < lane.issued and (not op.lanes or lane.name in op.lanes):
                    lane.watch(lane.issued, self._release)
                    num_awaited += 1
        if not num_awaited:
            return False
        self.blocked_at = op
        self._num_awaited = num_awaited
        self._return_s = return_s + wake_s
        return True

    def _must_retry(self, op: Op) -> bool:
        """Has the thread resumed when all freed blocks are free indeed, if the device has no room beside them.

        release_cached_blocks() of CUDACachingAllocator.cpp: waits for all events, then gives all cached segments back.
        """
        assert isinstance(op, Alloc)
        in_use = self._in_use()
        needed, capacity = self._allocated + op.nbytes, self._allocator.capacity_bytes
        if not needed <= capacity < needed + in_use:
            return False
        self.blocked_at = op
        self._num_awaited = len(self._recorded)
        self._return_s = len(self._recorded) * self._allocator.segment_s * self._scale
        for lane, num_finished, _, _ in self._recorded:
            lane.watch(num_finished, self._release)
        return True

    def _in_use(self, pool: Pool | None = None) -> int:
        """Bytes of freed blocks, of one pool or of all, that a lane has not passed; process_events() at each malloc."""
        self._recorded = [entry for entry in self._recorded if entry[0].finished < entry[1]]
        return sum(nbytes for _, _, taken_from, nbytes in self._recorded if pool in {None, taken_from})

    def _release(self, now: float) -> None:
        """One of the awaited lanes has come so far."""
        self._num_awaited -= 1
        if not self._num_awaited:
            self.blocked_at = None
            self._alarm.set(now + self._return_s, self._resuming)

    def _account(self, now: float, code: int, op: Op) -> None:
        """Takes or returns memory at the host's word."""
        if code == ALLOC:
            assert isinstance(op, Alloc)
            self.live[op.buffer] = alloc = op
            pool = self._pools.setdefault(alloc.lane, Pool())
            delta = op.nbytes
        else:
            assert isinstance(op, Free)
            alloc = self.live.pop(op.buffer)
            pool = self._pools[alloc.lane]
            delta = -alloc.nbytes
            if op.event is not None:
                self._recorded.append((*self.device.events[op.event], pool, alloc.nbytes))
        self._allocated = allocated = self._allocated + delta
        pool.allocated += delta
        if delta > 0:
            held = pool.allocated + (self._in_use(pool) if self._recorded else 0)
            if held > pool.reserved:
                self._reserved += held - pool.reserved
                pool.reserved = held
        fields = (self.rank, now, alloc.category, delta, allocated, self._reserved)
        self.memory.append(tuple.__new__(MemorySample, fields))  # a call less
