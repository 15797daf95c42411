"""A transformer as its modules: parameters, GEMMs, bytes, kernels and saved activations of each visit.

Legend: b micro-batch, s sequence length, T = b·s tokens, h hidden, f feed-forward width, a heads, d head dimension,
kv key/value heads, v vocabulary, e bytes of an activation element. N1 = T·h and N2 = b·a·s² elements.

A module is what `nn.Module` is to Hugging Face's models: containers and dropouts are modules too, because ZeRO-3 hooks
every one of them. Kernels that a container launches between its children are booked on the child next to them.
Leaves out: the position-id arithmetic, attention-mask construction, and kernels on tensors smaller than T elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.ops import Gemm
from zsim.spec import ModelSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor; `name` is unique in the model."""

    name: str
    numel: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one visit launches: GEMMs, bytes of memory-bound kernels, launches in all."""

    gemms: tuple[Gemm, ...] = ()
    nbytes: int = 0
    num_kernels: int = 0

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(self.gemms + other.gemms, self.nbytes + other.nbytes, self.num_kernels + other.num_kernels)


@dataclass(frozen=True, slots=True)
class Module:
    """One nn.Module with what a forward and a backward visit of it cost."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    forward: Kernels = Kernels()
    backward: Kernels = Kernels()
    children: tuple["Module", ...] = ()
    late_gradients: tuple[str, ...] = ()
    """Parameters whose gradient is complete only at another module (tied weights)."""

    def in_forward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-forward hooks run."""
        yield self
        for child in self.children:
            yield from child.in_forward_order()

    def in_backward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-backward hooks run: outer first, last child first."""
        yield self
        for child in reversed(self.children):
            yield from child.in_backward_order()


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Embedding, equal blocks and head, with the bytes that each keeps for its backward."""

    embedding: Module
    blocks: tuple[Module, ...]
    head: Module
    embedding_saved_bytes: int
    block_input_bytes: int
    block_saved_bytes: int
    head_saved_bytes: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, in order of construction (DeepSpeed's ds_id)."""
        seen: dict[str, Parameter] = {}
        for root in (self.embedding, *self.blocks, self.head):
            for module in root.in_forward_order():
                seen.update((parameter.name, parameter) for parameter in module.parameters)
        return tuple(seen.values())

    @property
    def num_parameters(self) -> int:
        """Ψ: tied weights counted once."""
        return sum(parameter.numel for parameter in self.parameters)


def build(model: ModelSpec, train: TrainSpec) -> ModelGraph:
    """The modules of a model at one batch shape."""
    shape = _Shape(model, train)
    block = _BLOCKS[model.family]
    return ModelGraph(
        embedding=_embedding(shape),
        blocks=tuple(block(shape, f"layer.{layer}") for layer in range(model.num_layers)),
        head=_head(shape),
        embedding_saved_bytes=shape.e * shape.n1,
        block_input_bytes=shape.e * shape.n1,
        block_saved_bytes=_block_saved_bytes(shape),
        head_saved_bytes=_head_saved_bytes(shape),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """The symbols of the module docstring."""

    model: ModelSpec
    train: TrainSpec

    @property
    def e(self) -> int:
        return self.train.element_bytes

    @property
    def tokens(self) -> int:
        return self.train.micro_batch * self.train.seq_len

    @property
    def n1(self) -> int:
        return self.tokens * self.model.hidden

    @property
    def n2(self) -> int:
        return self.train.micro_batch * self.model.heads * self.train.seq_len**2

    @property
    def query_width(self) -> int:
        return self.model.heads * self.model.head_dim

    @property
    def kv_width(self) -> int:
        return self.model.kv_heads * self.model.head_dim


def _linear(shape: _Shape, name: str, n_in: int, n_out: int, *, bias: bool) -> Module:
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


def _elementwise(
    forward_bytes: int, backward_bytes: int, forward_kernels: int, backward_kernels: int
) -> tuple[Kernels, Kernels]:
    return Kernels((), forward_bytes, forward_kernels), Kernels((), backward_bytes, backward_kernels)


def _with(module: Module, extra: tuple[Kernels, Kernels]) -> Module:
    """The module with further kernels booked on its visits."""
    forward, backward = extra
    return Module(
        module.name,
        module.parameters,
        module.forward + forward,
        module.backward + backward,
        module.children,
        module.late_gradients,
    )


def _dropout(shape: _Shape, name: str, num_elements: int) -> Module:
    """Reads and writes the elements and a mask of one byte; nothing when fused or switched off."""
    if not shape.model.dropout or shape.model.fused_kernels:
        return Module(name)
    nbytes = (2 * shape.e + 1) * num_elements
    return Module(name, (), *_elementwise(nbytes, nbytes, 1, 1))


def _norm(shape: _Shape, name: str, *, bias: bool = True) -> Module:
    """LayerNorm: read and write forward; two kernels, four passes backward. RMSNorm unfused runs as six kernels."""
    h, e, n1 = shape.model.hidden, shape.e, shape.n1
    weights = (
        (Parameter(f"{name}.weight", h), Parameter(f"{name}.bias", h)) if bias else (Parameter(f"{name}.weight", h),)
    )
    if bias or shape.model.fused_kernels:
        return Module(name, weights, *_elementwise(2 * e * n1, 4 * e * n1, 1, 3))
    # Hugging Face's RMSNorm: cast to fp32, square, mean, rsqrt-multiply, cast back, weight.
    return Module(name, weights, *_elementwise((6 * e + 16) * n1, (6 * e + 24) * n1, 6, 9))


def _residual(shape: _Shape) -> tuple[Kernels, Kernels]:
    """Residual add forward (three passes), gradient accumulation backward.

    Fused, it takes bias, dropout and add in one pass: two reads, one write, and the mask.
    """
    e, n1 = shape.e, shape.n1
    if shape.model.fused_kernels:
        return _elementwise((3 * e + 1) * n1, (4 * e + 1) * n1, 1, 2)
    return _elementwise(3 * e * n1, 3 * e * n1, 1, 1)


def _attention(shape: _Shape) -> tuple[Kernels, Kernels]:
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
    return _sum(core, _softmax(shape))


def _softmax(shape: _Shape) -> tuple[Kernels, Kernels]:
    """Scale, mask and softmax: three kernels, of which the mask has no gradient; one when fused.

    A fused softmax is followed by a dropout that is no module of its own any more.
    """
    m, e, n2 = shape.model, shape.e, shape.n2
    if not m.fused_kernels:
        return _elementwise(6 * e * n2, 5 * e * n2, 3, 2)
    fused = _elementwise(2 * e * n2, 3 * e * n2, 1, 1)
    dropout_bytes = (2 * e + 1) * n2
    return _sum(fused, _elementwise(dropout_bytes, dropout_bytes, 1, 1)) if m.dropout else fused


def _activation(shape: _Shape) -> tuple[Kernels, Kernels]:
    """GELU on T × f; with SwiGLU a product besides."""
    e, elements = shape.e, shape.tokens * shape.model.ffn
    if shape.model.family == "llama":
        if shape.model.fused_kernels:
            return _elementwise(3 * e * elements, 5 * e * elements, 1, 1)
        return _elementwise(5 * e * elements, 9 * e * elements, 2, 3)
    return _elementwise(2 * e * elements, 3 * e * elements, 1, 1)


def _input_gradients(shape: _Shape, num_branches: int) -> tuple[Kernels, Kernels]:
    """Gradients of one input used by several modules: one accumulation for each further use."""
    extra = num_branches - 1
    return _elementwise(0, 3 * shape.e * shape.n1 * extra, 0, extra)


def _bert_block(shape: _Shape, name: str) -> Module:
    """BertLayer / RobertaLayer: 17 modules, 8 of them with parameters, 16 tensors."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attention = f"{name}.attention"
    dropout = _dropout(shape, f"{attention}.self.dropout", shape.n2 if shape.model.attention == "eager" else 0)
    self_attention = Module(
        f"{attention}.self",
        children=(
            _with(_linear(shape, f"{attention}.self.query", h, q, bias=True), _input_gradients(shape, 3)),
            _linear(shape, f"{attention}.self.key", h, shape.kv_width, bias=True),
            _linear(shape, f"{attention}.self.value", h, shape.kv_width, bias=True),
            _with(dropout, _attention(shape)),
        ),
    )
    attention_output = _bert_output(shape, f"{attention}.output", q)
    feed_forward = _with(_linear(shape, f"{name}.intermediate.dense", h, f, bias=True), _activation(shape))
    return Module(
        name,
        children=(
            Module(attention, children=(self_attention, attention_output)),
            Module(f"{name}.intermediate", children=(feed_forward,)),
            _bert_output(shape, f"{name}.output", f),
        ),
    )


def _bert_output(shape: _Shape, name: str, n_in: int) -> Module:
    return Module(
        name,
        children=(
            _linear(shape, f"{name}.dense", n_in, shape.model.hidden, bias=True),
            _dropout(shape, f"{name}.dropout", shape.n1),
            _with(_norm(shape, f"{name}.LayerNorm"), _residual(shape)),
        ),
    )


def _gpt2_block(shape: _Shape, name: str) -> Module:
    """GPT2Block: 12 modules, 12 tensors; query, key and value in one projection."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    dropout = _dropout(shape, f"{name}.attn.attn_dropout", shape.n2 if shape.model.attention == "eager" else 0)
    attention = Module(
        f"{name}.attn",
        children=(
            _linear(shape, f"{name}.attn.c_attn", h, q + 2 * shape.kv_width, bias=True),
            _with(dropout, _attention(shape)),
            _linear(shape, f"{name}.attn.c_proj", q, h, bias=True),
            _with(_dropout(shape, f"{name}.attn.resid_dropout", shape.n1), _residual(shape)),
        ),
    )
    feed_forward = Module(
        f"{name}.mlp",
        children=(
            _with(_linear(shape, f"{name}.mlp.c_fc", h, f, bias=True), _activation(shape)),
            _linear(shape, f"{name}.mlp.c_proj", f, h, bias=True),
            _with(_dropout(shape, f"{name}.mlp.dropout", shape.n1), _residual(shape)),
        ),
    )
    return Module(name, children=(_norm(shape, f"{name}.ln_1"), attention, _norm(shape, f"{name}.ln_2"), feed_forward))


def _llama_block(shape: _Shape, name: str) -> Module:
    """LlamaDecoderLayer: 13 modules, 9 tensors; grouped-query attention, SwiGLU, RMSNorm, no biases."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attention = Module(
        f"{name}.self_attn",
        children=(
            _with(_linear(shape, f"{name}.self_attn.q_proj", h, q, bias=False), _input_gradients(shape, 3)),
            _linear(shape, f"{name}.self_attn.k_proj", h, shape.kv_width, bias=False),
            _with(_linear(shape, f"{name}.self_attn.v_proj", h, shape.kv_width, bias=False), _rotary(shape)),
            _with(
                _linear(shape, f"{name}.self_attn.o_proj", q, h, bias=False),
                _sum(_attention(shape), _residual(shape)),
            ),
        ),
    )
    feed_forward = Module(
        f"{name}.mlp",
        children=(
            _with(_linear(shape, f"{name}.mlp.gate_proj", h, f, bias=False), _input_gradients(shape, 2)),
            Module(f"{name}.mlp.act_fn"),
            _with(_linear(shape, f"{name}.mlp.up_proj", h, f, bias=False), _activation(shape)),
            _with(_linear(shape, f"{name}.mlp.down_proj", f, h, bias=False), _residual(shape)),
        ),
    )
    return Module(
        name,
        children=(
            _norm(shape, f"{name}.input_layernorm", bias=False),
            attention,
            _norm(shape, f"{name}.post_attention_layernorm", bias=False),
            feed_forward,
        ),
    )


def _sum(left: tuple[Kernels, Kernels], right: tuple[Kernels, Kernels]) -> tuple[Kernels, Kernels]:
    """Forward and backward kernels of two parts together."""
    return left[0] + right[0], left[1] + right[1]


def _rotary(shape: _Shape) -> tuple[Kernels, Kernels]:
    """Rotary positions on query and key: rotate-half, two products and a sum, each as its own kernel unless fused."""
    elements = shape.tokens * (shape.query_width + shape.kv_width)
    if shape.model.fused_kernels:
        return _elementwise(2 * shape.e * elements, 2 * shape.e * elements, 2, 2)
    return _elementwise(11 * shape.e * elements, 11 * shape.e * elements, 10, 10)


_BLOCKS = {"bert": _bert_block, "gpt2": _gpt2_block, "llama": _llama_block}


def _embedding(shape: _Shape) -> Module:
    """Token, position and type embeddings, their sum, norm and dropout as far as the family has them."""
    m, e, n1 = shape.model, shape.e, shape.n1
    tables = {"word_embeddings": m.vocab, "position_embeddings": m.max_positions, "token_type_embeddings": m.type_vocab}
    children = [
        Module(
            f"embeddings.{table}",
            (Parameter(f"embeddings.{table}.weight", rows * m.hidden),),
            # Gather and, from the second table on, add; backward writes the whole table, then scatters.
            *_elementwise(2 * e * n1 + 3 * e * n1 * (i > 0), e * rows * m.hidden + 3 * e * n1, 1 + (i > 0), 3),
        )
        for i, (table, rows) in enumerate(tables.items())
        if rows
    ]
    if m.family == "bert":
        children.append(_norm(shape, "embeddings.LayerNorm"))
    if m.family != "llama":
        children.append(_dropout(shape, "embeddings.dropout", n1))
    return Module("embeddings", children=tuple(children))


def _head(shape: _Shape) -> Module:
    """Final norm or transform, logits of every token, and the cross entropy."""
    m, e, tokens = shape.model, shape.e, shape.tokens
    logits = tokens * m.vocab
    decoder_name = "embeddings.word_embeddings" if m.tied_embeddings else "lm_head.decoder"
    # Cast to fp32, log-softmax with loss; backward writes the gradient in both precisions.
    loss = _elementwise((e + 4) * logits + 10 * logits, (8 + e) * logits, 4, 3)
    weights = [Parameter(f"{decoder_name}.weight", m.hidden * m.vocab)]
    if m.family == "bert":
        weights.append(Parameter("lm_head.bias", m.vocab))
        loss = _sum(loss, _elementwise(2 * e * logits, e * logits, 1, 1))
    decoder = Module(
        "lm_head.decoder",
        tuple(weights),
        Kernels((Gemm(tokens, m.vocab, m.hidden),), 0, 1),
        Kernels((Gemm(tokens, m.hidden, m.vocab), Gemm(m.vocab, m.hidden, tokens)), 0, 2),
        late_gradients=(f"{decoder_name}.weight",) if m.tied_embeddings else (),
    )
    decoder = _with(decoder, loss)
    if m.family != "bert":
        return Module("lm_head", children=(_norm(shape, "final_norm", bias=m.family == "gpt2"), decoder))
    gelu = _elementwise(2 * e * shape.n1, 3 * e * shape.n1, 1, 1)
    dense = _with(_linear(shape, "lm_head.dense", m.hidden, m.hidden, bias=True), gelu)
    return Module("lm_head", children=(dense, _norm(shape, "lm_head.layer_norm"), decoder))


def _block_saved_bytes(shape: _Shape) -> int:
    """Activations a block keeps for its backward.

    With learned biases and dropout: s·b·h·(34 + 5·a·s/h) at two bytes an element, without the attention matrix when it
    is never stored (Korthikanti et al. 2022, equation 2). For llama the same count over its own modules: inputs of the
    two norms and of the projections, query, key, value and context, gate, up and their product.
    """
    m, e = shape.model, shape.e
    attention_matrix = (2 * e + 1) * shape.n2 if m.attention == "eager" else 0
    if m.family == "llama":
        widths = 4 * m.hidden + 2 * shape.query_width + 2 * shape.kv_width + 4 * m.ffn
        return e * shape.tokens * widths + attention_matrix
    widths = 7 * m.hidden + shape.query_width + 2 * m.ffn  # inputs of norms and projections, q, k, v, context, GELU
    masks = 2 * shape.n1 * m.dropout
    return e * shape.tokens * widths + masks + attention_matrix


def _head_saved_bytes(shape: _Shape) -> int:
    """Logits in the training precision and once more in fp32 for the loss."""
    return (shape.e + 4) * shape.tokens * shape.model.vocab
