"""The parameter side of ZeRO-3: all-gathers on demand, prefetch along the module trace, release.

A parameter is *available* (gathered and usable), *in flight* (its all-gather is issued) or neither.
"""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from reference.sharding.gather import Gather, Gatherer
from reference.sharding.limiter import Limiter
from reference.sharding.lookahead import Lookahead
from reference.sharding.sharding import Moment, ShardedParameter, Sharding, Visit
from zsim.ops import COMPUTE


class Fetcher:
    """Keeps the books of DeepSpeed's parameter coordinator."""

    def __init__(self, sharding: Sharding, communicator: str) -> None:
        settings = sharding.settings
        self.sharding = sharding
        self.device = sharding.device
        self.switches = sharding.switches
        self.zero = sharding.zero
        self.communicator = communicator
        self.lane = "all_gather" if sharding.zero.overlap_comm else COMPUTE
        self.persistent: dict[str, ShardedParameter] = {}
        self._persistent_fulls: dict[str, Tensor] = {}
        self._available: dict[str, ShardedParameter] = {}
        self._in_flight: dict[str, Gather] = {}
        self._active: defaultdict[str, set[int]] = defaultdict(set)
        """Positions of the visits that go on with a parameter; DeepSpeed's ds_active_sub_modules."""
        self._num_available = 0
        self._searched: dict[int, set[str]] = {}
        self._lookahead = Lookahead(sharding.zero, later_version=settings.persistence_inclusive)
        self._limiter = Limiter(sharding.device, sharding.switches.limiter_depth)
        self._gatherer = Gatherer(sharding)

    def setup(self, at: Moment, parameters: Sequence[ShardedParameter]) -> None:
        """The persistent parameters are gathered before the first step."""
        threshold = self.zero.param_persistence_threshold + self.sharding.settings.persistence_inclusive
        total = 0
        for parameter in parameters:
            if parameter.numel < threshold and total + parameter.numel <= self.zero.model_persistence_threshold:
                self.persistent[parameter.name] = parameter
                total += parameter.numel
                numel = parameter.shard_numel * self.sharding.num_ranks
                self._persistent_fulls[parameter.name] = self.device.empty(
                    at.key("persistent:alloc"),
                    f"persistent.{parameter.name}",
                    numel,
                    parameter.shard.dtype,
                    "parameters",
                )
        self._gather_persistent(at)

    def visit(self, visit: Visit) -> None:
        """A module's turn: held against the trace, and its parameters marked as in use."""
        self._lookahead.visit(visit)
        if visit.position == 0:
            self._active.clear()
        for parameter in visit.module.parameters:
            self._active[parameter.name].add(visit.position)

    def fetch(self, at: Moment, visit: Visit) -> None:
        """Everything a module needs, then what later modules will need."""
        own, name = visit.module.parameters, visit.module.name
        if not self.switches.cached_decisions:
            with self.device.host(at.key(f"{name}:decide"), "decision"):
                self._searched[visit.position] = self._lookahead.search_reuse(visit)
        if own:
            self._bookkeeping(at, name, own)
        needed = [p for p in own if not self._is_gathered(p)]
        self._gather(at, needed)
        self._wait_for(at, visit, gathered=bool(needed))
        if self.switches.debug_norms:
            self._debug_norms(at, own)
        if self._lookahead.is_complete:
            self._prefetch(at, visit)

    def fetch_external(self, at: Moment, visit: Visit, parameter: ShardedParameter) -> None:
        """A parameter that the visit turns out to need."""
        self._active[parameter.name].add(visit.position)
        self._gather(at, [] if self._is_gathered(parameter) else [parameter])
        self._wait_for(at, visit, gathered=True)

    def release(self, at: Moment, visit: Visit) -> None:
        """Gives back what no other visit is going on with and is not used again within the reuse distance."""
        own = visit.module.parameters
        if not own:
            return
        with self.device.host(at.key(f"{visit.module.name}:release"), "parameter"):
            for parameter in own:
                self._active[parameter.name].discard(visit.position)
            idle = [p for p in own if p.name in self._available and not self._active[p.name]]
            released = [p for p in idle if not self._is_kept(visit, p)]
        for parameter in released:
            self._free(at, parameter)

    def end_of_backward(self, at: Moment) -> None:
        """Old versions partition everything, persistent parameters included."""
        self._limiter.forget()
        self._lookahead.freeze()
        self._searched.clear()
        if not self.switches.cached_decisions:
            self.release_all(at)

    def release_all(self, at: Moment) -> None:
        """Partitions whatever is still gathered."""
        self._drain(at)
        if self._available:
            with self.device.host(at.key("parameters:release"), "parameter"):
                remaining = list(self._available.values())
            for parameter in remaining:
                self._free(at, parameter)

    def after_update(self, at: Moment) -> None:
        """The persistent parameters are gathered again: by one all-gather each, or by one for all of them."""
        self._gather_persistent(at)

    def _gather_persistent(self, at: Moment) -> None:
        """From the compute lane, where the optimizer has just written what is gathered."""
        if self.switches.coalesced_persistents and self.persistent:
            self._gather_persistent_together(at)
        else:
            self._gather_persistent_apart(at)
        self._available.update(self.persistent)

    def _gather_persistent_together(self, at: Moment) -> None:
        what, group = "persistent:all_gather", tuple(self.persistent.values())
        with self.device.host(at.key(what), "parameter"):
            fulls = [self._persistent_fulls[parameter.name] for parameter in group]
        gather = self._gatherer.gather(at, group, fulls, what, via=self.communicator, lane=COMPUTE)
        self.device.wait(at.key(what), COMPUTE, gather.done)
        # What is fetched next is flattened from the parts that the optimizer has just written.
        self.device.wait_stream(at.key(what), self.lane, COMPUTE)
        self._gatherer.unflatten(at, gather, COMPUTE)
        for parameter, full in zip(group, fulls, strict=True):
            parameter.use(full)

    def _gather_persistent_apart(self, at: Moment) -> None:
        gathers = []
        for parameter in self.persistent.values():
            with self.device.host(at.key(f"{parameter.name}:persist"), "parameter"):
                full = self._persistent_fulls[parameter.name]
            what = f"{parameter.name}:all_gather"
            gathers.append(self._gatherer.gather(at, (parameter,), [full], what, via=self.communicator, lane=COMPUTE))
        self.device.sync(at.key("persistent:sync"))
        for gather in gathers:
            gather.done.synchronize()
            gather.parameters[0].use(gather.fulls[0])

    def _drain(self, at: Moment) -> None:
        """What was fetched ahead and never used: only where a micro-batch left its trace."""
        if not self._in_flight:
            return
        for gather in {id(g): g for g in self._in_flight.values()}.values():
            self._complete(at, gather, gather.what)
        # They read parts that are about to be updated, and fill persistent parameters that are gathered again.
        self.device.sync(at.key("parameters:drain"), self.lane)

    def _complete(self, at: Moment, gather: Gather, what: str) -> None:
        self.device.wait(at.key(what), self.lane, gather.done)
        self._gatherer.unflatten(at, gather, self.lane)
        for parameter, full in zip(gather.parameters, gather.fulls, strict=True):
            parameter.use(full)
            del self._in_flight[parameter.name]
            self._available[parameter.name] = parameter

    def _free(self, at: Moment, parameter: ShardedParameter) -> None:
        del self._available[parameter.name]
        if parameter.name not in self.persistent:
            self._num_available -= parameter.numel
            if parameter.full is not None:
                self.device.used_on(COMPUTE, parameter.full)
            parameter.release()
            self.device.free(at.key(f"{parameter.name}:free"), f"gathered.{parameter.name}")

    def _is_kept(self, visit: Visit, parameter: ShardedParameter) -> bool:
        if parameter.name in self.persistent:
            return True
        # Off by one, the old trace finds no module where it looks for it.
        if self.switches.broken_trace:
            return False
        if not self.switches.cached_decisions:
            return parameter.name in self._searched.get(visit.position, ())
        return self._lookahead.is_kept(visit, parameter)

    def _bookkeeping(self, at: Moment, name: str, own: Sequence[ShardedParameter]) -> None:
        with self.device.host(at.key(f"{name}:bookkeeping"), "parameter"):
            for parameter in own:
                parameter.parameter.requires_grad_(parameter.trained)
        if self.switches.debug_strings:
            with self.device.host(at.key(f"{name}:strings"), "string"):
                for p in own:
                    sizes = f"{p.numel} {p.shard_numel}"
                    _ = f"-fetch: {name} {p.name} {tuple(p.shape)} {sizes} {p.parameter.requires_grad}"

    def _debug_norms(self, at: Moment, own: Sequence[ShardedParameter]) -> None:
        """A norm inside a debug string: kernel, copy to the host, and with it the compute lane drained."""
        for parameter in own:
            key = at.key(f"{parameter.name}:debug_norm")
            norms: list[Tensor] = []
            self.device.compute(key, lambda p=parameter, n=norms: n.append(p.parameter.detach().norm()))  # type: ignore[misc]
            self.device.sync(key, COMPUTE)
            with self.device.host(key, "norm_string"):
                _ = f"{parameter.name}: norm {norms[0]}"

    # ------------------------------------------------------------------ gather

    def _gather(self, at: Moment, parameters: Sequence[ShardedParameter]) -> None:
        """All-gathers of some parameters: one for all of them when coalesced or grouped, else one each."""
        groups = [tuple(parameters)] if self._gatherer.together else [(p,) for p in parameters]
        for group in filter(None, groups):
            self._gather_group(at, group)

    def _gather_group(self, at: Moment, group: tuple[ShardedParameter, ...]) -> None:
        what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
        fulls = [self._empty(at, parameter) for parameter in group]
        if self.switches.all_gather_sync == "per_parameter":
            self._fill(at, what, fulls)
        gather = self._gatherer.gather(at, group, fulls, what, via=self.communicator, lane=self.lane)
        for parameter in group:
            self._in_flight[parameter.name] = gather
            if parameter.name not in self.persistent:
                self._num_available += parameter.numel

    def _empty(self, at: Moment, parameter: ShardedParameter) -> Tensor:
        if parameter.name in self.persistent:
            return self._persistent_fulls[parameter.name]
        numel = parameter.shard_numel * self.sharding.num_ranks
        key = at.key(f"{parameter.name}:alloc")
        buffer, dtype = f"gathered.{parameter.name}", parameter.shard.dtype
        return self.device.empty(key, buffer, numel, dtype, "gathered", lane_name=self.lane)

    def _fill(self, at: Moment, what: str, fulls: list[Tensor]) -> None:
        """Zeros, then the device synchronised: what old versions do before an all-gather."""
        nbytes = sum(full.numel() * full.element_size() for full in fulls)
        self.device.copy(at.key(f"{what}.fill"), self.lane, nbytes, lambda: [full.zero_() for full in fulls])
        self.device.sync(at.key(f"{what}.sync"))

    # ------------------------------------------------------------------ wait

    def _wait_for(self, at: Moment, visit: Visit, *, gathered: bool) -> None:
        """Makes the module's parameters usable, in the version's own way of synchronising.

        Streams wait for the module's own all-gathers; a version that makes the host wait, waits for all in flight.
        """
        what = f"{visit.module.name}:fetch_wait"
        awaited = [g for p in visit.module.parameters if (g := self._in_flight.get(p.name))]
        if not awaited:
            return
        by_stream = self.switches.all_gather_sync == "stream"
        gathers = {id(g): g for g in (awaited if by_stream else self._in_flight.values())}
        for gather in gathers.values():
            self._limiter.limit(at, what)
            self._complete(at, gather, what)
            if by_stream:
                self._limiter.record(at, what, self.lane)
        if by_stream:
            self.device.wait_stream(at.key(what), COMPUTE, self.lane)
            return
        if gathered and self.switches.all_gather_sync == "per_module":
            # At the end of _allgather_params_coalesced.
            self.device.sync(at.key(f"{what}.gathered"))
        # _synchronize_communication: the side stream, then the device.
        self.device.sync(at.key(f"{what}.stream"), self.lane)
        self.device.sync(at.key(f"{what}.device"))

    # ------------------------------------------------------------------ prefetch

    def _prefetch(self, at: Moment, visit: Visit) -> None:
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
            with self.device.host(at.key(f"{visit.module.name}:scan"), "scan"):
                free = room > 0 and not self._in_flight
                chosen = self._lookahead.scan(visit, self._is_gathered) if free else []
        if not chosen:
            return
        self._bookkeeping(at, f"{visit.module.name}:prefetch", chosen)
        if self.switches.all_gather_sync != "per_module":
            self._gather(at, chosen)
            return
        for parameter in chosen:
            # Each prefetched tensor is zero-filled and the device synchronised before its all-gather.
            self._gather_zeroed(at, parameter)

    def _gather_zeroed(self, at: Moment, parameter: ShardedParameter) -> None:
        what = f"{parameter.name}:all_gather"
        full = self._empty(at, parameter)
        self._fill(at, what, [full])
        gather = self._gatherer.gather(at, (parameter,), [full], what, via=self.communicator, lane=self.lane)
        self._in_flight[parameter.name] = gather
        if parameter.name not in self.persistent:
            self._num_available += parameter.numel

    def _is_gathered(self, parameter: ShardedParameter) -> bool:
        return parameter.name in self._available or parameter.name in self._in_flight
