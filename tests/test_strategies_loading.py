"""Phases "load" and "init": what construction holds, tensor by tensor, and what set-up makes of it."""

from dataclasses import replace

import pytest
from strategy_cases import BLOCK, LAYERS, MATRIX, PSI, WORDS, bert, curve, ops, resolved, set_up, switched

from zsim import simulate
from zsim.allocator import FLUSH, AllocatorSettings, CachingAllocator
from zsim.figures.states import Counts, ways_to_fit
from zsim.ops import COMPUTE, OUTSIDE, SETUP, Alloc, EmptyCache, Free, Record

STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
RANKS = 4


def most(spec, category, *phases):
    """The most that a category holds in some phases."""
    return max(held.get(category, 0) for op, held in curve(spec) if op.key.phase in phases)


def reserved_after_set_up(spec):
    """By the allocator, and how much of it is free between what is held."""
    cache, handles = CachingAllocator(AllocatorSettings(), 40 * 10**9), {}
    for handle, op in enumerate(ops(spec)):
        if op.key.phase not in SETUP:
            break
        if isinstance(op, Alloc) and op.category != OUTSIDE:
            assert cache.malloc(handle, op.nbytes, 0) != FLUSH
            handles[op.buffer] = handle
        elif isinstance(op, Free):
            cache.free(handles.pop(op.buffer))
        elif isinstance(op, EmptyCache):
            cache.empty_cache()
    return cache.reserved_bytes, cache.inactive_split_bytes


@pytest.mark.parametrize("runtime", ["deepspeed-0.5.4", "deepspeed-0.19"])
def test_under_zero_init_one_module_is_whole_at_a_time(tmp_path, runtime):
    spec = resolved(tmp_path, runtime, zero=STAGE_3)
    # The words come first, so nothing of them is a partition yet.
    assert most(spec, "parameters", "load") == 2 * (WORDS + WORDS // RANKS)
    assert [op.buffer for op in ops(spec, "load") if "word_embeddings" in getattr(op, "buffer", "")] == [
        "parameter.embeddings.word_embeddings.weight",
        "partition.embeddings.word_embeddings.weight",
        "parameter.embeddings.word_embeddings.weight",
    ]
    *_, (_, held) = ((op, now) for op, now in curve(spec) if op.key.phase == "load")
    assert held["parameters"] == 2 * PSI // RANKS


@pytest.mark.parametrize("runtime", ["deepspeed-0.5.4", "deepspeed-0.19"])
def test_without_zero_init_a_rank_holds_the_model_whole_in_16_bits(tmp_path, runtime):
    spec = resolved(tmp_path, runtime, zero=STAGE_3, zero_init=False)
    assert most(spec, "parameters", "load") == 2 * PSI
    # Partitions are made of one parameter after the other.
    assert most(spec, "parameters", "init") == 2 * (PSI + WORDS // RANKS)
    assert set_up(spec) == set_up(resolved(tmp_path, runtime, zero=STAGE_3))


def test_what_the_model_needs_whole_decides_whether_it_fits(tmp_path):
    """13 billion parameters on an A100 of 40 GB: 26 GB whole, 16 bytes of each over 64 ranks."""
    large = {"zero": STAGE_3, "nodes": 8, "gpus": 8, "activation_checkpointing": "full"}
    spec = resolved(tmp_path, "deepspeed-0.19", model=bert(layers=4, hidden=16_384, heads=64), **large)
    whole = replace(spec, train=replace(spec.train, zero_init=False))
    cluster = replace(spec.cluster, device=replace(spec.cluster.device, memory_bytes=24e9))
    assert simulate(replace(spec, cluster=cluster)).metrics.fits
    metrics = simulate(replace(whole, cluster=cluster)).metrics
    assert not metrics.fits
    assert "change: train.zero_init=true" in metrics.warnings[-1]
    assert metrics.step_time_s == pytest.approx(simulate(spec).step_time_s)


def test_whole_parameters_of_stages_1_and_2_go_before_the_flat_buffer_comes(tmp_path):
    """By way of the CPU: runtime/zero/stage_1_and_2.py."""
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero={"stage": 2})
    assert most(spec, "parameters", "load", "init") == 2 * PSI
    (flat,) = [op for op in ops(spec, "init") if isinstance(op, Alloc) and op.category == "parameters"]
    assert flat.nbytes == 2 * PSI


def test_optimizer_states_are_one_tensor_each_of_every_sub_group(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.19", zero=STAGE_3 | {"sub_group_size": BLOCK // RANKS})
    found = [op for op in ops(spec, "init") if isinstance(op, Alloc) and op.category == "optimizer"]
    assert {op.buffer.rpartition(".")[0] for op in found} == {
        "optimizer.master",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
    }
    num_groups = len(found) // 3
    # Embeddings, blocks, and what is left: the head.
    assert num_groups == LAYERS + 2
    assert sum(op.nbytes for op in found) == 12 * PSI // RANKS
    steps = [op for op in ops(spec, "step") if isinstance(op, Alloc) and op.key.what.endswith(":fp32")]
    # Flattened in 16 bits, then cast.
    masters = [op.nbytes for op in found[:num_groups]]
    assert [op.nbytes for op in steps] == [nbytes for master in masters for nbytes in (master // 2, master)]


def test_defragmentation_is_one_buffer_behind_an_empty_cache(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero=STAGE_3 | {"sub_group_size": BLOCK // RANKS})
    off = switched(spec, defragmentation=False)
    flats = {
        name: [op for op in ops(each, "init") if "parameters.flat" in getattr(op, "buffer", "")]
        for name, each in (("on", spec), ("off", off))
    }
    assert [op.nbytes for op in flats["on"]] == [2 * PSI // RANKS]
    assert len(flats["off"]) == LAYERS + 2
    assert [sum(isinstance(op, EmptyCache) for op in ops(each, "init")) for each in (spec, off)] == [1, 0]


def test_partitions_between_freed_parameters_hold_segments_until_the_cache_is_emptied(tmp_path):
    """32 blocks of 1024: partitions of 1 MiB and below share segments with nothing, larger ones with whole tensors."""
    model = bert(layers=32, hidden=2048, heads=16)
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero=STAGE_3, model=model)
    with_it, without = (reserved_after_set_up(each) for each in (spec, switched(spec, defragmentation=False)))
    assert with_it[0] < without[0]
    assert set_up(spec) == set_up(switched(spec, defragmentation=False))


@pytest.mark.parametrize(
    ("runtime", "used_on"),
    [("deepspeed-0.5.4", "nccl.world"), ("deepspeed-0.6.0", COMPUTE), ("deepspeed-0.19", COMPUTE)],
)
def test_memory_of_released_parameters_waits_for_who_uses_it(tmp_path, runtime, used_on):
    """Since PR #1453 `free_param` calls record_stream; before, the host has waited, and c10d has called it."""
    found = ops(resolved(tmp_path, runtime, zero=STAGE_3 | {"overlap_comm": True}))
    recorded = {op.event: op.lane for op in found if isinstance(op, Record)}
    gathered = {op.buffer: op for op in found if isinstance(op, Alloc) and op.category == "gathered"}
    released = [op for op in found if isinstance(op, Free) and op.buffer in gathered]
    assert {gathered[op.buffer].lane for op in released} == {"all_gather"}
    assert {recorded[op.event] for op in released} == {used_on}


@pytest.mark.parametrize("runtime", ["deepspeed-0.6.0", "deepspeed-0.19"])
def test_gradients_wait_for_the_stream_that_reduces_them(tmp_path, runtime):
    found = ops(resolved(tmp_path, runtime, zero=STAGE_3 | {"overlap_comm": True}), "backward")
    recorded = {op.event: op.lane for op in found if isinstance(op, Record)}
    freed = [op for op in found if isinstance(op, Free) and op.buffer.startswith("gradient.") and op.event is not None]
    assert {recorded[op.event] for op in freed} == {"reduce"}
    assert len(freed) == len([op for op in found if isinstance(op, Alloc) and op.buffer.startswith("gradient.0.0")]) - 1


def test_what_c10d_makes_of_lists_goes_behind_its_stream(tmp_path):
    found = ops(resolved(tmp_path, "deepspeed-0.5.4", zero=STAGE_3))
    recorded = {op.event: op.lane for op in found if isinstance(op, Record)}
    freed = [op for op in found if isinstance(op, Free) and op.buffer.startswith(("list.", "flat."))]
    assert freed
    assert {recorded[op.event] for op in freed} == {"nccl.world"}


ONE_UNIT = 4 * max(BLOCK, PSI - LAYERS * BLOCK)
"""The root's, fp32: it has the words."""


@pytest.mark.parametrize(
    ("runtime", "device", "expected"),
    [
        # Whole tensors of a unit and the flat one of them, beside the shards of all others.
        ("fsdp1", "cpu", 2 * ONE_UNIT + 4 * LAYERS * BLOCK // RANKS),
        ("fsdp1", "cuda", 4 * PSI + 4 * BLOCK),
        ("fsdp2", "cpu", ONE_UNIT + 4 * LAYERS * BLOCK // RANKS + WORDS // RANKS * 4),
        ("fsdp2", "cuda", 4 * PSI + 4 * MATRIX // RANKS),
        ("fsdp2", "meta", 4 * PSI // RANKS),
    ],
)
def test_units_of_fsdp_are_sharded_one_by_one(tmp_path, runtime, device, expected):
    spec = resolved(tmp_path, runtime, fsdp={}, precision="bf16", init_device=device)
    assert most(spec, "parameters", *SETUP) == expected
    assert set_up(spec)["parameters"] == 4 * PSI // RANKS


@pytest.mark.parametrize("changes", [{"runtime": "ddp"}, {"runtime": "deepspeed-0.19", "zero": {"stage": 2}}])
def test_zero_init_elsewhere_is_said_to_be_without_effect(tmp_path, changes):
    spec = resolved(tmp_path, **changes, zero_init=True)
    assert any("train.zero_init has no effect" in warning for warning in spec.warnings)
    assert not any("zero_init" in warning for warning in resolved(tmp_path, **changes).warnings)


def test_advice_names_the_construction_only_where_it_is_what_does_not_fit(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.19", zero=STAGE_3, zero_init=False)
    found = ways_to_fit(spec, Counts(PSI, PSI), activation_bytes=0, excess_bytes=1.0)
    assert found[0] == "train.zero_init=true"
    assert not any("zero_init" in way for way in ways_to_fit(spec, Counts(PSI, PSI), 1e6, 1.0))


def test_a_model_made_on_the_device_is_there_in_fp32_first(tmp_path):
    """Cast one parameter after the other, so that the largest is there in both types."""
    for changes in ({"zero": {"stage": 2}}, {"zero": STAGE_3, "zero_init": False}):
        spec = resolved(tmp_path, "deepspeed-0.19", **changes, init_device="cuda")
        assert most(spec, "parameters", "load") == 4 * PSI
        assert most(spec, "parameters", "init") == 4 * PSI + 2 * WORDS
        assert set_up(spec) == set_up(resolved(tmp_path, "deepspeed-0.19", **changes))


def test_the_meta_device_is_refused_but_for_fsdp(tmp_path):
    with pytest.raises(ValueError, match=r"train.init_device: meta given with ddp; allowed: cpu, cuda"):
        resolved(tmp_path, "ddp", init_device="meta")


def test_zero_init_leaves_no_say_to_the_device(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.19", zero=STAGE_3, init_device="cuda")
    assert any("train.init_device has no effect" in warning for warning in spec.warnings)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_given_activations_stand_for_all_others(tmp_path, checkpointing):
    model = bert(activation_bytes_per_sample=3e8)
    spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": 2}, model=model, activation_checkpointing=checkpointing)
    held = [now for _, now in curve(spec)]
    assert max(now.get("activations", 0) for now in held) == 2 * 3e8
    assert held[-1]["activations"] == 0
    assert any("taken as 0.3 GB a sample" in warning for warning in spec.warnings)
    assert not [op for op in ops(spec) if isinstance(op, Alloc) and op.key.what.endswith(":put_out")]
