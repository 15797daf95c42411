"""T5, encoder and decoder (Raffel et al. 2020; v1.1 with a gated feed-forward; transformers, models/t5).

The blocks of the encoder come first, then those of the decoder. The first decoder block has a prologue: the encoder's
final norm and the decoder's own look at the shared embedding. The decoder is given as many tokens as the encoder.
Leaves out: `wo` in fp32 under fp16; the position bias is made once a stack, its lookup of
s² buckets is not counted but its sum with the scores and the gradient of that are.
"""

from zsim.model import layers
from zsim.model.layers import ENCODED, WORDS, Architecture, BlockLayers, Layer, Prologue, Reads, Shape, container


def architecture(shape: Shape) -> Architecture:
    """T5ForConditionalGeneration."""
    m = shape.model
    encoder = [BlockLayers(_block(shape, f"encoder.{i}", first=i == 0)) for i in range(m.num_layers)]
    decoder = [
        BlockLayers(_block(shape, f"decoder.{i}", first=i == 0, decodes=True), _prologue(shape) if i == 0 else None)
        for i in range(m.num_decoder_layers)
    ]
    return Architecture(
        embedding=container(
            "embeddings",
            layers.table(shape, WORDS, m.vocab),
            layers.dropout(shape, "embeddings.dropout", shape.n1),
        ),
        blocks=(*encoder, *decoder),
        head=container(
            "lm_head",
            _norm(shape, "decoder.final_norm"),
            layers.dropout(shape, "decoder.final_dropout", shape.n1),
            layers.decoder(shape, "lm_head.decoder"),
        ),
    )


def _norm(shape: Shape, name: str) -> Layer:
    """T5LayerNorm: the mean is of the input in fp32, the product takes the input as it came."""
    return layers.rms_norm(shape, name, casts_product=True)


def _prologue(shape: Shape) -> Prologue:
    kept = layers.elementwise(0, 0, 0, 0, layers.Tensor(ENCODED, shape.e * shape.n1)).running(
        layers.Operator(binds=(ENCODED,))
    )
    return Prologue(
        encoder=layers.part(
            "encoder.end",
            _norm(shape, "encoder.final_norm"),
            layers.dropout(shape, "encoder.final_dropout", shape.n1).followed_by(kept),
        ),
        decoder=layers.part(
            "decoder.begin",
            layers.table(shape, "decoder.embeddings", shape.model.vocab, tied_to=WORDS, until="decoder.final_norm"),
            layers.dropout(shape, "decoder.dropout", shape.n1),
        ),
    )


def _block(shape: Shape, name: str, *, first: bool, decodes: bool = False) -> Layer:
    """T5Block: self-attention, in the decoder attention to the encoder's output, feed-forward."""
    parts = [_attention(shape, f"{name}.self", "SelfAttention", has_table=first)]
    if decodes:
        parts.append(_attention(shape, f"{name}.cross", "EncDecAttention", crossed=True))
    return container(name, *parts, _feed_forward(shape, f"{name}.ff"))


def _attention(shape: Shape, outer: str, kind: str, *, crossed: bool = False, has_table: bool = False) -> Layer:
    m, name = shape.model, f"{outer}.{kind}"
    h, q, shared = m.hidden, shape.query_width, f"{name}:input"
    query = layers.linear(shape, f"{name}.q", h, q, bias=False, kept_as=shared)
    source: tuple[str, Reads] = (ENCODED, "encoder") if crossed else (shared, "parent")
    key, value = (
        layers.linear(shape, f"{name}.{role}", h, q, bias=False, kept_as=source[0], reads=source[1])
        for role in ("k", "v")
    )
    out = layers.linear(shape, f"{name}.o", q, h, bias=False, kept_as=layers.context_tensor(shape, name).name)
    core = layers.functional_attention(shape, name) + _position_bias(shape, learned=not crossed)
    table = layers.bias_table(shape, f"{name}.relative_attention_bias", m.position_buckets)
    query = layers.shared_input(shape, query, 1 if crossed else 3)
    key = layers.shared_input(shape, key, 3) if crossed else key
    attention = container(
        name,
        *layers.projections(shape, name, (query, key, value)),
        *([table] if has_table else []),
        out.with_core(core),
    )
    return container(
        outer,
        _norm(shape, f"{outer}.layer_norm"),
        attention,
        layers.dropout(shape, f"{outer}.dropout", shape.n1).followed_by(layers.residual(shape, outer)),
    )


def _position_bias(shape: Shape, *, learned: bool) -> layers.Step:
    """Added to the scores; its gradient is summed over the batch and added to that of the other blocks.

    A cross-attention adds zeros, which have no gradient. Nothing with a fused softmax, which takes it along.
    """
    if shape.model.fused_kernels:
        return layers.elementwise(0, 0, 0, 0)
    nbytes = shape.e * shape.n2
    summed = nbytes + 3 * nbytes // shape.train.micro_batch
    if shape.model.compile != "none":
        # Part of the softmax's kernel, which reads it once for all samples.
        return layers.elementwise(nbytes // shape.train.micro_batch, summed * learned, 0, 2 * learned)
    return layers.elementwise(2 * nbytes, summed * learned, 1, 2 * learned)


def _feed_forward(shape: Shape, outer: str) -> Layer:
    m, name = shape.model, f"{outer}.DenseReluDense"
    h, f, shared = m.hidden, m.ffn, f"{name}:input"
    act = layers.gate_activation(shape, Layer(f"{name}.act"), name, f) if m.gated else Layer(f"{name}.act")
    # Without dropout in between, what ReLU keeps is what `wo` reads.
    kept_as = "" if m.gated or m.dropout else f"{name}.wo:input"
    activation = layers.activation(shape, name, f, gated=m.gated, kept_as=kept_as)
    if m.gated:
        gate = layers.linear(shape, f"{name}.wi_0", h, f, bias=False, kept_as=shared)
        up = layers.linear(shape, f"{name}.wi_1", h, f, bias=False, kept_as=shared, reads="parent")
        gate = layers.shared_input(shape, gate, 2).running(layers.Operator(named=f"{name}:gate"))
        inner: tuple[Layer, ...] = (gate, act, up.followed_by(activation))
    else:
        inner = (layers.linear(shape, f"{name}.wi", h, f, bias=False, kept_as=shared).followed_by(activation), act)
    return container(
        outer,
        _norm(shape, f"{outer}.layer_norm"),
        container(
            name,
            *inner,
            layers.dropout(shape, f"{name}.dropout", shape.tokens * f),
            layers.linear(shape, f"{name}.wo", f, h, bias=False),
        ),
        layers.dropout(shape, f"{outer}.dropout", shape.n1).followed_by(layers.residual(shape, outer, ends_block=True)),
    )
