"""ZeRO stage 3: parameters partitioned, gathered module by module, gradients reduce-scattered by buckets.

The generations of DeepSpeed differ by switches, see `spec.Optimisations`: 0.5.4 synchronises the device before each
all-gather, 0.5.10 once per module, 0.6.0 orders streams by events, prefetches along a recorded trace and coalesces.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import HostTask, Op
from zsim.spec import Spec
from zsim.strategies.optimizer_step import OptimizerStep
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, NCCL_WORLD, Moment, Sharding, Visit
from zsim.strategies.zero3_fetch import Fetcher
from zsim.strategies.zero3_reduce import Reducer


class Zero3(Sharding):
    """Ties the parameter side, the gradient side and the optimizer step together."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        switches = spec.runtime.optimisations
        reduce_communicator = NCCL_DATA_PARALLEL if switches.separate_communicators else NCCL_WORLD
        self.fetcher = Fetcher(self, NCCL_WORLD)
        self.reducer = Reducer(self, reduce_communicator)
        self.optimizer = OptimizerStep(self, reduce_communicator)

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Partitioned states, the buffers that stay, and the persistent parameters."""
        at = Moment(0, 0, "init", -1)
        yield from self.optimizer.setup_states(at, partitioned_parameters=True, partitioned_gradients=True)
        yield from self.reducer.setup(at)
        yield from self.fetcher.setup(at, visits)

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
        """It stays until it is complete."""
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
        yield from self.optimizer.update(at)
        yield from self.reducer.after_update(at)
        yield from self.fetcher.gather_persistent(at)
