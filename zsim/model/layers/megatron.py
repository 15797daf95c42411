"""Where Megatron-LM's GPT differs from Hugging Face's: kernels of the core, embedding and loss. Legend as in `model`.

Sources: megatron/core of megatron-core 0.3.0 and 0.5.0 (transformer/dot_product_attention.py, tensor_parallel/
cross_entropy.py), which took them over from Megatron-LM 2 and 3. Leaves out: that queries, keys and values are read
where the projection put them, so that memory counts copies that are kept in their place.
"""

from dataclasses import replace
from typing import Final

from zsim.model.layers.attention import attention
from zsim.model.layers.dense import dropout, elementwise
from zsim.model.layers.ends import LOG_SOFTMAX, LOGITS, logits_of
from zsim.model.layers.layer import Gradient, Layer, Step
from zsim.model.layers.operators import Operator
from zsim.model.layers.shape import Shape
from zsim.model.modules import Kernels, Tensor

_FP32: Final = 4
"""Bytes of an element."""


def wrapped(layer: Layer) -> Layer:
    """All that the layer and those below it launch comes from within Megatron-LM's modules and functions."""

    def of(kernels: Kernels) -> Kernels:
        return replace(kernels, num_wrapped=kernels.num_kernels)

    def computed(gradient: Gradient) -> Gradient:
        return replace(gradient, kernels=of(gradient.kernels))

    return replace(
        layer,
        forward=of(layer.forward),
        core=of(layer.core),
        through=computed(layer.through),
        to_input=computed(layer.to_input),
        to_weights=tuple(computed(gradient) for gradient in layer.to_weights),
        children=tuple(wrapped(child) for child in layer.children),
    )


def core_attention(shape: Shape, name: str, attention_name: str) -> Layer:
    """The core, booked on the softmax module: its products take the heads as they lie in [s, b, h].

    Forward copies the context alone. Backward copies its gradient, puts those of query, key and value together and
    scales two of them (`baddbmm` has the scale as its alpha).
    """
    core = attention(shape, attention_name)
    if shape.model.attention == "eager":
        width = shape.tensor_bytes(shape.query_width)
        forward, backward = core.forward, core.backward.kernels
        core = replace(
            core,
            forward=replace(forward, nbytes=forward.nbytes - 6 * width, num_kernels=forward.num_kernels - 3),
            backward=replace(core.backward, kernels=replace(backward, nbytes=backward.nbytes + 4 * width)),
        )
    return Layer(name).with_core(core)


def transposed(shape: Shape) -> Step:
    """From [b, s, h] to [s, b, h] or back, copied."""
    output = Tensor("embeddings:transposed", shape.e * shape.n1)
    return elementwise(2 * shape.e * shape.n1, 2 * shape.e * shape.n1, 1, 1).running(Operator((output,)))


def hidden_dropout(shape: Shape, name: str) -> Step:
    """Part of the function that adds the residual."""
    layer = dropout(shape, name, shape.n1)
    return Step(layer.forward, layer.through, layer.operators)


def embedding_dropout(shape: Shape, name: str) -> Layer:
    """Dropout by itself: no residual is added behind embeddings."""
    return dropout(replace(shape, model=replace(shape.model, fused_kernels=False)), name, shape.n1)


def parallel_decoder(shape: Shape, name: str) -> Layer:
    """Logits and `vocab_parallel_cross_entropy` on one tensor-parallel rank: operator by operator, in fp32.

    Per logit: cast; maximum; subtracted; exponential in place; sum; divided in place. Besides some 26 kernels on
    numbers a token: masks, the target's logit, the mean over unmasked tokens. Backward updates the targets' entries,
    multiplies in place and casts back. Leaves out the three all-reduces within the tensor-parallel group.
    """
    e, logits = shape.e, shape.tokens * shape.model.vocab
    softmax = Tensor(LOG_SOFTMAX, _FP32 * logits)
    casts = e < _FP32
    loss = elementwise(
        ((e + 4) * casts + 4 + 8 + 8 + 4 + 8) * logits,
        (8 + (e + 4) * casts) * logits,
        5 + casts + 26,
        1 + casts + 12,
        softmax,
    )
    cast = (Operator((Tensor(f"{LOGITS}:fp32", _FP32 * logits),)),) if casts else ()
    operators = (
        *cast,
        Operator((softmax,), keeps=(LOG_SOFTMAX,)),
        Operator((Tensor("loss", _FP32),), keeps=(LOG_SOFTMAX,)),
    )
    return logits_of(shape, name).followed_by(loss.running(*operators))
