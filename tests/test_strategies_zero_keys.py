"""Keys of `zero_optimization` whose effect is on the program alone: each is shown to have it, or said to have none."""

import pytest
from strategy_cases import BLOCK, HIDDEN, LAYERS, MATRIX, PSI, VOCAB, bert, collectives, count, moved, ops, resolved

from zsim.model import build
from zsim.model.leaf_modules import with_leaf_modules
from zsim.ops import COMPUTE, Alloc, Collective, Copy, HostTask, Record, Wait

HEAD_RUNTIME = "deepspeed-0.19"
PARTITIONED = {"stage": 3, "stage3_param_persistence_threshold": 0}
BARE = PARTITIONED | {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
COALESCED = PARTITIONED | {"stage3_prefetch_bucket_size": 4 * MATRIX, "stage3_max_reuse_distance": 0}
LARGE = {"layers": 16, "hidden": 2560, "heads": 20}
"""Blocks of 79 million parameters, 1.27 billion together: too many for one leaf module."""


def gathers(spec):
    return [op for op in collectives(spec) if op.kind == "all_gather" and op.key.phase != "step"]


@pytest.mark.parametrize("cap", [0, HIDDEN - 1, HIDDEN, 5 * HIDDEN + 1, 10**6])
def test_persistent_parameters_stop_at_the_cap_of_the_model(tmp_path, cap):
    """In order of construction; what is too large is passed over."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 2 * HIDDEN, "stage3_model_persistence_threshold": cap}
    spec = resolved(tmp_path, HEAD_RUNTIME, zero=zero)
    gathered = [op for op in ops(spec, "init") if isinstance(op, Alloc) and op.buffer.startswith("gathered.")]
    held = sum(op.nbytes for op in gathered)
    everything = LAYERS * 9 * HIDDEN + (2 + 2) * HIDDEN + 3 * HIDDEN  # without the intermediate bias of 4h
    assert held == 2 * min(cap // HIDDEN * HIDDEN, everything)


def test_fetches_by_all_reduce_move_twice_as_much_and_flatten_nothing(tmp_path):
    usual = resolved(tmp_path, HEAD_RUNTIME, zero=COALESCED)
    reduced = resolved(tmp_path, HEAD_RUNTIME, zero=COALESCED | {"stage3_use_all_reduce_for_fetch_params": True})
    several = [op for op in gathers(usual) if "+" in op.key.what]
    fetched = [op for op in collectives(reduced) if op.kind == "all_reduce"]
    assert [op.num_elements for op in fetched] == [op.num_elements for op in several]
    assert len(gathers(usual)) == len(gathers(reduced)) + len(fetched)
    assert moved(reduced) == moved(usual) + sum(op.num_elements for op in several)
    assert count(ops(usual), Copy, "flatten")
    assert not count(ops(reduced), Copy, "flatten")


def test_sequential_fetches_are_one_all_gather_a_parameter(tmp_path):
    usual = resolved(tmp_path, HEAD_RUNTIME, zero=COALESCED)
    sequential = resolved(tmp_path, HEAD_RUNTIME, zero=COALESCED | {"stage3_allgather_sequential": True})
    assert moved(sequential) == moved(usual)
    assert not [op for op in gathers(sequential) if "+" in op.key.what]
    assert len(gathers(sequential)) > len(gathers(usual))
    assert not count(ops(sequential), Copy, "flatten")
    # What is in flight is waited for together all the same.
    assert count(ops(sequential), Wait, "fetch_wait") == count(ops(usual), Wait, "fetch_wait")


@pytest.mark.parametrize("runtime", ["deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.18", HEAD_RUNTIME])
def test_gradients_dealt_in_turn_are_more_runs_of_as_many_elements(tmp_path, runtime):
    def reduces(turn):
        zero = {"stage": 2, "round_robin_gradients": turn, "use_multi_rank_bucket_allreduce": False}
        return [op for op in collectives(resolved(tmp_path, runtime, zero=zero)) if op.kind == "reduce"]

    usual, dealt = reduces(turn=False), reduces(turn=True)
    assert sum(op.num_elements for op in usual) == sum(op.num_elements for op in dealt) == PSI
    # All gradients are in one bucket. Later versions bring the runs of an owner together, for a copy.
    old = runtime in {"deepspeed-0.5.10", "deepspeed-0.6.0"}
    assert (len(usual), len(dealt)) == ((9, 43) if old else (4, 4))


def test_a_sub_group_of_nothing_holds_one_tensor(tmp_path):
    spec = resolved(tmp_path, HEAD_RUNTIME, zero={"stage": 3, "sub_group_size": 0})
    tensors = len(build(spec.model, spec.train).parameters)
    assert count(ops(spec), HostTask, ":update") == tensors
    assert count(ops(spec), Collective, "norm_all_reduce") == tensors


@pytest.mark.parametrize(
    ("runtime", "zero", "text"),
    [
        ("deepspeed-0.6.0", {"stage": 3, "reduce_scatter": False}, "deepspeed-0.6.0 takes it as true in stage 3"),
        ("deepspeed-0.5.4", {"stage": 1, "allgather_partitions": False}, "no optimizer of DeepSpeed reads it"),
        (HEAD_RUNTIME, {"stage": 2, "allgather_partitions": False}, "no optimizer of DeepSpeed reads it"),
        (HEAD_RUNTIME, {"stage": 3, "round_robin_gradients": True}, "it belongs to stages 1 and 2"),
        (HEAD_RUNTIME, {"stage": 2, "stage3_allgather_sequential": True}, "it belongs to stage 3, not to stage 2"),
    ],
)
def test_what_has_no_effect_is_said(tmp_path, runtime, zero, text):
    spec = resolved(tmp_path, runtime, zero=zero)
    assert [line for line in spec.warnings if "has no effect" in line and text in line]
    assert ops(spec) == ops(resolved(tmp_path, runtime, zero={"stage": zero["stage"]}))


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("runtime", ["deepspeed-0.18", HEAD_RUNTIME])
def test_backward_waits_for_the_bucket_it_has_filled_or_for_the_one_before(tmp_path, runtime, contiguous):
    """DeepSpeed 0.18 joins the streams where it changes buffers (runtime/zero/stage_1_and_2.py)."""
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": BLOCK, "contiguous_gradients": contiguous}
    found = ops(resolved(tmp_path, runtime, zero=zero), "backward")
    reduced = {op.event: op.key.what for op in found if isinstance(op, Record) and op.lane == "reduce"}
    joined = [op for op in found if isinstance(op, Wait) and op.lane == COMPUTE and op.event in reduced]
    own = [op for op in joined if op.key.what.startswith(reduced[op.event])]
    assert bool(own) == (runtime == "deepspeed-0.18" and contiguous)
    assert len(joined) > len(own)


# ---------------------------------------------------------------------- leaf modules


def granular(tmp_path, threshold, **model):
    zero = BARE | {"stage3_module_granularity_threshold": threshold}
    return resolved(tmp_path, HEAD_RUNTIME, zero=zero, model=bert(**LARGE, **model), gpus=8)


def visits(spec, layer=1):
    return count(ops(spec, "forward", layer), HostTask, ":fetch")


def test_modules_below_the_threshold_are_fetched_as_one(tmp_path):
    """8 modules with parameters and four that hold them: BertLayer is 12 h² and 13 h over 13 modules, h² a module."""
    hidden = LARGE["hidden"]
    block = 12 * hidden**2 + 13 * hidden
    attention = 4 * hidden**2 + 6 * hidden  # with its LayerNorm, over 8 modules
    usual, inner, whole = (granular(tmp_path, t) for t in (0, attention // 8, block // 13))
    assert (visits(usual), visits(inner), visits(whole)) == (17, 8, 1)
    assert moved(usual) == moved(inner) == moved(whole)
    first = next(op for op in gathers(whole) if op.key.layer == 1)
    assert first.num_elements == block
    # Python still calls every module.
    for spec in (usual, inner, whole):
        calls = [op for op in ops(spec, "forward", 1) if isinstance(op, HostTask) and op.activity == "module_call"]
        assert sum(op.count for op in calls) == 17


def test_a_threshold_that_takes_the_whole_model_is_refused(tmp_path):
    message = r"granularity_threshold: given 1000000; with it all [\d,]+ parameters are one leaf .*; allowed: below \d+"
    with pytest.raises(ValueError, match=message):
        resolved(tmp_path, HEAD_RUNTIME, zero=BARE | {"stage3_module_granularity_threshold": 10**6})


def test_tied_weights_stay_late_in_a_leaf(tmp_path):
    spec = granular(tmp_path, 0)
    graph = build(spec.model, spec.train)
    hidden = LARGE["hidden"]
    merged = with_leaf_modules(graph, (hidden**2 + 3 * hidden + VOCAB * hidden + VOCAB) // 4)
    assert not merged.head.children
    assert merged.head.late_gradients == ("embeddings.word_embeddings.weight",)
    assert merged.head.backward.num_kernels == sum(m.backward.num_kernels for m in graph.head.in_backward_order())
    assert merged.parameters == graph.parameters
