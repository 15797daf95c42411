"""One step of AdamW with weight decay on fp32 tensors, in the three implementations of torch.optim.

`for_loop` and `foreach` run the same eight operations (torch/optim/adam.py, `_single_tensor_adam` and
`_multi_tensor_adam`), tensor by tensor or each on the whole list; `fused` does all of it in one kernel
(torch._fused_adamw_, DeepSpeed's and Apex's FusedAdam). Multi-tensor operations take chunks of tensors, as many as fit
into one launch (aten/src/ATen/native/cuda/MultiTensorApply.cuh; DeepSpeed's csrc/adam/multi_tensor_apply.cuh has the
same sizes).

Leaves out: amsgrad, capturable, the step counters, which live on the CPU, and the smaller limit of lists with scalars.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from zsim.spec import OptimizerImplementation

_FP32: Final = 4
_OPERATIONS: Final = {
    "param.mul_": (1, 1, 1),
    "exp_avg.lerp_": (2, 1, 2),
    "exp_avg_sq.mul_": (1, 1, 1),
    "exp_avg_sq.addcmul_": (2, 1, 3),
    "exp_avg_sq.sqrt": (1, 1, 2),
    "denom.div_": (1, 1, 1),
    "denom.add_": (1, 1, 1),
    "param.addcdiv_": (3, 1, 3),
}
"""A step without fusion: decay, both moments, denominator, update. Of each operation the tensors that it reads (one
that it takes twice is read once) and writes, and the lists that it takes."""
_FUSED: Final = (4, 3, 4)
"""Gradient, parameter and two moments read; all but the gradient written."""

_CHUNK_ELEMENTS: Final = 65_536
_MOST_CHUNKS: Final = 320
_MOST_TENSORS: Final = {1: 110, 2: 64, 3: 48, 4: 36}
"""Of one launch; tensors by the number of lists that the operation takes."""


class AdamWork(NamedTuple):
    """What one step launches and holds."""

    nbytes: int
    num_kernels: int
    temporaries: tuple[int, ...]
    """Bytes of each tensor that lives beside the states during the step: denominators."""


def adam(implementation: OptimizerImplementation, numels: Sequence[int]) -> AdamWork:
    """One step on tensors of these sizes."""
    numel = sum(numels)
    if implementation == "fused":
        return AdamWork(_nbytes(_FUSED, numel), launches(numels, num_lists=_FUSED[2]), ())
    nbytes = sum(_nbytes(operation, numel) for operation in _OPERATIONS.values())
    if implementation == "foreach":
        num_kernels = sum(launches(numels, num_lists=num_lists) for _, _, num_lists in _OPERATIONS.values())
        return AdamWork(nbytes, num_kernels, tuple(_FP32 * each for each in numels))
    # The root of one tensor lives until it has been divided.
    return AdamWork(nbytes, len(_OPERATIONS) * len(numels), (_FP32 * max(numels, default=0),) * 2)


def sgd(numels: Sequence[int], *, has_momentum: bool) -> AdamWork:
    """One step of torch.optim.SGD in one kernel: gradient and parameter read, parameter written; so is a momentum."""
    operation = (3, 2, 3) if has_momentum else (2, 1, 2)
    return AdamWork(_nbytes(operation, sum(numels)), launches(numels, num_lists=operation[2]), ())


def _nbytes(operation: tuple[int, int, int], numel: int) -> int:
    read, written, _ = operation
    return (read + written) * _FP32 * numel


def launches(numels: Iterable[int], *, num_lists: int) -> int:
    """Kernels of one multi-tensor operation: full with chunks, or with tensors that end in it."""
    num_launches = num_chunks = num_tensors = 0
    for numel in filter(None, numels):
        num_tensors += 1
        num_full, num_chunks = divmod(num_chunks - (-numel // _CHUNK_ELEMENTS), _MOST_CHUNKS)
        if num_full:
            # The tensor goes on in the launch that is left open.
            num_launches, num_tensors = num_launches + num_full, 1 if num_chunks else 0
        elif num_tensors == _MOST_TENSORS[num_lists]:
            num_launches, num_chunks, num_tensors = num_launches + 1, 0, 0
    return num_launches + (num_chunks > 0)
