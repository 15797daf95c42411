"""What kernels of an operator compute and move, by the shapes that the profiler records (`record_shapes`).

Arguments are those of ATen's schemas; a test holds the positions used here against the installed PyTorch.
"""

from collections.abc import Mapping
from math import prod
from typing import Final, NamedTuple

from zsim.imports.kineto.collectives import element_bytes
from zsim.imports.kineto.records import Arguments
from zsim.ops import Attention, Gemm


class Operands(NamedTuple):
    """Which arguments of a GEMM are its matrices."""

    left: int
    right: int


GEMMS: Final[Mapping[str, Operands]] = {
    "aten::mm": Operands(0, 1),
    "aten::bmm": Operands(0, 1),
    "aten::addmm": Operands(1, 2),
    "aten::_addmm_activation": Operands(1, 2),
    "aten::baddbmm": Operands(1, 2),
    "aten::addmm_": Operands(1, 2),
    "aten::baddbmm_": Operands(1, 2),
}


class Fused(NamedTuple):
    """Attention as one kernel: where its arguments are, and what it computes."""

    query: int
    key: int
    is_causal: int
    heads_first: bool
    """[batch, heads, tokens, width], else [batch, tokens, heads, width]."""
    num_products: int
    num_repeated: int


ATTENTION: Final[Mapping[str, Fused]] = {
    "aten::_scaled_dot_product_flash_attention": Fused(0, 1, 4, True, 2, 0),
    "aten::_scaled_dot_product_flash_attention_backward": Fused(1, 2, 11, True, 4, 1),
    "aten::_flash_attention_forward": Fused(0, 1, 8, False, 2, 0),
    "aten::_flash_attention_backward": Fused(1, 2, 11, False, 4, 1),
    "aten::_scaled_dot_product_efficient_attention": Fused(0, 1, 6, True, 2, 0),
    "aten::_scaled_dot_product_efficient_attention_backward": Fused(1, 2, 11, True, 4, 1),
    "aten::_scaled_dot_product_cudnn_attention": Fused(0, 1, 6, True, 2, 0),
    "aten::_scaled_dot_product_cudnn_attention_backward": Fused(1, 2, 14, True, 4, 1),
}
"""Backward repeats one product within the kernel (Dao 2023, FlashAttention-2, section 3.1.2)."""


class Traffic(NamedTuple):
    """Tensors of an elementwise operator: what it reads, and how often the largest one's size it writes."""

    read: tuple[int, ...]
    writes: int


TRAFFIC: Final[Mapping[str, Traffic]] = {
    **{
        f"aten::{name}": Traffic((0,), 1)
        for name in ("gelu", "silu", "relu", "tanh", "sigmoid", "neg", "rsqrt", "sqrt", "exp", "pow")
    },
    **{f"aten::{name}": Traffic((0, 1), 1) for name in ("add", "sub", "mul", "div", "add_", "mul_", "div_", "sub_")},
    **{
        f"aten::{name}": Traffic((0, 1), 1)
        for name in ("gelu_backward", "silu_backward", "tanh_backward", "threshold_backward")
    },
    "aten::copy_": Traffic((1,), 1),
    "aten::fill_": Traffic((), 1),
    "aten::zero_": Traffic((), 1),
}
"""An operator in place reads and writes its first tensor; a copy writes its first and reads its second."""


def gemm(name: str, arguments: Arguments | None) -> Gemm | None:
    """The product that an operator is; None where it is none or its shapes are not known."""
    operands = GEMMS.get(name)
    if operands is None or arguments is None:
        return None
    left, right = (_tensor(arguments, place) for place in operands)
    if len(left) != len(right) or len(left) not in {2, 3} or left[-1] != right[-2]:
        return None
    found = Gemm(left[-2], right[-1], left[-1], left[0] if len(left) == 3 else 1)
    return found if min(found) > 0 else None


def attention(name: str, arguments: Arguments | None) -> Attention | None:
    """The attention that an operator is; None where it is none, or where shapes or the mask are not known."""
    fused = ATTENTION.get(name)
    if fused is None or arguments is None or len(arguments.values) <= fused.is_causal:
        return None
    query, key = _tensor(arguments, fused.query), _tensor(arguments, fused.key)
    causal = arguments.values[fused.is_causal]
    if len(query) != 4 or len(key) != 4 or causal not in {"True", "False"}:
        return None
    tokens = 2 if fused.heads_first else 1
    return Attention(
        queries=prod(query[:-1]),
        keys=key[tokens],
        head_dim=query[-1],
        num_products=fused.num_products,
        num_repeated=fused.num_repeated,
        causal=causal == "True",
    )


def moved_bytes(name: str, arguments: Arguments | None) -> int:
    """Read and written by an elementwise operator; 0 where it is none or its shapes are not known."""
    traffic = TRAFFIC.get(name)
    if traffic is None or arguments is None:
        return 0
    sizes = [
        prod(shape) * element_bytes(arguments.types[place])
        for place, shape in ((place, _tensor(arguments, place)) for place in range(len(arguments.shapes)))
        if shape and place < len(arguments.types)
    ]
    read = sum(_nbytes(arguments, place) for place in traffic.read)
    if name == "aten::copy_":
        return read + traffic.writes * _nbytes(arguments, 0)
    return read + traffic.writes * max(sizes, default=0)


def product_bytes(name: str, arguments: Arguments | None) -> int:
    """Bytes of an element of a GEMM's or attention's operands; 0 where they are not known or differ."""
    if arguments is None:
        return 0
    places: tuple[int, ...] = GEMMS.get(name, ())
    if fused := ATTENTION.get(name):
        places = (fused.query, fused.key)
    sizes = {element_bytes(arguments.types[place]) for place in places if place < len(arguments.types)}
    return sizes.pop() if len(sizes) == 1 else 0


def _nbytes(arguments: Arguments, place: int) -> int:
    shape = _tensor(arguments, place)
    if not shape or place >= len(arguments.types):
        return 0
    return prod(shape) * element_bytes(arguments.types[place])


def _tensor(arguments: Arguments, place: int) -> tuple[int, ...]:
    """Dimensions of one tensor; () for anything else."""
    if place >= len(arguments.shapes):
        return ()
    shape = arguments.shapes[place]
    return tuple(size for size in shape if isinstance(size, int)) if all(type(s) is int for s in shape) else ()
