"""Lanes of a device as state machines: what a stream runs, waits for, and how kernels and collectives share a GPU.

No lane is a process: the end of its present op is a timer whose callback starts the next one. Kernels of one device
divide it evenly: k of them on different lanes each run at 1/k, and running communication kernels take their compute
share from all of them, from the moment they spin at the head of their lane. Timers are set anew only when that rate
changes. What this leaves out: kernels too small to fill the device, which would overlap for free.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from zsim.fabric import Clock, Fabric, Timer
from zsim.lowering import COLLECTIVE, KERNEL, Transfer
from zsim.ops import Op

Item = tuple[int, int, float, int, float, float, float, Op]
"""What waits on a lane: code; number of the collective or event; seconds alone; launches; earliest start; earliest
end; when issued; the op."""
Entry = tuple[int, Op, float, float, float]
"""A line of a rank's log: code, op, start, end, when issued."""

ON_LANE, LAUNCHING, HOST_BUSY, SYNCING, QUEUE_FULL = range(5)
"""Codes of log entries."""

PENDING, WORKING, ENDING = range(3)
"""What a lane's timer stands for: the start of its kernel, the end of its work, the end of the op."""


class Device:
    """What the lanes of one rank share."""

    __slots__ = ("clock", "events", "log", "running", "spinning")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.log: list[Entry] = []
        self.events: dict[int, tuple[Lane, int]] = {}
        """Recorded events: a lane, and how many of its items must have finished."""
        self.running: list[Lane] = []
        """Lanes whose head is a kernel, begun or about to."""
        self.spinning: list[float] = []
        """Compute shares of the communication kernels on the device."""

    def spin(self, now: float, share: float) -> None:
        """A communication kernel takes its share."""
        if share > 0.0:
            self.spinning.append(share)
            if self.running:
                self.retime(now)

    def unspin(self, now: float, share: float) -> None:
        """A communication kernel gives its share back."""
        if share > 0.0:
            self.spinning.remove(share)
            if self.running:
                self.retime(now)

    def retime(self, now: float) -> None:
        """Gives every running kernel its present rate, and a new timer where that has changed."""
        num_busy = 0
        for lane in self.running:
            if lane.since_s <= now:
                lane.remaining_s = max(0.0, lane.remaining_s - (now - lane.since_s) * lane.rate)
                lane.since_s = now
                num_busy += lane.remaining_s > 0.0
        rate = (1.0 - max(self.spinning, default=0.0)) / max(1, num_busy)
        for lane in self.running:
            if lane.since_s > now:
                if lane.stage != PENDING or lane.timer is None:
                    lane.set_timer(PENDING, lane.since_s - now)
            elif lane.remaining_s > 0.0:
                if lane.rate != rate or lane.timer is None or lane.stage == PENDING:
                    lane.rate = rate
                    work_s = lane.remaining_s / rate
                    lane.set_timer(ENDING if now + work_s >= lane.floor_s else WORKING, work_s)
            elif lane.timer is None or lane.stage != ENDING:
                lane.set_timer(ENDING, max(0.0, lane.floor_s - now))


class Lane:
    """One stream: items in the order of issue, one at its head."""

    __slots__ = (
        "clock", "device", "finished", "floor_s", "head", "issued", "name", "network", "pending", "queue", "rate",
        "remaining_s", "serial", "since_s", "stage", "start_s", "timer", "watchers",
    )  # fmt: skip

    def __init__(self, name: str, device: Device, network: "Network") -> None:
        self.name = name
        self.device = device
        self.clock = device.clock
        self.network = network
        self.queue: deque[Item] = deque()
        self.head: Item | None = None
        self.pending = 0
        """Launches issued and not finished."""
        self.issued = 0
        self.finished = 0
        """Items so far."""
        self.watchers: list[tuple[int, int, Callable[[float], None]]] = []
        self.serial = count()
        self.timer: Timer | None = None
        self.stage = ENDING
        self.start_s = 0.0
        self.since_s = 0.0
        """Up to when `remaining_s`, seconds on an idle device, is accounted for."""
        self.remaining_s = 0.0
        self.floor_s = 0.0
        self.rate = 1.0

    def push(self, now: float, item: Item) -> None:
        """Puts an item at the tail; at once at the head if the lane is idle."""
        self.issued += 1
        self.pending += item[3]
        if self.head is None:
            self.head = item
            if not self._begin(now, item):
                self.advance(now)
        else:
            self.queue.append(item)

    def watch(self, num_finished: int, waker: Callable[[float], None]) -> None:
        """Calls back as soon as that many items have finished."""
        heappush(self.watchers, (num_finished, next(self.serial), waker))

    def set_timer(self, stage: int, delay_s: float) -> None:
        """Replaces the timer; the old one fires into the void."""
        self.stage = stage
        self.timer = timer = self.clock.timeout(delay_s)
        timer.callbacks.append(self.on_timer)

    def advance(self, now: float) -> None:
        """The head has finished: wakes who waited for it and begins what can begin."""
        while True:
            self.finished += 1
            self.head = None
            watchers = self.watchers
            while watchers and watchers[0][0] <= self.finished:
                heappop(watchers)[2](now)
            if not self.queue:
                return
            self.head = item = self.queue.popleft()
            if self._begin(now, item):
                return

    def _begin(self, now: float, item: Item) -> bool:
        """Begins the item at the head; False if it is a wait for something past."""
        code, number, alone_s, _, ready_s, floor_s, _, _ = item
        if code == KERNEL:
            device = self.device
            self.start_s = self.since_s = start_s = ready_s if ready_s > now else now
            self.remaining_s = alone_s
            self.floor_s = floor_s
            running = device.running
            running.append(self)
            if len(running) > 1 or device.spinning:
                self.timer = None
                device.retime(now)
            else:
                self.rate = 1.0
                self.stage = ENDING
                end_s = start_s + alone_s
                self.timer = timer = self.clock.timeout((end_s if end_s > floor_s else floor_s) - now)
                timer.callbacks.append(self.on_timer)
            return True
        if code == COLLECTIVE:
            if ready_s > now:
                self.clock.timeout(ready_s - now).callbacks.append(self._on_arrival)
            else:
                self.network.arrive(now, self, number)
            return True
        lane, num_finished = self.device.events[number]
        if lane.finished >= num_finished:
            return False
        lane.watch(num_finished, self.advance)
        return True

    def _on_arrival(self, _: Timer) -> None:
        assert self.head is not None
        self.network.arrive(self.clock.now, self, self.head[1])

    def on_timer(self, timer: Timer) -> None:
        """The kernel at the head starts, has done its work, or ends."""
        if timer is not self.timer:
            return  # replaced
        now = self.clock.now
        device = self.device
        if self.stage != ENDING:
            self.since_s = now
            if self.stage == WORKING:
                self.remaining_s = 0.0
            self.timer = None
            device.retime(now)
            return
        running = device.running
        running.remove(self)
        self.finish(now)
        if running and running[-1] is not self:
            device.retime(now)

    def finish(self, now: float) -> None:
        """Logs the op at the head and goes on to the next."""
        item = self.head
        assert item is not None
        self.device.log.append((ON_LANE, item[7], self.start_s, now, item[6]))
        self.pending -= item[3]
        self.advance(now)


class Network:
    """Where collectives meet: each starts when its last rank has it at the head of its lane."""

    __slots__ = ("_arrived", "_clock", "_fabric", "_transfers")

    def __init__(self, clock: Clock, fabric: Fabric, transfers: tuple[Transfer, ...]) -> None:
        self._clock = clock
        self._fabric = fabric
        self._transfers = transfers
        self._arrived: list[list[Lane]] = [[] for _ in transfers]

    def arrive(self, now: float, lane: Lane, number: int) -> None:
        """A rank's communication kernel starts to spin; the last one starts the transfer."""
        transfer = self._transfers[number]
        arrived = self._arrived[number]
        arrived.append(lane)
        lane.device.spin(now, transfer.compute_share)
        if len(arrived) < transfer.num_participants:
            return
        for participant in arrived:
            participant.start_s = now
        if transfer.demands:
            timer = self._clock.timeout(transfer.latency_s, number)
            timer.callbacks.append(self._start_flow)
        else:
            timer = self._clock.timeout(transfer.latency_s + transfer.flow_s, number)
            timer.callbacks.append(self._on_end)

    def _start_flow(self, timer: Timer) -> None:
        number = timer.value
        assert isinstance(number, int)
        transfer = self._transfers[number]
        self._fabric.start(transfer.demands, transfer.flow_s, number, self._end)

    def _on_end(self, timer: Timer) -> None:
        number = timer.value
        assert isinstance(number, int)
        self._end(self._clock.now, number)

    def _end(self, now: float, number: int) -> None:
        share = self._transfers[number].compute_share
        for lane in self._arrived[number]:
            lane.device.unspin(now, share)
            lane.finish(now)

    def missing(self, number: int) -> int:
        """How many ranks have not arrived."""
        return self._transfers[number].num_participants - len(self._arrived[number])
