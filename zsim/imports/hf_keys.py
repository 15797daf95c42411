"""Keys of Hugging Face's config.json: what changes nothing here, and what makes a model one that is not known."""

from typing import Any, Final

NEUTRAL: Final = frozenset(
    {
        # Of every configuration: bookkeeping, generation, labels (transformers 5.24, configuration_utils.py).
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache", "use_bfloat16"),
        *("return_dict", "output_hidden_states", "output_attentions", "torchscript", "output_past", "is_decoder"),
        *("is_encoder_decoder", "tokenizer_class", "prefix", "task_specific_params", "finetuning_task"),
        *("problem_type", "id2label", "label2id", "num_labels", "pad_token_id", "bos_token_id", "eos_token_id"),
        *("sep_token_id", "decoder_start_token_id", "unk_token_id", "begin_suppress_tokens", "suppress_tokens"),
        *("bad_words_ids", "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "top_k", "top_p"),
        *("num_beam_groups", "diversity_penalty", "temperature", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
        *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "tf_legacy_loss", "tie_encoder_decoder", "pruned_heads"),
        *("cross_attention_hidden_size", "chunk_size_feed_forward", "gradient_checkpointing", "classifier_dropout"),
        # Numbers within a kernel and initial values.
        *("hidden_act", "activation_function", "dense_act_fn", "initializer_range", "initializer_factor", "init_std"),
        *("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "scale_attn_weights", "pretraining_tp"),
        *("scale_attn_by_inverse_layer_idx", "rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base"),
        *("relative_attention_max_distance", "n_ctx", "clip_qkv"),
        # Heads that language modelling does not use.
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        *("pooler_type", "directionality"),
        # Numbers of routing.
        *("norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "moe_loss_weight"),
        *("moe_normalize_expert_weights", "ffn_act_fn", "model_type"),
    }
)
"""Known to change neither a parameter nor a kernel that is counted."""

_MLA: Final = "multi-head latent attention (MLA)"
_MULTIMODAL: Final = "a model of several modalities"
_LINEAR: Final = "linear or hybrid attention"
_STATE_SPACE: Final = "a state-space model"

UNKNOWN_FEATURES: Final[dict[str, str]] = {
    "kv_lora_rank": _MLA,
    "q_lora_rank": _MLA,
    "qk_rope_head_dim": _MLA,
    "vision_config": _MULTIMODAL,
    "text_config": _MULTIMODAL,
    "audio_config": _MULTIMODAL,
    "thinker_config": _MULTIMODAL,
    "visual": _MULTIMODAL,
    "linear_num_key_heads": _LINEAR,
    "linear_num_value_heads": _LINEAR,
    "linear_key_head_dim": _LINEAR,
    "full_attention_interval": _LINEAR,
    "hybrid_override_pattern": _LINEAR,
    "attn_type_list": _LINEAR,
    "attn_layer_period": _LINEAR,
    "block_types": _LINEAR,
    "mamba_d_state": _STATE_SPACE,
    "ssm_state_size": _STATE_SPACE,
    "state_size": _STATE_SPACE,
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "per_layer_config": "layers of different shapes",
    "num_nextn_predict_layers": "multi-token prediction",
    "first_k_dense_replace": "experts behind a few dense blocks",
}
"""A key with a value -> what it means that is not modelled, whatever the model calls itself."""

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"


def is_set(value: Any) -> bool:
    """Whether a key says anything: null, false, 0 and nothing at all do not."""
    return value not in (None, False, 0, "", [], {})
