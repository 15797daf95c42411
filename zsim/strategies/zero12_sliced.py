"""ZeRO stages 1 and 2 of the reference engine, in the layout of its stage 3: of each tensor every rank owns a slice.

Gradients go through stage 3's bucket and reduce-scatter: with stage 2 each micro-batch, with stage 1 at the last one of
a step, after they have been accumulated whole. Parameters stay whole; those updated are gathered behind the step.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import COMPUTE, Op, Wait
from zsim.spec import Spec
from zsim.strategies import communicators as c
from zsim.strategies.optimizer_step import OptimizerStep
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, Communicator, Moment, Sharding, Visit
from zsim.strategies.zero3_gather import Gather, Gatherer
from zsim.strategies.zero3_reduce import Reducer


class SlicedZero12(Sharding):
    """Hooks of stages 1 and 2."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.keeps_gradients = spec.zero.stage == 1
        self.communicator = Communicator(NCCL_DATA_PARALLEL, c.WORLD, self.num_ranks)
        self.reducer = Reducer(self, self.communicator, keeps_gradients=self.keeps_gradients)
        self.optimizer = OptimizerStep(self, self.communicator.lane, self.communicator.group)
        self._gatherer = Gatherer(self, spec.runtime.optimisations.parameter_gather_form)

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Whole parameters, whole gradients with stage 1, and the bucket where it is kept."""
        at = Moment(0, 0, "init", -1)
        partitioned = not self.keeps_gradients
        yield from self.optimizer.setup_states(at, partitioned_parameters=False, partitioned_gradients=partitioned)
        yield from self.reducer.setup(at)

    def _reduces(self, at: Moment) -> bool:
        return not self.keeps_gradients or self.is_boundary(at)

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Bucket buffers, where they are not kept and this micro-batch reduces."""
        if self._reduces(at):
            yield from self.reducer.start_of_backward(at)

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Stage 2: it stays until its bucket takes it. Stage 1 has a place for each of them."""
        if not self.keeps_gradients:
            yield from self.reducer.gradients.begin(at, parameter)

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Into the bucket; a full bucket is reduced first."""
        if self._reduces(at):
            yield from self.reducer.gradient_ready(at, parameter)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """Reduce the remainder and wait for it."""
        if self._reduces(at):
            yield from self.reducer.end_of_backward(at)

    def update(self, at: Moment) -> Iterator[Op]:
        """Own slices updated, then all parameters gathered."""
        yield from self.optimizer.update(at)
        yield from self.reducer.after_update(at)
        yield from self._gather_parameters(at)

    def _gather_parameters(self, at: Moment) -> Iterator[Op]:
        """One all-gather is under way while what the one before has brought is put in place."""
        previous: Gather | None = None
        for group in self._gathered_together():
            what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
            gather = yield from self._gatherer.gather(at, group, what, self.communicator, lane=COMPUTE, secondary=False)
            yield from self._put_in_place(at, previous)
            previous = gather
        yield from self._put_in_place(at, previous)

    def _put_in_place(self, at: Moment, gather: Gather | None) -> Iterator[Op]:
        if gather is not None:
            yield Wait(at.key("parameters:all_gather.wait"), COMPUTE, gather.done)
            yield from self._gatherer.unflatten(at, gather, COMPUTE)

    def _gathered_together(self) -> Iterator[tuple[Parameter, ...]]:
        """As constructed: one each, or as many as `allgather_bucket_size` holds."""
        limit = self.spec.zero.allgather_bucket_size if self._gatherer.together else 0
        group: list[Parameter] = []
        for parameter in self.graph.trained_parameters:
            if group and sum(p.numel for p in group) + parameter.numel > limit:
                yield tuple(group)
                group = []
            group.append(parameter)
        if group:
            yield tuple(group)
