"""The attention core between the projections, eager or as one kernel. Legend as in `model`."""

from typing import Final

from zsim.model.layers import inductor
from zsim.model.layers.dense import elementwise
from zsim.model.layers.layer import Gradient, Layer, Step
from zsim.model.layers.shape import Shape
from zsim.model.modules import Kernels, Tensor
from zsim.ops import Attention, Gemm

_FP32: Final = 4
"""Bytes of an element."""


def attention(shape: Shape, name: str) -> Step:
    """Scores, softmax and context, without projections and without the dropout module.

    Eager kernels compute the whole square of scores, one kernel of a causal model what is not masked.
    Frozen projections in front of which nothing is trained still count as if both operands of each product had a
    gradient, if one of them has.
    """
    m, b, s = shape.model, shape.train.micro_batch, shape.train.seq_len
    qo_bytes, kv_bytes = shape.tensor_bytes(shape.query_width), 2 * shape.tensor_bytes(shape.kv_width)
    operands = _operands(name, qo_bytes, kv_bytes // 2)
    if m.attention != "eager":
        # One kernel each way that streams over keys, with the two products of forward and the four of backward inside;
        # backward computes the scores once more (FlashAttention 2, section 3) and takes two small kernels besides.
        forward = Attention(b * m.heads * s, s, m.head_dim, 2, 0, m.causal, 2 * qo_bytes + kv_bytes)
        backward = forward._replace(num_products=4, num_repeated=1, nbytes=4 * qo_bytes + 2 * kv_bytes)
        return Step(
            Kernels((forward,), 0, 1), Gradient(Kernels((backward,), 0, 3), (*operands, context_tensor(shape, name)))
        )
    # Keys and values of a group are copied to all of its heads (transformers, repeat_kv).
    repeated = _operands(name, qo_bytes, qo_bytes)
    batch = b * m.heads
    scores, context = Gemm(s, s, m.head_dim, batch), Gemm(s, m.head_dim, s, batch)
    # Contiguous copies of query, key, value (repeated to all heads) and context; each copied back in backward.
    copies = 2 * qo_bytes * 4
    core = Step(
        Kernels((scores, context), copies, 6),
        # Both operands of both products: the gradients of value, probabilities, query and key.
        Gradient(Kernels((context, scores, context, context), copies, 8), repeated),
    )
    return core + _softmax(shape, name)


def _operands(name: str, query_bytes: int, key_bytes: int) -> tuple[Tensor, ...]:
    return Tensor(f"{name}:query", query_bytes), Tensor(f"{name}:key", key_bytes), Tensor(f"{name}:value", key_bytes)


def context_tensor(shape: Shape, name: str) -> Tensor:
    """What attention puts out: input of the output projection, and kept by attention as one kernel."""
    return Tensor(f"{name}:context", shape.tensor_bytes(shape.query_width))


def _softmax(shape: Shape, name: str) -> Step:
    """Scale, mask and softmax: three kernels, of which the mask has no gradient; one when fused.

    Some families write fp32 and cast it back, unless fused. A fused softmax is followed by a dropout that is no module
    of its own any more. Kept are what softmax puts out, what the product reads if that is another tensor, and the mask.
    """
    m, e, n2 = shape.model, shape.e, shape.n2
    eager = m.compile == "none" and not m.fused_kernels
    casts = eager and m.softmax_in_fp32 and e < _FP32
    written = _FP32 if casts else e
    kept = [Tensor(f"{name}:probabilities", written * n2, core=True)]
    if casts:
        kept.append(Tensor(f"{name}:cast", e * n2, core=True))
    if m.attention_dropout:
        kept += [Tensor(f"{name}:mask", n2, core=True), Tensor(f"{name}:dropped", e * n2, core=True)]
    if m.compile != "none":
        return inductor.softmax(shape, tuple(kept))
    if eager:
        cast = (e + written) * casts
        return elementwise(
            (5 * e + written + cast) * n2, (3 * e + 2 * written + cast) * n2, 3 + casts, 2 + casts, *kept
        )
    fused = elementwise(2 * e * n2, 3 * e * n2, 1, 1, *kept)
    return fused + dropped_scores(shape) if m.attention_dropout else fused


def dropped_scores(shape: Shape) -> Step:
    """Dropout of the probabilities as a function, not a module."""
    if shape.model.compile == "block":
        return inductor.dropped_scores(shape)
    nbytes = (2 * shape.e + 1) * shape.n2
    return elementwise(nbytes, nbytes, 1, 1)


def attention_dropout(shape: Shape, name: str, attention_name: str) -> Layer:
    """The dropout module with the core booked on it; its mask is among what the core keeps."""
    m = shape.model
    active = m.attention == "eager" and m.attention_dropout and not m.fused_kernels
    dropped = dropped_scores(shape) if active else Step(Kernels(), Gradient())
    layer = Layer(name).followed_by(dropped)
    return layer.with_core(attention(shape, attention_name), dropout=layer.forward)


def functional_attention(shape: Shape, name: str) -> Step:
    """The core where dropout is a function: nothing unless eager and switched on."""
    m = shape.model
    core = attention(shape, name)
    if m.attention == "eager" and m.attention_dropout and not m.fused_kernels:
        return core + dropped_scores(shape)
    return core


def rotary(shape: Shape) -> Step:
    """Rotary positions on query and key: rotate-half, two products and a sum, each as its own kernel unless fused.

    Backward takes the halves apart: two tensors of zeros with a half copied in, and their sum.
    """
    elements = shape.tokens * (shape.query_width + shape.kv_width)
    if shape.model.compile != "none":
        return inductor.rotary(shape)
    if shape.model.fused_kernels:
        return elementwise(2 * shape.e * elements, 2 * shape.e * elements, 2, 2)
    return elementwise(10 * shape.e * elements, 15 * shape.e * elements, 10, 18)
