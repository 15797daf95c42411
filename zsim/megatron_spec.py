"""Megatron-LM's own data parallelism with nothing left open."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MegatronSpec:
    """Arguments of Megatron-LM's own data parallelism under its names; the defaults are those of other frameworks."""

    use_contiguous_buffers: bool = False
    """Gradients are added into one buffer as they come (`main_grad`); otherwise flattened for the reduction."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """That buffer, and with it the reduction, is fp32."""
    gradient_accumulation_fusion: bool = False
    """The GEMM of a weight's gradient adds into the buffer itself."""
    use_distributed_optimizer: bool = False
    """Gradients reduce-scattered, optimizer states divided over the ranks, parameters all-gathered."""
    overlap_grad_reduce: bool = False
    """Buckets of the buffer are reduced while backward goes on."""
    overlap_param_gather: bool = False
    """Buckets of parameters are gathered while the next forward goes on."""
    bucket_size: int = 0
    """Elements of such a bucket."""
    blocking_broadcast: bool = False
    """The sizes of each batch are broadcast within the tensor-parallel group and read by the host."""
