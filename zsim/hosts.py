"""Host threads as SimPy processes: each issues its ops one after the other, and pays for every one of them.

A host blocks only in a sync or on a full launch queue. Its time is covered by spans without a gap: "launch" while it
issues work for a lane, "host" for all other ops, "sync" and "queue" while it is blocked.
"""

from collections.abc import Callable, Generator, Sequence
from heapq import heappush

from zsim.fabric import NORMAL, Alarm, Gate
from zsim.lanes import Device, Entry, Lane
from zsim.lowering import ALLOC, COLLECTIVE, HOST_TASK, RECORD, SYNC, WAIT, Executed
from zsim.ops import HOST, Alloc, Free, Op, Sync

Report = Callable[[int], None]
"""Called with a number of ops that have been issued."""
Blocking = Generator[Gate, None, float]
"""Suspends the thread and returns the time at which it goes on."""
Sample = tuple[int, float, str, int, int, int]
"""The fields of a memory sample."""

CHUNK = 1024
"""Ops between two reports of progress."""


class Host:
    """The thread of one rank."""

    def __init__(self, role: Executed, device: Device, *, launch_queue_depth: int, scale: float) -> None:
        self.rank = device.rank
        self.device = device
        self.lanes = [Lane(name, device) for name in role.lanes]
        self.log: list[Entry] = []
        self.memory: list[Sample] = []
        self.blocked_at: Op | None = None
        self._instructions = role.instructions
        self._depth = launch_queue_depth
        self._scale = scale
        self._allocated = 0
        self._reserved = 0
        self._live: dict[str, Alloc] = {}

    def thread(self, report: Report) -> Generator[Gate, None, None]:
        """The process. One function, for each call and each look-up would be paid once an op."""
        rank, clock, latency_s = self.rank, self.device.clock, self.device.latency_s
        lanes, events, log = self.lanes, self.device.events, self.log
        depth, scale = self._depth, self._scale
        agenda, serial, alarm = clock.agenda, clock.serial, Alarm(clock)
        now = 0.0
        for begin in range(0, len(self._instructions), CHUNK):
            chunk = self._instructions[begin : begin + CHUNK]
            for instruction in chunk:
                code = instruction.code
                end_s = now + instruction.host_s * scale
                if code <= COLLECTIVE:
                    lane = lanes[instruction.lane]
                    if lane.pending + instruction.launches > depth and lane.pending:
                        now = yield from self._wait_for_room(lane, instruction.launches, instruction.op, now)
                        end_s = now + instruction.host_s * scale
                    ready_s = now + instruction.first_s * scale + latency_s
                    lane.push(now, (instruction, ready_s, end_s + latency_s + instruction.last_s))
                    if end_s > now:
                        log.append((rank, HOST, instruction.key, "launch", now, end_s, 0, now, "", 0.0))
                        alarm.callbacks = []
                        heappush(agenda, (end_s, NORMAL, next(serial), alarm))
                        yield alarm
                elif code == SYNC:
                    end_s = yield from self._sync(instruction.op, now, end_s - now, instruction.wake_s * scale)
                else:
                    if end_s > now:
                        log.append((rank, HOST, instruction.key, "host", now, end_s, 0, now, "", 0.0))
                        alarm.callbacks = []
                        heappush(agenda, (end_s, NORMAL, next(serial), alarm))
                        yield alarm
                    if code == RECORD:
                        lane = lanes[instruction.lane]
                        events[instruction.number] = (lane, lane.issued)
                    elif code == WAIT:
                        lanes[instruction.lane].push(end_s, (instruction, end_s, end_s))
                    elif code != HOST_TASK:
                        self._account(end_s, code, instruction.op)
                now = end_s
            report(len(chunk))

    def _wait_for_room(self, lane: Lane, launches: int, op: Op, now: float) -> Blocking:
        """Blocks until so few launches are pending on the lane that these fit the queue, or none."""
        pending = lane.pending
        num_finished = lane.finished
        for item in (lane.head, *lane.queue):
            assert item is not None
            num_finished += 1
            pending -= item[0].launches
            if pending + launches <= self._depth or not pending:
                break
        released_s = yield from self._block([(lane, num_finished)], op)
        self._log(op, "queue", now, released_s)
        return released_s

    def _sync(self, op: Op, now: float, return_s: float, wake_s: float) -> Blocking:
        """Blocks until what was issued so far on the awaited lanes has finished, then pays for the return."""
        assert isinstance(op, Sync)
        if op.event is not None:
            targets = [self.device.events[op.event]]
        else:
            targets = [(lane, lane.issued) for lane in self.lanes if not op.lanes or lane.name in op.lanes]
        unfinished = [(lane, num_finished) for lane, num_finished in targets if lane.finished < num_finished]
        end_s = now + return_s
        if unfinished:
            released_s = yield from self._block(unfinished, op)
            end_s = released_s + return_s + wake_s
        if end_s > now:
            self._log(op, "sync", now, end_s)
            alarm = Alarm(self.device.clock)
            alarm.set(end_s, [])
            yield alarm
        return end_s

    def _block(self, targets: Sequence[tuple[Lane, int]], op: Op) -> Blocking:
        """Suspends the thread until each lane has finished so many items; returns the time."""
        clock = self.device.clock
        gate = clock.event()
        num_missing = len(targets)

        def release(_: float) -> None:
            nonlocal num_missing
            num_missing -= 1
            if not num_missing:
                gate.succeed()

        for lane, num_finished in targets:
            lane.watch(num_finished, release)
        self.blocked_at = op
        yield gate
        self.blocked_at = None
        return clock.now

    def _log(self, op: Op, kind: str, start_s: float, end_s: float) -> None:
        entry: Entry = (self.rank, HOST, op.key, kind, start_s, end_s, 0, start_s, "", 0.0)
        self.log.append(entry)

    def _account(self, now: float, code: int, op: Op) -> None:
        """Takes or returns memory at the host's word."""
        if code == ALLOC:
            assert isinstance(op, Alloc)
            self._live[op.buffer] = alloc = op
            delta = op.nbytes
        else:
            assert isinstance(op, Free)
            alloc = self._live.pop(op.buffer)
            delta = -alloc.nbytes
        self._allocated = allocated = self._allocated + delta
        self._reserved = max(self._reserved, allocated)
        self.memory.append((self.rank, now, alloc.category, delta, allocated, self._reserved))
