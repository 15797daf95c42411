"""DeepSpeed configurations as users have them: what is read, ignored, refused, and what is said of it."""

import json
from functools import partial
from pathlib import Path

import pytest
from own_configurations import BASE, NEW, OLD, refusal, resolved_with

from zsim import cli
from zsim.imports.deepspeed_reading import lost_digits
from zsim.writing.report import auto_lines


@pytest.fixture
def read(tmp_path):
    """Resolves an experiment with a configuration."""
    return partial(resolved_with, tmp_path)


def zero(**settings):
    return json.dumps({"zero_optimization": settings}, indent=1)


def said(spec, part):
    return [line for line in spec.warnings if part in line]


# ---------------------------------------------------------------------- as text


def test_a_file_with_everything_that_people_write(read):
    spec = read(
        """\ufeff{
        // a tutorial's file
        "bf16": {"enabled": "auto"},   # the Trainer knows
        zero_optimization: {
            "stage": 3, /* all of it */
            "reduce_bucket_size": 5e7,
            "offload_param": null, "offload_optimizer": {"device": "none"},
            "overlap_comm": null,
        },
        "_comment": "kept",
        }"""
    )
    assert (spec.zero.stage, spec.zero.reduce_bucket_size, spec.zero.overlap_comm) == (3, 50_000_000, True)
    assert spec.warnings == ()


def test_a_file_is_hjson_whatever_it_is_called_but_for_yaml(read):
    assert read('{"zero_optimization": {"stage": 2} // c\n}', name="zero2.config").zero.stage == 2
    assert read("zero_optimization:\n  stage: 1\n", name="zero1.yml").zero.stage == 1


def test_a_file_on_the_command_line_starts_from_either_folder(read, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "two.json").write_text(zero(stage=2))
    (here / "ds.json").write_text(zero(stage=3))
    monkeypatch.chdir(here)
    assert read(zero(stage=1), "deepspeed=two.json").zero.stage == 2
    assert read(zero(stage=1), "deepspeed=here/two.json").zero.stage == 2
    assert read(zero(stage=1), f"deepspeed={here}/two.json").zero.stage == 2
    assert "lies beside the experiment" in refusal(read, zero(stage=1), "deepspeed=ds.json")
    monkeypatch.setenv("HOME", str(here))
    assert read(zero(stage=1), "deepspeed=~/two.json").zero.stage == 2
    # In the experiment itself a path starts from its folder only.
    assert "'two.json' does not exist" in refusal(read, {}, deepspeed="two.json")


def test_a_configuration_that_is_set_moves_its_twins(read, tmp_path):
    (tmp_path / "b.json").write_text('{"train_micro_batch_size_per_gpu": 6, "fp16": {"enabled": true}}')
    spec = read(zero(stage=1), "deepspeed=b.json")
    assert (spec.train.micro_batch, spec.train.precision, spec.zero.stage) == (6, "fp16", 0)
    assert read(zero(stage=1), "deepspeed=b.json", "train.micro_batch=3").train.micro_batch == 3
    assert read(zero(stage=1), "deepspeed={train_micro_batch_size_per_gpu: 5}").train.micro_batch == 5
    assert read({}, "deepspeed={bf16: {enabled: true}}", precision="fp16").train.precision == "bf16"
    # In the files as written the two still have to agree.
    assert "allowed: the same in both" in refusal(read, {}, deepspeed="b.json")


def test_no_output_over_a_configuration_in_the_working_folder(read, tmp_path, monkeypatch, capsys):
    read(zero(stage=1))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("two.json").write_text(zero(stage=2))
    arguments = ["run", str(tmp_path / "mine.yaml"), "--set", "deepspeed=two.json", "--json", "two.json"]
    assert cli.main(arguments) == 2
    assert "would overwrite the input" in capsys.readouterr().err


# ---------------------------------------------------------------------- "auto"


def test_every_auto_is_resolved_by_the_rules_of_hugging_face_and_shown(read):
    config = """{
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto"}}"""
    spec = read(config)
    assert list(auto_lines(spec.autos)) == [
        "auto: deepspeed.bf16.enabled = true (train.precision)",
        "auto: deepspeed.fp16.enabled = false (train.precision)",
        "auto: deepspeed.train_batch_size = 16 (2 (micro-batch) x 1 (accumulation) x 8 (ranks))",
        "auto: deepspeed.train_micro_batch_size_per_gpu = 2 (train.micro_batch)",
        "auto: deepspeed.gradient_accumulation_steps = 1 (train.gradient_accumulation)",
        "auto: deepspeed.zero_optimization.reduce_bucket_size = 16,777,216 (hidden^2)",
        "auto: deepspeed.zero_optimization.stage3_prefetch_bucket_size = 15,099,494 (0.9 x hidden^2, rounded down)",
        "auto: deepspeed.zero_optimization.stage3_param_persistence_threshold = 40,960 (10 x hidden)",
        (
            "auto: deepspeed.zero_optimization.stage3_max_live_parameters = 1,000,000,000 "
            "(default of the version; the Trainer leaves it to DeepSpeed)"
        ),
        (
            "auto, no part in time or memory: gradient_clipping (the Trainer's max_grad_norm), "
            "optimizer.params.lr (the Trainer's learning_rate)"
        ),
    ]
    assert (spec.zero.prefetch_bucket_size, spec.zero.param_persistence_threshold) == (15_099_494, 40_960)
    assert "train.precision is missing" in refusal(read, config, precision=None)
    assert "train.micro_batch is missing" in refusal(read, config, micro_batch=None)


@pytest.mark.parametrize(("hidden", "prefetch"), [(4096, 15099494), (3584, 11560550), (3072, 8493465), (2048, 3774873)])
def test_the_prefetch_of_auto_is_whole_where_its_fraction_is_refused(read, hidden, prefetch):
    """0.9 x hidden^2 as people computed it by hand: DeepSpeed issue #6525."""
    model = BASE["model"] | {"hidden": hidden, "heads": hidden // 128}
    auto = read(zero(stage=3, stage3_prefetch_bucket_size="auto"), model=model)
    assert auto.zero.prefetch_bucket_size == prefetch
    by_hand = zero(stage=3, stage3_prefetch_bucket_size=0.9 * hidden * hidden)
    message = f"rejects a fraction of an element; allowed: {prefetch} or"
    assert message in refusal(read, by_hand, model=model)


def test_the_trainer_does_not_see_other_spellings(read):
    spec = read(zero(stage=3, prefetch_bucket_size="auto"))
    assert spec.zero.prefetch_bucket_size == 50_000_000
    assert [item.rule for item in spec.autos] == ["default of the version; the Trainer leaves it to DeepSpeed"]


def test_the_trainer_leaves_sizes_of_stage_3_alone_in_other_stages(read):
    spec = read(zero(stage=2, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto"))
    assert (spec.zero.reduce_bucket_size, spec.zero.prefetch_bucket_size) == (4096 * 4096, 50_000_000)
    assert said(spec, "stage3_prefetch_bucket_size has no effect: it belongs to stage 3, not to stage 2")


def test_autos_are_in_the_json(read, tmp_path, capsys):
    read(zero(stage=2, reduce_bucket_size="auto"), model={"preset": "gpt2-124m", "attention": "eager"})
    assert cli.main(["run", str(tmp_path / "mine.yaml"), "--json", "-"]) == 0
    auto = json.loads(capsys.readouterr().out)["provenance"]["auto"]
    assert auto == {"zero_optimization.reduce_bucket_size": {"value": 768 * 768, "rule": "hidden^2"}}


# ---------------------------------------------------------------------- keys that nobody knows


def test_a_misspelled_key_is_ignored_or_refused_as_by_the_version(read):
    config = '{"zero_optimization": {"stage": 3,\n"stage3_param_persitence_threshold": 8.192000e+04}}'
    spec = read(config, runtime=OLD)
    assert spec.zero.param_persistence_threshold == 100_000
    assert said(spec, "ds.json:2: zero_optimization.stage3_param_persitence_threshold: given 81,920, but") == [
        (
            "ds.json:2: zero_optimization.stage3_param_persitence_threshold: given 81,920, but deepspeed-0.6.0 ignores"
            " this unknown key; did you mean 'stage3_param_persistence_threshold'? It is 100,000 in this run"
        )
    ]
    hint = "did you mean 'stage3_param_persistence_threshold'?"
    assert f"unknown key, which deepspeed-0.19 refuses; {hint}" in refusal(read, config, runtime=NEW)


def test_a_slip_in_what_is_written_for_zsim_is_an_error(read):
    setting = "deepspeed.zero_optimization.stge=2"
    assert "--set deepspeed.zero_optimization.stge: unknown key" in refusal(read, zero(stage=3), setting, runtime=OLD)
    inline = {"zero_optimization": {"stge": 2}}
    assert "unknown key; did you mean 'stage'?" in refusal(read, inline, runtime=OLD)


def test_keys_with_blanks_are_other_keys_for_deepspeed(read):
    spec = read('{"zero_optimization": {" stage": 3}, "wall_clock_breakdown ": true}', runtime=OLD)
    assert spec.zero.stage == 0
    assert said(
        spec, "zero_optimization. stage: given 3, but deepspeed-0.6.0 ignores this unknown key; without the blanks"
    )
    assert said(spec, "'stage' It is 0 in this run")
    assert said(spec, "without the blanks it is 'wall_clock_breakdown'")


def test_comments_are_keys_that_only_a_strict_section_refuses(read):
    config = '{"_comment": "top", "comment": 1, "zero_optimization": {"stage": 2, "_comment": "why"}}'
    assert read(config, runtime=OLD).warnings == ()
    assert "zero_optimization._comment: unknown key, which deepspeed-0.19 refuses" in refusal(read, config)


def test_a_key_that_the_version_does_not_know_is_ignored(read):
    spec = read(zero(stage=3, max_live_parameters=0, use_multi_rank_bucket_allreduce=False), runtime=OLD)
    assert spec.zero.max_live_parameters == 10**9
    assert said(spec, "max_live_parameters has no effect: deepspeed-0.6.0 does not know it and ignores it; its name is")
    assert said(spec, "use_multi_rank_bucket_allreduce has no effect: deepspeed-0.6.0 does not know it and ignores it")
    assert read(zero(stage=3, max_live_parameters=0)).zero.max_live_parameters == 0


def test_a_key_that_was_removed_is_said_to_be(read):
    assert said(read(zero(stage=3, mics_shard_size=-1)), "mics_shard_size was removed: release 0.19.8 refuses to start")
    assert "deepspeed-0.19 refuses this old key; allowed: offload_param" in refusal(
        read, zero(stage=3, cpu_offload_params=False)
    )
    section = '{"curriculum_learning": {"enabled": false}}'
    assert said(read(section), "curriculum_learning is off and has no part in a step, but release 0.19.8 refuses")
    assert read(section, runtime=OLD).warnings == ()


# ---------------------------------------------------------------------- old names and other stages


def test_old_names_are_read_under_the_new_ones(read):
    spec = read(
        '{"bfloat16": {"enabled": true}, "fp32_allreduce": true, "zero_optimization": '
        '{"stage": 0, "cpu_offload": false, "stage3_gather_fp16_weights_on_model_save": true}}',
        precision=None,
    )
    assert (spec.train.precision, spec.train.communication_bytes) == ("bf16", 4)
    assert said(spec, "bfloat16 is the old name of bf16")
    assert said(spec, "fp32_allreduce is the old name of communication_data_type")
    assert said(spec, "cpu_offload is the old name of offload_optimizer")
    assert said(spec, "fp16_weights_on_model_save is the old name of stage3_gather_16bit_weights_on_model_save")
    assert read('{"zero_optimization": true}').zero.stage == 1
    assert said(read('{"zero_optimization": false}'), "= false is the old spelling of stage: 0")
    assert "old name" not in refusal(read, zero(stage=2, cpu_offload=True))
    assert "cpu_offload: given True; offload: not modelled yet" in refusal(read, zero(stage=2, cpu_offload=True))


def test_what_is_not_modelled_and_belongs_to_another_stage_has_no_effect(read):
    spec = read(zero(stage=0, round_robin_gradients=True, stage3_module_granularity_threshold=1000, legacy_stage1=True))
    assert len(said(spec, "has no effect: stage 0 partitions nothing")) == 3
    assert said(read(zero(stage=2, zero_quantized_weights=True)), "it belongs to stage 3, not to stage 2")
    assert said(read(zero(stage=3, round_robin_gradients=True)), "it belongs to stages 1 and 2")
    assert "the stage 1 of before 0.3.17" in refusal(read, zero(stage=1, legacy_stage1=True))


def test_zeros_of_2021(read):
    message = 'reduce_bucket_size: given 0, which stood for "auto" in 2021; allowed: "auto" or a number from 1'
    assert message in refusal(read, zero(stage=3, reduce_bucket_size=0, offload_param={"device": "cpu"}))
    spec = read(zero(stage=3, stage3_prefetch_bucket_size=0, stage3_param_persistence_threshold=0, sub_group_size=0))
    assert (spec.zero.prefetch_bucket_size, spec.zero.param_persistence_threshold, spec.zero.sub_group_size) == (
        0,
        0,
        0,
    )
    assert said(spec, "= 0 is taken as DeepSpeed takes it: nothing is prefetched; in 2021 Hugging Face meant")
    assert said(spec, "= 0 is taken as DeepSpeed takes it: every parameter is partitioned; in 2021 Hugging Face")
    assert said(spec, "= 0 is taken as DeepSpeed takes it: each parameter is a sub-group of its own")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.710886e07, "up to 5 are lost; 67,108,864 is within them"),
        (6.039798e07, "up to 5 are lost; taken as written"),
        (1.342177e08, "up to 50 are lost; 134,217,728 is within them"),
        (5e8, ""),
        (500_000_000, ""),
        (67_108_864, ""),
        (67_108_864.0, ""),
        (8.192e4, ""),
        ("auto", ""),
    ],
)
def test_digits_that_a_log_has_lost(value, text):
    found = lost_digits(value)
    assert text in found
    assert bool(text) == bool(found)


# ---------------------------------------------------------------------- refused by name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"zero_optimization": {"stage": 3, "reduce_bucket_size": [1e8, 5e8]}}', "a list is a search space of the"),
        ('{"zero_optimization": {"stage": 3, "overlap_comm": [true, false]}}', "a list is a search space of the"),
        ('{"zero_optimization": {"stage": 3, "contiguous_gradients": null}}', "given None; allowed: true, false"),
        ('{"zero_optimization": {"stage": ZERO_STAGE}}', "ds.json:1: zero_optimization.stage: the unquoted text"),
        ('{"train_batch_size": 16,\n "train_batch_size": 32}', "ds.json:2: train_batch_size is given twice"),
        ('{"pipe_parallel_size": 1, "zero_optimization": {"stage": 1}}', "a key of GPT-NeoX"),
        ('{"deepspeed_config": {}, "distributed_type": "DEEPSPEED"}', "a key of accelerate"),
        ('{"model_type": "llama", "hidden_size": 4096}', "a key of a model's config.json"),
        (
            '{"optimizer": {"type": "OneBitAdam"}}',
            "given 'OneBitAdam' (1-bit compression of the momentum); only Adam's",
        ),
        ('{"optimizer": {"type": "LAMB"}}', "given 'LAMB' (a trust ratio of each layer); only Adam's"),
        (
            '{"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}',
            "params.learning_rate: unknown key, which",
        ),
        ('{"optimizer": 3}', "optimizer: given 3; allowed: a mapping"),
        ('{"data_types": {"grad_accum_dtype": "fp32"}}', "gradients accumulated in another type: not modelled"),
        ('{"bf16": {"bf16_optimizer_states": true}}', "16-bit optimizer states: not modelled yet"),
        ('{"bf16": {"loss_scale": 0}}', "bf16.loss_scale: unknown key, which deepspeed-0.19 refuses"),
        ('{"expert_parallel": {"enabled": true}}', "expert parallelism: not modelled yet"),
        ('{"managed_gradient_accumulation": false}', "accumulation by the training loop itself: not modelled"),
        (
            '{"prescale_gradients": true, "zero_optimization": {"stage": 2}}',
            "asserts against it with reduce_scatter in stage 2; allowed: false, or reduce_scatter: false",
        ),
    ],
)
def test_refused_in_one_line(read, config, message):
    assert message in refusal(read, config)


def test_gradients_accumulated_in_the_type_of_training(read):
    """What DeepSpeed does anyway (runtime/engine.py, get_data_types)."""
    types = '"data_types": {"grad_accum_dtype": "%s"}'
    assert read(f'{{"bf16": {{"enabled": true}}, {types % "bf16"}}}').train.precision == "bf16"
    message = "gradients accumulated in another type: not modelled"
    assert message in refusal(read, f'{{"bf16": {{"enabled": true}}, {types % "fp32"}}}')
    assert message in refusal(read, f'{{"bf16": {{"enabled": "auto"}}, {types % "fp32"}}}')


def test_accepted_and_said(read):
    spec = read(
        '{"prescale_gradients": true, "optimizer": {"type": "adam", "params": {"fp32_optimizer_states": true}}'
        ', "bf16": {"enabled": true, "check_grad_overflow": false}, "pipeline": {"stages": "auto"},'
        ' "activation_checkpointing": {"profile": false, "partition_activation": true}, "seed": 3}'
    )
    assert said(spec, "prescale_gradients has no effect: its scaling kernel is left out")
    assert said(spec, "fp32_optimizer_states has no effect: it belongs to offload")
    assert said(spec, "check_grad_overflow has no effect: the check for overflow stays")
    assert said(spec, "partition_activation: given True, but deepspeed-0.19 ignores this unknown key; did you mean")
    assert said(spec, "activation_checkpointing has no effect: train.activation_checkpointing decides")
    assert said(spec, "seed: given 3, but deepspeed-0.19 ignores this unknown key")
    assert len(spec.warnings) == 7
