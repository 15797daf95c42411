"""The gradient side of FSDP2: gradients of a unit chunked and concatenated, reduce-scattered behind its backward.

torch/distributed/fsdp/_fully_shard: `post_backward` in `_fsdp_param_group.py`, `foreach_reduce` in
`_fsdp_collectives.py`. Compute waits for the reduce-scatter of the unit before, whose input buffer it then drops.
"""

from collections.abc import Iterator

from zsim.ops import COMPUTE, Alloc, Copy, Free, HostTask, Op, Record, Wait
from zsim.strategies.fsdp import FullySharded, Unit, predivide_factor
from zsim.strategies.sharding import Moment

REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"


class PerParameterReducer:
    """Keeps what one post-backward hook leaves to the next."""

    def __init__(self, sharding: FullySharded) -> None:
        self.sharding = sharding
        self.fsdp = sharding.fsdp
        separate = sharding.fsdp.separate_reduce_scatter_group
        self.communicator = "nccl.reduce_scatter" if separate else sharding.communicator
        # Only fp16 can overflow; with other types NCCL averages by itself.
        self._divides = sharding.spec.train.precision == "fp16" and self.fsdp.reduce_bytes == 2
        self._predivide = predivide_factor(sharding.num_ranks)
        self._unreduced: dict[str, list[str]] = {}
        """Unit -> buffers of the whole gradients that no_sync has left, one a parameter."""
        self.lane = ALL_REDUCE if sharding.is_replicated else REDUCE_SCATTER
        """Where a reduced gradient is cast and accumulated."""
        self._replicated: list[str] = []
        self._held: tuple[str, int] | None = None
        """Input of the last reduce-scatter, and the event behind it."""

    def accumulate(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Adds the new gradients to those that no_sync has left, each by itself."""
        if unit.name in self._unreduced:
            numel, num_tensors = self._sizes(unit)
            nbytes = numel * (2 * self.fsdp.reduce_bytes + self.sharding.element_bytes)
            yield Copy(at.key(f"{unit.name}:reduce.accumulate"), COMPUTE, nbytes, num_tensors)
            yield from self.sharding.gradients.end(at, unit.trained)

    def keep(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Without synchronisation: whole gradients stay, in the type of the reduction."""
        if not unit.trained or unit.name in self._unreduced:
            return
        e, r, what = self.sharding.element_bytes, self.fsdp.reduce_bytes, f"{unit.name}:reduce.upcast"
        numel, num_tensors = self._sizes(unit)
        self._unreduced[unit.name] = buffers = [f"unreduced.{at.step}.{parameter.name}" for parameter in unit.trained]
        for buffer, parameter in zip(buffers, unit.trained, strict=True):
            yield Alloc(at.key(what), buffer, parameter.numel * r, "gradients", by_operator=True)
        if r != e:
            yield Copy(at.key(what), COMPUTE, numel * (e + r), num_tensors)
        yield from self.sharding.gradients.end(at, unit.trained)

    def reduce(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Chunk and concatenate on the compute stream, reduce-scatter on its own, cast, accumulate."""
        yield from self._drop_held(at)
        if not unit.trained:
            return
        e, r, what = self.sharding.element_bytes, self.fsdp.reduce_bytes, f"{unit.name}:reduce"
        numel = self.sharding.sharded_numel(unit.trained)
        shard = numel // self.fsdp.shard_size
        unreduced = self._unreduced.pop(unit.name, [])
        yield Alloc(at.key(what), f"{what}.input", numel * r, "buckets")
        yield HostTask(at.key(f"{what}.views"), "view", len(unit.trained))
        yield Copy(at.key(f"{what}.chunk_cat"), COMPUTE, numel * ((r if unreduced else e) + r))
        yield from self.sharding.gradients.end(at, unit.trained)
        for buffer in unreduced:
            yield Free(at.key(what), buffer)
        yield from self.sharding.wait_stream(at, REDUCE_SCATTER, COMPUTE, what)
        becomes_gradient = r == self.fsdp.param_bytes and unit.name not in self.sharding.reduced
        if becomes_gradient:
            yield from self.sharding.hold_gradient(at, unit, shard, r, REDUCE_SCATTER)
        else:
            yield Alloc(at.key(what), f"{what}.output", shard * r, "temporary", REDUCE_SCATTER)
        yield from self._reduce_scatter(at, what, numel)
        done = self.sharding.new_event()
        yield Record(at.key(what), REDUCE_SCATTER, done)
        self._held = (f"{what}.input", done)
        yield HostTask(at.key(f"{what}.gradients"), "partition_gradient", len(unit.trained))
        if self.sharding.is_replicated:
            yield from self.sharding.wait_stream(at, self.lane, REDUCE_SCATTER, what)
            yield from self.sharding.reduce(at, f"{what}.replicas", "all_reduce", shard, lane=self.lane)
        yield from self._divide(at, f"{what}.postdivide", shard, self.sharding.num_ranks / self._predivide, self.lane)
        if not becomes_gradient:
            yield from self._to_gradient(at, unit, shard)

    def finish(self, at: Moment) -> Iterator[Op]:
        """At the end of backward compute waits for the last reduction."""
        if self._held is not None:
            yield from self.sharding.wait_stream(at, COMPUTE, self.lane, "root:reduce.wait")
            yield from self._drop_held(at)
        for buffer in self._replicated:
            yield Free(at.key(f"{buffer}.free"), buffer)
        self._replicated.clear()

    def _drop_held(self, at: Moment) -> Iterator[Op]:
        """The input of the reduction before goes, once compute is ordered behind it."""
        if self._held is not None:
            buffer, done = self._held
            self._held = None
            yield Wait(at.key(f"{buffer}.wait"), COMPUTE, done)
            yield Free(at.key(f"{buffer}.free"), buffer)

    def _reduce_scatter(self, at: Moment, what: str, numel: int) -> Iterator[Op]:
        r = self.fsdp.reduce_bytes
        yield from self._divide(at, f"{what}.predivide", numel, self._predivide)
        if self.fsdp.shard_size == 1:
            yield Copy(at.key(f"{what}.copy"), REDUCE_SCATTER, 2 * numel * r)
            return
        yield from self.sharding.reduce(
            at, what, "reduce_scatter", numel, lane=REDUCE_SCATTER, communicator=self.communicator
        )

    def _to_gradient(self, at: Moment, unit: Unit, numel: int) -> Iterator[Op]:
        """The reduced shard in the type of the parameters; a new gradient, or added to that of each parameter."""
        r, kept, what = self.fsdp.reduce_bytes, self.fsdp.param_bytes, f"{unit.name}:reduce"
        accumulates = unit.name in self.sharding.reduced
        if not accumulates:
            yield from self.sharding.hold_gradient(at, unit, numel, kept, self.lane)
        elif kept != r:
            yield Alloc(at.key(f"{what}.upcast"), f"{what}.upcast", numel * kept, "temporary", self.lane)
        if kept != r:
            yield Copy(at.key(f"{what}.upcast"), self.lane, numel * (kept + r))
        if accumulates:
            yield Copy(at.key(f"{what}.accumulate"), self.lane, 3 * numel * kept, len(unit.trained))
            if kept != r:
                yield Free(at.key(f"{what}.free"), f"{what}.upcast")
        if self.sharding.is_replicated:
            # Held to the end of backward, so that no later reduce-scatter gets the memory of this all-reduce.
            self._replicated.append(f"{what}.output")
        else:
            yield Free(at.key(f"{what}.free"), f"{what}.output")

    def _divide(self, at: Moment, what: str, numel: int, factor: float, lane: str = REDUCE_SCATTER) -> Iterator[Op]:
        if self._divides and factor > 1:
            yield Copy(at.key(what), lane, 2 * numel * self.fsdp.reduce_bytes)

    def _sizes(self, unit: Unit) -> tuple[int, int]:
        return sum(parameter.numel for parameter in unit.trained), len(unit.trained)
