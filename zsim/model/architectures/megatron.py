"""GPT as Megatron-LM writes it (Shoeybi et al. 2019; Narayanan et al. 2021): one tensor-parallel rank."""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container, megatron


def architecture(shape: Shape) -> Architecture:
    """GPTModel: learned positions, pre-norm blocks, a final norm, logits without a bias."""
    m = shape.model
    return Architecture(
        embedding=layers.part(
            "embeddings",
            layers.table(shape, WORDS, m.vocab),
            layers.table(shape, "embeddings.position_embeddings", m.max_positions, added=True, once=True).followed_by(
                megatron.transposed(shape)
            ),
            megatron.embedding_dropout(shape, "embeddings.dropout"),
        ),
        blocks=tuple(BlockLayers(megatron.wrapped(_block(shape, f"layer.{layer}"))) for layer in range(m.num_layers)),
        head=layers.part(
            "lm_head",
            layers.layer_norm(shape, "final_layernorm"),
            megatron.parallel_decoder(shape, "lm_head.decoder"),
        ),
    )


def _block(shape: Shape, name: str) -> Layer:
    """ParallelTransformerLayer: 14 kernels forward where they are fused, 12 tensors.

    Bias, dropout and the sum with the residual are one function of the block, booked on the linear layer before it.
    """
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attn, mlp = f"{name}.self_attention", f"{name}.mlp"
    context = layers.context_tensor(shape, attn).name
    attention = container(
        attn,
        layers.fused_projection(
            shape, attn, layers.linear(shape, f"{attn}.query_key_value", h, q + 2 * shape.kv_width, bias=True)
        ),
        megatron.core_attention(shape, f"{attn}.scale_mask_softmax", attn),
        layers.linear(shape, f"{attn}.dense", q, h, bias=True, kept_as=context)
        .followed_by(megatron.hidden_dropout(shape, f"{attn}.hidden_dropout"))
        .followed_by(layers.residual(shape, attn, needs=f"{name}.input_layernorm:output")),
    )
    feed_forward = container(
        mlp,
        layers.linear(shape, f"{mlp}.dense_h_to_4h", h, f, bias=True).followed_by(
            layers.activation(shape, mlp, f, gated=False)
        ),
        layers.linear(shape, f"{mlp}.dense_4h_to_h", f, h, bias=True)
        .followed_by(megatron.hidden_dropout(shape, f"{mlp}.hidden_dropout"))
        .followed_by(layers.residual(shape, mlp, ends_block=True, needs=f"{name}.post_attention_layernorm:output")),
    )
    return container(
        name,
        layers.layer_norm(shape, f"{name}.input_layernorm"),
        attention,
        layers.layer_norm(shape, f"{name}.post_attention_layernorm"),
        feed_forward,
    )
