"""How Megatron-LM gets a batch: the same for its own data parallelism and under DeepSpeed.

megatron/mpu/data.py, `broadcast_data`: the sizes of all tensors are broadcast within the tensor-parallel group, and the
host reads them, so that on one such rank too it waits for all that it has queued; then the tokens are. Mask, loss mask
and positions are made on the device (megatron/utils.py, `get_ltor_masks_and_position_ids`).
"""

from collections.abc import Iterator
from typing import Final

from zsim.ops import COMPUTE, Compute, HostTask, Op, Sync
from zsim.spec import Spec
from zsim.strategies.sharding import Moment

_MASK_BYTES: Final = 13
"""For a pair of tokens: ones in fp32, their lower triangle, and whether it is below one half."""
_MASK_KERNELS: Final = 10
_NUM_BROADCASTS: Final = 2


def next_batch(at: Moment, spec: Spec) -> Iterator[Op]:
    """Before the forward pass of a micro-batch."""
    yield HostTask(at.key("batch:broadcast"), "collective", _NUM_BROADCASTS)
    if spec.megatron.blocking_broadcast:
        yield Sync(at.key("batch:sizes"), (COMPUTE,))
        yield HostTask(at.key("batch:sizes"), "item")
    yield Compute(at.key("batch:masks"), (), _MASK_BYTES * spec.train.seq_len**2, _MASK_KERNELS)
