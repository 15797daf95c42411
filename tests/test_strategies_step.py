"""The optimizer step in bytes an element, and how a bucket of stages 1 and 2 reaches the wire."""

from dataclasses import replace

import pytest
from strategy_cases import BLOCK, PSI, count, ops, resolved

from zsim.ops import Alloc, Compute, Copy, EmptyCache, Free, HostTask, Sync

RANKS = 4
ALL_PARTITIONED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def step_bytes(spec, what):
    return sum(op.nbytes for op in ops(spec, "step") if isinstance(op, Compute) and op.key.what.endswith(what))


@pytest.mark.parametrize(("stage", "share"), [(0, 1), (1, RANKS), (2, RANKS), (3, RANKS)])
def test_adam_moves_52_bytes_an_element_of_the_partition(tmp_path, stage, share):
    """Flatten 4, to fp32 6, unscale 8, Adam 28 (gradient, parameter and two moments; three written back), to fp16 6."""
    zero = {"stage": stage} | (ALL_PARTITIONED if stage == 3 else {})
    assert step_bytes(resolved(tmp_path, "deepspeed-0.19", zero=zero), ":update") == 52 * PSI // share


@pytest.mark.parametrize(
    ("runtime", "overflow"), [("deepspeed-0.5.4", 10), ("deepspeed-0.6.0", 0), ("deepspeed-0.19", 4)]
)
def test_overflow_and_norm_read_each_gradient(tmp_path, runtime, overflow):
    """Old: cast to fp32 (2 + 4) and sum (4); new: twice two bytes. Norm: cast to double (2 + 8) and square (8)."""
    spec = resolved(tmp_path, runtime, zero=ALL_PARTITIONED)
    assert step_bytes(spec, ":norm") == 18 * PSI // RANKS
    found = step_bytes(spec, ":overflow") + step_bytes(spec, "overflow:check")
    assert found == overflow * PSI // RANKS


def test_ddp_reads_no_scalar_of_other_ranks(tmp_path):
    """Without loss scaling there is no overflow to look for, and every rank has the whole averaged gradient."""
    spec = resolved(tmp_path, "ddp", precision="bf16")
    assert not [op for op in ops(spec, "step") if isinstance(op, HostTask) and op.activity == "item"]
    assert step_bytes(spec, ":update") == (24 + 80) * PSI


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(
    ("runtime", "reduce_scatter", "always"),
    [("deepspeed-0.5.4", True, False), ("deepspeed-0.5.4", False, False), ("deepspeed-0.19", True, True)],
)
def test_buckets_are_flattened_where_they_are_no_buffer_already(tmp_path, runtime, reduce_scatter, always, contiguous):
    """One all-reduce for several owners brings their slices together first, also out of a contiguous bucket."""
    zero = {"stage": 2, "contiguous_gradients": contiguous, "reduce_scatter": reduce_scatter}
    found = ops(resolved(tmp_path, runtime, zero=zero), "backward")
    flattened = [op.nbytes for op in found if isinstance(op, Copy) and op.key.what.endswith(".flatten")]
    assert flattened == ([2 * 2 * PSI] if always or not contiguous else [])
    copied = count(found, Copy, ":gradient.copy")
    assert (copied > 0) == contiguous


def test_a_bucket_within_one_partition_is_a_view(tmp_path):
    """On two ranks the first buckets of backward, deep in the second half of the model, have a single owner."""
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": BLOCK // 4}
    found = ops(resolved(tmp_path, "deepspeed-0.19", zero=zero, gpus=2), "backward")
    reduced = [op for op in found if isinstance(op, Copy) and op.key.what.endswith(":reduce.divide")]
    flattened = [op for op in found if isinstance(op, Copy) and op.key.what.endswith(".flatten")]
    assert len(reduced) > 5
    # Only the one across the border of the two partitions.
    assert len(flattened) == 1


def test_the_cache_is_emptied_behind_every_nth_step(tmp_path):
    """When the loss has been read, so that the device is idle."""
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero=ALL_PARTITIONED)
    spec = replace(spec, noise=replace(spec.noise, steps=5))
    assert {op.key.phase for op in ops(spec) if isinstance(op, EmptyCache)} == {"init"}
    found = ops(replace(spec, train=replace(spec.train, empty_cache_every=2)))
    places = [index for index, op in enumerate(found) if isinstance(op, EmptyCache) and op.key.phase == "step"]
    assert [found[index].key.step for index in places] == [1, 3]
    before = [found[index - 1] for index in places]
    assert all(isinstance(op, Sync) and op.key.what == "loss:read" for op in before)


def test_what_a_rank_holds_beside_its_program_is_taken_before_the_last_one_goes(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero=ALL_PARTITIONED)
    assert not [op for op in ops(spec) if isinstance(op, Alloc) and op.varies]
    found = ops(replace(spec, noise=replace(spec.noise, steps=2, stray_bytes=1000)))
    mine = [op for op in found if op.key.what.startswith("stray:")]
    assert [(type(op), op.buffer, op.key.step) for op in mine] == [
        (Alloc, "0.stray", 0),
        (Alloc, "1.stray", 1),
        (Free, "0.stray", 1),
        (Free, "1.stray", 1),
    ]
    assert all(op.varies and op.nbytes == 1000 for op in mine[:2])
