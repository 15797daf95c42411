"""The parameter side of ZeRO-3: all-gathers on demand, prefetch along the module trace, release.

A parameter is *available* (gathered and usable), *in flight* (its all-gather is issued) or neither.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, Compute, Copy, Free, HostTask, Op, Record, Sync, Wait
from zsim.strategies.limiter import Limiter
from zsim.strategies.sharding import Moment, Sharding, Visit, padded
from zsim.strategies.zero3_lookahead import Lookahead


@dataclass(slots=True)
class _Gather:
    """One all-gather on its way."""

    parameters: tuple[Parameter, ...]
    what: str
    """Names it in keys and buffers."""
    done: int
    """Event behind the collective."""
    flattened: bool
    """The result still has to be copied from rank-major slices into tensors."""


class Fetcher:
    """Keeps the books of DeepSpeed's parameter coordinator while the program is written."""

    def __init__(self, sharding: Sharding, communicator: str) -> None:
        spec = sharding.spec
        self.sharding = sharding
        self.switches = spec.runtime.optimisations
        self.zero = spec.zero
        self.communicator = communicator
        self.lane = "all_gather" if spec.zero.overlap_comm else COMPUTE
        threshold = spec.zero.param_persistence_threshold + spec.runtime.persistence_inclusive
        self.persistent = {p.name: p for p in sharding.graph.parameters if p.numel < threshold}
        self._available: dict[str, Parameter] = {}
        self._in_flight: dict[str, _Gather] = {}
        self._num_available = 0
        self._lookahead = Lookahead(spec)
        self._limiter = Limiter(sharding)

    def setup(self, at: Moment, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Freezes the module trace; the persistent parameters are gathered before the first step."""
        self._lookahead.freeze(visits)
        self._available.update(self.persistent)
        if self.persistent:
            nbytes = self._nbytes(tuple(self.persistent.values()))
            yield Alloc(at.key("persistent:alloc"), "parameters.persistent", nbytes, "parameters")

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

    def gather_persistent(self, at: Moment) -> Iterator[Op]:
        """After the step: one all-gather for each persistent tensor, one device synchronisation at the end.

        Issued from the compute stream, where the optimizer has just written what is gathered.
        """
        for parameter in self.persistent.values():
            yield HostTask(at.key(f"{parameter.name}:persist"), "parameter")
            yield from self._all_gather(at, (parameter,), f"{parameter.name}:all_gather", flat=False, lane=COMPUTE)
        self._available.update(self.persistent)
        yield self.sharding.device_sync(at, "persistent:sync")

    def _alloc(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        # Persistent tensors are counted once for the whole run, although old versions drop them for moments.
        if parameter.name not in self.persistent:
            nbytes = self._nbytes((parameter,))
            yield Alloc(at.key(f"{parameter.name}:alloc"), f"gathered.{parameter.name}", nbytes, "gathered", self.lane)

    def _free(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        del self._available[parameter.name]
        if parameter.name not in self.persistent:
            self._num_available -= parameter.numel
            yield Free(at.key(f"{parameter.name}:free"), f"gathered.{parameter.name}")

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
        if not parameters:
            return
        together = self.switches.coalesced_collectives or self.switches.all_gather_form == "grouped"
        for group in [tuple(parameters)] if together else [(p,) for p in parameters]:
            what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
            flat = len(group) > 1 and self.switches.all_gather_form != "grouped"
            for parameter in group:
                yield from self._alloc(at, parameter)
            if flat:
                yield Alloc(at.key(what), f"flat.{what}", self._nbytes(group), "temporary", self.lane)
            if self.switches.all_gather_sync == "per_parameter":
                yield Copy(at.key(f"{what}.fill"), self.lane, self._nbytes(group))
                yield self.sharding.device_sync(at, f"{what}.sync")
            done = yield from self._all_gather(at, group, what, flat=flat, lane=self.lane)
            gather = _Gather(group, what, done, flat)
            for parameter in group:
                self._in_flight[parameter.name] = gather
                if parameter.name not in self.persistent:
                    self._num_available += parameter.numel

    def _all_gather(
        self, at: Moment, group: tuple[Parameter, ...], what: str, *, flat: bool, lane: str
    ) -> Generator[Op, None, int]:
        """Issues one collective from `lane` and returns the event behind it."""
        num_ranks = self.sharding.num_ranks
        form = self.switches.all_gather_form
        nbytes = self._nbytes(group)
        after: list[Op] = []
        listed = f"list.{what}"
        if form == "list":
            yield Alloc(at.key(what), listed, nbytes, "temporary", lane)
            yield HostTask(at.key(f"{what}.narrow"), "narrow", num_ranks)
            yield Copy(at.key(f"{what}.own_slice"), lane, 2 * nbytes // num_ranks)
            # c10d gathers into a flat buffer and copies from it to each entry of the list.
            after.append(Copy(at.key(f"{what}.copy_out"), self.communicator, 2 * nbytes, num_ranks))
        elif flat:
            yield HostTask(at.key(f"{what}.views"), "view", num_ranks * len(group))
            yield Copy(at.key(f"{what}.flatten"), lane, 2 * nbytes // num_ranks)
        yield from self.sharding.collective(
            at,
            what,
            "all_gather",
            issued_from=lane,
            communicator=self.communicator,
            num_elements=nbytes // self.sharding.element_bytes,
            element_bytes=self.sharding.element_bytes,
            num_tensors=len(group) if form == "grouped" else 1,
            after=after,
        )
        done = self.sharding.new_event()
        yield Record(at.key(what), self.communicator, done)
        if form == "list":
            yield Free(at.key(what), listed)
        return done

    def _nbytes(self, group: Sequence[Parameter]) -> int:
        return sum(padded(p.numel, self.sharding.num_ranks) for p in group) * self.sharding.element_bytes

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
            yield from self._unflatten(at, gather)
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

    def _unflatten(self, at: Moment, gather: _Gather) -> Iterator[Op]:
        if not gather.flattened:
            return
        nbytes, what = self._nbytes(gather.parameters), gather.what
        yield HostTask(at.key(f"{what}.views"), "view", self.sharding.num_ranks * len(gather.parameters))
        yield Copy(at.key(f"{what}.unflatten"), self.lane, 2 * nbytes, len(gather.parameters))
        yield Free(at.key(what), f"flat.{what}")

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
                yield Copy(at.key(f"{what}.fill"), self.lane, self._nbytes((parameter,)))
                yield self.sharding.device_sync(at, f"{what}.sync")
                yield from self._gather(at, [parameter])
        else:
            yield from self._gather(at, chosen)

    def _is_gathered(self, parameter: Parameter) -> bool:
        return parameter.name in self._available or parameter.name in self._in_flight
