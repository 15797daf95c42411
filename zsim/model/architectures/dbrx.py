"""DBRX: fused query, key and value, LayerNorm without bias, experts in every block (transformers, models/dbrx).

Its experts run in a loop that asks the device for each expert's tokens; they are priced as one grouped GEMM, as those
of the other families run. Leaves out: the host sync for each expert of that loop.
"""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container


def architecture(shape: Shape) -> Architecture:
    """DbrxForCausalLM."""
    m = shape.model
    return Architecture(
        embedding=layers.part("embeddings", layers.table(shape, WORDS, m.vocab, until="final_norm")),
        blocks=tuple(BlockLayers(_block(shape, f"layer.{layer}")) for layer in range(m.num_layers)),
        head=layers.part(
            "lm_head", layers.layer_norm(shape, "final_norm", bias=False), layers.decoder(shape, "lm_head.decoder")
        ),
    )


def _block(shape: Shape, name: str) -> Layer:
    """DbrxBlock: 13 modules, 8 tensors."""
    m = shape.model
    outer, attn, ffn = f"{name}.norm_attn_norm", f"{name}.norm_attn_norm.attn", f"{name}.ffn"
    width = shape.query_width + 2 * shape.kv_width
    nbytes = shape.tensor_bytes(width)
    clamped = layers.elementwise(2 * nbytes, 3 * nbytes, 1, 2, layers.Tensor(f"{attn}:qkv", nbytes)).running(
        layers.Operator((layers.Tensor(f"{attn}:clamped", nbytes),), binds=(f"{attn}:qkv",), keeps=(f"{attn}:qkv",))
    )
    qkv = layers.linear(shape, f"{attn}.Wqkv", m.hidden, width, bias=False).followed_by(clamped)
    qkv = layers.fused_projection(shape, attn, qkv)
    context = layers.context_tensor(shape, attn).name
    out = layers.linear(shape, f"{attn}.out_proj", shape.query_width, m.hidden, bias=False, kept_as=context)
    router = layers.router(shape, f"{ffn}.router.layer", m.experts)
    experts = layers.experts_layer(shape, f"{ffn}.experts.mlp", m.experts, (("w1", 1), ("v1", 1), ("w2", 1)))
    joins = layers.residual(shape, ffn, ends_block=True)
    return container(
        name,
        container(
            outer,
            layers.layer_norm(shape, f"{outer}.norm_1", bias=False),
            container(
                attn,
                qkv.followed_by(layers.rotary(shape, attn)),
                out.with_core(layers.functional_attention(shape, attn)).followed_by(layers.residual(shape, attn)),
            ),
            layers.layer_norm(shape, f"{outer}.norm_2", bias=False),
        ),
        container(
            ffn,
            container(f"{ffn}.router", layers.shared_input(shape, router, 2)),
            container(f"{ffn}.experts", experts.followed_by(joins)).on_parents_input(),
        ),
    )
