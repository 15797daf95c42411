"""The tables of keys against the installed DeepSpeed: no key of it is unknown, none is taken for one of its own."""

import dataclasses
import itertools

import pytest

from zsim.imports import deepspeed_keys as keys
from zsim.imports import deepspeed_sections as sections

REASON = "deepspeed is of the extra `peers`"


def spellings(model):
    """Names under which a pydantic model of DeepSpeed reads its fields."""
    return {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}


class Recording(dict):
    """Remembers what it is asked for."""

    def __init__(self, content, asked):
        super().__init__(content)
        self.asked = asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self

    def __copy__(self):
        return Recording(self, self.asked)


def test_zero_optimization_has_the_keys_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.zero.config", reason=REASON)
    assert keys.GRAMMARS["2026"].zero == spellings(config.DeepSpeedZeroConfig)


def test_the_top_level_has_every_key_that_deepspeed_asks_for():
    config = pytest.importorskip("deepspeed.runtime.config", reason=REASON)
    asked = set()
    config.DeepSpeedConfig(Recording({"train_batch_size": 1, "zero_optimization": True}, asked))
    assert len(asked) > 50
    assert asked <= sections.KNOWN
    # Read by the reader of the raw file, by the autotuner and by the data loader, or read until 2022.
    assert sections.KNOWN - asked == {"sequence_parallel_size", "fp32_allreduce"}


def test_precisions_have_the_keys_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.precision_config", reason=REASON)
    assert spellings(config.DeepSpeedFP16Config) == sections.FP16_KEYS
    assert spellings(config.DeepSpeedBF16Config) == sections.BF16_KEYS


def test_what_deepspeed_has_removed():
    config = pytest.importorskip("deepspeed.runtime.config", reason=REASON)
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == keys.REMOVED_IN_0_19
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == keys.REMOVED_SECTIONS_IN_0_19


def test_defaults_are_those_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.zero.config", reason=REASON)
    fields = config.DeepSpeedZeroConfig.model_fields
    for name, (default, least) in keys.SIZES.items():
        assert fields[name].default == default
        bounds = {"reduce_bucket_size": 1, "allgather_bucket_size": 1}
        assert least == bounds.get(name, 0)
    for name, default in keys.SWITCHES.items():
        assert fields[name].default == (None if name == "overlap_comm" else default)


def test_activation_checkpointing_has_the_keys_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.activation_checkpointing.config", reason=REASON)
    assert set(config.ACT_CHKPT_DEFAULT) == sections.CHECKPOINTING_KEYS


def test_optimizers_are_those_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.config", reason=REASON)
    assert set(config.DEEPSPEED_OPTIMIZERS) <= sections.OPTIMIZERS | set(sections.OPTIMIZERS_NOT_MODELLED)


def test_a_key_is_of_one_kind():
    zero = (keys.SIZES, keys.SWITCHES, keys.ZERO_IDLE, keys.ZERO_NOT_MODELLED, keys.OFFLOAD_SECTIONS)
    top = (
        sections.READ,
        sections.NEUTRAL,
        sections.SECTIONS_NOT_MODELLED,
        sections.FLAGS_NOT_MODELLED,
        sections.SAID_OUT_LOUD,
        sections.SECTIONS_SAID_OUT_LOUD,
    )
    for kinds in (zero, top):
        for one, other in itertools.combinations(map(set, kinds), 2):
            assert not one & other
    for name in keys.ZERO_KNOWN - {"stage"}:
        field = keys.ALIASES.get(keys.RENAMED.get(name, name), keys.RENAMED.get(name, name))
        assert any(field in kind for kind in zero), name


def test_each_time_knows_what_is_always_read():
    for grammar in keys.GRAMMARS.values():
        assert {"stage", "reduce_bucket_size", "overlap_comm", "stage3_max_live_parameters"} <= grammar.zero
        assert grammar.zero <= keys.ZERO_KNOWN
        assert len(dataclasses.fields(grammar)) == 6
