"""Lanes of a device as state machines: what a stream runs, waits for, and how its kernels share the GPU.

No lane is a process: the end of its present op is an alarm whose callback begins the next one. Kernels of one device
divide it evenly: k of them on different lanes each run at 1/k, and running communication kernels take their compute
share from all of them, from the moment they spin at the head of their lane. Alarms are set anew only when that rate
changes. What this leaves out: kernels too small to fill the device, which would overlap for free.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from zsim.engine.fabric import NORMAL, Alarm, Callbacks, Clock
from zsim.engine.lowering import COLLECTIVE, KERNEL, Instruction
from zsim.trace import Span

Item = tuple[Instruction, float, float]
"""What waits on a lane: an instruction, its earliest start, its earliest end."""

UNSET, PENDING, WORKING, ENDING = range(4)
"""What a lane's alarm stands for: nothing, the start of its kernel, the end of its work, the end of the op."""


class Meeting(Protocol):
    """Where collectives of several ranks meet."""

    def arrive(self, now: float, lane: "Lane", number: int) -> None:
        """A rank's communication kernel is at the head of its lane."""


class Device:
    """What the lanes of one rank share."""

    __slots__ = ("clock", "events", "inline", "latency_s", "meeting", "rank", "rate", "running", "shares")

    def __init__(self, rank: int, clock: Clock, meeting: Meeting, latency_s: float, inline: str = "") -> None:
        self.rank = rank
        self.clock = clock
        self.meeting = meeting
        self.latency_s = latency_s
        """From a launch to its start on an idle lane."""
        self.inline = inline
        """Name of the lane that the host executes itself, without latency."""
        self.events: dict[int, tuple[Lane, int]] = {}
        """Recorded events: a lane, and how many of its items must have finished."""
        self.running: list[Lane] = []
        """Lanes whose head is a kernel, begun or about to."""
        self.shares: list[float] = []
        """Compute shares of the communication kernels on the device."""
        self.rate = 1.0
        """What they leave to compute."""

    def spin(self, now: float, share: float) -> None:
        """A communication kernel takes its share."""
        self.shares.append(share)
        self._set_rate(now)

    def unspin(self, now: float, share: float) -> None:
        """A communication kernel gives its share back."""
        self.shares.remove(share)
        self._set_rate(now)

    def _set_rate(self, now: float) -> None:
        rate = 1.0 - max(self.shares, default=0.0)
        if rate != self.rate:
            self.rate = rate
            if self.running:
                self.retime(now)

    def retime(self, now: float) -> None:
        """Gives every running kernel its present rate, and a new alarm where that has changed."""
        num_busy = 0
        for lane in self.running:
            if lane.since_s <= now:
                lane.remaining_s = max(0.0, lane.remaining_s - (now - lane.since_s) * lane.rate)
                lane.since_s = now
                num_busy += lane.remaining_s > 0.0
        if len(self.running) == 1:
            self.running[0].run_alone(self.rate)
            return
        rate = self.rate / max(1, num_busy)
        for lane in self.running:
            if lane.since_s > now:
                if lane.stage != PENDING:
                    lane.set_alarm(PENDING, lane.since_s)
            elif lane.remaining_s > 0.0:
                if lane.stage <= PENDING or lane.rate != rate:
                    lane.rate = rate
                    lane.done_s = done_s = now + lane.remaining_s / rate
                    lane.set_alarm(ENDING if done_s >= lane.floor_s else WORKING, done_s)
            elif lane.stage != ENDING:
                lane.set_alarm(ENDING, max(now, lane.floor_s))


class Lane:
    """One stream: items in the order of issue, one at its head."""

    __slots__ = (
        "agenda", "alarm", "arrived_s", "arriving", "device", "done_s", "finished", "floor_s", "head", "issued",
        "latency_s", "log", "name", "order", "pending", "queue", "rank", "rate", "remaining_s", "ringing", "serial",
        "since_s", "stage", "start_s", "watchers",
    )  # fmt: skip

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self.device = device
        self.rank = device.rank
        self.latency_s = 0.0 if name == device.inline else device.latency_s
        self.agenda = device.clock.agenda
        self.serial = device.clock.serial
        self.log: list[Span] = []
        self.queue: deque[Item] = deque()
        self.head: Item | None = None
        self.pending = 0
        """Launches issued and not finished."""
        self.issued = 0
        self.finished = 0
        """Items so far."""
        self.watchers: list[tuple[int, int, Callable[[float], None]]] = []
        self.order = count()
        self.alarm = Alarm(device.clock)
        self.ringing: Callbacks = [self._ring]
        self.arriving: Callbacks = [self._arrive]
        self.stage = UNSET
        self.start_s = 0.0
        self.arrived_s = 0.0
        """When the collective at the head began to spin."""
        self.since_s = 0.0
        self.remaining_s = 0.0
        """Seconds on an idle device that the kernel still needs, as of `since_s`."""
        self.done_s = 0.0
        """When that is done, at the present rate."""
        self.floor_s = 0.0
        """No earlier end, for its last launch comes no sooner."""
        self.rate = 1.0

    def push(self, now: float, item: Item) -> None:
        """Puts an item at the tail, which is the head if the lane is idle."""
        self.issued += 1
        self.pending += item[0][0].launches
        if self.head is not None:
            self.queue.append(item)
        elif not self._begin(now, item):
            self.advance(now)

    def watch(self, num_finished: int, waker: Callable[[float], None]) -> None:
        """Calls back as soon as that many items have finished."""
        heappush(self.watchers, (num_finished, next(self.order), waker))

    def set_alarm(self, stage: int, due_s: float) -> None:
        """Replaces the alarm; the old one rings unheard."""
        self.stage = stage
        if not self.alarm.processed:
            self.alarm = Alarm(self.device.clock)
        self.alarm.set(due_s, self.ringing)

    def run_alone(self, rate: float) -> None:
        """Sets the end of a kernel that has the device to itself from `since_s` on."""
        if self.stage != ENDING or (self.rate != rate and self.remaining_s > 0.0):
            self.rate = rate
            if self.remaining_s > 0.0:
                self.done_s = self.since_s + self.remaining_s / rate
            self.set_alarm(ENDING, max(self.done_s, self.floor_s))

    def advance(self, now: float) -> None:
        """The head has finished: logs it, wakes who waited for it and begins what can begin."""
        while True:
            assert self.head is not None
            (action, key, _, _), ready_s, _ = self.head
            if action.launches:  # else it was a wait
                self.pending -= action.launches
                issued_s = ready_s - self.latency_s
                # A kernel whose work is done earlier has waited for its launches; a collective has but one.
                stalled_s = now - self.done_s if action.code == KERNEL else 0.0
                kind, nbytes, group = action.kind, action.nbytes, action.group
                said = (action.element_bytes, action.note)
                fields = (self.rank, self.name, key, kind, self.start_s, now, nbytes, issued_s, group, stalled_s, *said)
                self.log.append(tuple.__new__(Span, fields))  # a call less than `Span(...)`
            self.finished += 1
            self.head = None
            watchers = self.watchers
            while watchers and watchers[0][0] <= self.finished:
                heappop(watchers)[2](now)
            if not self.queue or self._begin(now, self.queue.popleft()):
                return

    def _begin(self, now: float, item: Item) -> bool:
        """Begins the item at the head; False if it is a wait for something past."""
        self.head = item
        (action, _, number, _), ready_s, floor_s = item
        code = action.code
        device = self.device
        if code == KERNEL:
            start_s = ready_s if ready_s > now else now  # noqa: FURB136 - a call less
            self.start_s = self.since_s = start_s
            self.remaining_s = alone_s = action.alone_s
            self.floor_s = floor_s
            running = device.running
            running.append(self)
            if len(running) > 1:
                self.stage = UNSET
                self.done_s = start_s  # of a kernel without work; `retime` knows better of others
                device.retime(now)
            else:
                self.rate = rate = device.rate
                self.stage = ENDING
                self.done_s = end_s = start_s + alone_s / rate
                # `Alarm.set` in line; the alarm has rung, for whatever ran here before has ended.
                alarm = self.alarm
                alarm.callbacks = self.ringing
                alarm.due_s = due_s = end_s if end_s > floor_s else floor_s  # noqa: FURB136
                heappush(self.agenda, (due_s, NORMAL, next(self.serial), alarm))
            return True
        if code == COLLECTIVE:
            if ready_s > now:
                Alarm(device.clock).set(ready_s, self.arriving)
            else:
                device.meeting.arrive(now, self, number)
            return True
        lane, num_finished = device.events[number]
        if lane.finished >= num_finished:
            return False
        lane.watch(num_finished, self.advance)
        return True

    def _arrive(self, alarm: Alarm) -> None:
        assert self.head is not None
        self.device.meeting.arrive(alarm.due_s, self, self.head[0][2])

    def _ring(self, alarm: Alarm) -> None:
        """The kernel at the head starts, has done its work, or ends."""
        if alarm is not self.alarm:
            return
        now = alarm.due_s
        device = self.device
        if self.stage != ENDING:
            if self.stage == WORKING:
                self.remaining_s = 0.0
            self.since_s = now
            self.stage = UNSET
            device.retime(now)
            return
        running = device.running
        running.remove(self)
        self.advance(now)
        if running and running[-1] is not self:
            device.retime(now)
