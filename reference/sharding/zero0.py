"""Everything on every rank: gradients all-reduced by buckets after backward, nothing overlapped."""

import torch

from reference.sharding.optimizer_step import OptimizerStep
from reference.sharding.sharding import NCCL_DATA_PARALLEL, Moment, ShardedParameter, Sharding
from zsim.ops import COMPUTE


class Zero0(Sharding):
    """Hooks of stage 0."""

    def setup(self, at: Moment, parameters: list[ShardedParameter]) -> None:
        """Optimizer states; gradients stay where autograd puts them."""
        self._trained = [p for p in parameters if p.trained]
        self.optimizer = OptimizerStep(self, NCCL_DATA_PARALLEL)
        self.optimizer.setup(at, parameters)

    def gradient_ready(self, at: Moment, parameter: ShardedParameter) -> None:  # noqa: ARG002
        """It stays until the step."""
        self.keep_whole(parameter)

    def end_of_backward(self, at: Moment) -> None:
        """At the boundary: flatten, all-reduce, divide, copy back; a bucket closes once it exceeds its size."""
        if not self.is_boundary(at):
            return
        bucket: list[ShardedParameter] = []
        reached = [p for p in self._trained if p.parameter.grad is not None]
        for i, parameter in enumerate(reached):
            bucket.append(parameter)
            if sum(p.numel for p in bucket) > self.zero.reduce_bucket_size or i == len(reached) - 1:
                self._reduce(at, bucket)
                bucket = []

    def _reduce(self, at: Moment, bucket: list[ShardedParameter]) -> None:
        device, what = self.device, f"bucket.{bucket[0].name}:reduce"
        numel, e = sum(p.numel for p in bucket), self.settings.element_bytes
        gradients = [p.parameter.grad for p in bucket if p.parameter.grad is not None]
        buffer = f"{what}.{at.step}"
        flat = device.empty(at.key(what), buffer, numel, self.settings.dtype, "buckets")
        device.copy(
            at.key(f"{what}.flatten"),
            COMPUTE,
            2 * numel * e,
            lambda: torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat),
        )
        device.wait_stream(at.key(what), NCCL_DATA_PARALLEL, COMPUTE)
        device.collective(
            at.key(what), NCCL_DATA_PARALLEL, self.call("all_reduce", numel, e), lambda c: c.all_reduce(flat)
        )
        device.wait_stream(at.key(what), COMPUTE, NCCL_DATA_PARALLEL)
        device.copy(at.key(f"{what}.divide"), COMPUTE, 2 * numel * e, lambda: flat.div_(self.num_ranks))

        def copy_back() -> None:
            for gradient, part in zip(gradients, flat.split([p.numel for p in bucket]), strict=True):
                gradient.view(-1).copy_(part)

        device.copy(at.key(f"{what}.copy_back"), COMPUTE, 2 * numel * e, copy_back)
        device.free(at.key(what), buffer)

    def update(self, at: Moment) -> bool:
        """Every rank updates everything."""
        for parameter in self._trained:
            gradient = parameter.parameter.grad
            parameter.has_gradient = gradient is not None
            parameter.gradient = None if gradient is None else gradient.reshape(-1)
        done = self.optimizer.update(at)
        for parameter in self._trained:
            parameter.parameter.grad = parameter.gradient = None
            parameter.has_gradient = False
            self.give_up_whole(parameter)
        return done
