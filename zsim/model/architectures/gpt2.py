"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020)."""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container


def architecture(shape: Shape) -> Architecture:
    """GPT2LMHeadModel: learned positions, pre-norm blocks, a final norm, logits without a bias."""
    m = shape.model
    return Architecture(
        embedding=layers.part(
            "embeddings",
            layers.table(shape, WORDS, m.vocab, until="final_norm"),
            layers.table(
                shape, "embeddings.position_embeddings", m.max_positions, added=True, until="final_norm", once=True
            ),
            layers.dropout(shape, "embeddings.dropout", shape.n1),
        ),
        blocks=tuple(BlockLayers(_block(shape, f"layer.{layer}")) for layer in range(m.num_layers)),
        head=layers.part("lm_head", layers.layer_norm(shape, "final_norm"), layers.decoder(shape, "lm_head.decoder")),
    )


def _block(shape: Shape, name: str) -> Layer:
    """GPT2Block: 12 modules, 12 tensors; query, key and value in one projection."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attn, mlp = f"{name}.attn", f"{name}.mlp"
    context = layers.context_tensor(shape, attn).name
    attention = container(
        attn,
        layers.fused_projection(
            shape, attn, layers.linear(shape, f"{attn}.c_attn", h, q + 2 * shape.kv_width, bias=True)
        ),
        layers.attention_dropout(shape, f"{attn}.attn_dropout", attn),
        layers.linear(shape, f"{attn}.c_proj", q, h, bias=True, kept_as=context),
        layers.dropout(shape, f"{attn}.resid_dropout", shape.n1)
        .held(name)
        .followed_by(layers.residual(shape, attn, needs=f"{name}.ln_1:output")),
    )
    feed_forward = container(
        mlp,
        layers.linear(shape, f"{mlp}.c_fc", h, f, bias=True).followed_by(layers.activation(shape, mlp, f, gated=False)),
        layers.linear(shape, f"{mlp}.c_proj", f, h, bias=True),
        layers.dropout(shape, f"{mlp}.dropout", shape.n1).followed_by(
            layers.residual(shape, mlp, ends_block=True, needs=f"{name}.ln_2:output")
        ),
    )
    return container(
        name,
        layers.layer_norm(shape, f"{name}.ln_1"),
        attention,
        layers.layer_norm(shape, f"{name}.ln_2"),
        feed_forward,
    )
