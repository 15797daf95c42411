"""What has no effect is said out loud: held against the programs, both ways."""

import json
from itertools import product
from typing import get_args, get_type_hints

import pytest
from strategy_cases import bert, resolved

from zsim import load, programs, resolve
from zsim.spec import Optimisations

CASES = [
    (runtime, stage, overlap, reduce_scatter)
    for runtime, stage, overlap, reduce_scatter in product(
        ("deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.18", "deepspeed-0.19"),
        (0, 1, 2, 3),
        (True, False),
        (True, False),
    )
    if stage or (overlap and reduce_scatter)
] + [
    *((runtime, 0, True, True) for runtime in ("ddp", "fsdp1", "fsdp2")),
    *(("reference", stage, overlap, True) for stage in (0, 1, 2, 3) for overlap in (True, False)),
]


FEATURES = {
    "hpZ": ("deepspeed-0.19", {"zero_hpz_partition_size": 2}),
    "MiCS": ("deepspeed-0.18", {"mics_shard_size": 2}),
    "sequential": ("deepspeed-0.19", {"stage3_allgather_sequential": True}),
    "all-reduce": ("deepspeed-0.19", {"stage3_use_all_reduce_for_fetch_params": True}),
    "one buffer": ("deepspeed-0.19", {"reduce_scatter": False, "reduce_bucket_size": 500_000_000}),
}


def values_of(hint):
    return (False, True) if hint is bool else (0, 1, 2) if hint is int else get_args(hint)


SMALL_BUCKETS = {
    "reduce_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 2_000,
    "stage3_prefetch_bucket_size": 200_000,
}


@pytest.mark.parametrize(("runtime", "stage", "overlap", "reduce_scatter"), CASES)
def test_a_switch_changes_the_program_or_is_said_to_have_no_effect(tmp_path, runtime, stage, overlap, reduce_scatter):
    zero = {"stage": stage, "reduce_bucket_size": 100_000, "overlap_comm": overlap, "reduce_scatter": reduce_scatter}
    check_all_switches(tmp_path, runtime, zero | (SMALL_BUCKETS if stage == 3 else {}))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_switch_beside_another_way_of_fetching(tmp_path, feature):
    runtime, settings = FEATURES[feature]
    check_all_switches(tmp_path, runtime, SMALL_BUCKETS | {"stage": 3, "overlap_comm": True} | settings)


def check_all_switches(tmp_path, runtime, zero):
    def spec(**optimisations):
        case = {"zero": zero, "model": bert(), "nodes": 2, "gpus": 2, "optimisations": optimisations}
        return resolved(tmp_path, runtime, **case, precision="fp16" if runtime.startswith("deepspeed") else "bf16")

    usual = spec()
    ops = programs(usual)[0].ops
    for name, hint in get_type_hints(Optimisations).items():
        others = [value for value in values_of(hint) if value != getattr(usual.runtime.optimisations, name)]
        changed = [spec(**{name: value}) for value in others]
        differs = [programs(one)[0].ops != ops for one in changed]
        said = [any(f"optimisations.{name} has no effect: " in line for line in one.warnings) for one in changed]
        assert not any(one and other for one, other in zip(differs, said, strict=True)), f"{name} has an effect"
        assert any(differs) or all(said), f"{name} has no effect, and nobody says so"


def test_other_keys_without_effect(tmp_path):
    def said(runtime="deepspeed-0.6.0", precision="bf16", deepspeed=None, **changes):
        path = tmp_path / "other.yaml"
        train = {"micro_batch": 2, "seq_len": 64, "precision": precision} | changes.pop("train", {})
        cluster = {"topology": "p4d.24xlarge", "nodes": 1} | changes.pop("cluster", {})
        settings = {"question": "?", "model": bert(), "runtime": runtime, "train": train, "cluster": cluster} | changes
        settings["deepspeed"] = {"bf16": {"enabled": True}} | (deepspeed or {})
        path.write_text(json.dumps(settings))
        return [line.partition(" has no effect")[0] for line in resolve(load(path)).warnings if "no effect" in line]

    assert said() == []
    assert said(noise={"seed": 3}) == ["noise.seed"]
    assert said(noise={"seed": 3, "host_jitter": 0.1}) == []
    assert said(noise={"seed": 3, "stray_memory": "64 MiB"}) == []
    assert said(train={"empty_cache_every": 2}) == ["train.empty_cache_every"]
    assert said(train={"empty_cache_every": 2}, noise={"steps": 2}) == []
    assert said(cluster={"price_per_node_hour": 32}) == ["cluster.price_per_node_hour"]
    assert said(cluster={"price_per_node_hour": 32}, train={"tokens": 1e9}) == []
    assert said("ddp", deepspeed={"communication_data_type": "fp32"}) == ["deepspeed.communication_data_type"]
    for section in ("flops_profiler", "comms_logger"):
        assert [section in line for line in said(deepspeed={section: {"enabled": True}})] == [True]
        assert said(deepspeed={section: {"enabled": False}}) == []
    zero = {"stage": 2, "reduce_scatter": False, "use_multi_rank_bucket_allreduce": True}
    assert said("deepspeed-0.19", deepspeed={"zero_optimization": zero}) == [
        "deepspeed.zero_optimization.use_multi_rank_bucket_allreduce"
    ]
