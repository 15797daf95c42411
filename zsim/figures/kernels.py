"""What runs on a stream, as a profiler tells it: computation, communication or a copy by the copy engine.

PyTorch's profiler knows three categories of device activity: kernels, memory copies (cudaMemcpyAsync) and NCCL's
kernels, told apart by name. A `Copy` op may be either of the first two: torch.cat, div_ and fill_ are kernels, copy_
between tensors of one type and layout is a memory copy.
"""

from typing import Literal, NamedTuple

from zsim.figures.breakdown import COLLECTIVE_CAUSE
from zsim.spec import Spec
from zsim.trace import Span

Activity = Literal["compute", "communication", "memory"]


class CopyKernel(NamedTuple):
    """How a copy is done."""

    activity: Literal["compute", "memory"]
    name: str
    """As the profiler shows it."""
    operator: str
    """ATen's, on the host."""


_DEVICE_COPY = CopyKernel("memory", "Memcpy DtoD (Device -> Device)", "aten::copy_")
_CONCATENATION = CopyKernel("compute", "at::native::(anonymous namespace)::CatArrayBatchedCopy", "aten::cat")
_COPIES: dict[str, CopyKernel] = {
    "flatten": _CONCATENATION,
    "unflatten": _CONCATENATION,
    "interleave": _CONCATENATION,
    "divide": CopyKernel(
        "compute", "at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>", "aten::div_"
    ),
    "fill": CopyKernel(
        "compute", "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>", "aten::zero_"
    ),
    "overflow": CopyKernel("compute", "at::native::reduce_kernel<512, 1, at::native::or_kernel_cuda>", "aten::any"),
    "norm_to_device": CopyKernel("memory", "Memcpy HtoD (Pageable -> Device)", "aten::copy_"),
}
"""By what happens to the tensor: the last word of a key. Everything else is a copy between device tensors."""


def copy_kernel(span: Span) -> CopyKernel:
    """How the copy of a span is done."""
    purpose = span.key.what.rpartition(":")[2]
    return _COPIES.get(purpose.rpartition(".")[2], _DEVICE_COPY)


def activity(span: Span) -> Activity:
    """What a span on a lane is to a profiler."""
    if span.kind in COLLECTIVE_CAUSE:
        return "communication"
    return copy_kernel(span).activity if span.kind == "copy" else "compute"


def launch_s(spec: Spec) -> float:
    """Time of one cudaLaunchKernel on the host; a span's first launch ends when it is issued."""
    return spec.runtime.host.launch_s * spec.cluster.host_slowdown
