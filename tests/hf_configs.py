"""Small Hugging Face configurations of every family, with the choices that change their parameters."""

import json

from strategy_cases import resolved

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 512}
"""Sizes that most families write alike."""
DECODER = SMALL | {"intermediate_size": 176, "max_position_embeddings": 128}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_heads": 8,
    "vocab_size": 512,
    "decoder_start_token_id": 0,
}
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
    "qwen3_moe-mixed": DECODER | QWEN_EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [0], "head_dim": 16},
    "qwen3_moe-alternating": DECODER | QWEN_EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "t5": T5 | {"model_type": "t5", "feed_forward_proj": "relu"},
    "t5-uneven": T5 | {"model_type": "t5", "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"},
    "dbrx": {"model_type": "dbrx", "d_model": 64, "n_layers": 3, "n_heads": 8, "vocab_size": 512}
    | {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


def written(folder, config, **train):
    """A spec with the model of a configuration that is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return resolved(folder, "deepspeed-0.19", model={"hf_config": "config.json"}, **train)
