"""A transformer as its modules: parameters, GEMMs, bytes, kernels and saved activations of each visit.

Legend: b micro-batch, s sequence length, T = b·s tokens, h hidden, f feed-forward width, a heads, d head dimension,
kv key/value heads, v vocabulary, e bytes of an activation element. N1 = T·h and N2 = b·a·s² elements.

A module is what `nn.Module` is to Hugging Face's models: containers and dropouts are modules too, because ZeRO-3 hooks
every one of them. Kernels that a container launches between its children are booked on the child next to them.
Leaves out: the position-id arithmetic, attention-mask construction, and kernels on tensors smaller than T elements.
"""

from zsim import layers
from zsim.layers import Shape
from zsim.modules import Block, Kernels, ModelGraph, Module, Parameter
from zsim.ops import Gemm
from zsim.spec import ModelSpec, TrainSpec

__all__ = ["Block", "Kernels", "ModelGraph", "Module", "Parameter", "build"]


def build(model: ModelSpec, train: TrainSpec) -> ModelGraph:
    """The modules of a model at one batch shape."""
    shape = Shape(model, train)
    block = _BLOCKS[model.family]
    return ModelGraph(
        embedding=_embedding(shape),
        blocks=tuple(
            Block(
                block(shape, f"layer.{layer}"), shape.e * shape.n1, _block_saved_bytes(shape), _core_saved_bytes(shape)
            )
            for layer in range(model.num_layers)
        ),
        head=_head(shape),
        embedding_saved_bytes=shape.e * shape.n1,
        head_saved_bytes=_head_saved_bytes(shape),
    )


def _bert_block(shape: Shape, name: str) -> Module:
    """BertLayer / RobertaLayer: 17 modules, 8 of them with parameters, 16 tensors."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attention = f"{name}.attention"
    dropout = layers.dropout(shape, f"{attention}.self.dropout", shape.n2 if shape.model.attention == "eager" else 0)
    self_attention = Module(
        f"{attention}.self",
        children=(
            layers.linear(shape, f"{attention}.self.query", h, q, bias=True).plus(layers.input_gradients(shape, 3)),
            layers.linear(shape, f"{attention}.self.key", h, shape.kv_width, bias=True),
            layers.linear(shape, f"{attention}.self.value", h, shape.kv_width, bias=True),
            dropout.plus_core(layers.attention(shape), dropout=dropout.forward),
        ),
    )
    attention_output = _bert_output(shape, f"{attention}.output", q)
    feed_forward = layers.linear(shape, f"{name}.intermediate.dense", h, f, bias=True).plus(layers.activation(shape))
    return Module(
        name,
        children=(
            Module(attention, children=(self_attention, attention_output)),
            Module(f"{name}.intermediate", children=(feed_forward,)),
            _bert_output(shape, f"{name}.output", f),
        ),
    )


def _bert_output(shape: Shape, name: str, n_in: int) -> Module:
    return Module(
        name,
        children=(
            layers.linear(shape, f"{name}.dense", n_in, shape.model.hidden, bias=True),
            layers.dropout(shape, f"{name}.dropout", shape.n1),
            layers.norm(shape, f"{name}.LayerNorm").plus(layers.residual(shape)),
        ),
    )


def _gpt2_block(shape: Shape, name: str) -> Module:
    """GPT2Block: 12 modules, 12 tensors; query, key and value in one projection."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    dropout = layers.dropout(shape, f"{name}.attn.attn_dropout", shape.n2 if shape.model.attention == "eager" else 0)
    attention = Module(
        f"{name}.attn",
        children=(
            layers.linear(shape, f"{name}.attn.c_attn", h, q + 2 * shape.kv_width, bias=True),
            dropout.plus_core(layers.attention(shape), dropout=dropout.forward),
            layers.linear(shape, f"{name}.attn.c_proj", q, h, bias=True),
            layers.dropout(shape, f"{name}.attn.resid_dropout", shape.n1).plus(layers.residual(shape)),
        ),
    )
    feed_forward = Module(
        f"{name}.mlp",
        children=(
            layers.linear(shape, f"{name}.mlp.c_fc", h, f, bias=True).plus(layers.activation(shape)),
            layers.linear(shape, f"{name}.mlp.c_proj", f, h, bias=True),
            layers.dropout(shape, f"{name}.mlp.dropout", shape.n1).plus(layers.residual(shape)),
        ),
    )
    return Module(
        name, children=(layers.norm(shape, f"{name}.ln_1"), attention, layers.norm(shape, f"{name}.ln_2"), feed_forward)
    )


def _llama_block(shape: Shape, name: str) -> Module:
    """LlamaDecoderLayer: 13 modules, 9 tensors; grouped-query attention, SwiGLU, RMSNorm, no biases."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attention = Module(
        f"{name}.self_attn",
        children=(
            layers.linear(shape, f"{name}.self_attn.q_proj", h, q, bias=False).plus(layers.input_gradients(shape, 3)),
            layers.linear(shape, f"{name}.self_attn.k_proj", h, shape.kv_width, bias=False),
            layers.linear(shape, f"{name}.self_attn.v_proj", h, shape.kv_width, bias=False).plus(layers.rotary(shape)),
            layers.linear(shape, f"{name}.self_attn.o_proj", q, h, bias=False)
            .plus_core(layers.attention(shape))
            .plus(layers.residual(shape)),
        ),
    )
    feed_forward = Module(
        f"{name}.mlp",
        children=(
            layers.linear(shape, f"{name}.mlp.gate_proj", h, f, bias=False).plus(layers.input_gradients(shape, 2)),
            Module(f"{name}.mlp.act_fn"),
            layers.linear(shape, f"{name}.mlp.up_proj", h, f, bias=False).plus(layers.activation(shape)),
            layers.linear(shape, f"{name}.mlp.down_proj", f, h, bias=False).plus(layers.residual(shape)),
        ),
    )
    return Module(
        name,
        children=(
            layers.norm(shape, f"{name}.input_layernorm", bias=False),
            attention,
            layers.norm(shape, f"{name}.post_attention_layernorm", bias=False),
            feed_forward,
        ),
    )


_BLOCKS = {"bert": _bert_block, "gpt2": _gpt2_block, "llama": _llama_block}


def _embedding(shape: Shape) -> Module:
    """Token, position and type embeddings, their sum, norm and dropout as far as the family has them."""
    m, e, n1 = shape.model, shape.e, shape.n1
    tables = {"word_embeddings": m.vocab, "position_embeddings": m.max_positions, "token_type_embeddings": m.type_vocab}
    children = [
        Module(
            f"embeddings.{table}",
            (Parameter(f"embeddings.{table}.weight", rows * m.hidden),),
            # Gather and, from the second table on, add; backward writes the whole table, then scatters.
            *layers.elementwise(2 * e * n1 + 3 * e * n1 * (i > 0), e * rows * m.hidden + 3 * e * n1, 1 + (i > 0), 3),
        )
        for i, (table, rows) in enumerate(tables.items())
        if rows
    ]
    if m.family == "bert":
        children.append(layers.norm(shape, "embeddings.LayerNorm"))
    if m.family != "llama":
        children.append(layers.dropout(shape, "embeddings.dropout", n1))
    return Module("embeddings", children=tuple(children))


def _head(shape: Shape) -> Module:
    """Final norm or transform, logits of every token, and the cross entropy."""
    m, e, tokens = shape.model, shape.e, shape.tokens
    logits = tokens * m.vocab
    decoder_name = "embeddings.word_embeddings" if m.tied_embeddings else "lm_head.decoder"
    # Cast to fp32, log-softmax with loss; backward writes the gradient in both precisions.
    loss = layers.elementwise((e + 4) * logits + 10 * logits, (8 + e) * logits, 4, 3)
    weights = [Parameter(f"{decoder_name}.weight", m.hidden * m.vocab)]
    if m.family == "bert":
        weights.append(Parameter("lm_head.bias", m.vocab))
        loss = layers.together(loss, layers.elementwise(2 * e * logits, e * logits, 1, 1))
    decoder = Module(
        "lm_head.decoder",
        tuple(weights),
        Kernels((Gemm(tokens, m.vocab, m.hidden),), 0, 1),
        Kernels((Gemm(tokens, m.hidden, m.vocab), Gemm(m.vocab, m.hidden, tokens)), 0, 2),
        late_gradients=(f"{decoder_name}.weight",) if m.tied_embeddings else (),
    )
    decoder = decoder.plus(loss)
    if m.family != "bert":
        return Module("lm_head", children=(layers.norm(shape, "final_norm", bias=m.family == "gpt2"), decoder))
    gelu = layers.elementwise(2 * e * shape.n1, 3 * e * shape.n1, 1, 1)
    dense = layers.linear(shape, "lm_head.dense", m.hidden, m.hidden, bias=True).plus(gelu)
    return Module("lm_head", children=(dense, layers.norm(shape, "lm_head.layer_norm"), decoder))


def _block_saved_bytes(shape: Shape) -> int:
    """Activations a block keeps for its backward.

    With learned biases and dropout: s·b·h·(34 + 5·a·s/h) at two bytes an element, without the attention matrix when it
    is never stored (Korthikanti et al. 2022, equation 2). For llama the same count over its own modules: inputs of the
    two norms and of the projections, query, key, value and context, gate, up and their product.
    """
    m, e = shape.model, shape.e
    attention_matrix = _core_saved_bytes(shape)
    if m.family == "llama":
        widths = 4 * m.hidden + 2 * shape.query_width + 2 * shape.kv_width + 4 * m.ffn
        return e * shape.tokens * widths + attention_matrix
    widths = 7 * m.hidden + shape.query_width + 2 * m.ffn  # inputs of norms and projections, q, k, v, context, GELU
    masks = 2 * shape.n1 * m.dropout
    return e * shape.tokens * widths + masks + attention_matrix


def _core_saved_bytes(shape: Shape) -> int:
    """Softmax, mask and dropout of the attention scores: the 5·a·s²·b of equation 2. Nothing where they are not stored.

    Query, key and value, which the core begins with, are not among them.
    """
    return (2 * shape.e + 1) * shape.n2 if shape.model.attention == "eager" else 0


def _head_saved_bytes(shape: Shape) -> int:
    """Logits in the training precision and once more in fp32 for the loss."""
    return (shape.e + 4) * shape.tokens * shape.model.vocab
