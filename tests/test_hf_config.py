"""Hugging Face configurations: what is read of them, what is said, and what is refused by name."""

import json
import os
import re
from pathlib import Path

import pytest
from hf_configs import CONFIGS, written
from hypothesis import given
from hypothesis import strategies as st
from strategy_cases import resolved
from test_fuzz_readers import QUICK, mutated, passes

from zsim import load, resolve
from zsim.model import build
from zsim.reading.config import ModelSettings
from zsim.reading.documents import InputError
from zsim.reading.presets import resolve_model
from zsim.spec import TrainSpec

# ---------------------------------------------------------------------- what is read


def test_explicit_fields_and_overrides_beat_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-gqa"]))
    model = {"hf_config": "config.json", "layers": 2, "vocab": 256}
    spec = resolved(tmp_path, "deepspeed-0.19", model=model)
    assert (spec.model.num_layers, spec.model.vocab, spec.model.hidden) == (2, 256, 64)
    assert spec.model.name == f"{tmp_path.name} (layers=2, vocab=256)"
    (tmp_path / "other.json").write_text(json.dumps(CONFIGS["opt"]))
    other = resolve(load(tmp_path / "small.yaml", ["model.hf_config=other.json", "model.layers=1"]))
    assert (other.model.family, other.model.num_layers, other.model.name) == ("opt", 1, "other (layers=1, vocab=256)")


def test_a_folder_stands_for_its_configuration(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    assert resolved(tmp_path, "ddp", model={"hf_config": "my-model"}).model.name == "my-model"


def test_a_typed_path_may_start_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.json").write_text(json.dumps(CONFIGS["gpt2"]))
    resolved(tmp_path, "ddp", model={"preset": "llama3-8b"})
    monkeypatch.chdir(tmp_path / "here")
    overrides = ["model={hf_config: mine.json}"]
    experiment = load(tmp_path / "small.yaml", overrides)
    assert resolve(experiment).model.name == "mine"
    assert experiment.files[-1] == tmp_path / "here" / "mine.json"
    (tmp_path / "mine.json").write_text(json.dumps(CONFIGS["opt"]))
    with pytest.raises(InputError, match=r"lies beside the experiment .* and in the working folder"):
        resolve(load(tmp_path / "small.yaml", overrides))


def test_positions_in_front_of_the_first_token(tmp_path):
    """RoBERTa's begin behind the padding's index, OPT's behind two rows of their own."""
    for name, longest in (("roberta", 512), ("opt", 128), ("bert", 128), ("gpt2", 128)):
        model = written(tmp_path, CONFIGS[name]).model
        assert (name, model.max_positions - model.position_offset) == (name, longest)
    with pytest.raises(ValueError, match=r"train\.seq_len: given 129; allowed: at most the 128 positions"):
        written(tmp_path, CONFIGS["opt"], seq_len=129)


def test_dropout_is_read_from_its_keys(tmp_path):
    def dropouts(name, **more):
        model = written(tmp_path, CONFIGS[name] | more).model
        return model.dropout, model.attention_dropout

    assert dropouts("opt") == (True, False)
    assert dropouts("opt", dropout=0, attention_dropout=0.1) == (False, True)
    assert dropouts("bert", hidden_dropout_prob=0.0) == (False, True)
    assert dropouts("llama-mha") == (False, False)
    assert dropouts("t5", dropout_rate=0) == (False, False)


def notes(folder, config, **train):
    return [line for line in written(folder, config, **train).warnings if "not stated" not in line]


def test_keys_that_are_not_known_are_named(tmp_path):
    config = CONFIGS["llama-gqa"] | {"use_flash_attention": True, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
    assert notes(tmp_path, config) == [
        "config.json: keys that are not known, taken to change nothing: use_flash_attention"
    ]
    inner = CONFIGS["dbrx"] | {"ffn_config": CONFIGS["dbrx"]["ffn_config"] | {"moe_frequency": 2}}
    assert notes(tmp_path, inner) == [
        "config.json: keys that are not known, taken to change nothing: ffn_config.moe_frequency"
    ]


def test_many_keys_that_are_not_known_are_counted(tmp_path):
    (line,) = notes(tmp_path, CONFIGS["llama-gqa"] | {f"k{index}": index for index in range(300)} | {"a\nb": 1})
    assert line.endswith("k19 and 281 more")
    (line,) = notes(tmp_path, CONFIGS["llama-gqa"] | {"a\nb": 1})
    assert "\n" not in line


def test_a_sliding_window_that_bites_is_said(tmp_path):
    config = CONFIGS["mistral"] | {"sliding_window": 32}
    assert notes(tmp_path, config, seq_len=32) == []
    (line,) = notes(tmp_path, config, seq_len=64)
    assert "attention looks back 32 of train.seq_len 64 tokens" in line
    assert "priced over all of them" in line
    assert notes(tmp_path, config | {"sliding_window": None}, seq_len=64) == []
    # Qwen has a window only where it is switched on, and not in its full layers.
    qwen = CONFIGS["qwen3"] | {"sliding_window": 32}
    assert notes(tmp_path, qwen, seq_len=64) == []
    assert len(notes(tmp_path, qwen | {"use_sliding_window": True}, seq_len=64)) == 1
    full = {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}
    assert notes(tmp_path, qwen | full, seq_len=64) == []


def test_a_sequence_beyond_the_positions_of_the_model_is_said(tmp_path):
    config = CONFIGS["llama-gqa"] | {"max_position_embeddings": 32}
    assert notes(tmp_path, config) == ["train.seq_len 64 is beyond the 32 positions of " + tmp_path.name]


def test_an_untied_head_of_t5_is_said(tmp_path):
    lines = notes(tmp_path, CONFIGS["t5"] | {"tie_word_embeddings": False})
    assert [line for line in lines if "lm_head has a weight of its own" in line]
    assert [line for line in lines if "as many tokens as the encoder" in line]


def test_another_head_is_said(tmp_path):
    (line,) = notes(tmp_path, CONFIGS["llama-mha"] | {"architectures": ["LlamaForSequenceClassification"]})
    assert (
        line
        == "config.json:1: architectures: LlamaForSequenceClassification is taken as LlamaForCausalLM, with its head"
    )
    assert notes(tmp_path, CONFIGS["llama-mha"] | {"architectures": ["LlamaForCausalLM"]}) == []


def test_the_class_stands_in_for_a_missing_type(tmp_path):
    config = {key: value for key, value in CONFIGS["mixtral"].items() if key != "model_type"}
    model = written(tmp_path, config | {"architectures": ["MixtralForCausalLM"]}).model
    assert model.experts.number == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "flash", "attention_dropout": True}, ["model.attention_dropout has no effect: flash attention"]),
        ({"fused_kernels": True, "gelu_new": True}, ["model.gelu_new has no effect: its kernels are fused into one"]),
        ({"attention_dropout": False, "gelu_new": True}, []),
    ],
)
def test_fields_without_effect_are_said(tmp_path, fields, said):
    spec = resolved(tmp_path, "ddp", model={"preset": "gpt2-124m"} | fields)
    found = [line for line in spec.warnings if "no effect" in line]
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


# ---------------------------------------------------------------------- what is refused


def without(name, *keys):
    return {key: value for key, value in CONFIGS[name].items() if key not in keys}


REFUSED = {
    "latent attention": (
        CONFIGS["llama-mha"] | {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        r"kv_lora_rank: multi-head latent attention \(MLA\): not modelled \(model_type 'deepseek_v3'\)",
    ),
    "vision": (
        {"model_type": "qwen2_vl", "vision_config": {"depth": 32}, "hidden_size": 64},
        r"vision_config: a model of several modalities: not modelled",
    ),
    "hybrid attention": (
        CONFIGS["qwen3"] | {"model_type": "qwen3_next", "linear_num_value_heads": 32},
        r"linear_num_value_heads: linear or hybrid attention: not modelled",
    ),
    "hybrid layers": (
        CONFIGS["qwen3"] | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
        r"layer_types: given 'linear_attention': linear or hybrid attention is not modelled",
    ),
    "fp8": (
        CONFIGS["llama-mha"] | {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config: quantised weights: not modelled",
    ),
    "unknown type": (
        CONFIGS["llama-mha"] | {"model_type": "lama"},
        r"model_type: unknown 'lama'; did you mean 'llama'\?",
    ),
    "no type": (without("llama-mha", "model_type"), r"model_type is missing: no Hugging Face config.json"),
    "look-alike": (
        {
            "name": "gpt2-xl",
            "model_type": "gpt2",
            "num_layers": 48,
            "n_head": 25,
            "hidden_dim": 1600,
            "vocab_size": 50257,
        },
        r"n_embd is missing; .* as transformers writes it, but with hidden_dim, name, num_layers",
    ),
    "no width": (
        without("llama-mha", "intermediate_size"),
        r"intermediate_size is missing; allowed: a whole number from 1",
    ),
    "text for a number": (
        CONFIGS["opt"] | {"ffn_dim": "wide"},
        r"ffn_dim: given 'wide'; allowed: a whole number from 1",
    ),
    "other class": (
        CONFIGS["llama-mha"] | {"architectures": ["Qwen2ForCausalLM"]},
        r"architectures: given 'Qwen2ForCausalLM'; allowed: LlamaForCausalLM, as model_type says",
    ),
    "encoder alone": (CONFIGS["t5"] | {"architectures": ["T5EncoderModel"]}, r"architectures: .* half a model"),
    "heads": (
        CONFIGS["llama-gqa"] | {"num_key_value_heads": 3},
        r"num_key_value_heads: 3 key/value heads do not divide 8 heads",
    ),
    "relative positions": (CONFIGS["bert"] | {"position_embedding_type": "relative_key"}, r"allowed: 'absolute'"),
    "cross-attention": (CONFIGS["gpt2"] | {"add_cross_attention": True}, r"add_cross_attention: .* is not modelled"),
    "bias": (CONFIGS["opt"] | {"enable_bias": False}, r"enable_bias: .* is not modelled"),
    "beyond any model": (
        CONFIGS["llama-mha"] | {"hidden_size": 10**9},
        r"hidden_size: given 1000000000; allowed: a whole number from 1 to 1,000,000",
    ),
    "experts beyond any": (CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 10**9}, r"from 1 to 10,000,000"),
    "two names": (
        CONFIGS["gpt2"] | {"hidden_size": 128},
        r"hidden_size: given 128, but n_embd is 64; allowed: the same",
    ),
    "too few layer types": (
        CONFIGS["qwen3"] | {"layer_types": ["full_attention"]},
        r"layer_types: given 1 of them; allowed: one for each of the 3 layers",
    ),
    "odd heads": (CONFIGS["llama-gqa"] | {"head_dim": 7}, r"head_dim: given 7; allowed: an even number"),
    "no list": (CONFIGS["qwen3_moe"] | {"mlp_only_layers": 0}, r"given 0; allowed: a list of whole numbers"),
    "no section": (CONFIGS["dbrx"] | {"attn_config": False}, r"attn_config: given False; allowed: a mapping"),
    "no gate": (
        CONFIGS["t5"] | {"feed_forward_proj": "gatedgelu"},
        r"given 'gatedgelu'; allowed: an activation, as in",
    ),
    "padding behind": (CONFIGS["roberta"] | {"pad_token_id": 600}, r"given 600; allowed: a whole number from 0 to 512"),
    "too many experts": (CONFIGS["mixtral"] | {"num_experts_per_tok": 9}, r"9 experts a token of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_line(tmp_path, name):
    config, said = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    with pytest.raises(ValueError, match=said) as refusal:
        resolved(tmp_path, "deepspeed-0.19", model={"hf_config": "config.json"}, seq_len=64)
    assert str(refusal.value).startswith("config.json")
    assert "\n" not in str(refusal.value)
    file, line, *_ = str(refusal.value).split(":")
    if line.isdigit():
        key = str(refusal.value).split(": ")[1]
        assert f'"{key.split(".")[0]}"' in (tmp_path / file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hf_config": "none.json"}, "small.yaml:1: model.hf_config: 'none.json' does not exist"),
        ({"hf_config": " "}, "small.yaml:1: model.hf_config: given ' '; allowed: the path of a file"),
        ({"hf_config": "x" * 400}, "File name too long"),
        ({"hf_config": "a\0b"}, "small.yaml:1: model.hf_config: 'a\\x00b'"),
        (
            {"hf_config": "config.json", "preset": "gpt2-124m"},
            "model.hf_config: given besides model.preset; allowed: one",
        ),
        (
            {"hf_config": "config.json", "gated": True},
            "small.yaml:1: model.gated: given true; allowed: false with gpt2",
        ),
        ({"hf_config": "config.json", "qk_norm": True}, "model.qk_norm: given true; allowed: false with gpt2"),
        ({"preset": "t5-large", "attention": "flash"}, "model.attention: given flash; allowed: eager, t5 adds"),
        ({"preset": "mixtral-8x7b", "experts": {"number": 8, "per_token": 2}}, "model.experts.ffn is missing"),
        ({"preset": "llama3-8b", "experts": {"numbers": 8}}, "unknown key; did you mean 'number'?"),
        ({"preset": "dbrx", "dropout": True}, "model.dropout: given true; allowed: false, dbrx has none"),
    ],
)
def test_slips_around_the_file(tmp_path, model, said):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    with pytest.raises(ValueError, match=re.escape(said)):
        resolved(tmp_path, "deepspeed-0.19", model=model, seq_len=64)


# ---------------------------------------------------------------------- files of others

EXPECTED_OF_USERS = {
    "dbrx_16x13b.config.json": (131_596_523_520, 36_469_708_800),
    "llama2_70b.config.json": (68_976_648_192, None),
    "llama2_7b.config.json": (6_738_415_616, None),
    "llama3.1_8b.config.json": (8_030_261_248, None),
    "mixtral_8x7b.config.json": (47_508_099_072, 13_685_231_616),
    "qwen3-30B-A3B_config.json": (30_532_122_624, 3_353_032_704),
    "qwen3-8B_config.json": (8_190_735_360, None),
    "t5-v1_1-xxl.config.json": (11_135_332_352, None),
    "deepseek_v3_config.json": "multi-head latent attention",
    "qwen_vl.config.json": "several modalities",
    "llmanalysis_gpt2-xl.json": "n_embd is missing",
    "llmanalysis_facebook_opt-350m.json": "hidden_size is missing",
}
"""Total and active parameters, or why a file is refused."""


def test_configurations_of_users_are_read_or_refused_by_name(tmp_path):
    folder = os.environ.get("ZSIM_USER_FILES")
    if not folder:
        pytest.skip("ZSIM_USER_FILES names no folder of stored configurations")
    paths = sorted(Path(folder, "hf_config").glob("*.json"))
    assert paths
    for path in paths:
        expected = EXPECTED_OF_USERS[path.name]
        if isinstance(expected, str):
            with pytest.raises(InputError, match=expected):
                resolved(tmp_path, "deepspeed-0.19", model={"hf_config": str(path)})
        else:
            spec = resolved(tmp_path, "deepspeed-0.19", model={"hf_config": str(path)})
            graph, (total, active) = build(spec.model, spec.train), expected
            assert (graph.num_parameters, graph.num_active_parameters) == (total, active or total), path.name


@QUICK
@given(st.sampled_from(sorted(CONFIGS)).flatmap(lambda name: mutated(CONFIGS[name])))
def test_mutated_configurations_are_read_or_refused_in_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = ModelSettings(hf_config="config.json")
    passes(lambda: complete_model(resolve_model(settings, lambda *keys: ".".join(keys), tmp_path).spec))


def complete_model(model):
    """What was read can be built."""
    if model.num_blocks <= 40 and not model.experts.number > 1000:
        build(model, TrainSpec(1, 1, 8, "bf16", "none", 2, 0))
