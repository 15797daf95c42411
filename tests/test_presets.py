"""Presets: the number of parameters that Hugging Face's modules of these shapes have."""

import pytest
from strategy_cases import resolved

from zsim.model import build
from zsim.reading.presets import preset_model, presets
from zsim.spec import TrainSpec

PRESETS = presets()


def parameters(folder, preset):
    spec = resolved(folder, "deepspeed-0.19", model={"preset": preset})
    return build(spec.model, spec.train).num_parameters


# Printed by Hugging Face's `num_parameters()`, or for models without a checkpoint the sum of the tensors:
# BERT   L(12h² + 13h) + (v + p + t + 2)h + (h² + h) + 2h + v, of RoBERTa p = 514 and t = 1
# GPT-2  L(12h² + 13h) + (v + p + 2)h
NUM_PARAMETERS = {
    "roberta-10b": 10_305_040_136,
    "roberta-10b-deep": 10_135_530_760,
    "roberta-50b": 52_052_021_000,
    "bert-5b": 5_125_136_643,
    "gpt2-124m": 124_475_904,
    "gpt2-1.5b": 1_557_611_200,
    "gpt-7.5b": 7_467_786_240,
    "gpt3-175b": 174_604_259_328,
    "gpt-1t": 1_008_038_758_400,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "bert-large": 335_174_458,
    "roberta-large": 355_412_057,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "llama2-13b": 13_015_864_320,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "dbrx": 131_596_523_520,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-xxl": 11_135_332_352,
}
ACTIVE_BILLIONS = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "dbrx": 36,
}
"""As their authors say."""
TRAITS = {"experts", "qk_norm", "qkv_bias", "tied_embeddings"}
PLAIN = [
    name for name in PRESETS if PRESETS[name]["family"] in {"bert", "gpt2", "llama"} and not TRAITS & set(PRESETS[name])
]


def test_every_preset_is_counted():
    assert set(PRESETS) == set(NUM_PARAMETERS)


@pytest.mark.parametrize(("preset", "number"), NUM_PARAMETERS.items())
def test_number_of_parameters(tmp_path, preset, number):
    assert parameters(tmp_path, preset) == number


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_active_parameters(tmp_path, preset):
    """Half a unit of the last digit in which they are published, and as much again for embeddings not counted."""
    graph = build(preset_model(preset), TrainSpec(1, 1, 1, "bf16", "none", 2, 0))
    published = ACTIVE_BILLIONS.get(preset, graph.num_parameters / 1e9)
    assert graph.num_active_parameters / 1e9 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("preset", sorted(PLAIN))
def test_number_of_parameters_by_formula(tmp_path, preset):
    shape = PRESETS[preset]
    layers, h, v = shape["layers"], shape["hidden"], shape["vocab"]
    match shape["family"]:
        case "bert":
            block = 12 * h**2 + 13 * h
            rest = (v + shape["max_positions"] + shape["type_vocab"] + 2) * h + h**2 + h + 2 * h + v
        case "gpt2":
            block, rest = 12 * h**2 + 13 * h, (v + shape["max_positions"] + 2) * h
        case "llama":
            kv_width = h * shape.get("kv_heads", shape["heads"]) // shape["heads"]
            block, rest = 2 * h**2 + 2 * h * kv_width + 3 * h * shape["ffn"] + 2 * h, 2 * v * h + h
    assert parameters(tmp_path, preset) == layers * block + rest


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_names_its_source(preset):
    assert len(PRESETS[preset]["source"]) > 20
