"""Llama and what has its blocks: Mistral, Qwen 2 and 3, and with experts Mixtral and the MoE models of Qwen."""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container
from zsim.model_spec import ExpertsSpec


def architecture(shape: Shape) -> Architecture:
    """LlamaForCausalLM and its relatives: rotary positions, pre-norm blocks, RMSNorm, gated feed-forward."""
    m = shape.model
    return Architecture(
        embedding=layers.part("embeddings", layers.table(shape, WORDS, m.vocab, until="final_norm")),
        blocks=tuple(BlockLayers(_block(shape, layer)) for layer in range(m.num_layers)),
        head=layers.part("lm_head", layers.rms_norm(shape, "final_norm"), layers.decoder(shape, "lm_head.decoder")),
    )


def _block(shape: Shape, layer: int) -> Layer:
    """LlamaDecoderLayer: 13 modules, 9 tensors; grouped-query attention, SwiGLU, RMSNorm, no biases."""
    name, experts = f"layer.{layer}", shape.model.experts
    return container(
        name,
        layers.rms_norm(shape, f"{name}.input_layernorm"),
        _attention(shape, f"{name}.self_attn"),
        layers.rms_norm(shape, f"{name}.post_attention_layernorm"),
        _sparse(shape, f"{name}.mlp", experts)
        if experts.replaces_feed_forward(layer)
        else _feed_forward(shape, f"{name}.mlp", shape.model.ffn),
    )


def _attention(shape: Shape, name: str) -> Layer:
    m = shape.model
    h, q, kv, shared = m.hidden, shape.query_width, shape.kv_width, f"{name}:input"
    query = layers.linear(shape, f"{name}.q_proj", h, q, bias=m.qkv_bias, kept_as=shared)
    key = layers.linear(shape, f"{name}.k_proj", h, kv, bias=m.qkv_bias, kept_as=shared, reads="parent")
    value = layers.linear(shape, f"{name}.v_proj", h, kv, bias=m.qkv_bias, kept_as=shared, reads="parent")
    out = layers.linear(
        shape, f"{name}.o_proj", q, h, bias=m.output_bias, kept_as=layers.context_tensor(shape, name).name
    )
    head_norms = {
        role: [layers.rms_norm(shape, f"{name}.{role}_norm", width=width, features=m.head_dim)] if m.qk_norm else []
        for role, width in (("q", q), ("k", kv))
    }
    query = layers.shared_input(shape, query, 3)
    *normed_query, last_query = query, *head_norms["q"]
    *normed_key, last_key = key, *head_norms["k"]
    last_query, last_key, value = layers.projections(shape, name, (last_query, last_key, value), rotated=True)
    return container(
        name,
        *normed_query,
        last_query,
        *normed_key,
        last_key,
        value.followed_by(layers.rotary(shape, name)),
        out.with_core(layers.functional_attention(shape, name)).followed_by(layers.residual(shape, name)),
    )


def _feed_forward(shape: Shape, name: str, width: int, *, joins: bool = True) -> Layer:
    """Gate, up and down; `joins` where its output is added to the residual stream."""
    h, bias, shared = shape.model.hidden, shape.model.mlp_bias, f"{name}:input"
    gate = layers.linear(shape, f"{name}.gate_proj", h, width, bias=bias, kept_as=shared)
    up = layers.linear(shape, f"{name}.up_proj", h, width, bias=bias, kept_as=shared, reads="parent")
    down = layers.linear(shape, f"{name}.down_proj", width, h, bias=bias)
    return container(
        name,
        layers.shared_input(shape, gate, 2).running(layers.Operator(named=f"{name}:gate")),
        layers.gate_activation(shape, Layer(f"{name}.act_fn"), name, width),
        up.followed_by(layers.activation(shape, name, width, gated=True)),
        down.followed_by(layers.residual(shape, name, ends_block=True)) if joins else down,
    )


def _sparse(shape: Shape, name: str, experts: ExpertsSpec) -> Layer:
    """MixtralSparseMoeBlock; with a shared expert and its gate Qwen2MoeSparseMoeBlock."""
    fused = (("gate_up_proj", 2), ("down_proj", 1))
    joins = layers.residual(shape, name, ends_block=True)
    routed = layers.experts_layer(shape, f"{name}.experts", experts, fused).on_parents_input()
    router = layers.router(shape, f"{name}.gate", experts)
    if not experts.shared_ffn:
        return container(name, layers.shared_input(shape, router, 2), routed.followed_by(joins))
    h, e, n1 = shape.model.hidden, shape.e, shape.n1
    shared = _feed_forward(shape, f"{name}.shared_expert", experts.shared_ffn, joins=False)
    gate = layers.linear(shape, f"{name}.shared_expert_gate", h, 1, bias=False, kept_as=f"{name}.shared_expert:input")
    # Sigmoid of one number a token, its product with the shared expert's output, and the sum with the others'.
    output = f"{name}.shared_expert:output"
    gated = layers.elementwise(5 * e * n1, 5 * e * n1, 3, 4, layers.Tensor(output, e * n1)).running(
        layers.Operator(
            (layers.Tensor(f"{name}:gated", e * n1),),
            reads=(f"{name}.shared_expert.down_proj:output",),
            binds=(output,),
            keeps=(output,),
        ),
        layers.Operator(
            (layers.Tensor(f"{name}:output", e * n1),), reads=(f"{name}:gated", f"{name}.experts:output"), hands_on=True
        ),
    )
    return container(
        name,
        shared,
        layers.shared_input(shape, router, 4).on_parents_input(),
        routed,
        gate.followed_by(gated).followed_by(joins).on_parents_input(),
    )
