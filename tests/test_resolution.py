"""From an experiment to a spec: precedence, twins, DeepSpeed's configuration, and what has no effect."""

import json
from dataclasses import fields, is_dataclass

import pytest

from zsim.reading import data
from zsim.reading.constants import with_constant
from zsim.reading.documents import InputError
from zsim.reading.presets import presets
from zsim.reading.resolution import load, resolve

TRAIN = {
    "micro_batch": 4,
    "gradient_accumulation": 2,
    "seq_len": 512,
    "precision": "bf16",
    "activation_checkpointing": "none",
}
BASE = {
    "question": "How fast?",
    "model": {"preset": "gpt2-124m", "attention": "eager"},
    "cluster": {"topology": "p4d.24xlarge", "nodes": 2},
    "runtime": "deepspeed-0.6.0",
    "deepspeed": {},
    "train": TRAIN,
}


@pytest.fixture
def make(tmp_path):
    """Resolves an experiment with this DeepSpeed configuration, in a file of its own where `separate`."""

    def build(deepspeed, *overrides, separate=False, **changes):
        experiment = BASE | {"deepspeed": deepspeed} | changes
        if separate:
            (tmp_path / "ds.json").write_text(json.dumps(deepspeed, indent=1))
            experiment["deepspeed"] = "ds.json"
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps({key: value for key, value in experiment.items() if value is not None}, indent=1))
        return resolve(load(path, overrides))

    return build


def zero(**settings):
    return {"bf16": {"enabled": True}, "zero_optimization": settings}


def refusal(make, deepspeed, *overrides, **changes):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        make(deepspeed, *overrides, **changes)
    return str(error.value)


def test_defaults_of_deepspeed(make):
    spec = make(zero(stage=3))
    assert (spec.zero.stage, spec.zero.overlap_comm, spec.zero.reduce_bucket_size) == (3, True, 500_000_000)
    assert (spec.zero.prefetch_bucket_size, spec.zero.param_persistence_threshold) == (50_000_000, 100_000)
    assert make(zero(stage=2)).zero.overlap_comm is False
    assert make({"bf16": {"enabled": True}}).zero.stage == 0
    assert make(zero(stage=3, overlap_comm=None)).zero.overlap_comm is True


def test_sizes_as_people_write_them(make):
    settings = zero(stage=3, reduce_bucket_size=5e7, stage3_prefetch_bucket_size="auto", max_live_parameters=0)
    both = settings["zero_optimization"] | {"reduce_bucket_size": "auto"}
    spec = make(settings | {"zero_optimization": both}, runtime="deepspeed-0.19")
    assert make(settings).zero.reduce_bucket_size == 50_000_000
    assert spec.zero.reduce_bucket_size == 768 * 768
    assert spec.zero.prefetch_bucket_size == int(0.9 * 768 * 768)
    assert spec.zero.max_live_parameters == 0
    assert make(zero(stage=3, stage3_param_persistence_threshold="auto")).zero.param_persistence_threshold == 7680
    assert make(zero(stage=3, sub_group_size="auto")).zero.sub_group_size == 10**9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage: given 4; allowed: 0, 1, 2 or 3"),
        ({"stage": "3"}, "stage: given '3'"),
        ({"stage": [2, 3]}, "stage: given [2, 3]"),
        ({"stage": True}, "stage: given True"),
        ({"stage": 3, "reduce_bucket_size": 0}, 'reduce_bucket_size: given 0, which stood for "auto" in 2021'),
        ({"stage": 3, "reduce_bucket_size": -5}, "given -5"),
        ({"stage": 3, "stage3_prefetch_bucket_size": 15099494.4},
         'given 15099494.4; DeepSpeed rejects a fraction of an element; allowed: 15099494 or "auto"'),
        ({"stage": 3, "reduce_bucket_size": [1, 2]}, "a list is a search space of the autotuner"),
        ({"stage": 3, "reduce_bucket_size": 1e30}, "allowed: a whole number from 1 to"),
        ({"stage": 3, "reduce_bucket_size": True}, "given True"),
        ({"stage": 3, "overlap_comm": "yes"}, 'given \'yes\'; allowed: true, false or "auto"'),
        ({"stage": 3, "stage3_param_persitence_threshold": 1}, "did you mean 'stage3_param_persistence_threshold'?"),
        ({"stage": 3, "stage3_max_live_parameters": 1, "max_live_parameters": 2}, "is given under two names"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload_param: given 'cpu'; offload: not modelled yet"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "given 'nvme'; offload: not modelled yet"),
        ({"stage": 2, "cpu_offload": True}, "cpu_offload: given True; offload: not modelled yet"),
        ({"stage": 3, "zero_quantized_weights": True}, "ZeRO++: not modelled yet"),
    ],
)  # fmt: skip
def test_zero_settings_that_are_refused(make, settings, message):
    assert message in refusal(make, zero(**settings), runtime="deepspeed-0.19")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"bf16": {"enable": True}}, "did you mean 'enabled'?"),
        ({"bf16": True}, "bf16: given True; allowed: a mapping"),
        (
            {"optimizer": {"type": "Lamb"}},
            "given 'Lamb' (a trust ratio of each layer); only Adam's states are modelled",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism: not modelled yet"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse attention: not modelled yet"),
        ({"communication_data_type": "int8"}, "given 'int8'; allowed: fp16, bf16 or fp32"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "offload of activations"),
        ({"sparse_gradients": True}, "sparse gradients: not modelled yet"),
        ({"zero_optimization": 3}, "zero_optimization: given 3; allowed: a mapping"),
        ({"train_batch_size": 1.5}, "given 1.5; allowed: a whole number from 1"),
    ],
)
def test_sections_that_are_refused(make, extra, message):
    assert message in refusal(make, zero(stage=2) | extra, train={**TRAIN, "precision": "bf16"})


@pytest.mark.parametrize(
    ("runtime", "settings", "message"),
    [
        ("deepspeed-0.6.0", {"stage": 1, "stage3_max_live_parameters": 1e9},
         "stage3_max_live_parameters has no effect: it belongs to stage 3, not to stage 1"),
        ("deepspeed-0.6.0", {"stage": 0, "overlap_comm": True},
         "overlap_comm has no effect: stage 0 partitions nothing"),
        ("deepspeed-0.6.0", {"stage": 2, "allgather_partitions": False}, "no optimizer of DeepSpeed reads it"),
        ("deepspeed-0.6.0", {"stage": 1, "overlap_comm": True}, "deepspeed-0.6.0 turns it off in stage 1"),
        ("deepspeed-0.6.0", {"stage": 3, "allgather_bucket_size": 5e8},
         "allgather_bucket_size has no effect: it belongs to stages 1 and 2"),
        ("deepspeed-0.5.4", {"stage": 3, "stage3_prefetch_bucket_size": 5e7},
         "stage3_prefetch_bucket_size has no effect: the module trace of deepspeed-0.5.4 is broken"),
        ("deepspeed-0.19", {"stage": 2, "allgather_bucket_size": 5e8}, "gathers all partitions in one call"),
        ("ddp", {"stage": 0, "reduce_bucket_size": 5e8}, "DistributedDataParallel has buckets of its own"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(make, runtime, settings, message):
    assert any(message in line for line in make(zero(**settings), runtime=runtime).warnings)


def test_what_has_an_effect_is_not_warned_of(make):
    settings = {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "reduce_bucket_size": 5e8, "overlap_comm": True}
    assert make(zero(**settings)).warnings == ()
    repaired = make(zero(**settings), runtime="deepspeed-0.5.4", optimisations={"broken_trace": False})
    assert repaired.warnings == ()


def test_other_settings_without_effect(make):
    extra = {"wall_clock_breakdown": True, "aio": {"block_size": 1}, "activation_checkpointing": {"profile": True}}
    assert len(make(zero(stage=2) | extra).warnings) == 3


def test_a_choice_that_the_file_does_not_make_is_said(make):
    open_choices = make({}, model={"preset": "gpt2-124m"}).warnings
    assert "not stated, so taken: model.attention = eager" in open_choices


def test_a_sweep_is_said_to_do_nothing_in_one_run(make):
    assert "sweep: has no effect in a single run" in make({}, sweep={"cluster.nodes": [1, 2]}).warnings


def test_ddp_takes_no_stage(make):
    assert "allowed: 0 with ddp" in refusal(make, zero(stage=2), runtime="ddp")
    assert make(None, runtime="ddp").runtime.framework == "ddp"
    assert "deepspeed is missing; deepspeed-0.6.0 needs one" in refusal(make, None)


def test_switches_beat_the_version_and_the_configuration(make):
    settings = zero(stage=2, use_multi_rank_bucket_allreduce=False)
    assert make(settings, runtime="deepspeed-0.19").runtime.optimisations.multi_rank_all_reduce is False
    chosen = {"multi_rank_all_reduce": True, "limiter_depth": 5}
    switched = make(settings, runtime="deepspeed-0.19", optimisations=chosen).runtime.optimisations
    assert (switched.multi_rank_all_reduce, switched.limiter_depth) == (True, 5)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("override", ["train.micro_batch=8", "deepspeed.train_micro_batch_size_per_gpu=8"])
def test_setting_the_micro_batch_moves_its_twin_and_the_total(make, separate, override):
    config = zero(stage=2) | {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * 2 * 16}
    assert make(config, override, separate=separate).train.micro_batch == 8


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.gradient_accumulation=3", (4, 3)),
        ("deepspeed.gradient_accumulation_steps=3", (4, 3)),
        ("deepspeed.train_batch_size=320", (4, 5)),
        ("cluster.nodes=8", (4, 2)),
        ("cluster.gpus_per_node=4", (4, 2)),
    ],
)
def test_the_total_follows_or_leads(make, override, expected):
    config = zero(stage=2) | {"gradient_accumulation_steps": 2, "train_batch_size": 128}
    spec = make(config, override)
    assert (spec.train.micro_batch, spec.train.gradient_accumulation) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.precision=fp16", "fp16"),
        ("train.precision=fp32", "fp32"),
        ("deepspeed.bf16.enabled=false", "fp32"),
        ("deepspeed.fp16.enabled=true", "fp16"),
        ("train.precision=bf16", "bf16"),
    ],
)
def test_precision_moves_with_its_twin(make, override, expected):
    assert make(zero(stage=2), override).train.precision == expected


def test_files_that_disagree_show_both_values(make):
    text = refusal(make, zero(stage=2) | {"train_micro_batch_size_per_gpu": 8}, separate=True)
    assert "train.micro_batch is 4, but ds.json:" in text
    assert "train_micro_batch_size_per_gpu is 8; allowed: the same in both" in text
    text = refusal(make, {"fp16": {"enabled": True}})
    assert "train.precision is bf16" in text
    assert "fp16.enabled is true" in text


def test_two_precisions_are_refused(make):
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    text = refusal(make, both, train={"micro_batch": 4, "seq_len": 512})
    assert "fp16 and bf16 are both enabled; allowed: one of them" in text


def test_an_override_does_not_hide_that_files_disagree(make):
    config = zero(stage=2) | {"train_micro_batch_size_per_gpu": 8}
    assert "is 8; allowed: the same" in refusal(make, config, "train.micro_batch=2")
    config = zero(stage=2) | {"train_batch_size": 100}
    assert "given 100; allowed: 128 = 4 (micro-batch) x 2 (accumulation) x 16 (ranks)" in refusal(
        make, config, "train.micro_batch=2"
    )


def test_two_overrides_that_disagree(make):
    config = zero(stage=2) | {"train_micro_batch_size_per_gpu": 4}
    overrides = ("train.micro_batch=2", "deepspeed.train_micro_batch_size_per_gpu=3")
    assert "--set train.micro_batch is 2, but --set deepspeed" in refusal(make, config, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.micro_batch", "--set: given 'train.micro_batch'; allowed: a.b=value"),
        ("=3", "--set: given '=3'"),
        ("train..x=3", "allowed: a.b=value"),
        ("train.micro_bach=3", "--set train.micro_bach: unknown key; did you mean 'micro_batch'?"),
        ("train.micro_batch=0", "--set train.micro_batch: given 0"),
        ("train.micro_batch.x=0", "train.micro_batch is no section"),
        ("deepspeed.zero_optimization.stage=9", "--set deepspeed.zero_optimization.stage: given 9"),
        ("deepspeed=absent.json", "--set deepspeed: 'absent.json' does not exist"),
        ("train.micro_batch={a", "--set train.micro_batch:1: not well-formed"),
    ],
)
def test_wrong_overrides(make, override, message):
    assert message in refusal(make, zero(stage=2), override)


@pytest.mark.parametrize("separate", [False, True])
def test_a_stage_may_be_set_on_a_mapping_or_a_file(make, separate):
    assert make(zero(stage=3), "deepspeed.zero_optimization.stage=1", separate=separate).zero.stage == 1


def test_what_the_batch_leaves_open_is_worked_out(make):
    train = {"seq_len": 512}
    config = zero(stage=2) | {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2}
    spec = make(config, train=train)
    assert (spec.train.micro_batch, spec.train.gradient_accumulation, spec.train.precision) == (2, 4, "bf16")
    spec = make(zero(stage=2) | {"train_batch_size": 128}, train=train)
    assert (spec.train.micro_batch, spec.train.gradient_accumulation) == (8, 1)
    assert "allowed: a multiple of" in refusal(make, zero(stage=2) | {"train_batch_size": 100}, train=train)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
    }
    spec = make(config)
    assert (spec.train.micro_batch, spec.train.gradient_accumulation, spec.train.precision) == (4, 2, "bf16")
    assert "train.precision is missing" in refusal(make, config, train={"micro_batch": 4, "seq_len": 512})
    assert make({}, train={"micro_batch": 4, "seq_len": 512}).train.precision == "fp32"


def test_the_type_on_the_wire(make):
    assert make(zero(stage=2)).train.communication_bytes == 2
    fp32 = zero(stage=2) | {"communication_data_type": "fp32"}
    assert make(fp32, runtime="deepspeed-0.19").train.communication_bytes == 4
    # runtime/engine.py of 2021 and 2022: "ZeRO supports only 'communication_data_type': ['fp16', 'bfp16']".
    assert "given fp32; deepspeed-0.6.0 asserts against it; allowed: bf16 or fp16" in refusal(make, fp32)


def test_a_constant_can_be_replaced(make):
    spec = make(zero(stage=3))
    changed = with_constant(spec, "cluster.network.hop_latency_s", 1e-3)
    assert changed.cluster.network.hop_latency_s == 1e-3
    assert next(c.value for c in changed.constants if c.path == "cluster.network.hop_latency_s") == 1e-3
    assert spec.cluster.network.hop_latency_s == 25e-6
    assert with_constant(spec, "cluster.device.num_sms", 86.4).cluster.device.num_sms == 86
    with pytest.raises(InputError, match=r"did you mean 'cluster\.network\.hop_latency_s'"):
        with_constant(spec, "cluster.network.hop_latency", 1.0)


def test_every_constant_is_the_value_of_its_path(make):
    spec = make(zero(stage=3))
    for constant in spec.constants:
        value = spec
        for name in constant.path.split("."):
            value = getattr(value, name)
        assert value == constant.value


def test_no_choice_is_left_open(make):
    def walk(record):
        for item in fields(record):
            value = getattr(record, item.name)
            assert value is not None, item.name
            assert value != "auto", item.name
            if is_dataclass(value):
                walk(value)

    walk(make(zero(stage=3)))


def test_every_preset_resolves_and_has_a_source(make):
    for name, fields_of_preset in presets().items():
        assert fields_of_preset["source"], name
        assert make(zero(stage=3), model={"preset": name}).model.name == name


@pytest.mark.parametrize("name", data.names("experiments"))
def test_every_shipped_experiment_resolves(name):
    assert resolve(load(data.folder("experiments") / f"{name}.yaml")).name == name


def test_a_typed_configuration_goes_with_the_typed_cluster(tmp_path):
    """As `zsim fit --write` leaves it: the total batch is that of the cluster it was written for."""
    won = tmp_path / "won.json"
    won.write_text('{"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1}')
    sets = [f"deepspeed={won}", "deepspeed.bf16.enabled=true"]
    with pytest.raises(InputError, match="given 1024; allowed: 2048 = 16"):
        load("experiments/roberta_10b_p4d_after.yaml", [*sets, "cluster.nodes=16"])
    assert load("experiments/roberta_10b_p4d_after.yaml", [*sets, "cluster.nodes=8"])
    won.write_text(won.read_text().replace("1024", "2048"))
    assert load("experiments/roberta_10b_p4d_after.yaml", [*sets, "cluster.nodes=16"])
