"""Parameters of every family against transformers' own models on the meta device: each tensor, published totals."""

import pytest
from hf_configs import CONFIGS, written

from zsim.model import build
from zsim.reading.presets import preset_model, presets
from zsim.spec import TrainSpec

REASON = "transformers is missing: install the extra dev, `make test` does"

LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
MIXTRAL = LLAMA_7B | {"model_type": "mixtral", "intermediate_size": 14336}
PUBLISHED = {
    "bert-large": (
        {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096, "vocab_size": 30522},
        335_174_458,
    ),
    "roberta-base": (
        {"model_type": "roberta", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        124_697_433,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257},
        1_557_611_200,
    ),
    "opt-350m": (
        {"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"ffn_dim": 4096, "vocab_size": 50272, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
        331_196_416,
    ),
    "llama2-7b": (LLAMA_7B | {"model_type": "llama", "intermediate_size": 11008}, 6_738_415_616),
    "mixtral-8x7b": (MIXTRAL | {"num_key_value_heads": 8}, 46_702_792_704),
    "mixtral-8x7b with 32 key/value heads": (MIXTRAL | {"num_key_value_heads": 32}, 47_508_099_072),
}
"""Sizes as published, with the counts of the checkpoints."""


def parameters_of_transformers(config):
    """Elements of each parameter of the model that transformers makes of the same keys, on the meta device."""
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    made = transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    kinds = {"bert": "AutoModelForMaskedLM", "roberta": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
    auto = getattr(transformers, kinds.get(config["model_type"], "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = auto.from_config(made)
    found = [parameter.numel() for parameter in model.parameters()]
    if config["model_type"] == "t5" and config.get("tie_word_embeddings") is False:
        # Version 5 ties T5 whatever the file says; the published checkpoints have the head that their files promise.
        found.append(config["vocab_size"] * config["d_model"])
    return sorted(found)


def config_of(model):
    """The configuration that transformers would want for a preset."""
    common = {"hidden_size": model.hidden, "num_hidden_layers": model.num_layers, "vocab_size": model.vocab}
    common |= {"num_attention_heads": model.heads, "tie_word_embeddings": model.tied_embeddings}
    gated = common | {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "intermediate_size": model.ffn}
    experts = model.experts
    routed = {"num_experts": experts.number, "moe_intermediate_size": experts.ffn}
    match model.family:
        case "bert":
            kind = "roberta" if model.position_offset else "bert"
            sizes = {"intermediate_size": model.ffn, "max_position_embeddings": model.max_positions}
            return common | sizes | {"model_type": kind, "type_vocab_size": model.type_vocab}
        case "gpt2":
            sizes = {"n_embd": model.hidden, "n_layer": model.num_layers, "n_head": model.heads}
            return sizes | {"model_type": "gpt2", "vocab_size": model.vocab, "n_positions": model.max_positions}
        case "opt":
            sizes = {"ffn_dim": model.ffn, "word_embed_proj_dim": model.embedding_width}
            return common | sizes | {"model_type": "opt", "do_layer_norm_before": model.norm_first}
        case "dbrx":
            sizes = {"d_model": model.hidden, "n_layers": model.num_layers, "n_heads": model.heads}
            return CONFIGS["dbrx"] | sizes | {
                "vocab_size": model.vocab,
                "attn_config": {"kv_n_heads": model.kv_heads, "rope_theta": 500000},
                "ffn_config": {"ffn_hidden_size": experts.ffn, "moe_num_experts": experts.number},
            }  # fmt: skip
        case "t5":
            sizes = {"d_model": model.hidden, "d_kv": model.head_dim, "d_ff": model.ffn, "num_layers": model.num_layers}
            form = "gated-gelu" if model.gated else "relu"
            return sizes | {
                "model_type": "t5", "num_heads": model.heads, "vocab_size": model.vocab, "feed_forward_proj": form,
                "tie_word_embeddings": model.tied_embeddings,
            }  # fmt: skip
    if model.qk_norm:
        return gated | ({"model_type": "qwen3_moe"} | routed if experts.number else {"model_type": "qwen3"})
    if experts.shared_ffn:
        return gated | routed | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": experts.shared_ffn}
    if experts.number:
        return gated | {"model_type": "mixtral", "num_local_experts": experts.number}
    return gated | {"model_type": "qwen2" if model.qkv_bias else "llama"}


def graph_of(spec):
    return build(spec.model, spec.train)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_that_of_transformers(tmp_path, name):
    """Not the sum alone: each tensor has its size."""
    found = sorted(parameter.numel for parameter in graph_of(written(tmp_path, CONFIGS[name])).parameters)
    assert found == parameters_of_transformers(CONFIGS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(tmp_path, name):
    config, published = PUBLISHED[name]
    assert graph_of(written(tmp_path, config)).num_parameters == published == sum(parameters_of_transformers(config))


def test_active_parameters_of_mixtral(tmp_path):
    """Jiang et al. 2024: 47B parameters, of which a token uses 13B."""
    config, total = PUBLISHED["mixtral-8x7b"]
    graph = graph_of(written(tmp_path, config))
    assert graph.num_active_parameters == 12_879_925_248
    assert graph.num_parameters - graph.num_active_parameters == 32 * 6 * 3 * 4096 * 14336
    assert graph.num_trained_parameters == total


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset_is_a_model_of_transformers(preset):
    """At its real size: each tensor."""
    model = preset_model(preset)
    graph = build(model, TrainSpec(1, 1, 1, "bf16", "none", 2, 0))
    assert sorted(parameter.numel for parameter in graph.parameters) == parameters_of_transformers(config_of(model))
