"""ZeRO stage 3: parameters partitioned, gathered module by module, gradients reduce-scattered by buckets."""

from reference.sharding.fetch import Fetcher
from reference.sharding.optimizer_step import OptimizerStep
from reference.sharding.reduce import Reducer
from reference.sharding.sharding import (
    NCCL_DATA_PARALLEL,
    NCCL_WORLD,
    Moment,
    ShardedParameter,
    Sharding,
    Visit,
)


class Zero3(Sharding):
    """Ties the parameter side, the gradient side and the optimizer step together."""

    def setup(self, at: Moment, parameters: list[ShardedParameter]) -> None:
        """The buffers that stay, optimizer states, and the persistent parameters."""
        reducing = NCCL_DATA_PARALLEL if self.switches.separate_communicators else NCCL_WORLD
        self.fetcher = Fetcher(self, NCCL_WORLD)
        self.reducer = Reducer(self, reducing)
        self.optimizer = OptimizerStep(self, reducing)
        self.optimizer.setup(at, parameters)
        self.reducer.setup(at, parameters)
        self.fetcher.setup(at, parameters)

    def before_forward(self, at: Moment, visit: Visit) -> None:
        """Fetch what the module needs, then look ahead."""
        with self.device.host(at.key(f"{visit.module.name}:fetch"), "visit"):
            self.fetcher.visit(visit)
        self.fetcher.fetch(at, visit)

    def after_forward(self, at: Moment, visit: Visit) -> None:
        """Release what is not used again soon."""
        self.fetcher.release(at, visit)

    def external_parameter(self, at: Moment, visit: Visit, parameter: ShardedParameter) -> None:
        """Fetched when it is asked for; from the next micro-batch on with the module's own."""
        self.fetcher.fetch_external(at, visit, parameter)

    def start_of_backward(self, at: Moment) -> None:
        """Bucket buffers, where they are not kept."""
        self.reducer.start_of_backward(at)

    def before_backward(self, at: Moment, visit: Visit) -> None:
        """As in forward, through hooks on the module's outputs."""
        with self.device.host(at.key(f"{visit.module.name}:fetch"), "visit_backward"):
            self.fetcher.visit(visit)
        self.fetcher.fetch(at, visit)

    def gradient_ready(self, at: Moment, parameter: ShardedParameter) -> None:
        """Into the bucket; a full bucket is reduced first."""
        gradient = parameter.parameter.grad
        assert gradient is not None
        parameter.parameter.grad = None
        self.reducer.gradient_ready(at, parameter, gradient)

    def after_backward(self, at: Moment, visit: Visit) -> None:
        """Release what is not used again soon."""
        self.fetcher.release(at, visit)

    def end_of_backward(self, at: Moment) -> None:
        """Reduce the remainder and wait for it; old versions drop the persistent parameters too."""
        self.reducer.end_of_backward(at)
        self.fetcher.end_of_backward(at)

    def update(self, at: Moment) -> bool:
        """Optimizer step on the partitions, then the persistent parameters are gathered again."""
        self.fetcher.release_all(at)
        done = self.optimizer.update(at, self.reducer.overflow)
        self.reducer.after_update(at)
        self.fetcher.after_update(at)
        return done

    def restored(self, at: Moment) -> None:
        """The persistent parameters are gathered anew."""
        self.fetcher.after_update(at)
