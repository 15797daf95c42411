"""Host threads as SimPy processes: each issues its ops one after the other, and pays for every one of them.

A host blocks only in a sync or on a full launch queue. Its time is covered by spans without a gap: "launch" while it
issues work for a lane, "host" for all other ops, "sync" and "queue" while it is blocked.
"""

from collections.abc import Callable, Generator, Sequence
from heapq import heappush

from zsim.fabric import NORMAL, Alarm
from zsim.lanes import Device, Entry, Lane
from zsim.lowering import ALLOC, COLLECTIVE, HOST_TASK, RECORD, SYNC, WAIT, Executed, Instruction
from zsim.ops import HOST, Alloc, Free, Op, Sync

Report = Callable[[int], None]
"""Called with a number of ops that have been issued."""
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
        self.live: dict[str, Alloc] = {}

    def thread(self, report: Report) -> Generator[Alarm, None, None]:
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
                        yield self._room(lane, instruction.launches, instruction.op)
                        log.append((rank, HOST, instruction.key, "queue", now, clock.now, 0, now, "", 0.0))
                        now = clock.now
                        end_s = now + instruction.host_s * scale
                    ready_s = now + instruction.first_s * scale + latency_s
                    lane.push(now, (instruction, ready_s, end_s + latency_s + instruction.last_s))
                    if end_s > now:
                        log.append((rank, HOST, instruction.key, "launch", now, end_s, 0, now, "", 0.0))
                        alarm.callbacks = []
                        heappush(agenda, (end_s, NORMAL, next(serial), alarm))
                        yield alarm
                elif code == SYNC:
                    gate = self._release(instruction, end_s - now)
                    if gate is not None:
                        yield gate
                        end_s = gate.due_s
                    elif end_s > now:
                        alarm.set(end_s, [])
                        yield alarm
                    if end_s > now:
                        log.append((rank, HOST, instruction.key, "sync", now, end_s, 0, now, "", 0.0))
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

    def _room(self, lane: Lane, launches: int, op: Op) -> Alarm:
        """Rings when so few launches are pending on the lane that these fit the queue, or none."""
        pending = lane.pending
        num_finished = lane.finished
        for item in (lane.head, *lane.queue):
            assert item is not None
            num_finished += 1
            pending -= item[0].launches
            if pending + launches <= self._depth or not pending:
                break
        return self._gate([(lane, num_finished)], 0.0, op)

    def _release(self, instruction: Instruction, return_s: float) -> Alarm | None:
        """Rings when a sync returns: what was issued so far has finished, and waking up is paid; None if it had."""
        op = instruction.op
        assert isinstance(op, Sync)
        if op.event is not None:
            targets = [self.device.events[op.event]]
        else:
            targets = [(lane, lane.issued) for lane in self.lanes if not op.lanes or lane.name in op.lanes]
        unfinished = [target for target in targets if target[0].finished < target[1]]
        return self._gate(unfinished, return_s + instruction.wake_s * self._scale, op) if unfinished else None

    def _gate(self, targets: Sequence[tuple[Lane, int]], delay_s: float, op: Op) -> Alarm:
        """An alarm that rings some time after each of the lanes has finished so many items."""
        gate = Alarm(self.device.clock)
        num_missing = len(targets)

        def release(now: float) -> None:
            nonlocal num_missing
            num_missing -= 1
            if not num_missing:
                self.blocked_at = None
                gate.set(now + delay_s, gate.callbacks)

        for lane, num_finished in targets:
            lane.watch(num_finished, release)
        self.blocked_at = op
        return gate

    def _account(self, now: float, code: int, op: Op) -> None:
        """Takes or returns memory at the host's word."""
        if code == ALLOC:
            assert isinstance(op, Alloc)
            self.live[op.buffer] = alloc = op
            delta = op.nbytes
        else:
            assert isinstance(op, Free)
            alloc = self.live.pop(op.buffer)
            delta = -alloc.nbytes
        self._allocated = allocated = self._allocated + delta
        self._reserved = max(self._reserved, allocated)
        self.memory.append((self.rank, now, alloc.category, delta, allocated, self._reserved))
