"""Executes priced programs in time. It has never heard of ZeRO.

`lowering` resolves what needs no time, `hosts` issue, `lanes` execute, collectives meet in `rendezvous` and cross the
`fabric`. Without noise one rank of each role stands for all of them; `expand` executes every rank.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter

from zsim.check import ProgramError, one_line
from zsim.engine.fabric import Clock, Fabric
from zsim.engine.hosts import Host
from zsim.engine.lanes import Device
from zsim.engine.lowering import Lowered, Price, lower
from zsim.engine.memory import DeviceMemory, Recording
from zsim.engine.rank_times import rank_times
from zsim.engine.rendezvous import Rendezvous, Waiting
from zsim.errors import OwnCheckError
from zsim.ops import Collective, Groups, Program, may_stay
from zsim.ranks import RankTimes
from zsim.trace import MemorySample, Span

Progress = Callable[[int, int], None]


class DeadlockError(OwnCheckError):
    """The run ended while a rank still had work: the time reached is no result."""


class StepsDifferError(Exception):
    """What comes behind the last step of a program cannot be told from it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Hosts whose programs have run, with their notes."""

    hosts: list[Host]
    num_events: int
    end_s: float
    waiting: Mapping[tuple[int, int], Waiting] | None
    """By rank and step; None where ranks stand for others, which would wait as well."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What happened."""

    spans: list[Span]
    """By rank, then by start."""
    memory: list[MemorySample]
    """By rank, then by time."""
    num_events: int
    """Events that SimPy processed."""
    end_s: float
    """When the last host and the last lane had finished."""
    ranks: RankTimes | None
    """None where one of equal ranks was executed."""
    num_device_frees: int
    """Segments that allocators gave back to their devices."""
    recording: Recording | None
    """What the allocator of the lowest rank did, if that was asked for."""
    num_ooms: int
    """Requests that not even a flush could serve; the run went on as if the device were larger."""


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Keeps the cycle collector away from a run.

    It makes a hundred thousand records, none of them garbage; looking at them again and again took a third of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Straight into the oldest generation: they live as long as the result.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def run(
    programs: Sequence[Program],
    *,
    price: Price,
    groups: Groups,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    expand: bool = False,
    inline: str = "",
    host_scale: Mapping[int, Sequence[float]] | None = None,
    stray_scale: Mapping[int, Sequence[float]] | None = None,
    memory: DeviceMemory | None = None,
    progress: Progress | None = None,
) -> Execution:
    """Lowers the programs and executes them.

    Args:
        programs: one a role; checked beforehand by `check.check`.
        price: seconds and bytes of an op; called before time starts.
        groups: the communicators of each name, with their ranks.
        link_capacities: bytes per second of each link that `price` names.
        launch_queue_depth: launches that may be pending on a lane before its host blocks.
        launch_latency_s: from a launch to its start on an idle lane.
        expand: execute every rank instead of the lowest of each role.
        inline: the lane that the host thread executes itself, as on a CPU; none if empty.
        host_scale: factors on the host seconds of single ranks, by step.
        stray_scale: factors on the sizes of allocations that vary, likewise.
        memory: of each rank's device, behind a caching allocator; without it memory has no end and no cache.
        progress: called now and then with the ops issued so far and their total.

    """
    lowered = lower(programs, price=price, groups=groups, link_capacities=link_capacities, expand=expand, inline=inline)
    return run_lowered(
        lowered,
        link_capacities=link_capacities,
        launch_queue_depth=launch_queue_depth,
        launch_latency_s=launch_latency_s,
        inline=inline,
        host_scale=host_scale,
        stray_scale=stray_scale,
        memory=memory,
        progress=progress,
    )


@no_cycle_collection()
def run_lowered(
    lowered: Lowered,
    *,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    inline: str = "",
    host_scale: Mapping[int, Sequence[float]] | None = None,
    stray_scale: Mapping[int, Sequence[float]] | None = None,
    memory: DeviceMemory | None = None,
    progress: Progress | None = None,
    meeting: Callable[[Clock], Rendezvous] | None = None,
) -> Execution:
    """Executes lowered programs; arguments as for `run` and `execute`."""
    finished = execute(
        lowered,
        link_capacities=link_capacities,
        launch_queue_depth=launch_queue_depth,
        launch_latency_s=launch_latency_s,
        inline=inline,
        host_scale=host_scale,
        stray_scale=stray_scale,
        memory=memory,
        progress=progress,
        meeting=meeting,
    )
    return collect(finished)


def execute(
    lowered: Lowered,
    *,
    link_capacities: Mapping[str, float],
    launch_queue_depth: int,
    launch_latency_s: float,
    inline: str = "",
    host_scale: Mapping[int, Sequence[float]] | None = None,
    stray_scale: Mapping[int, Sequence[float]] | None = None,
    memory: DeviceMemory | None = None,
    progress: Progress | None = None,
    meeting: Callable[[Clock], Rendezvous] | None = None,
) -> Finished:
    """Lets lowered programs happen; arguments as for `run`, and where collectives meet if not among these ranks."""
    clock = Clock()
    fabric = Fabric(clock, link_capacities)
    rendezvous = meeting(clock) if meeting else Rendezvous(clock, fabric, lowered.transfers)
    scales, strays = host_scale or {}, stray_scale or {}
    lowest = min(rank for role in lowered.roles for rank in role.ranks)
    quiet = replace(memory, records=False) if memory is not None else None
    hosts = [
        Host(
            role,
            Device(rank, clock, rendezvous, launch_latency_s, inline),
            launch_queue_depth=launch_queue_depth,
            scales=scales.get(rank),
            stray=strays.get(rank),
            memory=memory if rank == lowest else quiet,
        )
        for role in lowered.roles
        for rank in role.ranks
    ]
    counter = _Counter(progress, sum(len(role.ranks) * len(role.instructions) for role in lowered.roles))
    with no_cycle_collection():
        for host in hosts:
            host.start(counter.add)
        clock.drain()
    _raise_if_stuck(hosts, rendezvous)
    _raise_if_live(hosts)
    rendezvous.forget()
    hosts.sort(key=attrgetter("rank"))
    are_all = all(role.ranks == role.program.ranks for role in lowered.roles)
    end_s = max((host.end_s for host in hosts), default=0.0)  # not that of the clock, which may ring unheard later
    return Finished(hosts, clock.count_events(), end_s, rendezvous.waiting if are_all else None)


def collect(finished: Finished) -> Execution:
    """Makes spans of what hosts and lanes noted down; they forget it."""
    spans, waiting = _spans(finished.hosts), finished.waiting
    memory = [sample for host in finished.hosts for sample in host.memory]
    execution = Execution(
        spans=spans,
        memory=memory,
        num_events=finished.num_events,
        end_s=finished.end_s,
        ranks=None if waiting is None else rank_times([host.rank for host in finished.hosts], spans, memory, waiting),
        num_device_frees=sum(host.num_device_frees for host in finished.hosts),
        recording=finished.hosts[0].recording,
        num_ooms=sum(host.num_ooms for host in finished.hosts),
    )
    for host in finished.hosts:
        host.forget()
    return execution


class _Counter:
    """Adds up the progress of all hosts."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, num_ops: int) -> None:
        self._done += num_ops
        if self._progress is not None:
            self._progress(self._done, self._total)


def _spans(hosts: Iterable[Host]) -> list[Span]:
    """The logs by rank and start; at equal starts the host comes first, then its lanes in order of first use."""
    start_s = itemgetter(Span._fields.index("start_s"))
    spans: list[Span] = []
    for host in hosts:
        logs = [host.spans(), *(lane.log for lane in host.lanes)]
        # Each log is in order of start already, which the sort makes use of.
        spans += sorted(chain.from_iterable(logs), key=start_s)
    return spans


def _raise_if_stuck(hosts: Iterable[Host], rendezvous: Rendezvous) -> None:
    """SimPy returns silently when nothing can happen any more, and the time would look like a result."""
    stuck = []
    for host in hosts:
        places = [] if host.blocked_at is None else [f"host at {one_line(host.blocked_at)}"]
        for lane in host.lanes:
            if lane.head is not None:
                _, _, number, op = lane.head[0]
                place = f"lane {lane.name} at {one_line(op)}"
                if isinstance(op, Collective):
                    place += f" ({rendezvous.num_missing(host.rank, number)} ranks missing)"
                places.append(place)
        if places:
            stuck.append(f"rank {host.rank}: {'; '.join(places)}")
    if stuck:
        raise DeadlockError("deadlock: " + " | ".join(stuck))


def _raise_if_live(hosts: Iterable[Host]) -> None:
    """As `check` before the run, of what the engine really executed."""
    for host in hosts:
        left = [alloc for alloc in host.live.values() if not may_stay(alloc)]
        if left:
            raise ProgramError(f"rank {host.rank}: ends with {len(left)} live buffers, {one_line(left[0])}")
