"""The reference engine's model computes what transformers' models do, and learns from its data."""

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from reference_cases import BERT, GPT2, LLAMA, B, S, gradients, spec_of  # noqa: E402

from reference.model import build  # noqa: E402
from reference.model.layers import NORM_EPSILON  # noqa: E402
from reference.training.data import DataSettings, batch  # noqa: E402
from zsim.units import InputError  # noqa: E402

FAMILIES = {"gpt2": GPT2, "llama": LLAMA | {"kv_heads": 2}, "bert": BERT}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=FAMILIES, ids=FAMILIES)
def spec(request, tmp_path):
    return spec_of(tmp_path, FAMILIES[request.param])


def huggingface(spec):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is missing: install the extra dev, `make test` does"
    )
    m = spec.model
    if m.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=m.vocab,
            n_positions=m.max_positions,
            n_embd=m.hidden,
            n_layer=m.num_layers,
            n_head=m.heads,
            activation_function="gelu_pytorch_tanh",
            layer_norm_epsilon=NORM_EPSILON,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        return transformers.GPT2LMHeadModel(config)
    shape = {
        "vocab_size": m.vocab,
        "hidden_size": m.hidden,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.heads,
        "intermediate_size": m.ffn,
        "max_position_embeddings": m.max_positions or 64,
        "tie_word_embeddings": m.tied_embeddings,
    }
    if m.family == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_key_value_heads=m.kv_heads, rms_norm_eps=NORM_EPSILON, **shape)
        )
    config = transformers.BertConfig(
        type_vocab_size=m.type_vocab,
        layer_norm_eps=NORM_EPSILON,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,  # no token is padding, whose embedding would have no gradient
        **shape,
    )
    return transformers.BertForMaskedLM(config)


THEIR_NAMES = {
    "gpt2": {
        "embeddings.word_embeddings": "transformer.wte",
        "embeddings.position_embeddings": "transformer.wpe",
        "layer": "transformer.h",
        "final_norm": "transformer.ln_f",
    },
    "llama": {
        "embeddings.word_embeddings": "model.embed_tokens",
        "layer": "model.layers",
        "final_norm": "model.norm",
        "lm_head.decoder": "lm_head",
    },
    "bert": {
        "embeddings": "bert.embeddings",
        "layer": "bert.encoder.layer",
        "lm_head.bias": "cls.predictions.bias",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "lm_head": "cls.predictions.transform",
    },
}
"""Beginnings of names, the first that fits."""


def paired(ours, theirs, family):
    """Parameters of both; GPT-2's Conv1D holds its matrix transposed."""
    theirs = dict(theirs.named_parameters())
    for name, parameter in ours.parameters_by_name().items():
        prefix, other = next(item for item in THEIR_NAMES[family].items() if name.startswith(item[0]))
        transposed = family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        yield parameter, theirs.pop(other + name.removeprefix(prefix)), transposed
    assert not theirs


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_and_gradients_are_those_of_transformers(attention, spec, tmp_path):
    spec = spec_of(tmp_path, FAMILIES[spec.model.family] | {"attention": attention})
    ours, theirs = build(spec.model, seed=3), huggingface(spec)
    with torch.no_grad():
        for parameter, other, transposed in paired(ours, theirs, spec.model.family):
            other.copy_(parameter.t() if transposed else parameter)
    loss = gradients(ours, spec)[0]
    tokens, labels = batch(DataSettings.of(spec), 0, 0, 0)
    logits = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for parameter, other, transposed in paired(ours, theirs, spec.model.family):
        torch.testing.assert_close(parameter.grad, other.grad.t() if transposed else other.grad, rtol=1e-4, atol=1e-6)


def test_loss_goes_down(spec):
    transformer = build(spec.model)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        loss = transformer(*batch(DataSettings.of(spec), step, 0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(float(spec.model.vocab)).log().item(), rel=0.02)
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_one_seed_gives_the_same_bits_and_another_gives_others(spec):
    one, same, other = (list(build(spec.model, seed=seed).parameters()) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one[0], other[0])
    # Drawn in fp32 whatever they are kept in.
    assert all(
        torch.equal(a.bfloat16(), b)
        for a, b in zip(one, build(spec.model, dtype=torch.bfloat16, seed=1).parameters(), strict=True)
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_see_together_what_one_process_sees(num_ranks, tmp_path):
    whole = DataSettings.of(spec_of(tmp_path, GPT2, micro_batch=4), seed=7)
    part = DataSettings.of(spec_of(tmp_path, GPT2, micro_batch=4 // num_ranks), seed=7)
    for step, micro in [(0, 0), (0, 1), (5, 0)]:
        together = [batch(part, step, micro, rank) for rank in range(num_ranks)]
        for index, expected in enumerate(batch(whole, step, micro, 0)):
            assert torch.equal(torch.cat([pair[index] for pair in together]), expected)


def test_no_two_samples_are_the_same(tmp_path):
    settings = DataSettings.of(spec_of(tmp_path, GPT2))
    places = [(step, micro, rank) for step in range(3) for micro in range(2) for rank in range(2)]
    samples = {tuple(row.tolist()) for place in places for row in batch(settings, *place)[0]}
    assert len(samples) == B * len(places)


def test_labels(spec):
    tokens, labels = batch(DataSettings.of(spec), 0, 0, 0)
    assert tokens.shape == labels.shape == (B, S)
    assert tokens.dtype == labels.dtype == torch.int64
    assert 0 <= int(labels.min()) <= int(labels.max()) < spec.model.vocab
    if spec.model.causal:
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
    else:
        hidden = tokens != labels
        assert 0 < hidden.sum() < B * S / 3
        assert not tokens[hidden].any()


def test_bf16(spec):
    loss, *found = gradients(build(spec.model, dtype=torch.bfloat16), spec)
    expected = gradients(build(spec.model), spec)[0]
    assert loss.dtype == torch.float32
    assert all(gradient.dtype == torch.bfloat16 for gradient in found)
    assert float(loss) == pytest.approx(float(expected), rel=2**-8)


def test_backward_reads_weights_where_they_are_then(tmp_path):
    """Storage swapped between the passes, as stage 3 does; linear layers are the sharding's own matter."""
    for model in FAMILIES.values():
        spec = spec_of(tmp_path, model | {"tied_embeddings": False})
        expected = gradients(build(spec.model), spec)
        transformer = build(spec.model)
        loss = transformer(*batch(DataSettings.of(spec), 0, 0, 0))
        swapped = 0
        for module in transformer.modules():
            for parameter in () if isinstance(module, torch.nn.Linear) else module.parameters(recurse=False):
                released = parameter.data
                parameter.data = released.clone()
                released.fill_(float("nan"))
                swapped += 1
        assert swapped >= 2 * spec.model.num_layers + 2
        loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in transformer.parameters())]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_frozen_parameters_have_no_gradient(checkpointing, tmp_path):
    frozen = ["embeddings.*", "layer.0.*"]
    spec = spec_of(tmp_path, GPT2 | {"tied_embeddings": False, "frozen": frozen})
    transformer = build(spec.model, checkpointing=checkpointing)
    found = gradients(transformer, spec)
    assert all(map(torch.equal, found, gradients(build(spec.model), spec)))
    trained = {name for name, parameter in transformer.parameters_by_name().items() if parameter.grad is not None}
    assert trained == {
        name for name in transformer.parameters_by_name() if not name.startswith(("embeddings.", "layer.0."))
    }


def test_shapes_alone_take_no_memory(spec):
    transformer = build(spec.model, device="meta")
    assert all(parameter.is_meta for parameter in transformer.parameters())
    expected = [parameter.shape for parameter in build(spec.model).parameters()]
    assert [parameter.shape for parameter in transformer.parameters()] == expected


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (GPT2 | {"dropout": True}, "model.dropout: given true; allowed: `model.dropout: false`"),
        (GPT2 | {"attention_dropout": True}, "model.attention_dropout: given true"),
        (GPT2 | {"family": "opt"}, "model.family: given opt; allowed: bert, gpt2, llama"),
        (LLAMA | {"experts": {"number": 8, "per_token": 2, "ffn": 96}}, "model.experts: given experts"),
        (GPT2 | {"fused_kernels": True}, "model.fused_kernels: given true"),
        (GPT2 | {"compile": True}, "model.compile: given block"),
        (GPT2 | {"lora": {"rank": 4, "targets": ["c_attn"]}}, "model.lora: given adapters"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_name(model, problem, tmp_path):
    with pytest.raises(InputError, match="where the reference engine trains it") as caught:
        build(spec_of(tmp_path, model).model)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_flash_attention_in_fp32_is_refused_on_a_gpu_alone(tmp_path):
    spec = spec_of(tmp_path, GPT2 | {"attention": "flash"})
    with pytest.raises(InputError, match=r"^model\.attention: given flash in fp32; allowed: sdpa, eager where"):
        build(spec.model, device="cuda")
    build(spec.model)
