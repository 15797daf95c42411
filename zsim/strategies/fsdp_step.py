"""The optimizer step under FSDP: gradients unscaled and clipped, AdamW on fp32 shards, gradients dropped.

Kernels as torch.optim and torch.nn.utils launch them: multi-tensor ("foreach") ones for lists of tensors.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from zsim.ops import COMPUTE, Alloc, Compute, Free, HostTask, Op, Sync
from zsim.strategies.adam import adam, launches
from zsim.strategies.sharding import Moment

if TYPE_CHECKING:
    from zsim.strategies.fsdp import FullySharded, Unit


class FsdpStep:
    """Writes the step of one rank on its shards."""

    def __init__(self, sharding: "FullySharded") -> None:
        self.sharding = sharding
        self.fsdp = sharding.fsdp

    def update(self, at: Moment) -> Iterator[Op]:
        """Unscale, clip, update; without fusion square roots of the second moment live beside the shards."""
        tensors = self.tensors()
        numels = [numel for _, numel in tensors]
        if numels:
            if self.sharding.spec.train.precision == "fp16":
                yield from self._unscale(at, numels)
            if self.fsdp.clip_grad_norm:
                yield from self._clip(at, numels)
            yield HostTask(at.key("optimizer:update"), "optimizer_tensor", len(numels))
            work = adam(self.sharding.spec.train.optimizer_implementation, numels)
            roots = {f"optimizer.sqrt.{at.step}.{i}": nbytes for i, nbytes in enumerate(work.temporaries) if nbytes}
            for buffer, nbytes in roots.items():
                yield Alloc(at.key("optimizer:sqrt"), buffer, nbytes, "temporary", by_operator=True)
            yield Compute(at.key("optimizer:update"), (), work.nbytes, work.num_kernels)
            for buffer in roots:
                yield Free(at.key("optimizer:sqrt"), buffer, by_operator=True)
        for buffer in self.sharding.reduced.values():
            yield Free(at.key("gradients:zero_grad"), buffer)
        self.sharding.reduced.clear()

    def _unscale(self, at: Moment, numels: Sequence[int]) -> Iterator[Op]:
        """GradScaler: unscale and look for overflow, one flag over all ranks, read before the step."""
        nbytes = 2 * sum(numels) * self.fsdp.gradient_bytes
        yield Compute(at.key("gradients:unscale"), (), nbytes, launches(numels, num_lists=1))
        yield from self.sharding.scalar_all_reduce(at, "overflow:all_reduce")
        yield Sync(at.key("overflow:read"), (COMPUTE,))
        yield HostTask(at.key("overflow:read"), "item")

    def _clip(self, at: Moment, numels: Sequence[int]) -> Iterator[Op]:
        """Norm of the shards, summed over ranks and never read by the host, then all gradients scaled.

        FSDP1 goes through the tensors one by one, FSDP2 through lists of them.
        """
        one_by_one = self.sharding.spec.runtime.framework == "fsdp1"
        num_kernels = len(numels) if one_by_one else launches(numels, num_lists=1)
        nbytes = sum(numels) * self.fsdp.gradient_bytes
        yield HostTask(at.key("gradients:norm"), "optimizer_tensor", len(numels))
        # Squares are summed in two kernels; then stack, norm and square of the norms.
        yield Compute(at.key("gradients:norm"), (), nbytes, 2 * num_kernels + 3)
        if self.fsdp.shard_size > 1:
            yield from self.sharding.scalar_all_reduce(at, "gradients:norm_all_reduce")
        # Root, coefficient, clamp.
        yield Compute(at.key("gradients:clip"), (), 2 * nbytes, num_kernels + 3)

    def tensors(self) -> list[tuple[str, int]]:
        """What the optimizer of the first rank sees: (name, elements)."""
        sharding = self.sharding
        if sharding.spec.runtime.framework == "fsdp2":
            trained = sharding.graph.trained_parameters
            return [(p.name, sharding.padded(p.numel) // self.fsdp.shard_size) for p in trained]
        return [tensor for unit in sharding.units for tensor in self._flat_tensors(unit)]

    def _flat_tensors(self, unit: "Unit") -> list[tuple[str, int]]:
        """FSDP1: the flat shard, or with use_orig_params the trained parameters that the shard cuts."""
        if not unit.trained:
            return []
        share = self.sharding.padded(unit.numel) // self.fsdp.shard_size
        if not self.fsdp.use_orig_params:
            return [(unit.name, share)]
        ends = accumulate(parameter.numel for parameter in unit.parameters)
        cut = zip(unit.parameters, ends, strict=True)
        inside = [(p, min(p.numel, share - (end - p.numel))) for p, end in cut if end - p.numel < share]
        return [(p.name, numel) for p, numel in inside if p.trained]
