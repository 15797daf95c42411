"""Before and behind the blocks: embeddings, logits and loss. Legend as in `model`."""

from dataclasses import replace
from typing import Final

from zsim.model.layers import inductor
from zsim.model.layers.dense import elementwise
from zsim.model.layers.layer import Gradient, Layer
from zsim.model.layers.operators import INPUT, PREVIOUS, Operator, Operators
from zsim.model.layers.shape import Shape
from zsim.model.modules import NOTHING, Kernels, Parameter, Tensor
from zsim.ops import Gemm

_FP32: Final = 4
"""Bytes of an element."""
WORDS = "embeddings.word_embeddings"
LOGITS = "logits"
"""What the training loop keeps until backward is through, and a compiled loss reads there."""
LOG_SOFTMAX = "logits:log_softmax"
"""What the loss keeps, in fp32."""


def table(
    shape: Shape,
    name: str,
    rows: int,
    *,
    width: int = 0,
    added: bool = False,
    tied_to: str = "",
    until: str = "",
    once: bool = False,
) -> Layer:
    """An embedding table: gather and, where `added`, the sum with the tables in front of it.

    Local names hold what is found until a module is through; `once` where all samples look up the same rows.

    Backward writes the whole table, then scatters. A table tied to another is that one's parameter; its gradient is
    complete there.
    """
    width = width or shape.model.hidden
    e, elements = shape.e, shape.tokens * width
    weight = f"{tied_to or name}.weight"
    forward = Kernels((), 2 * e * elements + 3 * e * elements * added, 1 + added)
    if shape.model.compile == "block":
        forward = inductor.table(shape, width, added=added)
    output = Tensor(f"{name}:output", e * elements // (shape.train.micro_batch if once else 1))
    operators: Operators = (Operator((output,), reads=(), has_weights=True, until=until),)
    if added and shape.model.compile == "block":
        # Part of the kernel that writes the first.
        operators = (Operator(views=(output._replace(nbytes=e * elements),), hands_on=True, has_weights=True),)
    elif added:
        summed = Tensor(f"{name}:sum", e * elements)
        operators = (*operators, Operator((summed,), reads=(INPUT, PREVIOUS), hands_on=True))
    return Layer(
        name,
        (Parameter(weight, rows * width),),
        forward=forward,
        to_weights=(Gradient(Kernels((), e * rows * width + 3 * e * elements, 3)),),
        late_gradients=(weight,) if tied_to else (),
        operators=operators,
    )


def logits_of(shape: Shape, name: str, *, keeps: tuple[str, ...] = ()) -> Layer:
    """The product that makes logits of every token, its weight perhaps the embeddings'; `keeps` beside its input."""
    m, tokens, width = shape.model, shape.tokens, shape.model.embedding_width
    kept = Tensor(f"{name}:input", shape.tensor_bytes(width))
    weight = f"{WORDS if m.tied_embeddings else name}.weight"
    output = Tensor(LOGITS, shape.e * tokens * m.vocab)
    return Layer(
        name,
        (Parameter(weight, width * m.vocab),),
        forward=Kernels((Gemm(tokens, m.vocab, width),), 0, 1),
        to_input=Gradient(Kernels((Gemm(tokens, width, m.vocab),), 0, 1)),
        to_weights=(Gradient(Kernels((Gemm(m.vocab, width, tokens),), 0, 1), (kept,)),),
        late_gradients=(weight,) if m.tied_embeddings else (),
        operators=(
            Operator((output,), binds=(kept.name,), keeps=(kept.name, *keeps), has_weights=True, flattens=True),
        ),
    )


def decoder(shape: Shape, name: str, *, bias: str = "") -> Layer:
    """Logits of every token and the cross entropy; `bias` names a parameter beside the weight, which may be tied."""
    m, e, tokens = shape.model, shape.e, shape.tokens
    logits = tokens * m.vocab
    # The training loop keeps the logits until backward is through.
    layer = logits_of(shape, name, keeps=(LOGITS,))
    layer = replace(layer, operators=(*layer.operators, *_loss_operators(shape, logits)))
    if bias:
        layer = replace(
            layer,
            parameters=(*layer.parameters, Parameter(bias, m.vocab)),
            # torch.compile leaves the bias to the GEMM.
            forward=layer.forward + (Kernels((), 2 * e * logits, 1) if m.compile == "none" else NOTHING),
            to_weights=(*layer.to_weights, Gradient(Kernels((), e * logits, 1))),
        )
    if m.compile != "none":
        return layer.followed_by(inductor.loss(shape, LOGITS))
    kept_by_loss = (Tensor(LOGITS, e * logits), Tensor(LOG_SOFTMAX, _loss_bytes(shape) * logits))
    if not _casts_logits(shape):
        # Log-softmax with loss; backward writes the gradients of both.
        return layer.followed_by(elementwise(5 * e * logits // 2, 2 * e * logits, 3, 2, *kept_by_loss))
    # Cast to fp32, log-softmax with loss; backward writes the gradient in both precisions.
    return layer.followed_by(elementwise((e + 4) * logits + 10 * logits, (8 + e) * logits, 4, 3, *kept_by_loss))


def _casts_logits(shape: Shape) -> bool:
    """Causal language models take the loss in fp32; masked ones and T5 of the logits as they are (transformers)."""
    return shape.e < _FP32 and shape.model.family not in {"bert", "t5"}


def _loss_bytes(shape: Shape) -> int:
    """Of an element of the log-softmax; one kernel computes it in fp32 from logits as they are."""
    fused = shape.model.fused_kernels or shape.model.compile != "none"
    return _FP32 if fused or _casts_logits(shape) else shape.e


def _loss_operators(shape: Shape, logits: int) -> Operators:
    """Cast, log-softmax and its mean over the labels (transformers, loss/loss_utils.py).

    In kernels that write in place, and compiled ones, only the gradient of the logits is another tensor.
    """
    loss = Tensor("loss", 4)
    if shape.model.compile != "none":
        return (Operator((loss,), keeps=(LOGITS,)),)
    probabilities = Tensor(LOG_SOFTMAX, _loss_bytes(shape) * logits)
    if shape.model.fused_kernels:
        return (Operator((probabilities,), keeps=(LOG_SOFTMAX,)), Operator(views=(loss,), hands_on=True))
    cast = (Operator((Tensor("logits:fp32", _FP32 * logits),)),) if _casts_logits(shape) else ()
    return (*cast, Operator((probabilities,), keeps=(LOG_SOFTMAX,)), Operator((loss,), keeps=(LOG_SOFTMAX,)))


def bias_table(shape: Shape, name: str, buckets: int) -> Layer:
    """T5's relative position bias: a number for each bucket of distances and head."""
    numel = buckets * shape.model.heads
    scores = shape.model.heads * shape.train.seq_len**2
    return Layer(
        name,
        (Parameter(f"{name}.weight", numel),),
        forward=Kernels((), 2 * shape.e * scores, 1),
        to_weights=(Gradient(Kernels((), 3 * shape.e * scores, 3)),),
    )
