"""ZeRO stages 1 and 2 of the reference engine, in the layout of its stage 3: of each tensor every rank owns a slice.

Gradients go through stage 3's bucket and reduce-scatter: with stage 2 each micro-batch, with stage 1 at the last one of
a step, after they have been accumulated whole. Parameters stay whole; those updated are gathered behind the step.
"""

from collections.abc import Iterator

from zsim.model import ModelGraph, Parameter
from zsim.ops import COMPUTE, Op, Wait
from zsim.spec import Spec
from zsim.strategies import communicators as c
from zsim.strategies.loading import INIT
from zsim.strategies.optimizer_step import OptimizerStep
from zsim.strategies.sharding import NCCL_DATA_PARALLEL, Communicator, Moment, Sharding, Visit
from zsim.strategies.states import ReferenceStates
from zsim.strategies.zero3_gather import Gather, Gatherer
from zsim.strategies.zero3_reduce import Reducer


class SlicedZero12(Sharding):
    """Hooks of stages 1 and 2."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.communicator = Communicator(NCCL_DATA_PARALLEL, c.WORLD, self.num_ranks)
        self.reducer = Reducer(self, self.communicator)
        self.optimizer = OptimizerStep(self, self.communicator.lane, self.communicator.group)
        self._gatherer = Gatherer(self, spec.runtime.optimisations.parameter_gather_form)

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Whole parameters, slices of all else, and the bucket where it is kept."""
        yield from ReferenceStates(self, keeps_gradients=self.reducer.keeps_partition).setup()
        yield from self.reducer.setup(INIT)

    def _reduces(self, at: Moment) -> bool:
        return self.spec.zero.stage == 2 or self.is_boundary(at)

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Bucket buffers, where they are not kept and this micro-batch reduces."""
        if self._reduces(at):
            yield from self.reducer.start_of_backward(at)

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """It stays until its bucket takes it: with stage 1 over all micro-batches of a step, which add to it."""
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
        """All are issued before the first result is put in place."""
        gathers: list[Gather] = []
        for group in self._gathered_together():
            what = f"{group[0].name}{f'+{len(group) - 1}' if len(group) > 1 else ''}:all_gather"
            gathers.append(
                (yield from self._gatherer.gather(at, group, what, self.communicator, lane=COMPUTE, secondary=False))
            )
        for gather in gathers:
            yield Wait(at.key("parameters:all_gather.wait"), COMPUTE, gather.done)
            yield from self._gatherer.unflatten(at, gather, COMPUTE)

    def _gathered_together(self) -> Iterator[tuple[Parameter, ...]]:
        """One each, or as constructed until a group holds `allgather_bucket_size` elements."""
        group: list[Parameter] = []
        for parameter in self.graph.trained_parameters:
            group.append(parameter)
            if not self._gatherer.together or sum(p.numel for p in group) >= self.spec.zero.allgather_bucket_size:
                yield tuple(group)
                group = []
        if group:
            yield tuple(group)
