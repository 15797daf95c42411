"""Syncs, collectives and copies of one layer, counted by hand for each version.

A layer as Hugging Face runs it is 17 modules, 8 of them with parameters, 16 tensors; the threshold of these tests
leaves its ten vectors gathered, so that six matrices are fetched. With full checkpointing each module is visited three
times.
"""

from itertools import pairwise

import pytest
from strategy_cases import BLOCK, LAYERS, MATRIX, PSI, VOCAB, WORDS, bert, collectives, count, ops, resolved, switched

from zsim.model import build
from zsim.ops import SETUP, Alloc, Collective, Compute, Copy, Free, HostTask, Sync
from zsim.strategies.step import visit_order

MODULES, OWNERS, TENSORS, FETCHED = 17, 8, 16, 6
VISITS = 3
V1, V2, PR, HEAD = "deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.19"
RANKS = 4
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 2_000, "stage3_prefetch_bucket_size": 0}
ZERO |= {"stage3_max_reuse_distance": 2 * BLOCK}
OTHER_TENSORS = 5 + 5
"""Of the embeddings and of the head without its tied weight."""


def checkpointed(tmp_path, runtime, **zero):
    return resolved(tmp_path, runtime, zero=ZERO | zero, gpus=RANKS, activation_checkpointing="full")


def layer(spec, number=1):
    """Everything of a layer in the middle: forward, recomputation and backward."""
    return ops(spec, layer=number)


def more_per_layer(tmp_path, runtime, kind, what="", **zero):
    """How many more ops a program has for one more layer."""
    small, large = (
        ops(resolved(tmp_path, runtime, zero=ZERO | zero, model=bert(layers), activation_checkpointing="full"))
        for layers in (LAYERS, LAYERS + 1)
    )
    return count(large, kind, what) - count(small, kind, what)


def device_syncs(found):
    return [op for op in found if isinstance(op, Sync) and not op.lanes and op.event is None]


def test_visits_of_a_layer(tmp_path):
    spec = checkpointed(tmp_path, PR)
    graph = build(spec.model, spec.train)
    visits = [visit for visit in visit_order(graph, spec.train) if visit.layer == 1]
    assert [visit.phase for visit in visits] == ["forward"] * 17 + ["recompute"] * 17 + ["backward"] * 17
    assert sum(bool(visit.module.parameters) for visit in visits) == OWNERS * VISITS
    assert len({p.name for visit in visits for p in visit.module.parameters}) == TENSORS
    names = [visit.module.name.removeprefix("layer.1").removeprefix(".") for visit in visits]
    assert names[:4] == ["", "attention", "attention.self", "attention.self.query"]
    # Pre-backward hooks run from the outside in, the last child first.
    assert names[34:38] == ["", "output", "output.LayerNorm", "output.dropout"]
    assert names[50] == "attention.self.query"


def test_blocks_are_recomputed_right_before_their_backward(tmp_path):
    spec = checkpointed(tmp_path, PR)
    visits = visit_order(build(spec.model, spec.train), spec.train)
    order = [
        (v.phase, v.layer)
        for i, v in enumerate(visits)
        if (v.phase, v.layer) != (visits[i - 1].phase, visits[i - 1].layer)
    ]
    forward = [("forward", number) for number in (-1, 0, 1, 2, 3)]
    blocks = [(phase, number) for number in (2, 1, 0) for phase in ("recompute", "backward")]
    assert order == [*forward, ("backward", 3), *blocks, ("backward", -1)]


@pytest.mark.parametrize("runtime", [V1, V2, PR, HEAD])
def test_every_module_visit_costs_the_host(tmp_path, runtime):
    found = [op for op in layer(checkpointed(tmp_path, runtime)) if isinstance(op, HostTask)]
    activities = [op.activity for op in found]
    assert activities.count("visit") == 2 * MODULES
    assert activities.count("visit_backward") == MODULES
    old = runtime in {V1, V2}
    assert activities.count("decision") == 2 * MODULES * old
    assert activities.count("decision_backward") == MODULES * old
    # Strings for each own parameter, until they were guarded.
    assert activities.count("string") == OWNERS * VISITS * (runtime != HEAD)


@pytest.mark.parametrize("runtime", [V1, V2])
def test_old_versions_format_a_norm_for_each_tensor_of_each_visit(tmp_path, runtime):
    found = layer(checkpointed(tmp_path, runtime))
    norms = [op for op in found if isinstance(op, Sync) and "debug_norm" in op.key.what]
    assert len(norms) == TENSORS * VISITS == 48
    assert {op.lanes for op in norms} == {("compute",)}
    kernels = [op for op in found if isinstance(op, Compute) and "debug_norm" in op.key.what]
    # Each reads its tensor once.
    assert sum(op.nbytes for op in kernels) == VISITS * 2 * BLOCK
    assert count(layer(switched(checkpointed(tmp_path, runtime), debug_norms=False)), Sync, "debug_norm") == 0


@pytest.mark.parametrize("runtime", [PR, HEAD])
def test_later_versions_never_drain_a_lane_within_a_layer(tmp_path, runtime):
    found = [op for op in layer(checkpointed(tmp_path, runtime)) if isinstance(op, Sync)]
    assert not [op for op in found if op.event is None]
    # The limiter: with two fetches outstanding, each further one waits for the oldest.
    assert len(found) == 2 * FETCHED
    free = switched(checkpointed(tmp_path, runtime), limiter_depth=0)
    assert count(layer(free), Sync) == 0


@pytest.mark.parametrize("runtime", [V1, V2])
def test_fetches_of_old_versions_synchronise_three_times(tmp_path, runtime):
    """0.5.4: device before the all-gather, side stream and device behind; 0.5.10: all three behind."""
    found = [op for op in layer(checkpointed(tmp_path, runtime)) if isinstance(op, Sync)]
    fetches = [op for op in found if "debug_norm" not in op.key.what and "reduce" not in op.key.what]
    assert len(device_syncs(fetches)) == 2 * FETCHED * VISITS == 36
    assert sum(op.lanes == ("all_gather",) for op in fetches) == FETCHED * VISITS
    assert len(fetches) == 54
    gathers = [op for op in layer(checkpointed(tmp_path, runtime)) if isinstance(op, Collective | Sync)]
    for one, other in pairwise(gathers):
        if isinstance(other, Collective) and runtime == V1:
            assert isinstance(one, Sync)
            assert one.key.what == f"{other.key.what}.sync"


@pytest.mark.parametrize(("runtime", "behind_prefetch"), [(V1, 2), (V2, 2)])
def test_what_was_prefetched_is_only_waited_for(tmp_path, runtime, behind_prefetch):
    """The root's prefetch brings the word embedding: a device sync each, then side stream and device once for all."""
    found = ops(checkpointed(tmp_path, runtime, stage3_prefetch_bucket_size=WORDS + 1), "forward", -1)
    prefetched = [op for op in found if isinstance(op, Collective)]
    assert [op.key.what.partition(":")[0] for op in prefetched] == [
        "embeddings.word_embeddings.weight",
        "embeddings.position_embeddings.weight",
    ]
    syncs = [op for op in found if isinstance(op, Sync) and "debug_norm" not in op.key.what]
    assert sum(op.key.what.endswith("all_gather.sync") for op in syncs) == len(prefetched)
    assert len(syncs) == len(prefetched) + behind_prefetch


@pytest.mark.parametrize(("runtime", "visits"), [(V1, 3), (V2, 3), (PR, 2), (HEAD, 2)])
def test_all_gathers_of_a_layer(tmp_path, runtime, visits):
    gathers = [op for op in collectives(checkpointed(tmp_path, runtime), layer=1) if op.kind == "all_gather"]
    assert len(gathers) == FETCHED * visits
    assert sum(op.num_elements for op in gathers) == visits * 12 * MATRIX
    assert {op.lane for op in gathers} == {"nccl.world"}


def test_an_all_gather_through_a_list_copies_once_a_rank(tmp_path):
    found = layer(checkpointed(tmp_path, V1))
    for what, kernels in (("fill", 1), ("own_slice", 1), ("copy_out", RANKS)):
        copies = [op for op in found if isinstance(op, Copy) and op.key.what.endswith(f"all_gather.{what}")]
        assert [op.num_kernels for op in copies] == [kernels] * FETCHED * VISITS
    # Filled: written. Own slice and lists: read and written.
    totals = {"fill": 1, "own_slice": 2 / RANKS, "copy_out": 2}
    for what, passes in totals.items():
        nbytes = sum(op.nbytes for op in found if isinstance(op, Copy) and op.key.what.endswith(f"all_gather.{what}"))
        assert nbytes == VISITS * 12 * MATRIX * 2 * passes
    narrows = [op for op in found if isinstance(op, HostTask) and op.activity == "narrow"]
    assert [op.count for op in narrows if "all_gather" in op.key.what] == [RANKS] * FETCHED * VISITS
    # c10d's flat buffer is gone before the next is taken.
    lists = [op for op in found if isinstance(op, Alloc | Free) and op.buffer.startswith("list.")]
    assert [isinstance(op, Alloc) for op in lists] == [True, False] * FETCHED * VISITS


@pytest.mark.parametrize("runtime", [V2, PR, HEAD])
def test_an_all_gather_into_one_tensor_copies_nothing(tmp_path, runtime):
    assert not [
        op for op in layer(checkpointed(tmp_path, runtime)) if isinstance(op, Copy) and "all_gather" in op.key.what
    ]


# ---------------------------------------------------------------------- prefetch and coalescing


@pytest.mark.parametrize(("runtime", "at_least"), [(PR, MATRIX), (HEAD, 3 * MATRIX)])
def test_a_prefetch_gathers_several_tensors_at_once(tmp_path, runtime, at_least):
    """Until the bucket is full, which the last tensor may overshoot; 0.6.0 counts what is gathered already as well.

    Flattened before, and copied out again behind.
    """
    spec = checkpointed(tmp_path, runtime, stage3_prefetch_bucket_size=3 * MATRIX)
    forward = ops(spec, "forward")
    together = [op for op in forward if isinstance(op, Collective) and "+" in op.key.what]
    assert len(together) > 3
    copies = {(op.key.what, op.nbytes) for op in ops(spec) if isinstance(op, Copy)}
    for gather in together:
        assert gather.num_elements >= at_least or gather is together[-1]
        assert gather.num_elements < 3 * MATRIX + WORDS
        assert (f"{gather.key.what}.flatten", 2 * gather.nbytes // RANKS) in copies
        assert (f"{gather.key.what}.unflatten", 2 * gather.nbytes) in copies
    alone = ops(switched(spec, coalesced_collectives=False), "forward")
    assert not [op for op in alone if isinstance(op, Collective) and "+" in op.key.what]
    # Prefetched before they are needed: on the lane of gathers, without the host waiting for compute.
    assert not device_syncs(forward)


@pytest.mark.parametrize("form", ["list", "base", "grouped"])
def test_grouped_calls_move_the_same_without_flattening(tmp_path, form):
    spec = checkpointed(tmp_path, PR, stage3_prefetch_bucket_size=3 * MATRIX)
    spec = switched(spec, all_gather_form=form, reduce_scatter_form=form)
    found = ops(spec)
    flat = ("flatten", "unflatten", "interleave", "copy_in", "copy_out", "own_slice")
    copies = [op for op in found if isinstance(op, Copy) and op.key.what.endswith(flat)]
    # Those of operators, as of the loss, are there whatever the form.
    own = [op for op in found if isinstance(op, Alloc) and not op.by_operator]
    temporary = [op for op in own if op.category == "temporary" and op.key.phase not in SETUP | {"step"}]
    widest = max(op.num_tensors for op in found if isinstance(op, Collective))
    if form == "grouped":
        assert (copies, temporary) == ([], [])
        assert widest == TENSORS * LAYERS + OTHER_TENSORS
    else:
        assert copies
        assert temporary
        assert widest == 1
    kinds = {
        kind: sum(op.num_elements for op in collectives(spec) if op.kind == kind)
        for kind in ("all_gather", "reduce_scatter")
    }
    other = switched(spec, all_gather_form="base", reduce_scatter_form="base")
    assert kinds == {kind: sum(op.num_elements for op in collectives(other) if op.kind == kind) for kind in kinds}


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("runtime", [V1, V2])
def test_old_versions_reduce_each_tensor_through_a_list(tmp_path, runtime):
    found = ops(checkpointed(tmp_path, runtime))
    tensors = TENSORS * LAYERS + OTHER_TENSORS
    scatters = [op for op in found if isinstance(op, Collective) and op.kind == "reduce_scatter"]
    assert len(scatters) == tensors
    # On the communicator of the all-gathers: the two never overlap.
    assert {op.lane for op in scatters} == {"nccl.world"}
    copies = [op for op in found if isinstance(op, Copy) and op.key.what.endswith("copy_in")]
    assert [op.num_kernels for op in copies] == [RANKS] * tensors
    assert {op.lane for op in copies} == {"nccl.world"}
    assert more_per_layer(tmp_path, runtime, Copy, "copy_in") == TENSORS


def test_a_reduction_of_old_versions_waits_twice_and_scales_the_whole_bucket(tmp_path):
    spec = checkpointed(tmp_path, V1, reduce_bucket_size=BLOCK)
    found = ops(spec, "backward", 1)
    assert count(found, Sync, ":reduce.previous") == count(found, Sync, ":reduce.partitioned") > 0
    divides = [op for op in found if isinstance(op, Copy) and op.key.what.endswith(":reduce.divide")]
    assert {op.nbytes for op in divides} == {2 * 2 * BLOCK}


@pytest.mark.parametrize("runtime", [PR, HEAD])
def test_later_versions_reduce_once_a_bucket(tmp_path, runtime):
    def scatters(bucket):
        return [
            op
            for op in collectives(checkpointed(tmp_path, runtime, reduce_bucket_size=bucket))
            if op.kind == "reduce_scatter"
        ]

    tensors = TENSORS * LAYERS + OTHER_TENSORS
    assert len(scatters(500_000_000)) == 1
    assert len(scatters(1)) == tensors
    lanes = {PR: "nccl.data_parallel", HEAD: "nccl.world"}
    assert {op.lane for op in scatters(BLOCK)} == {lanes[runtime]}
    # Tensors come last block first, each in the order of backward; a bucket closes before it overflows.
    assert 3 < len(scatters(BLOCK)) < tensors


def test_buckets_of_later_versions_are_ordered_by_streams(tmp_path):
    found = ops(checkpointed(tmp_path, PR, reduce_bucket_size=4 * MATRIX), "backward")
    syncs = [op for op in found if isinstance(op, Sync) and "reduce" in op.key.what]
    # One at the end of backward; else the limiter, three buckets behind.
    assert [op.lanes for op in syncs if op.event is None] == [("reduce",)]
    reduced = sum(isinstance(op, Collective) and op.kind == "reduce_scatter" for op in found)
    assert sum(op.event is not None for op in syncs) == reduced - 3


def test_overflow_is_looked_for_where_each_version_does(tmp_path):
    def partition_checks(runtime):
        found = ops(checkpointed(tmp_path, runtime), "backward")
        return sum(op.num_kernels for op in found if isinstance(op, Copy) and op.key.what.endswith(".overflow"))

    assert partition_checks(V1) == partition_checks(HEAD) == 0
    assert partition_checks(PR) == 6 * (TENSORS * LAYERS + OTHER_TENSORS)


# ---------------------------------------------------------------------- step


@pytest.mark.parametrize(("runtime", "reads"), [(V1, 2 * 58 + 1 + 3), (V2, 2 * 58 + 1 + 3), (PR, 2 + 3), (HEAD, 1)])
def test_scalars_read_in_a_step(tmp_path, runtime, reads):
    """Two a tensor in old versions, one a sub-group since; later only the overflow flag."""
    assert TENSORS * LAYERS + OTHER_TENSORS == 58
    spec = checkpointed(tmp_path, runtime, sub_group_size=300_000)
    found = ops(spec, "step")
    assert sum(isinstance(op, HostTask) and op.activity == "item" for op in found) == reads
    scalars = [op for op in found if isinstance(op, Collective) and op.num_elements == 1]
    assert [op.element_bytes for op in scalars] == [1, 4, 4, 4]
    updates = [op for op in found if isinstance(op, Compute) and op.key.what.endswith(":update")]
    assert len(updates) == 3


@pytest.mark.parametrize("runtime", [V1, V2, PR, HEAD])
def test_persistent_tensors_are_gathered_one_by_one_behind_the_update(tmp_path, runtime):
    found = ops(checkpointed(tmp_path, runtime), "step")
    gathers = [i for i, op in enumerate(found) if isinstance(op, Collective) and op.kind == "all_gather"]
    assert len(gathers) == 10 * LAYERS + 6
    assert len(device_syncs(found)) == 1 + 1  # behind them, and where the loop reads the loss
    first = found[gathers[0]]
    records = [op for op in found[: gathers[0]] if op.key == first.key and hasattr(op, "event")]
    # The communicator waits for compute, where the optimizer ran.
    assert [op.lane for op in records][:2] == ["compute", "nccl.world"]


# ---------------------------------------------------------------------- stages 1 and 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_synchronises_the_device_only_in_old_versions_with_overlap(tmp_path, stage):
    tensors = TENSORS * LAYERS + OTHER_TENSORS

    def syncs(runtime, overlap, **switches):
        zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 1}
        return len(device_syncs(ops(switched(resolved(tmp_path, runtime, zero=zero), **switches), "backward")))

    for runtime in (V1, V2, PR):
        # These turn overlap off in stage 1 (runtime/engine.py).
        assert syncs(runtime, overlap=True) == (tensors + 1 if stage == 2 else 0)
        assert syncs(runtime, overlap=False) == 0
        by_streams = syncs(runtime, overlap=True, bucket_sync="stream", multi_rank_all_reduce=True)
        assert by_streams == (1 if stage == 2 else 0)
    assert syncs(HEAD, overlap=True) == 1
    assert syncs(HEAD, overlap=False) == 0
    # A reduction to each owner keeps its synchronisation; three tensors lie across a border of partitions.
    assert syncs(HEAD, overlap=True, multi_rank_all_reduce=False) == tensors + 3 + 1


def test_stage_1_without_overlap_reduces_behind_backward(tmp_path):
    def phases(stage, overlap, runtime=HEAD):
        spec = resolved(tmp_path, runtime, zero={"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": BLOCK})
        return {op.key.layer for op in collectives(spec, "backward")}

    for runtime in (PR, HEAD):
        assert phases(1, overlap=False, runtime=runtime) == {-1}
        assert phases(2, overlap=False, runtime=runtime) > {-1}
    assert phases(1, overlap=True) > {-1}
    assert phases(1, overlap=True, runtime=PR) == {-1}, "turned off in stage 1"


def test_partitions_are_gathered_by_lists_or_in_one_call(tmp_path):
    zero = {"stage": 2, "allgather_bucket_size": BLOCK}
    old, new = (resolved(tmp_path, runtime, zero=zero) for runtime in (V1, HEAD))
    gathers = [op for op in collectives(old, "step") if op.kind == "all_gather"]
    psi = sum(op.num_elements for op in gathers)
    assert len(gathers) == psi // BLOCK
    copies = [op for op in ops(old, "step") if isinstance(op, Copy) and op.key.what.endswith("copy_out")]
    assert [op.num_kernels for op in copies] == [RANKS] * len(gathers)
    assert [op.num_elements for op in collectives(new, "step")] == [psi]


def test_partitions_are_padded_to_two_elements_a_rank(tmp_path):
    """NCCL's alignment; 257 further elements make Ψ odd."""
    spec = resolved(tmp_path, HEAD, zero={"stage": 2}, model=bert(vocab=VOCAB + 1))
    (gather,) = [op for op in collectives(spec, "step") if op.kind == "all_gather"]
    assert PSI % 8 == 0
    assert gather.num_elements == PSI + 257 + 7
    (reduce,) = collectives(spec, "backward")
    assert reduce.num_elements == PSI + 257


def test_deepspeed_without_zero_reduces_behind_backward_and_ddp_within(tmp_path):
    zero = [op for op in collectives(resolved(tmp_path, HEAD)) if op.kind == "all_reduce"]
    assert {(op.key.phase, op.key.layer) for op in zero} == {("backward", -1)}
    ddp = collectives(resolved(tmp_path, "ddp", model=bert(hidden=1024)))
    assert len({op.key.layer for op in ddp}) > 2
    # The first bucket closes at 1 MiB, later ones at 25 MiB; only the last may be smaller.
    assert ddp[0].nbytes >= 2**20
    assert all(op.nbytes >= 25 * 2**20 for op in ddp[1:-1])


def test_ddp_accumulates_without_communication(tmp_path):
    once, thrice = (
        [op.nbytes for op in collectives(resolved(tmp_path, "ddp", gradient_accumulation=k))] for k in (1, 3)
    )
    assert once == thrice


def test_tied_weights_are_reduced_once(tmp_path):
    for runtime, zero in ((PR, ZERO), (HEAD, {"stage": 2}), (HEAD, {"stage": 0}), ("ddp", None)):
        hooks = [op for op in ops(resolved(tmp_path, runtime, zero=zero)) if isinstance(op, HostTask)]
        words = [op.key for op in hooks if op.key.what == "embeddings.word_embeddings.weight:gradient"]
        assert len(words) == (zero != {"stage": 0})
        assert {key.layer for key in words} <= {-1}
