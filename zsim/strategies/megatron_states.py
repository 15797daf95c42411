"""What Megatron-LM's training holds before the first step."""

from collections.abc import Iterator

from zsim.ops import Op
from zsim.strategies.loading import FP32_BYTES, INIT, context, take
from zsim.strategies.sharding import Sharding, padded
from zsim.strategies.states import States


class MegatronStates(States):
    """Parameters whole; the buffer of gradients; master copies and moments one by one, or flat parts of them."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self.settings = sharding.spec.megatron

    def setup(self) -> Iterator[Op]:
        """Construction and set-up."""
        spec, numel = self.sharding.spec, self.graph.num_trained_parameters
        yield from context(spec)
        yield from self._load()
        if self.settings.use_contiguous_buffers:
            yield from take(INIT, "gradients.buffer", numel * spec.train.communication_bytes, "gradients")
        if self.settings.use_distributed_optimizer:
            part = padded(numel, self.sharding.num_ranks) // self.sharding.num_ranks
            if self.element_bytes < FP32_BYTES:
                yield from self._fp32("master", part)
            yield from self._moments("flat", part)
            return
        for parameter in self.graph.trained_parameters:
            if self.element_bytes < FP32_BYTES:
                yield from self._fp32(f"master.{parameter.name}", parameter.numel)
            yield from self._moments(parameter.name, parameter.numel)
