"""The attention core between the projections, eager or as one kernel. Legend as in `model`."""

from dataclasses import replace
from typing import Final

from zsim.model.layers import inductor
from zsim.model.layers.dense import elementwise
from zsim.model.layers.layer import Gradient, Layer, Step
from zsim.model.layers.operators import Operator, held
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
            Kernels((forward,), 0, 1),
            Gradient(Kernels((backward,), 0, 3), (*operands, context_tensor(shape, name))),
            (_one_kernel(shape, name),),
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
    return (core + _softmax(shape, name)).running(*_eager_operators(shape, name))


def _operands(name: str, query_bytes: int, key_bytes: int) -> tuple[Tensor, ...]:
    return Tensor(f"{name}:query", query_bytes), Tensor(f"{name}:key", key_bytes), Tensor(f"{name}:value", key_bytes)


def projections(
    shape: Shape, name: str, parts: tuple[Layer, Layer, Layer], *, holder: str = "", rotated: bool = False
) -> list[Layer]:
    """Query, key and value, each seen by heads: a view whose gradient comes back in another order and is copied.

    Not so where the one kernel writes the gradient in the order of its operand. `holder` is the module in which local
    names hold them; what is rotated gets another name.
    """
    eager = shape.model.attention == "eager"
    widths = (shape.query_width, shape.kv_width, shape.kv_width)
    copied = (eager or rotated, eager or rotated, eager)
    found = []
    for layer, role, width, copies in zip(parts, ("q", "k", "v"), widths, copied, strict=True):
        heads = Tensor(f"{name}:{role}_heads", shape.tensor_bytes(width))
        view = Operator(views=(heads,), named=f"{name}:{role}") if copies else Operator(named=f"{name}:{role}")
        until = parts[2].name if rotated and role != "v" else holder or name
        found.append(layer.held(until).running(view))
    return found


def fused_projection(shape: Shape, name: str, layer: Layer) -> Layer:
    """Query, key and value as views of one result; backward puts their gradients together.

    Eager, those of query and value come back in the order of the heads and are copied; the key's was transposed once
    more.
    """
    widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    views = tuple(Tensor(f"{name}:{role}", shape.tensor_bytes(width)) for role, width in widths.items())
    seen = (f"{name}:q", f"{name}:v") if shape.model.attention == "eager" else ()
    by_heads = tuple(
        Operator(views=(view._replace(name=f"{view.name}_heads"),), reads=(view.name,), named=view.name)
        for view in views
        if view.name in seen
    )
    return layer.held(name).running(Operator(views=views), *by_heads)


def _one_kernel(shape: Shape, name: str) -> Operator:
    """Attention as one kernel: backward sums the query's gradient in fp32 (flash-attention, flash_api.cpp, mha_bwd)."""
    context = context_tensor(shape, name)
    kept = tuple(f"{name}:{what}" for what in ("query", "key", "value"))
    roles = tuple(f"{name}:{role}" for role in "qkv")
    sums = _FP32 * shape.tokens * shape.query_width
    # With fewer keys than queries their gradients are made for all heads first.
    spread = (context.nbytes,) * 2 if shape.kv_width < shape.query_width else ()
    return Operator((context,), (), roles, kept, (*kept, context.name), scratch_bytes=(sums, *spread))


def _eager_operators(shape: Shape, name: str) -> tuple[Operator, ...]:
    """Scores, softmax and context, operator by operator; products take contiguous copies of what is seen by heads."""
    m, e, n2 = shape.model, shape.e, shape.n2
    qo_bytes = shape.tensor_bytes(shape.query_width)
    repeats = m.kv_heads < m.heads

    def tensor(what: str, nbytes: int) -> Tensor:
        return Tensor(f"{name}:{what}", nbytes)

    def copy(what: str, role: str) -> Operator:
        # What is repeated to all heads of a group gets a gradient of its own, their sum.
        hands_on = role == "q" or not repeats
        return Operator((tensor(what, qo_bytes),), reads=(f"{name}:{role}",), hands_on=hands_on)

    query, key, value, context = (f"{name}:{what}" for what in ("query", "key", "value", "context_heads"))
    copies = (copy("query", "q"), copy("key", "k"))
    scores = Operator((tensor("scores", e * n2),), (), (query, key), keeps=(query, key), core=True)
    softmax = _softmax_operators(shape, name)
    read = softmax[-1].writes[0].name
    product = Operator((Tensor(context, qo_bytes),), (), (value, read), keeps=(read, value))
    late = () if repeats else (copy("value", "v"),)
    early = (copy("value", "v"),) if repeats else ()
    return (
        *copies,
        *early,
        scores,
        *softmax,
        *late,
        product,
        # Local names hold repeated keys and values to the end.
        Operator((context_tensor(shape, name),), reads=(context,), needs=(key, value) if repeats else ()),
    )


def _softmax_operators(shape: Shape, name: str) -> tuple[Operator, ...]:
    """From the scores to what the product reads, which the layer's caller is given as well and holds."""
    m, e, n2 = shape.model, shape.e, shape.n2
    eager = m.compile == "none" and not m.fused_kernels
    casts = eager and m.softmax_in_fp32 and e < _FP32

    def made(*what: tuple[str, int], keeps: tuple[str, ...] = (), hands_on: bool = False) -> Operator:
        tensors = tuple(Tensor(f"{name}:{part}", size * n2, core=True) for part, size in what)
        kept = tuple(f"{name}:{part}" for part in keeps)
        return Operator(tensors, keeps=kept, hands_on=hands_on, core=True)

    chain: list[Operator] = []
    if eager:
        chain += [made(("scaled", e)), made(("masked", e), hands_on=True)]
    if casts and shape.train.precision == "bf16":
        # Of fp16, softmax reads as it is (ATen, SoftMax.cpp, half_to_float).
        chain.append(made(("fp32", _FP32)))
    chain.append(made(("probabilities", _FP32 if casts else e), keeps=("probabilities",)))
    if casts:
        # The local name of the scores is rebound by the cast.
        chain.append(replace(made(("cast", e)), needs=(f"{name}:masked",)))
    if m.attention_dropout:
        chain.append(made(("dropped", e), ("mask", 1), keeps=("mask",)))
    return held(tuple(chain), until=".".join(name.split(".")[:2]))


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


def rotary(shape: Shape, name: str) -> Step:
    """Rotary positions on query and key: rotate-half, two products and a sum, each as its own kernel unless fused.

    Backward takes the halves apart: two tensors of zeros with a half copied in, and their sum.
    """
    elements = shape.tokens * (shape.query_width + shape.kv_width)
    roles = (("q", shape.query_width), ("k", shape.kv_width))
    operators = tuple(op for role, width in roles for op in _rotated(shape, name, role, shape.tensor_bytes(width)))
    if shape.model.compile != "none":
        step = inductor.rotary(shape)
    elif shape.model.fused_kernels:
        step = elementwise(2 * shape.e * elements, 2 * shape.e * elements, 2, 2)
    else:
        step = elementwise(10 * shape.e * elements, 15 * shape.e * elements, 10, 18)
    return step.running(*operators)


def _rotated(shape: Shape, name: str, role: str, nbytes: int) -> tuple[Operator, ...]:
    """x·cos + turned(x)·sin, where turned exchanges the halves and negates one."""

    def tensor(what: str, size: int = nbytes) -> Tensor:
        return Tensor(f"{name}:{role}_{what}", size)

    source = (f"{name}:{role}",)
    if shape.model.compile != "none" or shape.model.fused_kernels:
        return (Operator((tensor("rotated"),), reads=source, named=source[0], until=name),)
    cosine, sine, first, second, negated = (
        f"{name}:{role}_{what}" for what in ("cosine", "sine", "first", "second", "negated")
    )
    return (
        Operator((tensor("cosine"),), reads=source),
        # Halves: the gradient of each becomes one of the whole, with zeros in the other half.
        Operator(views=(Tensor(first, nbytes // 2),), reads=source),
        Operator(views=(Tensor(second, nbytes // 2),), reads=source),
        Operator((Tensor(negated, nbytes // 2),)),
        Operator((tensor("turned"),), reads=(negated, first), hands_on=True),
        Operator((tensor("sine"),)),
        Operator((tensor("rotated"),), reads=(cosine, sine), hands_on=True, named=source[0], until=name),
    )
