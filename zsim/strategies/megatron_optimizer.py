"""The step of Megatron-LM's optimizer of mixed precision, by Apex' multi-tensor kernels.

megatron/optimizer/optimizer.py (`Float16OptimizerWithFloat16Params`, later `MixedPrecisionOptimizer`), clip_grads.py:
gradients to fp32; with fp16 unscaled and searched for what is not finite, which the host reads; norm, which the host
reads; gradients scaled where it is above `--clip-grad`; Adam; masters copied back. Leaves out the all-reduces of flag
and norm within the model-parallel group of one rank but for their call, and that a small norm leaves gradients as they
are.
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from zsim.ops import COMPUTE, Alloc, Compute, Free, HostTask, Op, Sync
from zsim.strategies.adam import adam, launches
from zsim.strategies.loading import FP32_BYTES
from zsim.strategies.sharding import Moment

if TYPE_CHECKING:
    from zsim.strategies.megatron import MegatronDataParallel


class MegatronOptimizer:
    """Writes the step of one rank, on everything or on its part."""

    def __init__(self, sharding: "MegatronDataParallel", communicator: str) -> None:
        self.sharding = sharding
        self.spec = sharding.spec
        self.communicator = communicator

    def update(self, at: Moment) -> Iterator[Op]:
        """The whole step."""
        numels = self._numels()
        numel = sum(numels)
        held = yield from self._to_fp32(at, numels)
        yield from self.sharding.release_gradients(at)
        if self.spec.train.precision == "fp16":
            yield Compute(at.key("gradients:unscale"), (), 2 * FP32_BYTES * numel, launches(numels, num_lists=1))
            yield from self._read_reduced(at, "found_inf")
        yield HostTask(at.key("gradients:norm"), "optimizer_tensor", len(numels))
        yield Compute(at.key("gradients:norm"), (), FP32_BYTES * numel, launches(numels, num_lists=1) + 1)
        yield from self._read_reduced(at, "gradients:norm")
        yield HostTask(at.key("gradients:clip"), "optimizer_tensor", len(numels))
        yield Compute(at.key("gradients:clip"), (), 2 * FP32_BYTES * numel, launches(numels, num_lists=2))
        yield from self._adam(at, numels)
        if self.sharding.element_bytes < FP32_BYTES:
            yield HostTask(at.key("parameters:copy"), "optimizer_tensor", len(numels))
            nbytes = (FP32_BYTES + self.sharding.element_bytes) * numel
            yield Compute(at.key("parameters:copy"), (), nbytes, launches(numels, num_lists=2))
        for buffer in held:
            yield Free(at.key("main_gradients:free"), buffer)

    def _numels(self) -> list[int]:
        """Elements of each tensor that is updated; of the own part every parameter that reaches into it."""
        trained = self.sharding.graph.trained_parameters
        if not self.spec.megatron.use_distributed_optimizer:
            return [parameter.numel for parameter in trained]
        left = self.sharding.numel // self.sharding.num_ranks
        found: list[int] = []
        for parameter in trained:
            if left <= 0:
                break
            found.append(min(parameter.numel, left))
            left -= parameter.numel
        return found

    def _to_fp32(self, at: Moment, numels: list[int]) -> Generator[Op, None, list[str]]:
        """`main_param.grad`: a cast of each, or the buffer itself where it is fp32 already."""
        yield HostTask(at.key("main_gradients:copy"), "optimizer_tensor", len(numels))
        gradient_bytes = self.sharding.gradient_bytes
        if gradient_bytes == FP32_BYTES:
            return []
        held = [f"main_gradient.{at.step}.{i}" for i in range(len(numels))]
        for buffer, numel in zip(held, numels, strict=True):
            yield Alloc(at.key("main_gradients:copy"), buffer, FP32_BYTES * numel, "gradients", by_operator=True)
        nbytes = (gradient_bytes + FP32_BYTES) * sum(numels)
        yield Compute(at.key("main_gradients:copy"), (), nbytes, len(numels))
        return held

    def _adam(self, at: Moment, numels: list[int]) -> Iterator[Op]:
        work = adam(self.spec.train.optimizer_implementation, numels)
        yield HostTask(at.key("parameters:update"), "optimizer_tensor", len(numels))
        held = [f"adam.{at.step}.{i}" for i in range(len(work.temporaries))]
        for buffer, nbytes in zip(held, work.temporaries, strict=True):
            yield Alloc(at.key("parameters:update"), buffer, nbytes, "temporary", by_operator=True)
        yield Compute(at.key("parameters:update"), (), work.nbytes, work.num_kernels)
        for buffer in held:
            yield Free(at.key("parameters:update"), buffer)

    def _read_reduced(self, at: Moment, what: str) -> Iterator[Op]:
        """Reduced over the model-parallel group, or where states are divided over all ranks; then `.item()`."""
        if self.spec.megatron.use_distributed_optimizer:
            yield from self.sharding.collective(
                at,
                f"{what}.all_reduce",
                "all_reduce",
                issued_from=COMPUTE,
                communicator=self.communicator,
                num_elements=1,
                element_bytes=FP32_BYTES,
            )
            yield from self.sharding.wait_stream(at, COMPUTE, self.communicator, f"{what}.all_reduce.wait")
        else:
            yield HostTask(at.key(f"{what}.all_reduce"), "collective")
        yield Sync(at.key(f"{what}.read"), (COMPUTE,))
        yield HostTask(at.key(f"{what}.read"), "item")
