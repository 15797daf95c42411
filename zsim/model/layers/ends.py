"""Before and behind the blocks: embeddings, logits and loss. Legend as in `model`."""

from dataclasses import replace

from zsim.model.layers import inductor
from zsim.model.layers.dense import elementwise
from zsim.model.layers.layer import Gradient, Layer
from zsim.model.layers.shape import Shape
from zsim.model.modules import NOTHING, Kernels, Parameter, Tensor
from zsim.ops import Gemm

WORDS = "embeddings.word_embeddings"
LOGITS = "logits"
"""What the training loop keeps until backward is through, and a compiled loss reads there."""
LOG_SOFTMAX = "logits:log_softmax"
"""What the loss keeps, in fp32."""


def table(shape: Shape, name: str, rows: int, *, width: int = 0, added: bool = False, tied_to: str = "") -> Layer:
    """An embedding table: gather and, where `added`, the sum with the tables in front of it.

    Backward writes the whole table, then scatters. A table tied to another is that one's parameter; its gradient is
    complete there.
    """
    width = width or shape.model.hidden
    e, elements = shape.e, shape.tokens * width
    weight = f"{tied_to or name}.weight"
    forward = Kernels((), 2 * e * elements + 3 * e * elements * added, 1 + added)
    if shape.model.compile == "block":
        forward = inductor.table(shape, width, added=added)
    return Layer(
        name,
        (Parameter(weight, rows * width),),
        forward=forward,
        to_weights=(Gradient(Kernels((), e * rows * width + 3 * e * elements, 3)),),
        late_gradients=(weight,) if tied_to else (),
    )


def decoder(shape: Shape, name: str, *, bias: str = "") -> Layer:
    """Logits of every token and the cross entropy; `bias` names a parameter beside the weight, which may be tied."""
    m, e, tokens = shape.model, shape.e, shape.tokens
    logits = tokens * m.vocab
    width = m.embedding_width
    weight = f"{WORDS if m.tied_embeddings else name}.weight"
    layer = Layer(
        name,
        (Parameter(weight, width * m.vocab),),
        forward=Kernels((Gemm(tokens, m.vocab, width),), 0, 1),
        to_input=Gradient(Kernels((Gemm(tokens, width, m.vocab),), 0, 1)),
        to_weights=(Gradient(Kernels((Gemm(m.vocab, width, tokens),), 0, 1)),),
        late_gradients=(weight,) if m.tied_embeddings else (),
    )
    if bias:
        layer = replace(
            layer,
            parameters=(*layer.parameters, Parameter(bias, m.vocab)),
            # torch.compile leaves the bias to the GEMM.
            forward=layer.forward + (Kernels((), 2 * e * logits, 1) if m.compile == "none" else NOTHING),
            to_weights=(*layer.to_weights, Gradient(Kernels((), e * logits, 1))),
        )
    forward_bytes, backward_bytes = _scratch_of_loss(shape)
    layer = replace(layer, forward_scratch_bytes=forward_bytes, backward_scratch_bytes=backward_bytes)
    if m.compile != "none":
        return layer.followed_by(inductor.loss(shape, LOGITS))
    # Cast to fp32, log-softmax with loss; backward writes the gradient in both precisions.
    kept = (Tensor(LOGITS, e * logits), Tensor(LOG_SOFTMAX, 4 * logits))
    return layer.followed_by(elementwise((e + 4) * logits + 10 * logits, (8 + e) * logits, 4, 3, *kept))


def _scratch_of_loss(shape: Shape) -> tuple[int, int]:
    """What the loss of transformers holds besides the logits and the log-softmax that are kept, forward and backward.

    Forward casts the logits to fp32 first. Backward holds the gradients of the log-softmax and of its input at once,
    both in fp32. In kernels that write in place, and compiled ones, only the gradient of the logits is another tensor.
    """
    logits = shape.tokens * shape.model.vocab
    if shape.model.compile != "none" or shape.model.fused_kernels:
        return 0, shape.e * logits
    return 0 if shape.e == 4 else 4 * logits, 8 * logits


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
