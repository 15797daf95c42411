"""ZeRO stage 3: parameters partitioned, gathered module by module, gradients reduce-scattered by buckets.

The generations of DeepSpeed differ by switches, see `spec.Optimisations`: 0.5.4 synchronises the device before each
all-gather, 0.5.10 once per module, 0.6.0 orders streams by events, prefetches along a recorded trace and coalesces.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.model.leaf_modules import with_leaf_modules
from zsim.ops import Groups, HostTask, Op
from zsim.spec import Spec
from zsim.strategies import communicators as c
from zsim.strategies.loading import INIT
from zsim.strategies.optimizer_step import OptimizerStep
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, NCCL_WORLD, Communicator, Moment, Sharding, Visit
from zsim.strategies.states import PartitionedStates, ReferenceStates
from zsim.strategies.zero3_fetch import Fetcher
from zsim.strategies.zero3_reduce import Reducer
from zsim.strategies.zero3_secondary import secondary_size


class Zero3(Sharding):
    """Ties the parameter side, the gradient side and the optimizer step together."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        fetching, reducing = self._communicators()
        self.num_ranks = fetching.num_ranks
        self.fetcher = Fetcher(self, fetching)
        self.reducer = Reducer(self, reducing)
        self.optimizer = OptimizerStep(self, reducing.lane, reducing.group)

    def _communicators(self) -> tuple[Communicator, Communicator]:
        """For all-gathers and for reductions."""
        num_ranks = self.spec.cluster.num_ranks
        if self.spec.zero.is_mics:
            shard = Communicator("nccl.shard", c.SHARD, self.spec.zero.mics_shard_size)
            return shard, shard
        separate = self.spec.runtime.optimisations.separate_communicators
        return (
            Communicator(NCCL_WORLD, c.WORLD, num_ranks),
            Communicator(NCCL_DATA_PARALLEL if separate else NCCL_WORLD, c.WORLD, num_ranks),
        )

    @classmethod
    def view(cls, graph: ModelGraph, spec: Spec, /) -> ModelGraph:
        """With its leaf modules, where there are any."""
        return with_leaf_modules(graph, spec.zero.module_granularity_threshold)

    @classmethod
    def groups(cls, spec: Spec) -> Groups:
        """All ranks; the secondary groups of hpZ; the shard and replica groups of MiCS, and the levels of a shard."""
        found = dict(super().groups(spec))
        num_ranks, gpus, zero = spec.cluster.num_ranks, spec.cluster.gpus_per_node, spec.zero
        if zero.has_secondary_partition:
            found[c.SECONDARY] = c.shards(num_ranks, secondary_size(num_ranks, zero.zero_hpz_partition_size))
        if zero.is_mics:
            found[c.SHARD] = c.shards(num_ranks, zero.mics_shard_size)
            found[c.REPLICA] = c.replicas(num_ranks, zero.mics_shard_size)
            if zero.mics_hierarchical_params_gather:
                found[c.SHARD_INTRA] = c.shards(num_ranks, gpus)
                found[c.SHARD_INTER] = c.across_nodes(num_ranks, zero.mics_shard_size, gpus)
        return found

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Partitioned states, the buffers that stay, and the persistent parameters."""
        if self.spec.runtime.framework == "reference":
            yield from ReferenceStates(self, keeps_gradients=self.reducer.keeps_partition).setup()
        else:
            yield from PartitionedStates(self).setup()
        yield from self.reducer.setup(INIT)
        yield from self.fetcher.setup(INIT, visits)

    def before_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Fetch what the module needs, then look ahead."""
        yield from super().before_forward(at, visit)
        yield HostTask(at.key(f"{visit.module.name}:fetch"), "visit")
        yield from self.fetcher.fetch(at, visit)

    def after_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Release what is not used again soon."""
        yield from self.fetcher.release(at, visit)

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Bucket buffers, where they are not kept."""
        yield from self.reducer.start_of_backward(at)

    def before_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """As in forward, through autograd functions around the module's outputs."""
        yield HostTask(at.key(f"{visit.module.name}:fetch"), "visit_backward")
        yield from self.fetcher.fetch(at, visit)

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """It stays until its bucket takes it."""
        yield from self.reducer.gradients.begin(at, parameter)

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Into the bucket; a full bucket is reduced first."""
        yield from self.reducer.gradient_ready(at, parameter)

    def after_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Release what is not used again soon."""
        yield from self.fetcher.release(at, visit)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Reduce the remainder and wait for it; old versions drop the persistent parameters too."""
        yield from self.reducer.end_of_backward(at)
        yield from self.fetcher.end_of_backward(at)

    def update(self, at: Moment) -> Iterator[Op]:
        """Optimizer step on the partitions, then the persistent parameters are gathered again."""
        yield from self.fetcher.release_all(at)
        yield from self.optimizer.update(at, self.reducer.release)
        yield from self.reducer.after_update(at)
        yield from self.fetcher.after_update(at)
