"""Host threads: each issues its ops one after the other, and pays for every one of them.

A thread is a generator, as SimPy's processes are, but one that its single alarm resumes: a process would make and
subscribe to a new event for each op, at a tenth of the engine's time.

A host blocks only in a sync, on a full launch queue, or in an allocator that gives its cache back to the device. Its
time is covered by spans without a gap: "launch" while it issues work for a lane, "host" for all other ops, "sync" and
"queue" while it is blocked.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from heapq import heappush
from typing import NamedTuple

from zsim.engine.fabric import NORMAL, Alarm, Callbacks
from zsim.engine.lanes import Device, Lane
from zsim.engine.lowering import ALLOC, COLLECTIVE, FREE, HOST_TASK, RECORD, SYNC, WAIT, Executed
from zsim.engine.memory import CachedMemory, DeviceMemory, PlainMemory, RankMemory, Recording
from zsim.ops import HOST, SETUP, Alloc, Free, Op, Sync
from zsim.trace import DEVICE_FREE, DEVICE_MALLOC, RETRY, MemorySample, Span

Report = Callable[[int], None]
"""Called with a number of ops that have been issued."""

KINDS = ("launch", "launch", "host", "host", "sync", "host", "host", "host", "host")
"""What the host does, by code of instruction."""
CHUNK = 1024
"""Ops between two reports of progress."""


class Pause(NamedTuple):
    """A part of an op that is not its own work, from the end of the part before."""

    op_index: int
    kind: str
    note: str
    end_s: float


class Host:
    """The thread of one rank."""

    def __init__(
        self,
        role: Executed,
        device: Device,
        *,
        launch_queue_depth: int,
        scales: Sequence[float] | None,
        stray: Sequence[float] | None,
        memory: DeviceMemory | None,
    ) -> None:
        self.rank = device.rank
        self.device = device
        self.lanes = [Lane(name, device) for name in role.lanes]
        self.memory: list[MemorySample] = []
        self.blocked_at: Op | None = None
        self._ends: list[float] = []
        """When each op had been issued, which is when the next one begins."""
        self._pauses: list[Pause] = []
        """Waits for room in a launch queue and what the allocator did, in order."""
        self._instructions = role.instructions
        self._depth = launch_queue_depth
        self._scales = scales
        self._stray = stray
        self._scale = 1.0
        """Of the present step."""
        self._alarm = Alarm(device.clock)
        self._resuming: Callbacks = []
        self._num_awaited = 0
        """Lanes that must come further before the thread resumes,"""
        self._return_s = 0.0
        """and the time it takes for that."""
        self._device_memory = memory
        self._memory: RankMemory = (
            PlainMemory() if memory is None else CachedMemory(memory, self.lanes, role.outside_bytes)
        )
        self._numbers = {lane.name: number for number, lane in enumerate(self.lanes)}
        self.num_device_frees = 0
        """Segments that went back to the device within steps."""

    @property
    def live(self) -> dict[str, Alloc]:
        """Buffers that are allocated."""
        return self._memory.live

    @property
    def recording(self) -> Recording | None:
        """What its allocator did, where that is recorded."""
        return self._memory.recording

    @property
    def num_ooms(self) -> int:
        """Requests that not even a flush could serve."""
        return self._memory.num_ooms

    @property
    def end_s(self) -> float:
        """When host and lanes had done what they have done so far."""
        return max([0.0, *self._ends[-1:], *(lane.log[-1].end_s for lane in self.lanes if lane.log)])

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
                        now = alarm.due_s
                        self._pauses.append(Pause(len(ends), "queue", "", now))
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
                    elif code != HOST_TASK and not self._change_memory(code, op, action.lane, end_s):
                        if end_s > now:  # its own work comes before what the device has to do with it
                            self._pauses.append(Pause(len(ends), KINDS[code], action.note, end_s))
                        end_s = yield from self._stall(op, action.lane, end_s)
                ends.append(end_s)
                now = end_s
            report(len(chunk))
        yield

    def spans(self) -> list[Span]:
        """What the thread did: first its waits for room in a queue and what its allocator did, then all else."""
        new, rank = tuple.__new__, self.rank  # a call less than `Span(...)`
        starts = [0.0, *self._ends]
        spans: list[Span] = []
        for index, kind, note, end_s in self._pauses:
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
        self._pauses.clear()
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

    def _change_memory(self, code: int, op: Op, lane: int, now: float) -> bool:
        """Takes or returns memory at the host's word; False if the device comes into it."""
        memory = self._memory
        if code == ALLOC:
            op = self._of_this_rank(op)
            if not memory.take(op, lane) or memory.has_called:
                return False
        elif code == FREE:
            assert isinstance(op, Free)
            memory.give_back(op, None if op.event is None else self._position(op.event))
        else:
            return False
        self.memory.append(memory.sample(self.rank, now, op))
        return True

    def _of_this_rank(self, op: Op) -> Alloc:
        """With the size that it has on this rank in this step."""
        assert isinstance(op, Alloc)
        if self._stray is None or not op.varies:
            return op
        return replace(op, nbytes=max(1, round(op.nbytes * self._stray[op.key.step])))

    def _stall(self, op: Op, lane: int, now: float) -> Generator[None, Alarm, float]:
        """A flush, where memory could not be taken or is given back, and the calls of the device; returns the time.

        release_cached_blocks() of CUDACachingAllocator.cpp: waits for all events, then gives whole free segments back.
        """
        memory, op = self._memory, self._of_this_rank(op) if isinstance(op, Alloc) else op
        if not (isinstance(op, Alloc) and op.buffer in memory.live):
            awaited = [(self.lanes[number], num_items) for number, num_items in memory.pending()]
            now = yield from self._wait_in_allocator(op, now, awaited)
            if isinstance(op, Alloc):
                memory.flush_and_take(op, lane)
            else:
                memory.empty_cache()
        if memory.has_called:
            now = yield from self._pay_device_calls(op, now)
        if isinstance(op, Alloc):
            self.memory.append(memory.sample(self.rank, now, op))
        return now

    def _pay_device_calls(self, op: Op, now: float) -> Generator[None, Alarm, float]:
        """CudaFree waits for the whole device first; returns the time behind all calls."""
        assert self._device_memory is not None
        num_mallocs, num_frees = self._memory.device_calls()
        self.num_device_frees += num_frees * (op.key.phase not in SETUP)
        if num_frees:
            now = yield from self._wait_in_allocator(op, now, [(lane, lane.issued) for lane in self.lanes])
        each = self._device_memory
        for note, seconds in ((DEVICE_FREE, num_frees * each.free_s), (DEVICE_MALLOC, num_mallocs * each.malloc_s)):
            if seconds:
                self._alarm.set(now + seconds * self._scale, self._resuming)
                yield
                now = self._alarm.due_s
                self._pauses.append(Pause(len(self._ends), "host", note, now))
        return now

    def _wait_in_allocator(self, op: Op, now: float, awaited: list[tuple[Lane, int]]) -> Generator[None, Alarm, float]:
        """Until each lane has finished so many of its items."""
        unfinished = [(lane, num_items) for lane, num_items in awaited if lane.finished < num_items]
        if not unfinished:
            return now
        self.blocked_at = op
        self._num_awaited = len(unfinished)
        self._return_s = 0.0
        for lane, num_items in unfinished:
            lane.watch(num_items, self._release)
        yield
        now = self._alarm.due_s
        self._pauses.append(Pause(len(self._ends), "sync", RETRY, now))
        return now

    def _position(self, event: int) -> tuple[int, int]:
        """Of a recorded event: the number of its lane, and how many of its items come before."""
        lane, num_items = self.device.events[event]
        return self._numbers[lane.name], num_items

    def _release(self, now: float) -> None:
        """One of the awaited lanes has come so far."""
        self._num_awaited -= 1
        if not self._num_awaited:
            self.blocked_at = None
            self._alarm.set(now + self._return_s, self._resuming)
