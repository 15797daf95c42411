"""Frozen parameters: gathered and computed with like all others, without gradient, reduction and optimizer state."""

from dataclasses import replace

import pytest
from strategy_cases import (
    BLOCK,
    HIDDEN,
    LAYERS,
    MATRIX,
    PSI,
    bert,
    collectives,
    count,
    moved,
    ops,
    reduced,
    resolved,
    set_up,
)

from zsim import programs, strategies
from zsim.check import check
from zsim.figures.states import Counts, model_states
from zsim.model import build
from zsim.ops import Alloc, Compute, HostTask

RUNTIMES = ["deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.19"]
NUM_TENSORS = 2 * LAYERS
TRAINED = LAYERS * (MATRIX + HIDDEN)
"""The query projections, weight and bias: a stand-in for adapters that lie between frozen weights."""
ALL_PARTITIONED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def frozen(module):
    """The module with everything frozen but its query projections."""
    parameters = tuple(replace(p, trained="query" in p.name) for p in module.parameters)
    return replace(module, parameters=parameters, children=tuple(map(frozen, module.children)))


@pytest.fixture(autouse=True)
def adapters(monkeypatch):
    """Every model of these tests trains its query projections alone."""

    def build_frozen(model, train):
        graph = build(model, train)
        blocks = tuple(replace(block, module=frozen(block.module)) for block in graph.blocks)
        return replace(graph, embedding=frozen(graph.embedding), blocks=blocks, head=frozen(graph.head))

    monkeypatch.setattr(strategies, "build", build_frozen)


@pytest.mark.parametrize("runtime", [*RUNTIMES, "ddp"])
def test_only_trained_gradients_are_all_reduced(tmp_path, runtime):
    assert moved(resolved(tmp_path, runtime, zero={"stage": 0})) == 2 * TRAINED


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_stages_1_and_2_move_adapters_only(tmp_path, runtime, stage, overlap):
    spec = resolved(tmp_path, runtime, zero={"stage": stage, "overlap_comm": overlap})
    reduced = moved(spec, "reduce") + moved(spec, "all_reduce")
    assert reduced == (2 if runtime == "deepspeed-0.19" else 1) * TRAINED
    assert moved(spec, "all_gather") == TRAINED


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_stage_3_gathers_all_and_reduces_adapters(tmp_path, monkeypatch, runtime):
    """DeepSpeed #3349: with frozen weights the traffic of stage 3 is still that of the full model."""
    spec = resolved(
        tmp_path, runtime, zero=ALL_PARTITIONED | {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    )
    gathered = moved(spec, "all_gather")
    assert moved(spec, "reduce_scatter") == TRAINED
    monkeypatch.setattr(strategies, "build", build)
    assert moved(spec, "all_gather") == gathered > 2 * (PSI - TRAINED)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_have_neither_gradient_nor_master_copy(tmp_path, stage):
    zero = {"stage": stage} if stage < 3 else ALL_PARTITIONED
    spec = resolved(tmp_path, "deepspeed-0.19", zero=zero)
    states, held = model_states(Counts(PSI, TRAINED), 4, stage), reduced(spec)
    assert (held["parameters"], held["optimizer"]) == (states.parameters, states.optimizer)
    # In stages 1 and 2 what begins in the partition of the first rank, whole.
    assert held["gradients"] == (2 * MATRIX if stage in {1, 2} else states.gradients)


def test_the_formula_without_partitions():
    """2Ψ + (2 + 12)Ψ_trained."""
    assert model_states(Counts(1000, 10), 8, 0).total == 2 * 1000 + 14 * 10
    assert model_states(Counts(1000, 10), 8, 2).total == 2 * 1000 + 14 * 10 / 8
    assert model_states(1000, 8, 3) == model_states(Counts(1000, 1000), 8, 3)


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
def test_no_gradient_of_a_frozen_weight_is_touched(tmp_path, zero):
    spec = resolved(tmp_path, "deepspeed-0.19", zero=zero)
    touched = {op.key.what.partition(":")[0] for op in ops(spec) if ":gradient" in op.key.what}
    assert not [name for name in touched if "query" not in name]
    assert count(ops(spec), HostTask, ":update") == 1
    (update,) = [op for op in ops(spec) if isinstance(op, HostTask) and op.key.what.endswith(":update")]
    assert update.count == NUM_TENSORS


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("stage", [2, 3])
def test_overflow_and_norm_look_at_trained_gradients(tmp_path, runtime, stage):
    spec = resolved(tmp_path, runtime, zero={"stage": stage})
    looked_at = sum(op.nbytes for op in ops(spec, "step") if isinstance(op, Compute) and ":norm" in op.key.what)
    # Old versions of stage 2 look at whole tensors: at those that begin in the rank's partition.
    whole = stage == 2 and runtime in RUNTIMES[:2]
    assert looked_at == 18 * (MATRIX if whole else TRAINED / 4)


def test_secondary_partitions_of_frozen_weights_stay_valid(tmp_path):
    """Only what is trained is gathered from all ranks (runtime/zero/stage3.py, `invalidate_secondary_tensor`)."""
    zero = ALL_PARTITIONED | {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    zero |= {"zero_hpz_partition_size": 2}
    spec = resolved(tmp_path, "deepspeed-0.19", zero=zero)
    gathered = {"world": 0, "secondary": 0}
    for op in collectives(spec):
        if op.kind == "all_gather":
            gathered[op.group] += op.num_elements
    assert gathered["world"] == TRAINED
    assert gathered["secondary"] > PSI
    kept = [op.nbytes for op in ops(spec, "init") if isinstance(op, Alloc) and op.buffer.startswith("secondary.")]
    assert sum(kept) == 2 * (PSI - TRAINED) // 2
    assert count(ops(spec), Alloc, ":secondary") == NUM_TENSORS


def test_persistent_parameters_are_gathered_frozen_or_not(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": 3, "stage3_param_persistence_threshold": HIDDEN})
    gathered = [op for op in ops(spec, "init") if isinstance(op, Alloc) and op.buffer.startswith("gathered.")]
    assert moved(spec, "all_gather", "step") == sum(op.nbytes for op in gathered) / 2 > NUM_TENSORS * HIDDEN


ADAPTERS = LAYERS * (MATRIX + HIDDEN)


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}])
def test_fully_shard_reduces_trained_parameters_alone(tmp_path, settings):
    """Each parameter has a shard of its own, so frozen ones stay out of the reduction."""
    spec = resolved(tmp_path, "fsdp2", fsdp=settings, precision="bf16")
    assert moved(spec, "all_gather", "forward") == PSI
    assert moved(spec, "reduce_scatter") == ADAPTERS
    states = set_up(spec)
    assert (states["parameters"], states["optimizer"]) == (4 * PSI // 4, 8 * ADAPTERS // 4)


def test_flat_parameters_are_reduced_whole_if_any_of_it_is_trained(tmp_path):
    spec = resolved(tmp_path, "fsdp1", fsdp={"use_orig_params": True}, precision="bf16")
    assert moved(spec, "reduce_scatter") == LAYERS * BLOCK
    # The root is frozen whole: nothing to reduce.
    assert {op.key.layer for op in ops(spec) if ":reduce" in op.key.what and op.key.phase == "backward"} >= {0, 1, 2}


def test_flat_parameters_are_trained_or_frozen_whole_without_use_orig_params(tmp_path):
    refused = r"small\.yaml:1: fsdp\.use_orig_params: false, but layer\.0 has trained and frozen"
    with pytest.raises(ValueError, match=refused):
        resolved(tmp_path, "fsdp1", fsdp={"use_orig_params": False}, model=bert() | {"lora": {"rank": 4}})
    with pytest.raises(ValueError, match="but root has trained and frozen"):
        resolved(tmp_path, "fsdp1", model=bert() | {"frozen": "*embeddings*"})
    assert resolved(tmp_path, "fsdp1", model=bert() | {"frozen": "layer.0.*"}).model.frozen


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_units_that_backward_does_not_come_to_are_not_gathered_again_and_not_left_whole(
    runtime, kept, tmp_path, monkeypatch
):
    def build_frozen(model, train):
        return build(replace(model, frozen=("embeddings.*", "layer.0.*")), train)

    monkeypatch.setattr(strategies, "build", build_frozen)
    settings = {"fsdp1": {"sharding_strategy": "SHARD_GRAD_OP"}, "fsdp2": {"reshard_after_forward": False}}[runtime]
    settings = (settings if kept else {}) | ({"use_orig_params": True} if runtime == "fsdp1" else {})
    spec = resolved(tmp_path, runtime, fsdp=settings, precision="bf16")
    check(programs(spec), strategies.groups(spec))
    assert moved(spec, "all_gather", "backward") == (0 if kept else (LAYERS - 1) * BLOCK)
    assert moved(spec, "reduce_scatter", "backward", layer=0) == 0
