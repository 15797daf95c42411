"""The tables of keys against the installed DeepSpeed: no key of it is unknown, none is taken for one of its own."""

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from own_configurations import resolved_with

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
        if name in keys.REMOVED_IN_0_19:
            continue
        assert fields[name].default == default
        bounds = {"reduce_bucket_size": 1, "allgather_bucket_size": 1}
        assert least == bounds.get(name, 0)
    for name, default in keys.SWITCHES.items():
        if name not in keys.REMOVED_IN_0_19:
            assert fields[name].default == (None if name == "overlap_comm" else default)


def test_activation_checkpointing_has_the_keys_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.activation_checkpointing.config", reason=REASON)
    assert set(config.ACT_CHKPT_DEFAULT) == sections.CHECKPOINTING_KEYS


def test_optimizers_are_those_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.config", reason=REASON)
    assert set(config.DEEPSPEED_OPTIMIZERS) <= sections.OPTIMIZERS | set(sections.OPTIMIZERS_NOT_MODELLED)


CONFIG = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": dict.fromkeys(
        (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_max_live_parameters",
            "sub_group_size",
            "overlap_comm",
            "allgather_bucket_size",
        ),
        "auto",
    ),
}
"""Each "auto" that people write."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autos_are_filled_as_the_trainer_fills_them(tmp_path, stage):
    """The Trainer's own code on the same configuration: equal values, and the rest left to DeepSpeed."""
    hugging_face = pytest.importorskip("transformers.integrations.deepspeed", reason="transformers is of `dev`")
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["stage"] = stage
    spec = resolved_with(tmp_path, copy.deepcopy(config), gradient_accumulation=3)
    trainers = filled_by_the_trainer(hugging_face, config, spec)
    assert len(spec.autos) > 15
    for item in spec.autos:
        theirs = trainers
        for name in item.path.split("."):
            theirs = theirs[name]
        if item.rule.startswith(("left to DeepSpeed", "default of the version")):
            assert theirs == "auto", item.path
        elif item.value is None:
            assert theirs != "auto", item.path
        else:
            assert theirs == item.value, item.path


def filled_by_the_trainer(hugging_face, config, spec):
    """Runs the Trainer's rules; the four accessors are those of accelerate.utils.deepspeed.HfDeepSpeedConfig."""

    class Config(hugging_face.HfTrainerDeepSpeedConfig):
        def __init__(self):
            self.config, self._dtype, self.mismatches = config, None, []

        def find_config_node(self, path):
            *above, key = path.split(".")
            section = self.config
            for name in above:
                section = section.get(name)
                if section is None:
                    return None, key
            return section, key

        def get_value(self, path, default=None):
            section, key = self.find_config_node(path)
            return default if section is None else section.get(key, default)

        def is_true(self, path):
            return bool(self.get_value(path))

        def is_zero3(self):
            return self.get_value("zero_optimization.stage") == 3

    train, cluster = spec.train, spec.cluster
    arguments = SimpleNamespace(
        world_size=cluster.num_ranks,
        per_device_train_batch_size=train.micro_batch,
        gradient_accumulation_steps=train.gradient_accumulation,
        max_grad_norm=1.0,
        learning_rate=5e-5,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        save_on_each_node=False,
        fp16=train.precision == "fp16",
        fp16_full_eval=False,
        bf16=train.precision == "bf16",
        bf16_full_eval=False,
        get_warmup_steps=lambda _: 0,
    )
    filler = Config()
    filler.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=spec.model.hidden))
    filler.trainer_config_finalize(arguments, model, 1000)
    return config


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
        assert len(dataclasses.fields(grammar)) == 8
        assert not grammar.absent
        assert grammar.optimizers == sections.OPTIMIZERS
