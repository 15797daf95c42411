"""PyTorch's fully_shard: each parameter sharded by itself, a unit gathered in one buffer and copied out of it.

torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py` for the order of things, `_fsdp_collectives.py` for copies.
Shards are copied into the all-gather's buffer on a stream of their own, gathered on another, and copied out into the
parameters on the compute stream; gradients are put together on the compute stream and reduced on a third. Whatever
one stream makes and another uses is held until an event says that it is done, so memory does not depend on how far
the host runs ahead: two units, beside the root's.

Leaves out: dimensions that the ranks do not divide (each parameter is padded as a whole), and casts of inputs.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph
from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Record, Wait
from zsim.spec import Spec
from zsim.strategies.fsdp import FullySharded, Unit
from zsim.strategies.fsdp2_reduce import PerParameterReducer
from zsim.strategies.sharding import Moment

COPY_IN = "all_gather_copy_in"
ALL_GATHER = "all_gather"


class Fsdp2(FullySharded):
    """The parameter side; gradients are reduced by `fsdp2_reduce`."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self._reducer = PerParameterReducer(self)
        self._in_flight: dict[str, int] = {}
        """Unit -> event behind its all-gather."""
        self._unsharded: set[str] = set()
        self._resharded: dict[str, int] = {}
        """Unit that is sharded over fewer ranks -> event behind that."""
        self._held: tuple[str, int] | None = None
        """In forward: buffer of the last all-gather, and the event behind its copy-out."""

    # ------------------------------------------------------------------ forward

    def root_pre_forward(self, at: Moment) -> Iterator[Op]:
        """Gathers follow the optimizer step."""
        yield from self.wait_stream(at, COPY_IN, COMPUTE, "root:all_gather.order")
        yield from self.wait_stream(at, ALL_GATHER, COMPUTE, "root:all_gather.order")

    def pre_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """The host issues this unit's gather while compute is at the one before: implicit prefetching."""
        yield HostTask(at.key(f"{unit.name}:pre_forward"), "visit")
        yield from self._unshard(at, unit)
        yield from self._wait_for_unshard(at, unit, forward=True)

    def post_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Reshard; the root's parameters stay, and the last buffer of the forward goes."""
        if unit is not self.root:
            if 1 < self.fsdp.reshard_size < self.fsdp.shard_size:
                yield from self._reshard_to_smaller_mesh(at, unit)
            elif self.fsdp.reshard_size > 1:
                yield from self._reshard(at, unit)
        if unit is self.root and self._held is not None:
            yield from self._release_held(at)

    # ------------------------------------------------------------------ backward

    def pre_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """The unit's own parameters, if they have not been prefetched; then the unit that comes next."""
        yield HostTask(at.key(f"{unit.name}:pre_backward"), "visit_backward")
        yield from self._unshard(at, unit)
        yield from self._wait_for_unshard(at, unit, forward=False)
        order = (self.root, *self.backward_order)
        following = order.index(unit) + 1
        if following < len(order):
            yield from self._unshard(at, order[following])

    def post_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Reshard, then reduce."""
        yield from self._reducer.accumulate(at, unit)
        yield from self._reshard(at, unit)
        if self.is_synchronised(at):
            yield from self._reducer.reduce(at, unit)
        else:
            yield from self._reducer.keep(at, unit)

    def catch_all(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Parameters that are whole yet are freed like the others'."""
        if unit.name in self._unsharded:
            yield from self._reshard(at, unit)
        elif self._resharded.pop(unit.name, None) is not None:
            yield from self._drop_resharded(at, unit, f"{unit.name}:reshard")

    def final_callback(self, at: Moment) -> Iterator[Op]:
        """Compute waits for all reductions."""
        yield from self._reducer.finish(at)

    # ------------------------------------------------------------------ unshard

    def _unshard(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Copy-in and all-gather, unless the parameters are whole or on their way."""
        if unit.name in self._unsharded or unit.name in self._in_flight:
            return
        what = f"{unit.name}:all_gather"
        yield HostTask(at.key(f"{what}.inputs"), "parameter", len(unit.parameters))
        if self.fsdp.shard_size > 1:
            yield from self._gather(at, unit, what)
        self._in_flight[unit.name] = self.new_event()
        yield Record(at.key(what), ALL_GATHER, self._in_flight[unit.name])

    def _gather(self, at: Moment, unit: Unit, what: str) -> Iterator[Op]:
        numel, num_tensors = self.sharded_numel(unit.parameters), len(unit.parameters)
        regather = unit.name in self._resharded
        shard, e = numel // (self.fsdp.reshard_size if regather else self.fsdp.shard_size), self.element_bytes
        casts = self.casts and not regather
        if regather:
            yield from self._wait_on_gather_streams(at, f"{what}.order", self._resharded[unit.name])
        if casts:
            # One multi-tensor kernel casts all shards of the unit into a temporary.
            yield Alloc(at.key(f"{what}.cast"), f"{what}.cast", shard * e, "temporary", COPY_IN)
            yield Copy(at.key(f"{what}.cast"), COPY_IN, shard * (self.fsdp.param_bytes + e))
        yield Alloc(at.key(what), what, numel * e, "gathered", COPY_IN)
        yield HostTask(at.key(f"{what}.views"), "view", num_tensors)
        yield Copy(at.key(f"{what}.copy_in"), COPY_IN, 2 * shard * e)
        if casts:
            yield Free(at.key(f"{what}.cast"), f"{what}.cast")
        yield from self.wait_stream(at, ALL_GATHER, COPY_IN, what)
        yield from self.all_gather(at, what, numel, lane=ALL_GATHER, regather=regather)

    def _wait_for_unshard(self, at: Moment, unit: Unit, *, forward: bool) -> Iterator[Op]:
        """Copy-out on the compute stream; the buffer is held until the gather streams know that it is done."""
        if unit.name in self._unsharded:
            return
        what = f"{unit.name}:all_gather"
        event = self._in_flight.pop(unit.name)
        if forward and self._held is not None:
            yield from self._release_held(at)
        yield Wait(at.key(f"{what}.wait"), COMPUTE, event)
        yield from self._copy_out(at, unit, what)
        self._unsharded.add(unit.name)
        if self._resharded.pop(unit.name, None) is not None:
            yield from self._drop_resharded(at, unit, f"{what}.copy_out")
        if self.fsdp.shard_size == 1:
            return
        done = self.new_event()
        yield Record(at.key(f"{what}.copy_out"), COMPUTE, done)
        if forward:
            self._held = (what, done)
        else:
            yield from self._release(at, what, done)

    def _copy_out(self, at: Moment, unit: Unit, what: str) -> Iterator[Op]:
        """One multi-tensor kernel from the buffer into the parameters; alone, a cast of each parameter."""
        numel, num_tensors, e = self.sharded_numel(unit.parameters), len(unit.parameters), self.element_bytes
        for parameter in unit.parameters:
            buffer, nbytes = f"unsharded.{parameter.name}", self.padded(parameter.numel) * e
            yield Alloc(at.key(f"{what}.copy_out"), buffer, nbytes, "gathered", by_operator=True)
        yield HostTask(at.key(f"{what}.copy_out"), "parameter", num_tensors)
        if self.fsdp.shard_size > 1:
            yield Copy(at.key(f"{what}.copy_out"), COMPUTE, 2 * numel * e)
        else:
            yield Copy(at.key(f"{what}.copy_out"), COMPUTE, numel * (self.fsdp.param_bytes + e), num_tensors)

    def _release_held(self, at: Moment) -> Iterator[Op]:
        assert self._held is not None
        what, done = self._held
        self._held = None
        yield from self._release(at, what, done)

    def _release(self, at: Moment, what: str, done: int) -> Iterator[Op]:
        yield from self._wait_on_gather_streams(at, f"{what}.release", done)
        yield Free(at.key(f"{what}.release"), what)

    def _wait_on_gather_streams(self, at: Moment, what: str, event: int) -> Iterator[Op]:
        yield Wait(at.key(what), COPY_IN, event)
        yield Wait(at.key(what), ALL_GATHER, event)

    def _reshard_to_smaller_mesh(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """A clone of this rank's slice of each parameter stays, in the type of computation."""
        what, num_tensors = f"{unit.name}:reshard", len(unit.parameters)
        nbytes = self.sharded_numel(unit.parameters) // self.fsdp.reshard_size * self.element_bytes
        yield HostTask(at.key(what), "parameter", num_tensors)
        for parameter in unit.parameters:
            share_bytes = self.padded(parameter.numel) // self.fsdp.reshard_size * self.element_bytes
            yield Alloc(at.key(what), f"resharded.{parameter.name}", share_bytes, "gathered", by_operator=True)
        yield Copy(at.key(what), COMPUTE, 2 * nbytes, num_tensors)
        yield from self._reshard(at, unit)
        self._resharded[unit.name] = event = self.new_event()
        yield Record(at.key(what), COMPUTE, event)

    @staticmethod
    def _drop_resharded(at: Moment, unit: Unit, what: str) -> Iterator[Op]:
        for parameter in unit.parameters:
            yield Free(at.key(what), f"resharded.{parameter.name}", by_operator=True)

    def _reshard(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Parameters were made on the compute stream and go there: what compute does next may use their memory."""
        self._unsharded.discard(unit.name)
        yield HostTask(at.key(f"{unit.name}:reshard"), "parameter", len(unit.parameters))
        for parameter in unit.parameters:
            yield Free(at.key(f"{unit.name}:reshard"), f"unsharded.{parameter.name}", by_operator=True)
