"""Layers of a transformer: parameters, GEMMs, bytes and kernels of one visit; each count by PyTorch's eager kernels.

Legend as in `model`. A pair of `Kernels` is (forward, backward).
"""

from dataclasses import dataclass

from zsim.modules import Kernels, Module, Parameter
from zsim.ops import Gemm
from zsim.spec import ModelSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """The symbols of `model`'s legend."""

    model: ModelSpec
    train: TrainSpec

    @property
    def e(self) -> int:
        """Bytes of an activation element."""
        return self.train.element_bytes

    @property
    def tokens(self) -> int:
        """T = b·s."""
        return self.train.micro_batch * self.train.seq_len

    @property
    def n1(self) -> int:
        """Elements of a hidden state."""
        return self.tokens * self.model.hidden

    @property
    def n2(self) -> int:
        """Elements of the attention scores."""
        return self.train.micro_batch * self.model.heads * self.train.seq_len**2

    @property
    def query_width(self) -> int:
        """Queries of all heads of one token."""
        return self.model.heads * self.model.head_dim

    @property
    def kv_width(self) -> int:
        """Keys of all key/value heads of one token."""
        return self.model.kv_heads * self.model.head_dim


def linear(shape: Shape, name: str, n_in: int, n_out: int, *, bias: bool) -> Module:
    """A linear layer on T tokens; the bias is a kernel of its own unless kernels are fused into the GEMM."""
    tokens, e = shape.tokens, shape.e
    separate_bias = bias and not shape.model.fused_kernels
    weights = [Parameter(f"{name}.weight", n_in * n_out)]
    if bias:
        weights.append(Parameter(f"{name}.bias", n_out))
    return Module(
        name,
        tuple(weights),
        forward=Kernels((Gemm(tokens, n_out, n_in),), 2 * e * tokens * n_out * separate_bias, 1 + separate_bias),
        backward=Kernels((Gemm(tokens, n_in, n_out), Gemm(n_out, n_in, tokens)), e * tokens * n_out * bias, 2 + bias),
    )


def elementwise(
    forward_bytes: int, backward_bytes: int, forward_kernels: int, backward_kernels: int
) -> tuple[Kernels, Kernels]:
    """Memory-bound kernels of both directions."""
    return Kernels((), forward_bytes, forward_kernels), Kernels((), backward_bytes, backward_kernels)


def dropout(shape: Shape, name: str, num_elements: int) -> Module:
    """Reads and writes the elements and a mask of one byte; nothing when fused or switched off."""
    if not shape.model.dropout or shape.model.fused_kernels:
        return Module(name)
    nbytes = (2 * shape.e + 1) * num_elements
    return Module(name, (), *elementwise(nbytes, nbytes, 1, 1))


def norm(shape: Shape, name: str, *, bias: bool = True) -> Module:
    """LayerNorm: read and write forward; two kernels, four passes backward. RMSNorm unfused runs as six kernels."""
    h, e, n1 = shape.model.hidden, shape.e, shape.n1
    weights = (
        (Parameter(f"{name}.weight", h), Parameter(f"{name}.bias", h)) if bias else (Parameter(f"{name}.weight", h),)
    )
    if bias or shape.model.fused_kernels:
        return Module(name, weights, *elementwise(2 * e * n1, 4 * e * n1, 1, 3))
    # Hugging Face's RMSNorm: cast to fp32, square, mean, rsqrt-multiply, cast back, weight.
    return Module(name, weights, *elementwise((6 * e + 16) * n1, (6 * e + 24) * n1, 6, 9))


def residual(shape: Shape) -> tuple[Kernels, Kernels]:
    """Residual add forward (three passes), gradient accumulation backward.

    Fused, it takes bias, dropout and add in one pass: two reads, one write, and the mask.
    """
    e, n1 = shape.e, shape.n1
    if shape.model.fused_kernels:
        return elementwise((3 * e + 1) * n1, (4 * e + 1) * n1, 1, 2)
    return elementwise(3 * e * n1, 3 * e * n1, 1, 1)


def attention(shape: Shape) -> tuple[Kernels, Kernels]:
    """Scores, softmax and context, without projections and without the dropout module."""
    m, b, s = shape.model, shape.train.micro_batch, shape.train.seq_len
    e, width = shape.e, shape.query_width
    qo_bytes, kv_bytes = e * shape.tokens * width, 2 * e * shape.tokens * shape.kv_width
    if m.attention != "eager":
        # One kernel each way that streams over keys, with the two products of forward and the four of backward inside;
        # backward computes the scores once more (FlashAttention 2, section 3).
        rows = b * m.heads * s
        backward = (Gemm(rows, m.head_dim, 4 * s), Gemm(rows, m.head_dim, s, recomputed=True))
        return (
            Kernels((Gemm(rows, m.head_dim, 2 * s),), 2 * qo_bytes + kv_bytes, 1),
            Kernels(backward, 4 * qo_bytes + 2 * kv_bytes, 3),
        )
    batch = b * m.heads
    scores, context = Gemm(s, s, m.head_dim, batch), Gemm(s, m.head_dim, s, batch)
    # Contiguous copies of query, key, value (repeated to all heads) and context; each copied back in backward.
    copies = 2 * qo_bytes * 4
    core = (
        Kernels((scores, context), copies, 6),
        # Both operands of both products: the gradients of value, probabilities, query and key.
        Kernels((context, scores, context, context), copies, 8),
    )
    return together(core, _softmax(shape))


def _softmax(shape: Shape) -> tuple[Kernels, Kernels]:
    """Scale, mask and softmax: three kernels, of which the mask has no gradient; one when fused.

    A fused softmax is followed by a dropout that is no module of its own any more.
    """
    m, e, n2 = shape.model, shape.e, shape.n2
    if not m.fused_kernels:
        return elementwise(6 * e * n2, 5 * e * n2, 3, 2)
    fused = elementwise(2 * e * n2, 3 * e * n2, 1, 1)
    dropout_bytes = (2 * e + 1) * n2
    return together(fused, elementwise(dropout_bytes, dropout_bytes, 1, 1)) if m.dropout else fused


def activation(shape: Shape) -> tuple[Kernels, Kernels]:
    """GELU on T × f; with SwiGLU a product besides."""
    e, elements = shape.e, shape.tokens * shape.model.ffn
    if shape.model.family == "llama":
        if shape.model.fused_kernels:
            return elementwise(3 * e * elements, 5 * e * elements, 1, 1)
        return elementwise(5 * e * elements, 9 * e * elements, 2, 3)
    return elementwise(2 * e * elements, 3 * e * elements, 1, 1)


def input_gradients(shape: Shape, num_branches: int) -> tuple[Kernels, Kernels]:
    """Gradients of one input used by several modules: one accumulation for each further use."""
    extra = num_branches - 1
    return elementwise(0, 3 * shape.e * shape.n1 * extra, 0, extra)


def together(left: tuple[Kernels, Kernels], right: tuple[Kernels, Kernels]) -> tuple[Kernels, Kernels]:
    """Forward and backward kernels of two parts together."""
    return left[0] + right[0], left[1] + right[1]


def rotary(shape: Shape) -> tuple[Kernels, Kernels]:
    """Rotary positions on query and key: rotate-half, two products and a sum, each as its own kernel unless fused."""
    elements = shape.tokens * (shape.query_width + shape.kv_width)
    if shape.model.fused_kernels:
        return elementwise(2 * shape.e * elements, 2 * shape.e * elements, 2, 2)
    return elementwise(11 * shape.e * elements, 11 * shape.e * elements, 10, 10)
