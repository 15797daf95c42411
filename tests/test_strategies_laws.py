"""What the papers and DeepSpeed's source say of the volume that each stage moves, counted on the programs.

Ψ parameters, N ranks; elements moved per rank and step: an all-reduce counts its tensor twice, everything else once
(Rajbhandari et al. 2020, section 7). A hook fetches the parameters of every module it runs for, so the word embedding
is fetched by the embedding, by the decoder tied to it, and by the embedding's backward.
"""

import pytest
from strategy_cases import (
    BLOCK,
    EMBEDDINGS,
    HEAD,
    HIDDEN,
    LAYERS,
    MATRIX,
    PSI,
    VECTORS,
    VOCAB,
    WORDS,
    bert,
    collectives,
    count,
    moved,
    ops,
    resolved,
    switched,
)

from zsim.model import build
from zsim.ops import HostTask

BEFORE = ["deepspeed-0.5.4", "deepspeed-0.5.10"]
AFTER = "deepspeed-0.6.0"
HEAD_RUNTIME = "deepspeed-0.19"
OLD_AND_NEW = [*BEFORE, AFTER, HEAD_RUNTIME]
ALL_PARTITIONED = {"stage": 3, "stage3_param_persistence_threshold": 0}
WITHIN_A_BLOCK = 2 * (BLOCK - MATRIX - HIDDEN)
"""Elements between the recomputation of the query projection and its backward, 22 h² and the vectors: all other modules
of the block twice. Up to this distance a block is gathered once for both."""


def test_the_model_of_these_tests(tmp_path):
    spec = resolved(tmp_path, AFTER)
    assert build(spec.model, spec.train).num_parameters == PSI
    assert PSI % (2 * 4) == 0


@pytest.mark.parametrize("runtime", [*OLD_AND_NEW, "ddp"])
def test_without_partitions_gradients_are_all_reduced(tmp_path, runtime):
    spec = resolved(tmp_path, runtime, zero={"stage": 0})
    assert moved(spec) == moved(spec, "all_reduce") == 2 * PSI


@pytest.mark.parametrize("bucket", [1, 10_000, 500_000_000])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("runtime", OLD_AND_NEW)
def test_stages_1_and_2_reduce_to_owners_and_gather_once(tmp_path, runtime, stage, overlap, bucket):
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": bucket}
    spec = switched(resolved(tmp_path, runtime, zero=zero), multi_rank_all_reduce=False)
    assert moved(spec, "reduce") == PSI
    assert moved(spec, "all_gather") == PSI
    assert moved(spec) == 2 * PSI


def test_one_all_reduce_a_bucket_moves_half_as_much_again(tmp_path):
    assert moved(resolved(tmp_path, HEAD_RUNTIME, zero={"stage": 2})) == 3 * PSI


def test_the_switch_of_the_deepspeed_configuration_turns_it_off(tmp_path):
    spec = resolved(tmp_path, HEAD_RUNTIME, zero={"stage": 2, "use_multi_rank_bucket_allreduce": False})
    assert moved(spec) == 2 * PSI


@pytest.mark.parametrize("runtime", OLD_AND_NEW)
def test_without_reduce_scatter_gradients_are_all_reduced(tmp_path, runtime):
    zero = {"stage": 2, "reduce_scatter": False}
    assert moved(resolved(tmp_path, runtime, zero=zero)) == 3 * PSI
    spec = resolved(tmp_path, runtime, zero=ALL_PARTITIONED | zero | {"stage": 3})
    # 0.6.0 asks for it only to check the type on the wire; the old versions all-reduce their whole buffer.
    expected = {"deepspeed-0.6.0": (PSI, 0), "deepspeed-0.19": (0, 2 * PSI)}.get(runtime, (0, 2 * 500_000_000))
    assert (moved(spec, "reduce_scatter"), moved(spec, "all_reduce")) == expected


@pytest.mark.parametrize("runtime", OLD_AND_NEW)
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_gradient_accumulation(tmp_path, runtime, micro_batches):
    def elements(stage):
        zero = {"stage": stage, "overlap_comm": False}
        spec = resolved(tmp_path, runtime, zero=zero, gradient_accumulation=micro_batches)
        return moved(switched(spec, multi_rank_all_reduce=False))

    assert elements(0) == 2 * PSI
    assert elements(1) == 2 * PSI
    assert elements(2) == (micro_batches + 1) * PSI


# ---------------------------------------------------------------------- stage 3


@pytest.mark.parametrize("prefetch", [0, MATRIX, 50_000_000])
@pytest.mark.parametrize("overlap", [False, True])
def test_stage_3_gathers_twice_and_reduces_once(tmp_path, overlap, prefetch):
    zero = ALL_PARTITIONED | {"overlap_comm": overlap, "stage3_prefetch_bucket_size": prefetch}
    zero |= {"stage3_max_reuse_distance": BLOCK // 2}
    spec = resolved(tmp_path, AFTER, zero=zero)
    # The decoder's backward follows its forward at once, so it is kept; but its weight is the word embedding, used
    # twice more.
    decoder = WORDS + VOCAB
    assert moved(spec, "all_gather") == 2 * (PSI - WORDS - VOCAB) + decoder + 2 * WORDS
    assert moved(spec, "reduce_scatter") == PSI


def test_stage_3_moves_3_psi_where_nothing_is_tied_or_kept(tmp_path):
    """Llama's decoder is a weight of its own; at distance 0 later versions keep not even that."""
    llama = {"family": "llama", "layers": 3, "hidden": HIDDEN, "heads": 4, "ffn": 704, "vocab": VOCAB}
    zero = ALL_PARTITIONED | {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    spec = resolved(tmp_path, HEAD_RUNTIME, zero=zero, model=llama)
    psi = build(spec.model, spec.train).num_parameters
    assert psi == 3 * (4 * MATRIX + 3 * HIDDEN * 704 + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
    assert moved(spec) == 3 * psi


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("prefetch", [0, MATRIX, 50_000_000])
def test_blocks_move_3_psi_a_micro_batch_whether_or_not_they_are_recomputed(tmp_path, prefetch, micro_batches):
    zero = ALL_PARTITIONED | {"stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": WITHIN_A_BLOCK}
    for checkpointing in ("none", "full"):
        small, large = (
            resolved(
                tmp_path,
                AFTER,
                zero=zero,
                model=bert(layers),
                activation_checkpointing=checkpointing,
                gradient_accumulation=micro_batches,
            )
            for layers in (LAYERS, LAYERS + 1)
        )
        assert moved(large) - moved(small) == 3 * micro_batches * BLOCK


@pytest.mark.parametrize("runtime", BEFORE)
@pytest.mark.parametrize("prefetch", [0, 50_000_000])
def test_the_broken_trace_moves_4_psi_with_checkpointing(tmp_path, runtime, prefetch):
    zero = ALL_PARTITIONED | {"stage3_prefetch_bucket_size": prefetch}

    def spec(layers=LAYERS, checkpointing="full"):
        return resolved(tmp_path, runtime, zero=zero, model=bert(layers), activation_checkpointing=checkpointing)

    # Nothing is ever kept: a gather for each visit, four of them for the tied weight.
    gathered = 3 * LAYERS * BLOCK + 2 * EMBEDDINGS + 2 * HEAD + 2 * WORDS
    assert moved(spec(), "all_gather") == gathered
    assert moved(spec(), "reduce_scatter") == PSI
    assert moved(spec(LAYERS + 1)) - moved(spec()) == 4 * BLOCK
    assert moved(spec(LAYERS + 1, "none")) - moved(spec(LAYERS, "none")) == 3 * BLOCK


def test_the_trace_as_designed_saves_the_fourth(tmp_path):
    zero = ALL_PARTITIONED | {"stage3_max_reuse_distance": WITHIN_A_BLOCK}
    broken = resolved(tmp_path, BEFORE[1], zero=zero, activation_checkpointing="full")
    assert moved(broken) - moved(switched(broken, broken_trace=False)) == LAYERS * BLOCK + WORDS + VOCAB


@pytest.mark.parametrize(("runtime", "kept_from"), [(AFTER, WITHIN_A_BLOCK), (HEAD_RUNTIME, WITHIN_A_BLOCK + 1)])
def test_the_reuse_distance_to_the_element(tmp_path, runtime, kept_from):
    """The walk along the trace stops once it has passed the distance, in later versions once it has reached it."""

    def elements(distance):
        zero = ALL_PARTITIONED | {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
        return moved(resolved(tmp_path, runtime, zero=zero, activation_checkpointing="full"))

    assert elements(kept_from) == elements(kept_from + HIDDEN)
    # Query's weight and bias, once more in each block.
    assert elements(kept_from - 1) - elements(kept_from) == LAYERS * (MATRIX + HIDDEN)


def test_a_third_gather_of_the_projections_in_wide_models(tmp_path):
    """At h = 8192 the default distance of 1e9 is 14.9 h²: 16 h² lie behind attention's output, 8 h² behind the first
    feed-forward matrix."""
    wide, enough = (
        ALL_PARTITIONED | {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
        for distance in (int(14.9 * MATRIX), WITHIN_A_BLOCK)
    )
    lost = 4 * (MATRIX + HIDDEN) + 2 * HIDDEN  # q, k, v, o and the norm behind o
    first, second = (
        moved(resolved(tmp_path, AFTER, zero=zero, activation_checkpointing="full")) for zero in (wide, enough)
    )
    assert first - second == LAYERS * lost


@pytest.mark.parametrize(
    ("preset", "layers", "kept", "third"),
    [("roberta-10b", 6, 1, 0), ("roberta-10b-deep", 14, 3, 0), ("roberta-50b", 4, 0, 4)],
)
def test_what_survives_the_turn_around_in_the_measured_models(tmp_path, preset, layers, kept, third):
    """Behind block j from the end lie three times what follows it, the block itself and twice the decoder."""
    spec = resolved(
        tmp_path,
        AFTER,
        zero={"stage": 3},
        model={"preset": preset, "layers": layers},
        nodes=8,
        gpus=8,
        activation_checkpointing="full",
    )
    hidden = spec.model.hidden
    blocks = ((2 * layers - kept) * 12 + layers * third) * hidden**2
    # Words for embedding, decoder and embedding's backward; the head's dense layer lives on across the decoder.
    others = 3 * 53_000 * hidden + 2 * 514 * hidden + hidden**2
    gathered = sum(op.num_elements for op in collectives(spec) if op.kind == "all_gather" and op.key.phase != "step")
    assert gathered == blocks + others


def test_later_versions_keep_what_a_prefetch_passed_over(tmp_path):
    """So that the projections of a wide model are not gathered a third time."""
    zero = ALL_PARTITIONED | {"stage3_max_reuse_distance": int(14.9 * MATRIX), "stage3_prefetch_bucket_size": MATRIX}
    zero |= {"stage3_max_live_parameters": int(14.9 * MATRIX)}

    def per_block(runtime):
        small, large = (
            moved(resolved(tmp_path, runtime, zero=zero, model=bert(layers), activation_checkpointing="full"))
            for layers in (LAYERS, LAYERS + 1)
        )
        return large - small

    assert per_block(AFTER) == 3 * BLOCK + 4 * (MATRIX + HIDDEN) + 2 * HIDDEN
    assert per_block(HEAD_RUNTIME) == 3 * BLOCK


# ---------------------------------------------------------------------- persistent parameters


PERSISTENT = LAYERS * VECTORS + 4 * HIDDEN + 3 * HIDDEN
"""Elements of tensors below 2,000: all vectors but the decoder's bias."""


@pytest.mark.parametrize(("runtime", "first_kept"), [(AFTER, 4 * HIDDEN + 1), (HEAD_RUNTIME, 4 * HIDDEN)])
def test_the_persistence_threshold_to_the_element(tmp_path, runtime, first_kept):
    def kept(threshold):
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
        return moved(resolved(tmp_path, runtime, zero=zero), phase="step")

    assert kept(2_000) == kept(first_kept) == PERSISTENT
    # Without the biases of the intermediate layers.
    assert kept(first_kept - 1) == PERSISTENT - LAYERS * 4 * HIDDEN
    assert kept(0) == 0


@pytest.mark.parametrize("runtime", OLD_AND_NEW)
def test_later_micro_batches_gather_persistent_parameters_again_in_old_versions(tmp_path, runtime):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 2_000, "stage3_prefetch_bucket_size": 0}
    zero |= {"stage3_max_reuse_distance": WITHIN_A_BLOCK}

    def gathered(micro_batches):
        spec = resolved(tmp_path, runtime, zero=zero, gradient_accumulation=micro_batches)
        return moved(spec, "all_gather")

    first, second, third = gathered(1), gathered(2), gathered(3)
    again = PERSISTENT if runtime in BEFORE else 0
    # A micro-batch gathers what the first did without the gather of the persistent tensors after the step.
    assert second - first == first - PERSISTENT + again
    assert third - second == second - first


# ---------------------------------------------------------------------- prefetch


def prefetches(spec):
    return count(ops(spec), HostTask, ":prefetch:bookkeeping")


def test_no_prefetch_beyond_the_live_parameters(tmp_path):
    """`max_live_parameters` bounds the look-ahead, never what a module needs."""
    free = ALL_PARTITIONED | {"stage3_max_reuse_distance": WITHIN_A_BLOCK}
    bound = free | {"stage3_max_live_parameters": 1}
    with_prefetch, without = (resolved(tmp_path, AFTER, zero=zero) for zero in (free, bound))
    assert prefetches(with_prefetch) > 0
    # Only where nothing lives is there room for one more.
    assert prefetches(without) < prefetches(resolved(tmp_path, AFTER, zero=free | {"stage3_prefetch_bucket_size": 1}))
    assert moved(with_prefetch) == moved(without)


def test_the_broken_trace_prefetches_once_a_step(tmp_path):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 2_000, "stage3_prefetch_bucket_size": MATRIX}
    spec = resolved(tmp_path, BEFORE[0], zero=zero, gradient_accumulation=3)
    found = [op.key for op in ops(spec) if ":prefetch" in op.key.what and isinstance(op, HostTask)]
    assert {(key.micro, key.layer, key.what.partition(":")[0]) for key in found} == {(0, -1, "model")}
    assert prefetches(switched(spec, broken_trace=False)) > 3
