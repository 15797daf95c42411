"""Executes priced programs in time: host threads, lanes, events, collectives. It has never heard of ZeRO.

A host thread is a SimPy process that issues its ops one after the other; each costs host seconds, then takes effect.
Lanes are state machines (see `lanes`), links are shared (see `fabric`). Without noise one rank of each role stands
for all; `expand` executes every rank.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from zsim.check import ProgramError, unfreed
from zsim.errors import OwnCheckError
from zsim.fabric import Clock, Fabric, Gate
from zsim.lanes import HOST_BUSY, LAUNCHING, ON_LANE, QUEUE_FULL, SYNCING, Device, Lane, Network
from zsim.lowering import (
    ALLOC,
    COLLECTIVE,
    FREE,
    HOST_TASK,
    RECORD,
    SYNC,
    WAIT,
    Executed,
    Lowered,
    Price,
    lower,
)
from zsim.ops import HOST, Alloc, Collective, Compute, Copy, Free, Op, Program, Sync
from zsim.trace import MemorySample, Span

Progress = Callable[[int, int], None]
CHUNK = 1024
"""Ops between two reports of progress."""


class DeadlockError(OwnCheckError):
    """The run ended while a rank still had work: the time reached is no result."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What happened."""

    spans: list[Span]
    """By rank, then by start."""
    memory: list[MemorySample]
    num_events: int
    """Events that SimPy processed."""
    end_s: float
    """When the last host and the last lane had finished."""


def run(
    programs: Sequence[Program],
    *,
    price: Price,
    groups: Mapping[str, tuple[int, ...]],
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    expand: bool = False,
    host_scale: Mapping[int, float] | None = None,
    progress: Progress | None = None,
) -> Execution:
    """Lowers the programs and executes them.

    Args:
        programs: one a role; checked beforehand by `check.check`.
        price: seconds and bytes of an op; called once an op before time starts.
        groups: the ranks of each communicator.
        link_capacities: bytes per second of each link that `price` names.
        launch_queue_depth: launches that may be pending on a lane before its host blocks.
        launch_latency_s: from a launch to its start on an idle lane.
        expand: execute every rank instead of the lowest of each role.
        host_scale: factors on the host seconds of single ranks.
        progress: called now and then with the ops issued so far and their total.
    """
    lowered = lower(programs, price=price, groups=groups, link_capacities=link_capacities, expand=expand)
    return execute(
        lowered,
        link_capacities=link_capacities,
        launch_queue_depth=launch_queue_depth,
        launch_latency_s=launch_latency_s,
        host_scale=host_scale,
        progress=progress,
    )


def execute(
    lowered: Lowered,
    *,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    host_scale: Mapping[int, float] | None = None,
    progress: Progress | None = None,
) -> Execution:
    """Executes lowered programs; arguments as for `run`."""
    clock = Clock()
    network = Network(clock, Fabric(clock, link_capacities), lowered.transfers)
    scale = host_scale or {}
    report = _Report(progress, sum(len(role.ranks) * len(role.instructions) for role in lowered.roles))
    hosts = [
        Host(rank, role, clock, network, launch_queue_depth, launch_latency_s, scale.get(rank, 1.0))
        for role in lowered.roles
        for rank in role.ranks
    ]
    for host in hosts:
        clock.process(host.thread(report))
    clock.run()
    _raise_if_stuck(hosts, network)
    _raise_if_live(lowered)
    hosts.sort(key=attrgetter("rank"))
    return Execution(
        spans=[span for host in hosts for span in host.spans()],
        memory=[sample for host in hosts for sample in host.memory],
        num_events=clock.num_events,
        end_s=clock.now,
    )


class _Report:
    """Sums up the progress of all hosts."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, num_ops: int) -> None:
        self._done += num_ops
        if self._progress is not None:
            self._progress(self._done, self._total)


class Host:
    """A rank's host thread with its lanes."""

    def __init__(
        self,
        rank: int,
        role: Executed,
        clock: Clock,
        network: Network,
        launch_queue_depth: int,
        launch_latency_s: float,
        scale: float,
    ) -> None:
        self.rank = rank
        self.device = Device(clock)
        self.lanes = [Lane(name, self.device, network) for name in role.lanes]
        self.memory: list[MemorySample] = []
        self.blocked_at: Op | None = None
        self._clock = clock
        self._instructions = role.instructions
        self._depth = launch_queue_depth
        self._latency_s = launch_latency_s
        self._scale = scale
        self._allocated = 0
        self._reserved = 0
        self._live: dict[str, Alloc] = {}

    def thread(self, report: _Report) -> Generator[Gate, None, None]:
        """The process: issues one op after the other."""
        timeout = self._clock.timeout
        lanes, events, log = self.lanes, self.device.events, self.device.log
        latency_s, depth, scale = self._latency_s, self._depth, self._scale
        now = 0.0
        for begin in range(0, len(self._instructions), CHUNK):
            chunk = self._instructions[begin : begin + CHUNK]
            for code, host_s, lane_index, number, alone_s, launches, op in chunk:
                host_s *= scale  # noqa: PLW2901
                if code <= COLLECTIVE:
                    lane = lanes[lane_index]
                    if lane.pending + launches > depth and lane.pending:
                        now = yield from self._wait_for_room(lane, launches, op, now)
                    first_s = now + host_s / launches
                    end_s = now + host_s
                    floor_s = end_s + latency_s + alone_s / launches
                    lane.push(now, (code, number, alone_s, launches, first_s + latency_s, floor_s, first_s, op))
                    if host_s:
                        log.append((LAUNCHING, op, now, end_s, now))
                        yield timeout(host_s)
                        now = end_s
                elif code == SYNC:
                    now = yield from self._sync(op, now, host_s, alone_s)
                else:
                    if host_s:
                        end_s = now + host_s
                        log.append((HOST_BUSY, op, now, end_s, now))
                        yield timeout(host_s)
                        now = end_s
                    if code == RECORD:
                        lane = lanes[lane_index]
                        events[number] = (lane, lane.issued)
                    elif code == WAIT:
                        lanes[lane_index].push(now, (code, number, 0.0, 0, now, now, now, op))
                    elif code != HOST_TASK:
                        self._account(now, code, op)
            report.add(len(chunk))

    def _wait_for_room(self, lane: Lane, launches: int, op: Op, now: float) -> Generator[Gate, None, float]:
        """Blocks until the lane has so few pending launches that these fit the queue, or none."""
        pending = lane.pending
        num_finished = lane.finished
        for item in (lane.head, *lane.queue):
            assert item is not None
            num_finished += 1
            pending -= item[3]
            if pending + launches <= self._depth or not pending:
                break
        released_s = yield from self._block([(lane, num_finished)], op)
        self.device.log.append((QUEUE_FULL, op, now, released_s, now))
        return released_s

    def _sync(self, op: Op, now: float, host_s: float, wake_s: float) -> Generator[Gate, None, float]:
        """Blocks until the awaited lanes have finished what was issued so far, then pays for the return."""
        assert isinstance(op, Sync)
        if op.event is not None:
            targets: Iterable[tuple[Lane, int]] = [self.device.events[op.event]]
        else:
            targets = [(lane, lane.issued) for lane in self.lanes if not op.lanes or lane.name in op.lanes]
        unfinished = [(lane, num_finished) for lane, num_finished in targets if lane.finished < num_finished]
        released_s = now
        return_s = host_s
        if unfinished:
            released_s = yield from self._block(unfinished, op)
            return_s += wake_s * self._scale
        if return_s:
            yield self._clock.timeout(return_s)
        end_s = released_s + return_s
        if end_s > now:
            self.device.log.append((SYNCING, op, now, end_s, now))
        return end_s

    def _block(self, targets: Sequence[tuple[Lane, int]], op: Op) -> Generator[Gate, None, float]:
        """Suspends the thread until each lane has finished so many items; returns the time."""
        gate = self._clock.event()
        missing = len(targets)

        def release(_: float) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                gate.succeed()

        for lane, num_finished in targets:
            lane.watch(num_finished, release)
        self.blocked_at = op
        yield gate
        self.blocked_at = None
        return self._clock.now

    def _account(self, now: float, code: int, op: Op) -> None:
        """Takes or returns memory at the host's word."""
        if code == ALLOC:
            assert isinstance(op, Alloc)
            self._live[op.buffer] = alloc = op
            delta = op.nbytes
        else:
            assert code == FREE
            assert isinstance(op, Free)
            alloc = self._live.pop(op.buffer)
            delta = -alloc.nbytes
        self._allocated += delta
        self._reserved = max(self._reserved, self._allocated)
        self.memory.append(MemorySample(self.rank, now, alloc.category, delta, self._allocated, self._reserved))

    def spans(self) -> list[Span]:
        """The log, by start."""
        spans = [self._span(*entry) for entry in self.device.log]
        spans.sort(key=attrgetter("start_s"))
        return spans

    def _span(self, code: int, op: Op, start_s: float, end_s: float, issued_s: float) -> Span:
        if code != ON_LANE:
            return Span(self.rank, HOST, op.key, _HOST_KINDS[code], start_s, end_s, 0, issued_s)
        if isinstance(op, Collective):
            return Span(self.rank, op.lane, op.key, op.kind, start_s, end_s, op.nbytes, issued_s, op.group)
        assert isinstance(op, Compute | Copy)
        kind = "compute" if isinstance(op, Compute) else "copy"
        return Span(self.rank, op.lane, op.key, kind, start_s, end_s, op.nbytes, issued_s)


_HOST_KINDS = {LAUNCHING: "launch", HOST_BUSY: "host", SYNCING: "sync", QUEUE_FULL: "queue"}


def _raise_if_stuck(hosts: Sequence[Host], network: Network) -> None:
    """SimPy returns silently when nothing can happen any more, and the time would look like a result."""
    stuck = []
    for host in hosts:
        places = [f"host at {_one_line(host.blocked_at)}"] if host.blocked_at is not None else []
        for lane in host.lanes:
            if lane.head is not None:
                op = lane.head[7]
                absent = f" ({network.missing(lane.head[1])} ranks missing)" if isinstance(op, Collective) else ""
                places.append(f"lane {lane.name} at {_one_line(op)}{absent}")
        if places:
            stuck.append(f"rank {host.rank}: {'; '.join(places)}")
    if stuck:
        raise DeadlockError("deadlock: " + " | ".join(stuck))


def _raise_if_live(lowered: Lowered) -> None:
    for role in lowered.roles:
        left = unfreed(role.program)
        if left:
            raise ProgramError(f"role {role.program.role}: ended with {len(left)} live buffers, {_one_line(left[0])}")


def _one_line(op: Op) -> str:
    return " ".join(str(op).split())
