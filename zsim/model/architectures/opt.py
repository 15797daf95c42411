"""OPT (Zhang et al. 2022): learned positions behind two rows of padding, dropout as a function."""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container


def architecture(shape: Shape) -> Architecture:
    """OPTForCausalLM; OPT-350M projects narrower word embeddings and norms behind each part."""
    m = shape.model
    last = "final_norm" if m.norm_first else "lm_head.decoder"
    projected = m.embedding_width != m.hidden
    words = layers.table(shape, WORDS, m.vocab, width=m.embedding_width, until=last)
    positions = layers.table(shape, "embeddings.position_embeddings", m.max_positions, added=True, until=last)
    project_in = layers.linear(shape, "embeddings.project_in", m.embedding_width, m.hidden, bias=False)
    project_out = layers.linear(shape, "lm_head.project_out", m.hidden, m.embedding_width, bias=False)
    return Architecture(
        embedding=layers.part("embeddings", words, positions, *([project_in] if projected else [])),
        blocks=tuple(BlockLayers(_block(shape, f"layer.{layer}")) for layer in range(m.num_layers)),
        head=layers.part(
            "lm_head",
            *([layers.layer_norm(shape, "final_norm")] if m.norm_first else []),
            *([project_out] if projected else []),
            layers.decoder(shape, "lm_head.decoder"),
        ),
    )


def _block(shape: Shape, name: str) -> Layer:
    """OPTDecoderLayer: 10 modules, 16 tensors."""
    post = not shape.model.norm_first
    attention_norm = layers.layer_norm(shape, f"{name}.self_attn_layer_norm", continues_stream=post)
    final_norm = layers.layer_norm(shape, f"{name}.final_layer_norm", continues_stream=post)
    attention, feed_forward = _attention(shape, f"{name}.self_attn"), _feed_forward(shape, name)
    if shape.model.norm_first:
        return container(name, attention_norm, attention, final_norm, *feed_forward)
    return container(name, attention, attention_norm, *feed_forward, final_norm)


def _attention(shape: Shape, name: str) -> Layer:
    h, e, shared = shape.model.hidden, shape.e, f"{name}:input"
    query = layers.linear(shape, f"{name}.q_proj", h, h, bias=True, kept_as=shared)
    # The query is scaled before the product, in a kernel of its own.
    scale = layers.Operator((layers.Tensor(f"{name}:scaled_query", e * shape.n1),))
    scaled = query.followed_by(layers.elementwise(2 * e * shape.n1, 2 * e * shape.n1, 1, 1).running(scale))
    out = layers.linear(shape, f"{name}.out_proj", h, h, bias=True, kept_as=layers.context_tensor(shape, name).name)
    key, value = (
        layers.linear(shape, f"{name}.{role}_proj", h, h, bias=True, kept_as=shared, reads="parent") for role in "kv"
    )
    return container(
        name,
        *layers.projections(shape, name, (layers.shared_input(shape, scaled, 3), key, value)),
        out.with_core(layers.functional_attention(shape, name)).followed_by(_dropped_residual(shape, name)),
    )


def _feed_forward(shape: Shape, name: str) -> tuple[Layer, ...]:
    h, f = shape.model.hidden, shape.model.ffn
    up = layers.linear(shape, f"{name}.fc1", h, f, bias=True)
    down = layers.linear(shape, f"{name}.fc2", f, h, bias=True)
    return (
        up.followed_by(layers.activation(shape, name, f, gated=False, kept_as=f"{name}.fc2:input")),
        Layer(f"{name}.activation_fn"),
        down.followed_by(_dropped_residual(shape, f"{name}.fc2", ends_block=shape.model.norm_first)),
    )


def _dropped_residual(shape: Shape, name: str, *, ends_block: bool = False) -> layers.Step:
    dropped = layers.dropout(shape, f"{name}.dropout", shape.n1)
    step = layers.Step(dropped.forward, dropped.through, dropped.operators)
    # transformers flattens the batch behind the one sum and unflattens it behind the other.
    return step + layers.residual(shape, name, ends_block=ends_block, flattens=True)
