"""ZeRO stages 1 and 2: every rank has all parameters, updates its part of each, and gathers the others' parts.

Gradients go the way of stage 3. Stage 1 keeps them whole until the last micro-batch of a step, stage 2 its slices only.
"""

from reference.sharding.gather import Gatherer
from reference.sharding.optimizer_step import OptimizerStep
from reference.sharding.reduce import Reducer
from reference.sharding.sharding import NCCL_DATA_PARALLEL, Moment, ShardedParameter, Sharding
from zsim.ops import COMPUTE


class Zero12(Sharding):
    """Hooks of stages 1 and 2."""

    def setup(self, at: Moment, parameters: list[ShardedParameter]) -> None:
        """The buffers that stay, and optimizer states."""
        self._parameters = parameters
        self.reducer = Reducer(self, NCCL_DATA_PARALLEL)
        self.optimizer = OptimizerStep(self, NCCL_DATA_PARALLEL)
        self.optimizer.setup(at, parameters)
        self.reducer.setup(at, parameters)
        self._gatherer = Gatherer(self, self.switches.parameter_gather_form)

    def _reduces(self, at: Moment) -> bool:
        return self.zero.stage == 2 or self.is_boundary(at)

    def start_of_backward(self, at: Moment) -> None:
        """Bucket buffers and the gradient partition, where this micro-batch reduces and they are not kept."""
        if self._reduces(at):
            self.reducer.start_of_backward(at)

    def gradient_ready(self, at: Moment, parameter: ShardedParameter) -> None:
        """Stage 2 reduces each micro-batch, stage 1 the sum of all."""
        if not self._reduces(at):
            self.keep_whole(parameter)
            return
        gradient = parameter.parameter.grad
        assert gradient is not None
        parameter.parameter.grad = None
        self.give_up_whole(parameter)
        self.reducer.gradient_ready(at, parameter, gradient)

    def end_of_backward(self, at: Moment) -> None:
        """Reduce the remainder and wait for it; also what only earlier micro-batches of the step have reached."""
        if not self._reduces(at):
            return
        for parameter in self._parameters:
            if parameter.parameter.grad is not None:
                self.gradient_ready(at, parameter)
        self.reducer.end_of_backward(at)

    def update(self, at: Moment) -> bool:
        """Own parts updated, then all parts gathered; the next forward waits for them."""
        done = self.optimizer.update(at, self.reducer.overflow)
        self.reducer.after_update(at)
        if done:
            self._gather_parameters(at)
        return done

    def _gather_parameters(self, at: Moment) -> None:
        gathers = []
        for group in self._groups():
            what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
            fulls = [p.full for p in group if p.full is not None]
            gathers.append(self._gatherer.gather(at, group, fulls, what, via=NCCL_DATA_PARALLEL, lane=COMPUTE))
        for gather in gathers:
            self.device.wait(at.key("parameters:all_gather.wait"), COMPUTE, gather.done)
            self._gatherer.unflatten(at, gather, COMPUTE)

    def _groups(self) -> list[tuple[ShardedParameter, ...]]:
        """What is gathered by one call: `allgather_bucket_size` elements when coalesced, else one parameter."""
        trained = [p for p in self._parameters if p.trained]
        if not self._gatherer.together:
            return [(p,) for p in trained]
        groups: list[list[ShardedParameter]] = [[]]
        for parameter in trained:
            groups[-1].append(parameter)
            if sum(p.numel for p in groups[-1]) >= self.zero.allgather_bucket_size:
                groups.append([])
        return [tuple(group) for group in groups if group]
