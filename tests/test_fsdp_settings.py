"""The `fsdp` section: defaults, spellings, what the versions do not share, and what has no effect."""

import json

import pytest
from strategy_cases import bert, resolved

from zsim import load, resolve
from zsim.reading.resolution import variant


def fsdp_of(folder, runtime, fsdp=None, **changes):
    return resolved(folder, runtime, fsdp=fsdp, **{"precision": "bf16", "nodes": 2} | changes).fsdp


def refused(folder, runtime, fsdp, **changes):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  every case looks at the text
        fsdp_of(folder, runtime, fsdp, **changes)
    return str(caught.value).rpartition("small.yaml:1: ")[2]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("FULL_SHARD", (8, 8)),
        ("SHARD_GRAD_OP", (8, 1)),
        ("NO_SHARD", (1, 1)),
        ("HYBRID_SHARD", (4, 4)),
        ("HYBRID_SHARD_ZERO2", (4, 1)),
        ("_HYBRID_SHARD_ZERO2", (4, 1)),
        ("full_shard", (8, 8)),
        *((number, sizes) for number, sizes in enumerate([(8, 8), (8, 1), (1, 1), (4, 4), (4, 1)], start=1)),
    ],
)
def test_strategies_are_two_sizes(strategy, sizes, tmp_path):
    spec = fsdp_of(tmp_path, "fsdp1", {"sharding_strategy": strategy})
    assert (spec.shard_size, spec.reshard_size) == sizes


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (8, 8)),
        ({"reshard_after_forward": True}, (8, 8)),
        ({"reshard_after_forward": False}, (8, 1)),
        ({"reshard_after_forward": 4}, (8, 4)),
        ({"mesh": [8]}, (8, 8)),
        ({"mesh": [2, 4]}, (4, 4)),
        ({"mesh": [2, 4], "reshard_after_forward": 2}, (4, 2)),
    ],
)
def test_a_mesh_is_two_sizes_too(settings, sizes, tmp_path):
    spec = fsdp_of(tmp_path, "fsdp2", settings)
    assert (spec.shard_size, spec.reshard_size) == sizes


def test_defaults_are_those_of_pytorch(tmp_path):
    spec = fsdp_of(tmp_path, "fsdp1")
    assert (spec.limit_all_gathers, spec.backward_prefetch, spec.forward_prefetch) == (True, "BACKWARD_PRE", False)
    assert (spec.use_orig_params, spec.no_sync) == (False, False)
    assert (spec.param_bytes, spec.reduce_bytes, spec.gradient_bytes) == (4, 2, 4)
    assert fsdp_of(tmp_path, "fsdp1", precision="fp32").reduce_bytes == 4


@pytest.mark.parametrize("written", ["reshard_after_forward", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize("overridden", ["reshard_after_forward", "fsdp_reshard_after_forward"])
def test_an_override_replaces_either_spelling(written, overridden, tmp_path):
    assert fsdp_of(tmp_path, "fsdp2", {written: True}).reshard_size == 8
    path = next(tmp_path.glob("*.yaml"))
    assert resolve(load(path, [f"fsdp.{overridden}=false"])).fsdp.reshard_size == 1
    assert resolve(variant(load(path), {f"fsdp.{overridden}": 4})).fsdp.reshard_size == 4


def test_an_override_keeps_the_rest_of_a_section_with_prefix(tmp_path):
    fsdp_of(tmp_path, "fsdp1", {"fsdp_mixed_precision": {"reduce_dtype": "fp32"}})
    path = next(tmp_path.glob("*.yaml"))
    settings = load(path, ["fsdp.mixed_precision.param_dtype=bf16"]).settings.fsdp.mixed_precision
    assert (settings.param_dtype, settings.reduce_dtype) == ("bf16", "fp32")


def test_both_spellings_at_once_are_refused(tmp_path):
    fsdp_of(tmp_path, "fsdp2", {})
    path = next(tmp_path.glob("*.yaml"))
    both = {"fsdp.mesh": [8], "fsdp.fsdp_mesh": [8]}
    with pytest.raises(ValueError, match=r"--set fsdp\.fsdp_mesh: given twice; allowed: once"):
        load(path, [f"{key}={value}" for key, value in both.items()])
    with pytest.raises(ValueError, match="given with and without fsdp_; allowed: once"):
        variant(load(path), both)


def test_names_with_and_without_prefix(tmp_path):
    accelerate = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": 2,
        "fsdp_backward_prefetch": "NO_PREFETCH",
        "fsdp_use_orig_params": True,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    plain = {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "NO_PREFETCH", "use_orig_params": True}
    assert fsdp_of(tmp_path, "fsdp1", accelerate) == fsdp_of(tmp_path, "fsdp1", plain)
    text = refused(tmp_path, "fsdp1", {"no_sync": True, "fsdp_no_sync": True})
    assert text == "fsdp: no_sync is given with and without fsdp_; allowed: once"


@pytest.mark.parametrize(
    ("runtime", "settings", "expected"),
    [
        ("fsdp1", {"sharding_strateg": 1}, "fsdp.sharding_strateg: unknown key; did you mean 'sharding_strategy'?"),
        ("fsdp1", {"sharding_strategy": "ZERO3"}, "given 'ZERO3'; allowed: 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ("fsdp1", {"sharding_strategy": 6}, "given 6; allowed: 'FULL_SHARD'"),
        ("fsdp1", {"mesh": [2, 4]}, "fsdp.mesh: given with fsdp1; it has sharding_strategy"),
        ("fsdp1", {"reshard_after_forward": True}, "fsdp.reshard_after_forward: given with fsdp1; it has sharding_"),
        ("fsdp1", {"version": 2}, "fsdp.version: given 2; allowed: 1 (fsdp1)"),
        ("fsdp1", {"offload_params": True}, "fsdp.offload_params: given true; not modelled, allowed: false"),
        ("fsdp2", {"sharding_strategy": 1}, "fsdp.sharding_strategy: given with fsdp2; it has reshard_after_forward"),
        ("fsdp2", {"limit_all_gathers": False}, "fsdp.limit_all_gathers: given with fsdp2; it has nothing"),
        ("fsdp2", {"use_orig_params": True}, "fsdp.use_orig_params: given with fsdp2; it has nothing"),
        ("fsdp2", {"mesh": [3, 4]}, "fsdp.mesh: given 3 x 4; allowed: [8], or [replicate, shard] with product 8"),
        ("fsdp2", {"mesh": []}, "fsdp.mesh: given []; allowed:"),
        ("fsdp2", {"mesh": [8, 1]}, "fsdp.mesh: given [8, 1]; allowed: a last dimension above 1"),
        (
            "fsdp2",
            {"reshard_after_forward": 3},
            "fsdp.reshard_after_forward: given 3; allowed: true, false, or one of 2, 4",
        ),
        ("fsdp2", {"reshard_after_forward": 0}, "fsdp.reshard_after_forward: given 0; allowed: true, false or a whole"),
        ("fsdp2", {"reshard_after_forward": "2"}, "fsdp.reshard_after_forward: given '2'; allowed: true, false or a"),
        ("fsdp1", {"transformer_layer_cls_to_wrap": [1]}, "transformer_layer_cls_to_wrap: given [1]; allowed: the"),
        ("fsdp1", {"fsdp_sharding_strateg": 1}, "fsdp.fsdp_sharding_strateg: unknown key; did you mean"),
        (
            "fsdp2",
            {"reshard_after_forward": 8},
            "fsdp.reshard_after_forward: given 8; allowed: true, false, or one of 2, 4",
        ),
        ("fsdp2", {"mixed_precision": {"keep_low_precision_grads": True}}, "keep_low_precision_grads: given true with"),
        ("fsdp2", {"mixed_precision": {"params": "bf16"}}, "fsdp.mixed_precision.params: unknown key; "),
        ("fsdp2", {"activation_checkpointing": True}, "train.activation_checkpointing is none; allowed: the same"),
        ("fsdp2", {"mixed_precision": {"param_dtype": "fp16"}}, "mixed_precision.param_dtype is fp16; allowed: the s"),
        ("fsdp1", {"wrap_embeddings": True}, "fsdp.wrap_embeddings: given with fsdp1; it has nothing"),
        ("fsdp2", {"wrap_embeddings": True}, "fsdp.wrap_embeddings: given true; allowed: false, bert 3 x 256 shares"),
        ("ddp", {}, "fsdp: given with ddp; allowed: with fsdp1 and fsdp2"),
        ("deepspeed-0.19", {}, "fsdp: given with deepspeed-0.19; allowed: with fsdp1 and fsdp2"),
    ],
)
def test_what_is_refused(runtime, settings, expected, tmp_path):
    precision = "fp16" if runtime.startswith("deepspeed") else "bf16"
    text = refused(tmp_path, runtime, settings, precision=precision)
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mesh": [4, 3]}, "given [4, 3]; allowed: a last dimension of 2, 4, 12, which does not lie askew of 4"),
        ({"reshard_after_forward": 3}, "given 3; allowed: true, false, or one of 2, 4"),
    ],
)
def test_groups_that_lie_askew_of_nodes(settings, expected, tmp_path):
    assert expected in refused(tmp_path, "fsdp2", settings, nodes=3)


def test_one_gpu_a_node_has_nothing_to_shard_within(tmp_path):
    text = refused(tmp_path, "fsdp1", {"sharding_strategy": "HYBRID_SHARD"}, gpus=1)
    assert text.startswith("fsdp.sharding_strategy: given HYBRID_SHARD; allowed: with more than one GPU a node")


def written(folder, **changes):
    experiment = {
        "question": "?",
        "model": bert(),
        "cluster": {"topology": "p4d.24xlarge", "nodes": 1},
        "runtime": "fsdp2",
        "train": {"micro_batch": 2, "seq_len": 64},
    }
    path = folder / "own.yaml"
    path.write_text(json.dumps(experiment | changes))
    return resolve(load(path))


def test_deepspeed_is_refused_with_fsdp(tmp_path):
    with pytest.raises(ValueError, match=r"deepspeed: given with fsdp2; allowed: `fsdp`, or a deepspeed runtime"):
        written(tmp_path, deepspeed={"bf16": {"enabled": True}})


def test_the_precision_may_stand_in_the_policy_alone(tmp_path):
    spec = written(tmp_path, fsdp={"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}})
    assert (spec.train.precision, spec.train.communication_bytes) == ("bf16", 4)
    with pytest.raises(ValueError, match=r"train\.precision is missing"):
        written(tmp_path)


def test_what_has_no_effect_is_said(tmp_path):
    def said(runtime, settings, **changes):
        spec = resolved(tmp_path, runtime, fsdp=settings, **{"precision": "bf16"} | changes)
        return [line.partition(" has no effect")[0] for line in spec.warnings if "no effect" in line]

    assert said("fsdp1", {}) == []
    assert said("fsdp1", {"no_sync": True}) == ["fsdp.no_sync"]
    assert said("fsdp1", {"no_sync": True}, gradient_accumulation=2) == []
    assert said("fsdp2", {"state_dict_type": "SHARDED_STATE_DICT"}) == ["fsdp.state_dict_type"]
    assert said("fsdp1", {"sharding_strategy": 3, "forward_prefetch": True}) == ["fsdp.forward_prefetch"]
    assert said("fsdp1", {"mixed_precision": {"buffer_dtype": "bf16"}}) == ["fsdp.mixed_precision.buffer_dtype"]
    assert said("fsdp2", {}, optimisations={"limiter_depth": 0}) == ["optimisations.limiter_depth"]
