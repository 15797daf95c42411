"""The parameter side of ZeRO-3: all-gathers on demand, prefetch along the module trace, release.

A parameter is *available* (gathered and usable), *in flight* (its all-gather is issued) or neither.

Leaves out that DeepSpeed 0.19 has a frozen parameter which recomputation gathers released by the module whose backward
brought the recomputation about (`update_recompute_parameters`), not by its own.
"""

from collections.abc import Iterator, Sequence

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, Compute, Copy, HostTask, Op, Sync, Wait
from zsim.strategies.limiter import Limiter
from zsim.strategies.sharding import Communicator, Moment, Sharding, Visit
from zsim.strategies.zero3_gather import Gather, Gatherer
from zsim.strategies.zero3_lookahead import Lookahead
from zsim.strategies.zero3_memory import GatheredMemory
from zsim.strategies.zero3_secondary import SecondaryPartition


class Fetcher:
    """Keeps the books of DeepSpeed's parameter coordinator while the program is written."""

    def __init__(self, sharding: Sharding, communicator: Communicator) -> None:
        spec = sharding.spec
        self.sharding = sharding
        self.switches = spec.runtime.optimisations
        self.zero = spec.zero
        self.communicator = communicator
        self.lane = "all_gather" if spec.zero.overlap_comm else COMPUTE
        self.persistent = _persistent(sharding)
        self._available: dict[str, Parameter] = {}
        self._in_flight: dict[str, Gather] = {}
        self._num_available = 0
        self._lookahead = Lookahead(spec)
        self._limiter = Limiter(sharding)
        self._gatherer = Gatherer(sharding)
        self._secondary = SecondaryPartition(sharding)
        self._memory = GatheredMemory(sharding, self.persistent, communicator.lane)
        self._is_reference = spec.runtime.framework == "reference"

    def setup(self, at: Moment, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Freezes the module trace; the persistent parameters are gathered before the first step."""
        self._lookahead.freeze(visits)
        self._available.update(self.persistent)
        if self.persistent and self._is_reference:
            nbytes = self._gatherer.nbytes(tuple(self.persistent.values()))
            yield Alloc(at.key("persistent:alloc"), "parameters.persistent", nbytes, "parameters")
        for parameter in self.persistent.values():
            yield from self._memory.take(at, parameter, COMPUTE)
        yield from self._secondary.setup(at)

    def fetch(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Everything a module needs, then what later modules will need."""
        if visit.position == 0:
            self._lookahead.restart()
        own = visit.module.parameters
        if not self.switches.cached_decisions:
            activity = "decision_backward" if at.phase == "backward" else "decision"
            yield HostTask(at.key(f"{visit.module.name}:decide"), activity)
        if own:
            yield from self._bookkeeping(at, visit.module.name, len(own))
        needed = [p for p in own if not self._is_gathered(p)]
        yield from self._gather(at, needed)
        yield from self._wait_for(at, visit, gathered=bool(needed))
        if self.switches.debug_norms:
            yield from self._debug_norms(at, own)
        yield from self._prefetch(at, visit)

    def release(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Gives back what is not used again within the reuse distance."""
        own = visit.module.parameters
        if not own:
            return
        yield HostTask(at.key(f"{visit.module.name}:release"), "parameter", len(own))
        for parameter in own:
            if parameter.name in self._available and not self._is_kept(visit, parameter):
                yield from self._free(at, parameter)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Old versions partition everything, persistent parameters included."""
        # The host has just waited for the last reduction, and with it for every fetch.
        self._limiter.forget()
        if not self.switches.cached_decisions:
            yield from self.release_all(at)

    def release_all(self, at: Moment) -> Iterator[Op]:
        """Partitions whatever is still gathered."""
        if self._available:
            yield HostTask(at.key("parameters:release"), "parameter", len(self._available))
        for parameter in list(self._available.values()):
            yield from self._free(at, parameter)

    def after_update(self, at: Moment) -> Iterator[Op]:
        """The persistent parameters are gathered again; secondary partitions are out of date."""
        yield from self._gather_persistent(at)
        yield from self._secondary.invalidate(at)

    def _gather_persistent(self, at: Moment) -> Iterator[Op]:
        """One all-gather for each persistent tensor, one device synchronisation at the end; or one for all of them.

        Issued from the compute stream, where the optimizer has just written what is gathered.
        """
        if self.switches.coalesced_persistents and self.persistent:
            yield from self._gather_persistent_together(at)
            return
        for parameter in self.persistent.values():
            yield HostTask(at.key(f"{parameter.name}:persist"), "parameter")
            what = f"{parameter.name}:all_gather"
            yield from self._memory.take(at, parameter, COMPUTE)
            yield from self._gatherer.all_gather(at, (parameter,), what, self.communicator, lane=COMPUTE)
        self._available.update(self.persistent)
        yield self.sharding.device_sync(at, "persistent:sync")
        yield from self._gatherer.drop(at, "persistent:sync", self._gatherer.lists(), self.communicator.lane)

    def _gather_persistent_together(self, at: Moment) -> Iterator[Op]:
        what, group = "persistent:all_gather", tuple(self.persistent.values())
        yield HostTask(at.key(what), "parameter", len(group))
        copied_out = self._gatherer.is_copied_out(group)
        if not copied_out:
            yield from self._take(at, group, COMPUTE, secondary=False)
        gather = yield from self._gatherer.gather(at, group, what, self.communicator, lane=COMPUTE, secondary=False)
        yield Wait(at.key(what), COMPUTE, gather.done)
        # What is fetched next is flattened from the partitions that the optimizer has just written.
        yield from self.sharding.wait_stream(at, self.lane, COMPUTE, what)
        if copied_out:
            for parameter in group:
                yield from self._memory.take(at, parameter, COMPUTE, exact=True)
        yield from self._gatherer.unflatten(at, gather, COMPUTE)
        self._available.update(self.persistent)

    def _take(self, at: Moment, group: Sequence[Parameter], lane: str, *, secondary: bool) -> Iterator[Op]:
        """Memory of parameters when their gather is issued."""
        if self._gatherer.is_view(group, secondary=secondary) and not self._is_reference:
            yield from self._memory.take_together(at, group, self._gatherer.nbytes(group), lane)
            return
        for parameter in group:
            yield from self._memory.take(at, parameter, lane)

    def _free(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        yield from self._secondary.before_release(at, parameter)
        del self._available[parameter.name]
        if parameter.name not in self.persistent:
            self._num_available -= parameter.numel
        yield from self._memory.give(at, parameter)

    def _is_kept(self, visit: Visit, parameter: Parameter) -> bool:
        if parameter.name in self.persistent:
            return True
        # Off by one, the old trace finds no module where it looks for it.
        return not self.switches.broken_trace and self._lookahead.is_kept(visit, parameter)

    def _bookkeeping(self, at: Moment, name: str, num_parameters: int) -> Iterator[Op]:
        yield HostTask(at.key(f"{name}:bookkeeping"), "parameter", num_parameters)
        if self.switches.debug_strings:
            yield HostTask(at.key(f"{name}:strings"), "string", num_parameters)

    def _debug_norms(self, at: Moment, own: Sequence[Parameter]) -> Iterator[Op]:
        """A norm inside a debug string: kernel, copy to the host, and with it the compute lane drained."""
        for parameter in own:
            what = f"{parameter.name}:debug_norm"
            yield Compute(at.key(what), (), parameter.numel * self.sharding.element_bytes, 1)
            yield Sync(at.key(what), (COMPUTE,))
            yield HostTask(at.key(what), "norm_string")

    # ------------------------------------------------------------------ gather

    def _gather(self, at: Moment, parameters: Sequence[Parameter]) -> Iterator[Op]:
        """All-gathers of some parameters: one for all of them when coalesced or grouped, else one each."""
        for secondary in (True, False):
            chosen = tuple(p for p in parameters if self._secondary.holds(p) == secondary)
            groups = [chosen] if self._gatherer.together else [(p,) for p in chosen]
            for group in filter(None, groups):
                yield from self._gather_group(at, group, secondary=secondary)

    def _gather_group(self, at: Moment, group: tuple[Parameter, ...], *, secondary: bool) -> Iterator[Op]:
        what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
        if self._is_reference or not self._gatherer.is_copied_out(group):
            yield from self._take(at, group, self.lane, secondary=secondary)
        if self.switches.all_gather_sync == "per_parameter":
            yield Copy(at.key(f"{what}.fill"), self.lane, self._gatherer.nbytes(group))
            yield self.sharding.device_sync(at, f"{what}.sync")
        via = self._secondary.communicator if secondary else self.communicator
        gather = yield from self._gatherer.gather(at, group, what, via, lane=self.lane, secondary=secondary)
        for parameter in group:
            self._in_flight[parameter.name] = gather
            if parameter.name not in self.persistent:
                self._num_available += parameter.numel

    # ------------------------------------------------------------------ wait

    def _wait_for(self, at: Moment, visit: Visit, *, gathered: bool) -> Iterator[Op]:
        """Makes the module's parameters usable, in the version's own way of synchronising.

        Streams wait for the module's own all-gathers; a version that makes the host wait, waits for all in flight.
        """
        what = f"{visit.module.name}:fetch_wait"
        awaited = [g for p in visit.module.parameters if (g := self._in_flight.get(p.name))]
        if not awaited:
            return
        by_stream = self.switches.all_gather_sync == "stream"
        gathers = list({id(g): g for g in (awaited if by_stream else self._in_flight.values())}.values())
        for gather in gathers:
            yield from self._limiter.limit(at, what)
            yield Wait(at.key(what), self.lane, gather.done)
            if gather.num_views and not self._is_reference:
                for parameter in gather.parameters:
                    yield from self._memory.take(at, parameter, self.lane, exact=True)
            yield from self._gatherer.unflatten(at, gather, self.lane)
            if by_stream:
                yield from self._limiter.record(at, what, self.lane)
            for parameter in gather.parameters:
                del self._in_flight[parameter.name]
                self._available[parameter.name] = parameter
        if by_stream:
            yield from self.sharding.wait_stream(at, COMPUTE, self.lane, what)
            return
        if gathered and self.switches.all_gather_sync == "per_module":
            # At the end of _allgather_params_coalesced.
            yield self.sharding.device_sync(at, f"{what}.gathered")
        # _synchronize_communication: the side stream, then the device.
        yield Sync(at.key(f"{what}.stream"), (self.lane,))
        yield self.sharding.device_sync(at, f"{what}.device")

    # ------------------------------------------------------------------ prefetch

    def _prefetch(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Looks ahead along the trace until the prefetch bucket is full or enough parameters live."""
        room = self.zero.max_live_parameters - self._num_available
        if self.switches.broken_trace:
            # The root matches the trace once a step, at its first visit; every later module is off by one.
            if visit.position or at.micro:
                return
            chosen = self._lookahead.scan(visit, self._is_gathered) if room > 0 else []
        elif self.switches.cached_decisions:
            chosen = self._lookahead.pop(visit, min(room, self.zero.prefetch_bucket_size), self._is_gathered)
        else:
            chosen = self._lookahead.scan(visit, self._is_gathered) if room > 0 and not self._in_flight else []
            # A nested comprehension: each candidate is compared with all chosen before it.
            yield HostTask(at.key(f"{visit.module.name}:scan"), "scan", max(1, len(chosen) ** 2))
        if not chosen:
            return
        yield from self._bookkeeping(at, f"{visit.module.name}:prefetch", len(chosen))
        if self.switches.all_gather_sync == "per_module":
            for parameter in chosen:
                # Each prefetched tensor is zero-filled and the device synchronised before its all-gather.
                what = f"{parameter.name}:all_gather"
                yield Copy(at.key(f"{what}.fill"), self.lane, self._gatherer.nbytes((parameter,)))
                yield self.sharding.device_sync(at, f"{what}.sync")
                yield from self._gather(at, [parameter])
        else:
            yield from self._gather(at, chosen)

    def _is_gathered(self, parameter: Parameter) -> bool:
        return parameter.name in self._available or parameter.name in self._in_flight


def _persistent(sharding: Sharding) -> dict[str, Parameter]:
    """Parameters that stay gathered: those below the threshold, as constructed, while all together stay below theirs.

    DeepSpeed runtime/zero/parameter_offload.py, `mark_persistent_parameters`.
    """
    zero = sharding.spec.zero
    threshold = zero.param_persistence_threshold + sharding.spec.runtime.persistence_inclusive
    chosen: dict[str, Parameter] = {}
    total = 0
    for parameter in sharding.graph.parameters:
        if parameter.numel < threshold and total + parameter.numel <= zero.model_persistence_threshold:
            chosen[parameter.name] = parameter
            total += parameter.numel
    return chosen
