"""BERT and RoBERTa with the head of masked language modelling (Devlin et al. 2019; Liu et al. 2019)."""

from zsim.model import layers
from zsim.model.layers import WORDS, Architecture, BlockLayers, Layer, Shape, container


def architecture(shape: Shape) -> Architecture:
    """BertForMaskedLM / RobertaForMaskedLM: post-norm blocks, a transform in front of the tied decoder."""
    m = shape.model
    return Architecture(
        embedding=_embeddings(shape),
        blocks=tuple(BlockLayers(_block(shape, f"layer.{layer}")) for layer in range(m.num_layers)),
        head=_head(shape),
    )


def _embeddings(shape: Shape) -> Layer:
    m = shape.model
    tables = {WORDS: m.vocab, "embeddings.position_embeddings": m.max_positions}
    if m.type_vocab:
        tables["embeddings.token_type_embeddings"] = m.type_vocab
    return container(
        "embeddings",
        *(
            layers.table(shape, name, rows, added=i > 0, until="embeddings")
            for i, (name, rows) in enumerate(tables.items())
        ),
        layers.layer_norm(shape, "embeddings.LayerNorm"),
        layers.dropout(shape, "embeddings.dropout", shape.n1),
    )


def _block(shape: Shape, name: str) -> Layer:
    """BertLayer / RobertaLayer: 17 modules, 8 of them with parameters, 16 tensors."""
    h, f, q = shape.model.hidden, shape.model.ffn, shape.query_width
    attention, shared = f"{name}.attention", f"{name}:input"
    query = layers.linear(shape, f"{attention}.self.query", h, q, bias=True, kept_as=shared)
    key, value = (
        layers.linear(shape, f"{attention}.self.{role}", h, shape.kv_width, bias=True, kept_as=shared, reads="parent")
        for role in ("key", "value")
    )
    parts = (layers.shared_input(shape, query, 3), key, value)
    self_attention = container(
        f"{attention}.self",
        *layers.projections(shape, attention, parts, holder=f"{attention}.self"),
        layers.attention_dropout(shape, f"{attention}.self.dropout", attention),
    )
    context = layers.context_tensor(shape, attention).name
    up = layers.linear(shape, f"{name}.intermediate.dense", h, f, bias=True)
    gelu = layers.activation(shape, f"{name}.intermediate", f, gated=False)
    return container(
        name,
        container(attention, self_attention, _output(shape, f"{attention}.output", q, kept_as=context, until=name)),
        container(f"{name}.intermediate", up.followed_by(gelu)),
        _output(shape, f"{name}.output", f),
    )


def _output(shape: Shape, name: str, n_in: int, *, kept_as: str = "", until: str = "") -> Layer:
    """`until`: the module in which a local name holds what it puts out."""
    return container(
        name,
        layers.linear(shape, f"{name}.dense", n_in, shape.model.hidden, bias=True, kept_as=kept_as),
        layers.dropout(shape, f"{name}.dropout", shape.n1).held(name),
        layers.after_residual(
            layers.layer_norm(shape, f"{name}.LayerNorm", continues_stream=True), layers.residual(shape, name)
        ).held(until),
    )


def _head(shape: Shape) -> Layer:
    h, e, n1 = shape.model.hidden, shape.e, shape.n1
    # What the linear layer puts out, or the sum with its adapter.
    kept = layers.Tensor("lm_head:up", e * n1)
    gelu = layers.elementwise(2 * e * n1, 3 * e * n1, 1, 1, kept).running(
        layers.Operator((layers.Tensor("lm_head.dense:activated", e * n1),), binds=(kept.name,), keeps=(kept.name,))
    )
    return container(
        "lm_head",
        layers.linear(shape, "lm_head.dense", h, h, bias=True).followed_by(gelu),
        layers.layer_norm(shape, "lm_head.layer_norm"),
        layers.decoder(shape, "lm_head.decoder", bias="lm_head.bias"),
    )
