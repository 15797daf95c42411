"""Presets: the number of parameters that Hugging Face's modules of these shapes have."""

import pytest
from strategy_cases import resolved

from zsim.model import build
from zsim.presets import presets

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
}


def test_every_preset_is_counted():
    assert set(PRESETS) == set(NUM_PARAMETERS)


@pytest.mark.parametrize(("preset", "number"), NUM_PARAMETERS.items())
def test_number_of_parameters(tmp_path, preset, number):
    assert parameters(tmp_path, preset) == number


@pytest.mark.parametrize("preset", sorted(PRESETS))
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
