"""Hugging Face configurations: the parameters that transformers' own models have, and what is refused by name."""

import json

import pytest
from strategy_cases import resolved

from zsim.model import build

REASON = "transformers is missing: install the extra peers, `make test` does"
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 512}
"""Sizes that most families write alike."""
DECODER = SMALL | {"intermediate_size": 176, "max_position_embeddings": 128}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 8, "vocab_size": 512}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

CONFIGS = {
    "bert": DECODER | {"model_type": "bert"},
    "bert-one-type": DECODER | {"model_type": "bert", "type_vocab_size": 1},
    "roberta": DECODER | {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1},
    "gpt2": GPT2 | {"model_type": "gpt2", "n_inner": None, "n_ctx": 128},
    "gpt2-untied-wide": GPT2 | {"model_type": "gpt2", "n_inner": 100, "tie_word_embeddings": False},
    "opt": DECODER | {"model_type": "opt", "ffn_dim": 96},
    "opt-projected": DECODER
    | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "llama-mha": DECODER | {"model_type": "llama", "num_key_value_heads": None, "head_dim": None},
    "llama-gqa": DECODER | {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biased": DECODER | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": DECODER | {"model_type": "mistral"},
    "mistral-null": DECODER | {"model_type": "mistral", "num_key_value_heads": 4, "head_dim": None},
    "qwen2": DECODER | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": DECODER | {"model_type": "qwen3", "num_key_value_heads": 4},
    "qwen3-biased": DECODER | {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True},
    "mixtral": DECODER | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4},
    "qwen2_moe": DECODER
    | QWEN_EXPERTS
    | {"model_type": "qwen2_moe", "num_key_value_heads": 4, "shared_expert_intermediate_size": 80},
    "qwen2_moe-mixed": DECODER
    | QWEN_EXPERTS
    | {"model_type": "qwen2_moe", "num_key_value_heads": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "qwen3_moe": DECODER | QWEN_EXPERTS | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 16},
    "qwen3_moe-alternating": DECODER | QWEN_EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "t5": T5 | {"model_type": "t5", "feed_forward_proj": "relu"},
    "t5-uneven": T5 | {"model_type": "t5", "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"},
    "dbrx": {"model_type": "dbrx", "d_model": 64, "n_layers": 3, "n_heads": 8, "vocab_size": 512}
    | {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""Small models of every family, with the choices that change their parameters."""

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


def written(folder, config, name="config.json"):
    """A spec with the model of a configuration that is written into `folder`."""
    (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return resolved(folder, "deepspeed-0.19", model={"hf_config": name}, seq_len=64)


def graph_of(spec):
    return build(spec.model, spec.train)


def parameters_of_transformers(config):
    """Elements of each parameter of the model that transformers makes of the same keys, on the meta device."""
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    made = transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    kinds = {"bert": "AutoModelForMaskedLM", "roberta": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
    auto = getattr(transformers, kinds.get(config["model_type"], "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = auto.from_config(made)
    return sorted(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------- counts


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
