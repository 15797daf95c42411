"""The gradient side of FSDP1: the flat gradient of a unit, reduce-scattered behind its backward.

torch/distributed/fsdp/_runtime_utils.py: `_post_backward_hook`, `_reduce_grad`, `_accumulate_sharded_grad`.
"""

from collections.abc import Iterator

from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Record
from zsim.strategies.fsdp import FullySharded, Unit, predivide_factor
from zsim.strategies.sharding import Moment

POST_BACKWARD = "post_backward"
ALL_REDUCE = "all_reduce"


class FlatReducer:
    """Keeps the gradients of units that have not been reduced yet."""

    def __init__(self, sharding: FullySharded) -> None:
        self.sharding = sharding
        self.fsdp = sharding.fsdp
        self.lane = ALL_REDUCE if sharding.is_replicated else POST_BACKWARD
        """Where a reduced gradient is cast and accumulated."""
        self._flat: dict[str, str] = {}
        """Unit -> buffer of its flat gradient."""

    def flatten(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Backward of the split into parameters: one concatenation, added to what no_sync has left."""
        e, what = self.sharding.element_bytes, f"{unit.name}:reduce"
        nbytes = unit.numel * e
        fresh = f"flat_gradient.{at.step}.{at.micro}.{unit.name}"
        yield Alloc(at.key(f"{what}.cat"), fresh, nbytes, "gradients")
        yield Copy(at.key(f"{what}.cat"), COMPUTE, 2 * nbytes)
        yield from self.sharding.gradients.end(at, unit.parameters)
        if unit.name in self._flat:
            yield Copy(at.key(f"{what}.accumulate"), COMPUTE, 3 * nbytes)
            yield Free(at.key(f"{what}.accumulate"), fresh)
        else:
            self._flat[unit.name] = fresh

    def reduce(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Cast, pre-divide, reduce-scatter, post-divide, cast back, accumulate, all on the post-backward stream."""
        e, r, what = self.sharding.element_bytes, self.fsdp.reduce_bytes, f"{unit.name}:reduce"
        flat, numel = self._flat.pop(unit.name), unit.numel
        yield from self.sharding.wait_stream(at, POST_BACKWARD, COMPUTE, what)
        if r != e:
            yield Alloc(at.key(f"{what}.cast"), f"{what}.cast", numel * r, "temporary", POST_BACKWARD)
            yield Copy(at.key(f"{what}.cast"), POST_BACKWARD, numel * (e + r))
        yield from (self._reduce_scatter if self.fsdp.shard_size > 1 else self._all_reduce)(at, unit)
        if r != e:
            yield Free(at.key(f"{what}.free"), f"{what}.cast")
        if self.fsdp.use_orig_params:
            yield HostTask(at.key(f"{what}.views"), "partition_gradient", len(unit.trained))
        event = self.sharding.new_event()
        yield Record(at.key(f"{what}.record_stream"), POST_BACKWARD, event)
        yield Free(at.key(f"{what}.free"), flat, event)

    def finish(self, at: Moment) -> Iterator[Op]:
        """At the end of backward: compute waits, then gradients get the type that the optimizer is to see."""
        for lane in sorted({POST_BACKWARD, self.lane}):
            yield from self.sharding.wait_stream(at, COMPUTE, lane, "root:reduce.wait")
        if self.fsdp.gradient_bytes == self.fsdp.param_bytes or not self.sharding.is_boundary(at):
            return
        for unit in self.sharding.units:
            if held := self.sharding.reduced.pop(unit.name, None):
                numel = self.sharding.padded(unit.numel) // self.fsdp.shard_size
                yield from self.sharding.hold_gradient(at, unit, numel, self.fsdp.gradient_bytes, COMPUTE)
                nbytes = numel * (self.fsdp.gradient_bytes + self.fsdp.param_bytes)
                yield Copy(at.key(f"{unit.name}:gradient.downcast"), COMPUTE, nbytes)
                yield Free(at.key(f"{unit.name}:gradient.downcast"), held)

    def _divide(self, at: Moment, what: str, numel: int, factor: float, lane: str = POST_BACKWARD) -> Iterator[Op]:
        if factor > 1:
            yield Copy(at.key(what), lane, 2 * numel * self.fsdp.reduce_bytes)

    def _reduce_scatter(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Into a new tensor of the shard's size, which is the sharded gradient if nothing is left to do."""
        r, what = self.fsdp.reduce_bytes, f"{unit.name}:reduce"
        numel = self.sharding.padded(unit.numel)
        shard = numel // self.fsdp.shard_size
        if numel != unit.numel:
            yield Alloc(at.key(f"{what}.pad"), f"{what}.pad", numel * r, "temporary", POST_BACKWARD)
            yield Copy(at.key(f"{what}.pad"), POST_BACKWARD, (unit.numel + numel) * r)
        held = r == self.fsdp.param_bytes and unit.name not in self.sharding.reduced
        if held:
            yield from self.sharding.hold_gradient(at, unit, shard, r, POST_BACKWARD)
        else:
            yield Alloc(at.key(what), f"{what}.shard", shard * r, "temporary", POST_BACKWARD)
        num_ranks = self.sharding.num_ranks
        before = predivide_factor(num_ranks)
        yield from self._divide(at, f"{what}.predivide", numel, before)
        yield from self.sharding.reduce(at, what, "reduce_scatter", numel, lane=POST_BACKWARD)
        if numel != unit.numel:
            yield Free(at.key(f"{what}.free"), f"{what}.pad")
        if self.sharding.is_replicated:
            # HYBRID_SHARD: what follows is on a stream of its own, so that the next reduce-scatter need not wait.
            yield from self.sharding.wait_stream(at, self.lane, POST_BACKWARD, what)
            yield from self.sharding.reduce(at, f"{what}.replicas", "all_reduce", shard, lane=self.lane)
        yield from self._divide(at, f"{what}.postdivide", shard, num_ranks / before, self.lane)
        if not held:
            yield from self._accumulate(at, unit, shard)
            event = self.sharding.new_event()
            yield Record(at.key(f"{what}.record_stream"), self.lane, event)
            yield Free(at.key(f"{what}.free"), f"{what}.shard", event)

    def _all_reduce(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """NO_SHARD: in place, over the whole flat gradient."""
        what, num_ranks = f"{unit.name}:reduce", self.sharding.num_ranks
        before = predivide_factor(num_ranks)
        yield from self._divide(at, f"{what}.predivide", unit.numel, before)
        if num_ranks > 1:
            yield from self.sharding.reduce(at, what, "all_reduce", unit.numel, lane=POST_BACKWARD)
        yield from self._divide(at, f"{what}.postdivide", unit.numel, num_ranks / before)
        yield from self._accumulate(at, unit, unit.numel)

    def _accumulate(self, at: Moment, unit: Unit, numel: int) -> Iterator[Op]:
        """Into the type of the parameter, then added to what earlier micro-batches of the step have left."""
        r, kept, what = self.fsdp.reduce_bytes, self.fsdp.param_bytes, f"{unit.name}:reduce"
        if unit.name not in self.sharding.reduced:
            yield from self.sharding.hold_gradient(at, unit, numel, kept, self.lane)
            yield Copy(at.key(f"{what}.upcast"), self.lane, numel * (kept + r))
            return
        if kept != r:
            yield Alloc(at.key(f"{what}.upcast"), f"{what}.upcast", numel * kept, "temporary", self.lane)
            yield Copy(at.key(f"{what}.upcast"), self.lane, numel * (kept + r))
        yield Copy(at.key(f"{what}.accumulate"), self.lane, 3 * numel * kept)
        if kept != r:
            yield Free(at.key(f"{what}.free"), f"{what}.upcast")
