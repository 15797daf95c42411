"""Each `model_type` of Hugging Face -> fields of the model, with the defaults of its configuration class.

The defaults are those of transformers 5.24 (models/*/configuration_*.py). What gives the model its size must be in the
file all the same: a file without it is no configuration that transformers wrote.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from zsim.imports.hf_keys import FULL_ATTENTION, SLIDING_ATTENTION
from zsim.imports.hf_reader import Reader
from zsim.model_spec import ExpertsSpec
from zsim.reading.documents import InputError
from zsim.reading.shapes import MOST
from zsim.units import shown

Fields = dict[str, Any]


class ModelType(NamedTuple):
    """How one `model_type` is read."""

    prefix: str
    """Of its classes in `architectures`."""
    model: str
    """The class whose parameters are counted."""
    read: Callable[[Reader], Fields]


def _bert(keys: Reader) -> Fields:
    keys.must_be("add_cross_attention", allowed=False, why="cross-attention is not modelled")
    keys.must_be("position_embedding_type", "absolute", "relative positions have tables of their own")
    keys.must_be("tie_word_embeddings", allowed=True, why="an untied decoder has a second bias")
    hidden, attention = (
        keys.probability("hidden_dropout_prob", 0.1),
        keys.probability("attention_probs_dropout_prob", 0.1),
    )
    return {
        "family": "bert",
        **_stack(keys, "hidden_size", "num_hidden_layers", "num_attention_heads"),
        "ffn": keys.count("intermediate_size", of="ffn"),
        "max_positions": keys.count("max_position_embeddings", 512, of="max_positions"),
        "type_vocab": keys.count("type_vocab_size", 2, of="type_vocab"),
        "position_offset": 0,
        "gelu_new": keys.text("hidden_act", "gelu") == "gelu_new",
        "dropout": hidden > 0,
        "attention_dropout": attention > 0,
    }


def _roberta(keys: Reader) -> Fields:
    fields = _bert(keys)
    # The first token has the position behind that of the padding.
    padding = keys.count("pad_token_id", 1, of="position_offset", least=0, most=max(0, fields["max_positions"] - 2))
    return fields | {"position_offset": padding + 1}


def _gpt2(keys: Reader) -> Fields:
    keys.must_be("add_cross_attention", allowed=False, why="cross-attention is not modelled")
    if keys.flag("reorder_and_upcast_attn", default=False):
        keys.note(f"{keys.where('reorder_and_upcast_attn')}: attention in fp32 is priced in the training precision")
    dropouts = [keys.probability(name, 0.1) for name in ("resid_pdrop", "embd_pdrop")]
    fields = _stack(
        keys, ("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")
    )
    return {
        "family": "gpt2",
        **fields,
        "ffn": keys.count("n_inner", 4 * fields["hidden"], of="ffn"),
        "max_positions": keys.count(("n_positions", "max_position_embeddings"), 1024, of="max_positions"),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True, of="tied_embeddings"),
        "gelu_new": keys.text("activation_function", "gelu_new") == "gelu_new",
        "dropout": max(dropouts) > 0,
        "attention_dropout": keys.probability("attn_pdrop", 0.1) > 0,
    }


def _opt(keys: Reader) -> Fields:
    keys.must_be("activation_function", "relu", "other functions keep other tensors")
    keys.must_be("enable_bias", allowed=True, why="OPT without biases is not modelled")
    keys.must_be("layer_norm_elementwise_affine", allowed=True, why="norms without weights are not modelled")
    keys.must_be("_remove_final_layer_norm", allowed=False, why="the final norm is part of the model")
    if keys.probability("layerdrop", 0.0):
        keys.note(f"{keys.where('layerdrop')}: no layer is dropped, as if it were 0")
    keys.probability("activation_dropout", 0.0)
    fields = _stack(keys, "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {
        "family": "opt",
        **fields,
        "ffn": keys.count("ffn_dim", of="ffn"),
        "max_positions": keys.count("max_position_embeddings", 2048, of="max_positions") + 2,
        "position_offset": 2,
        "embedding_width": keys.count("word_embed_proj_dim", fields["hidden"], of="embedding_width"),
        "norm_first": keys.flag("do_layer_norm_before", default=True, of="norm_first"),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True, of="tied_embeddings"),
        "dropout": keys.probability("dropout", 0.1) > 0,
        "attention_dropout": keys.probability("attention_dropout", 0.0) > 0,
    }


def _decoder(keys: Reader, *, kv_heads: int | None = None, head_dim: int | None = None) -> Fields:
    """What Llama and its relatives share; the arguments are the defaults of their classes, None for derived ones."""
    fields = _stack(keys, "hidden_size", "num_hidden_layers", "num_attention_heads")
    heads = fields["heads"]
    if "num_key_value_heads" in keys.data:
        kv_heads = heads  # null stands for as many as heads
    if "head_dim" in keys.data or head_dim is None:
        head_dim = fields["hidden"] // heads
    return {
        "family": "llama",
        **fields,
        "kv_heads": keys.count("num_key_value_heads", kv_heads or heads, of="kv_heads"),
        "head_dim": keys.count("head_dim", max(1, head_dim), of="head_dim"),
        "ffn": keys.count("intermediate_size", of="ffn"),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False, of="tied_embeddings"),
        "attention_dropout": keys.probability("attention_dropout", 0.0) > 0,
    }


def _llama(keys: Reader) -> Fields:
    biased = keys.flag("attention_bias", default=False, of="qkv_bias")
    mlp_bias = keys.flag("mlp_bias", default=False, of="mlp_bias")
    return _decoder(keys) | {"qkv_bias": biased, "output_bias": biased, "mlp_bias": mlp_bias}


def _mistral(keys: Reader) -> Fields:
    return _decoder(keys, kv_heads=8)


def _mixtral(keys: Reader) -> Fields:
    fields = _decoder(keys, kv_heads=8)
    if keys.probability("router_jitter_noise", 0.0):
        keys.note(f"{keys.where('router_jitter_noise')}: its kernel is not counted")
    experts = ExpertsSpec(
        number=keys.count(("num_local_experts", "num_experts"), 8, of="experts"),
        per_token=keys.count("num_experts_per_tok", 2, most=MOST["experts"]),
        ffn=fields["ffn"],
        shared_ffn=0,
        every=1,
        dense_layers=(),
    )
    return fields | {"experts": experts}


def _qwen2(keys: Reader) -> Fields:
    return _decoder(keys, kv_heads=32) | {"qkv_bias": True, "output_bias": False}


def _qwen3(keys: Reader) -> Fields:
    return _decoder(keys, kv_heads=32, head_dim=128) | _normed(keys)


def _normed(keys: Reader) -> Fields:
    """Qwen 3: norms of query and key, biases of all four projections or of none."""
    biased = keys.flag("attention_bias", default=False, of="qkv_bias")
    return {"qkv_bias": biased, "output_bias": biased, "qk_norm": True}


def _qwen2_moe(keys: Reader) -> Fields:
    fields = _decoder(keys, kv_heads=16) | {"qkv_bias": keys.flag("qkv_bias", default=True, of="qkv_bias")}
    shared = keys.count("shared_expert_intermediate_size", 5632, least=0, most=MOST["ffn"])
    return fields | _qwen_experts(keys, number=60, per_token=4, ffn=1408, shared_ffn=shared)


def _qwen3_moe(keys: Reader) -> Fields:
    fields = _decoder(keys, kv_heads=4) | _normed(keys)
    return fields | _qwen_experts(keys, number=128, per_token=8, ffn=768, shared_ffn=0)


def _qwen_experts(keys: Reader, *, number: int, per_token: int, ffn: int, shared_ffn: int) -> Fields:
    experts = ExpertsSpec(
        number=keys.count(("num_experts", "num_local_experts"), number, of="experts"),
        per_token=keys.count("num_experts_per_tok", per_token, most=MOST["experts"]),
        ffn=keys.count("moe_intermediate_size", ffn, most=MOST["ffn"]),
        shared_ffn=shared_ffn,
        every=keys.count("decoder_sparse_step", 1),
        dense_layers=keys.counts("mlp_only_layers"),
    )
    return {"experts": experts}


def _t5(keys: Reader) -> Fields:
    layers = keys.count(("num_layers", "num_hidden_layers"), of="layers")
    feed_forward = _feed_forward(keys)
    tied = keys.flag("tie_word_embeddings", default=True, of="tied_embeddings")
    if not tied:
        keys.note(
            f"{keys.where('tie_word_embeddings')}: false: lm_head has a weight of its own, as in the published"
            " checkpoints; a model that transformers 5 makes of this file without weights ties it"
        )
    dropout = keys.probability("dropout_rate", 0.1) > 0
    keys.must_be("is_gated_act", feed_forward.startswith("gated"), "as feed_forward_proj says")
    return {
        "family": "t5",
        **_stack(
            keys, ("d_model", "hidden_size"), ("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")
        ),
        "layers": layers,
        "decoder_layers": keys.count("num_decoder_layers", layers, of="decoder_layers"),
        "head_dim": keys.count(("d_kv", "head_dim"), 64, of="head_dim"),
        "ffn": keys.count("d_ff", of="ffn"),
        "position_buckets": keys.count("relative_attention_num_buckets", 32, of="position_buckets"),
        "gated": feed_forward.startswith("gated"),
        # transformers takes "gated-gelu" for the composed one.
        "gelu_new": feed_forward in {"gated-gelu", "gelu_new", "gated-gelu_new"},
        "tied_embeddings": tied,
        "dropout": dropout,
        "attention_dropout": dropout,
    }


def _feed_forward(keys: Reader) -> str:
    """T5's activation, as in "gelu", or with a gate, as in "gated-gelu"."""
    given = keys.text("feed_forward_proj", "relu")
    gate, dash, activation = given.partition("-")
    is_known = activation and "-" not in activation if gate == "gated" else not dash and not given.startswith("gated")
    if not is_known or not given:
        place = keys.where("feed_forward_proj")
        raise InputError(f"{place}: given {shown(given)}; allowed: an activation, as in relu, or gated-gelu")
    return given


def _dbrx(keys: Reader) -> Fields:
    attention, feed_forward = keys.section("attn_config"), keys.section("ffn_config")
    for name in ("resid_pdrop", "emb_pdrop"):
        keys.must_be(name, 0, "dropout of DBRX is not modelled")
    keys.must_be("tie_word_embeddings", allowed=False, why="transformers does not tie DBRX's")
    jitter = feed_forward.data.get("moe_jitter_eps")
    feed_forward.read.add("moe_jitter_eps")
    if jitter:
        keys.note(f"{feed_forward.where('moe_jitter_eps')}: its kernel is not counted")
    fields = _stack(
        keys, ("d_model", "hidden_size"), ("n_layers", "num_hidden_layers"), ("n_heads", "num_attention_heads")
    )
    experts = ExpertsSpec(
        number=feed_forward.count("moe_num_experts", 4, of="experts"),
        per_token=feed_forward.count("moe_top_k", 1, most=MOST["experts"]),
        ffn=feed_forward.count("ffn_hidden_size", 3584, most=MOST["ffn"]),
        shared_ffn=0,
        every=1,
        dense_layers=(),
    )
    fields |= {
        "family": "dbrx",
        "kv_heads": attention.count("kv_n_heads", 1, of="kv_heads"),
        "attention_dropout": attention.probability("attn_pdrop", 0.0) > 0,
        "experts": experts,
    }
    for section in (attention, feed_forward):
        keys.read |= {f"{section.at[-1]}.{name}" for name in section.read}
    return fields


def _stack(
    keys: Reader, hidden: str | tuple[str, ...], layers: str | tuple[str, ...], heads: str | tuple[str, ...]
) -> Fields:
    for names in (hidden, layers, heads, "vocab_size"):
        keys.read |= {names} if isinstance(names, str) else set(names)
    return {
        "hidden": keys.count(hidden, of="hidden"),
        "layers": keys.count(layers, of="layers"),
        "heads": keys.count(heads, of="heads"),
        "vocab": keys.count("vocab_size", of="vocab"),
    }


MODEL_TYPES: Final[dict[str, ModelType]] = {
    "bert": ModelType("Bert", "BertForMaskedLM", _bert),
    "roberta": ModelType("Roberta", "RobertaForMaskedLM", _roberta),
    "gpt2": ModelType("GPT2", "GPT2LMHeadModel", _gpt2),
    "opt": ModelType("OPT", "OPTForCausalLM", _opt),
    "llama": ModelType("Llama", "LlamaForCausalLM", _llama),
    "mistral": ModelType("Mistral", "MistralForCausalLM", _mistral),
    "mixtral": ModelType("Mixtral", "MixtralForCausalLM", _mixtral),
    "qwen2": ModelType("Qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": ModelType("Qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen2_moe": ModelType("Qwen2Moe", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": ModelType("Qwen3Moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "t5": ModelType("T5", "T5ForConditionalGeneration", _t5),
    "dbrx": ModelType("Dbrx", "DbrxForCausalLM", _dbrx),
}


def attention_window(keys: Reader, model_type: str, num_layers: int) -> int:
    """Tokens that some layer's attention looks back; 0 where all look back to the beginning.

    Raises:
        InputError: layers with an attention that is neither full nor sliding, or not one for each.

    """
    default = 4096 if model_type in {"mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"} else 0
    # Null and 0 say that there is none; an absent key means the default of the class.
    given = "sliding_window" in keys.data and not keys.data["sliding_window"]
    window = 0 if given else keys.count("sliding_window", default, least=0)
    keys.read |= {"sliding_window", "max_window_layers"}
    if model_type.startswith("qwen") and not keys.flag("use_sliding_window", default=False):
        window = 0
    layer_types = keys.words("layer_types")
    kinds = set(layer_types)
    if others := kinds - {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise InputError(
            f"{keys.where('layer_types')}: given {min(others)!r}: linear or hybrid attention is not modelled;"
            f" allowed: {FULL_ATTENTION}, {SLIDING_ATTENTION}"
        )
    if keys.data.get("layer_types") is not None and len(layer_types) != num_layers:
        said = f"given {len(layer_types)} of them; allowed: one for each of the {num_layers} layers"
        raise InputError(f"{keys.where('layer_types')}: {said}")
    return 0 if kinds == {FULL_ATTENTION} else window
