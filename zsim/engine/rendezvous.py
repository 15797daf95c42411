"""Where collectives meet: each starts when its last rank has it at the head of its lane, then crosses the fabric."""

from dataclasses import dataclass
from functools import partial

from zsim.engine.fabric import Alarm, Callbacks, Clock, Fabric
from zsim.engine.lanes import Lane
from zsim.engine.lowering import Transfer
from zsim.ranks import TOGETHER


@dataclass(slots=True)
class Waiting:
    """Of one rank in one step: how long it waited for others in collectives, and others for it (see `RankTimes`)."""

    spinning_s: float = 0.0
    num_last: int = 0
    late_s: float = 0.0


class Rendezvous:
    """All collectives of a run by number."""

    def __init__(self, clock: Clock, fabric: Fabric, transfers: tuple[Transfer, ...]) -> None:
        self._clock = clock
        self._fabric = fabric
        self._transfers = transfers
        self._arrived: list[list[Lane]] = [[] for _ in transfers]
        self._starting: Callbacks = [self._start_flow]
        self.waiting: dict[tuple[int, int], Waiting] = {}
        """By rank and step, of collectives of several ranks."""
        self._ending: Callbacks = [lambda alarm: self._end(alarm.subject, alarm.due_s)]

    def arrive(self, now: float, lane: Lane, number: int) -> None:
        """A rank's communication kernel begins to spin; the last one starts the transfer."""
        transfer = self._transfers[number]
        if transfer.offsets:
            number += transfer.offsets[lane.rank]
            transfer = self._transfers[number]
        arrived = self._arrived[number]
        arrived.append(lane)
        lane.arrived_s = now
        if transfer.compute_share and not transfer.sleeps:
            lane.device.spin(now, transfer.compute_share)
        if len(arrived) < transfer.num_participants:
            return
        for participant in arrived:
            participant.start_s = now
        if len(arrived) > 1:
            self._note(now, arrived, transfer.op.key.step)
        alarm = Alarm(self._clock, number)
        if transfer.demands:
            alarm.set(now + transfer.latency_s, self._starting)
        else:
            self._wake(number, now)
            alarm.set(now + transfer.latency_s + transfer.flow_s, self._ending)

    def _note(self, now: float, arrived: list[Lane], step: int) -> None:
        """Who waited for whom; they came in order of time."""
        middle = len(arrived) // 2
        median_s = (arrived[middle].arrived_s + arrived[-1 - middle].arrived_s) / 2
        for lane in arrived:
            self._waiting_of(lane, step).spinning_s += now - lane.arrived_s
        together = (lane for lane in arrived if lane.arrived_s >= now - TOGETHER * now)
        last = self._waiting_of(min(together, key=lambda lane: lane.rank), step)
        last.num_last += 1
        last.late_s += now - median_s

    def _waiting_of(self, lane: Lane, step: int) -> Waiting:
        waiting = self.waiting.get((lane.rank, step))
        if waiting is None:
            waiting = self.waiting[lane.rank, step] = Waiting()
        return waiting

    def num_missing(self, rank: int, number: int) -> int:
        """How many ranks have not arrived where this rank waits for them."""
        number += self._transfers[number].offsets.get(rank, 0)
        return self._transfers[number].num_participants - len(self._arrived[number])

    def forget(self) -> None:
        """Drops who has arrived: lanes know their rendezvous, so only the cycle collector would."""
        self._arrived.clear()

    def _start_flow(self, alarm: Alarm) -> None:
        number: int = alarm.subject
        transfer = self._transfers[number]
        self._wake(number, alarm.due_s)
        end = partial(self._end, number)
        self._fabric.start(alarm.due_s, transfer.demands, transfer.flow_s, end, transfer.num_flows)

    def _wake(self, number: int, now: float) -> None:
        """Those that slept until now begin to take their share."""
        transfer = self._transfers[number]
        if transfer.compute_share and transfer.sleeps:
            for lane in self._arrived[number]:
                lane.device.spin(now, transfer.compute_share)

    def _end(self, number: int, now: float) -> None:
        transfer = self._transfers[number]
        for lane in self._arrived[number]:
            if transfer.compute_share:
                lane.device.unspin(now, transfer.compute_share)
            lane.advance(now)
