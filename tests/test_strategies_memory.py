"""Memory of the programs: model states to the digits that the papers print, and buffers where each version has them.

The curve is followed over the Alloc and Free of the program itself, without an engine.
"""

from dataclasses import replace

import pytest
from strategy_cases import BLOCK, LAYERS, PSI, VOCAB, WORDS, curve, highest, ops, reduced, resolved, set_up

from zsim import simulate
from zsim.figures.memory import peak
from zsim.figures.states import model_states
from zsim.ops import Alloc, Free

GIGA = 1e9
STATES = ("parameters", "gradients", "optimizer")
ALL_PARTITIONED = {"stage3_param_persistence_threshold": 0}


def taken(spec, category):
    """What is allocated under a category, in order."""
    return [op for op in ops(spec) if isinstance(op, Alloc) and op.category == category]


@pytest.mark.parametrize(
    ("stage", "printed"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")], ids=["stage 0", "1", "2", "3"]
)
def test_7_5_billion_parameters_on_64_gpus(stage, printed):
    """Rajbhandari et al. 2020, figure 1."""
    assert f"{model_states(7_500_000_000, 64, stage).total / GIGA:.1f}" == printed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_allocated_states_of_a_7_5_billion_model(tmp_path, stage):
    """The program holds what the formula says of its own number of parameters, but for padding."""
    zero = {"stage": stage} | (ALL_PARTITIONED if stage == 3 else {})
    spec = resolved(tmp_path, "deepspeed-0.19", zero=zero, model={"preset": "gpt-7.5b"}, nodes=8, gpus=8)
    words = 51_200 * 4096
    psi = 36 * (12 * 4096**2 + 13 * 4096) + words + (2_048 + 2) * 4096
    states, held = model_states(psi, 64, stage), reduced(spec)
    assert held["parameters"] == pytest.approx(states.parameters, rel=1e-5)
    assert held["optimizer"] == pytest.approx(states.optimizer, rel=1e-5)
    # Stages 1 and 2 keep whole what begins in the rank's partition, of the first rank the words.
    kept = 2 * words if stage in {1, 2} else states.gradients
    assert held["gradients"] == pytest.approx(kept, rel=1e-5)
    if stage == 1:
        assert highest(spec, "gradients") == pytest.approx(states.gradients + 2 * words, rel=1e-5)


def test_a_trillion_parameters_on_1024_gpus():
    assert model_states(10**12, 1024, 3).total == pytest.approx(16e12 / 1024)
    assert f"{model_states(10**12, 1000, 3).total / GIGA:.0f}" == "16"
    assert f"{model_states(10**12, 1024, 3).total / GIGA:.0f}" == "16"


def test_stage_1_saves_1068_mib_of_gpt2_on_4_gpus(tmp_path):
    """124,475,904 parameters: twelve bytes of each, three quarters of them elsewhere."""

    def allocated(stage):
        spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": stage}, model={"preset": "gpt2-124m"})
        return set_up(spec)

    saved = allocated(0)["optimizer"] - allocated(1)["optimizer"]
    assert saved == 12 * 124_475_904 * 3 // 4
    assert f"{saved / 2**20:,.0f}" == "1,068"


@pytest.mark.parametrize("runtime", ["deepspeed-0.5.4", "deepspeed-0.6.0", "deepspeed-0.19"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_reports_what_the_program_holds(tmp_path, runtime, stage):
    spec = resolved(tmp_path, runtime, zero={"stage": stage}, activation_checkpointing="full")
    measured = peak(simulate(spec).trace)
    every = {name for _, held in curve(spec) for name in held}
    # The allocator hands a block out whole where less than a mebibyte would be left of it.
    assert measured.peak_allocated - measured.categories.get("rounding", 0) == highest(spec, *every)
    assert sum(measured.categories.values()) == measured.peak_allocated


@pytest.mark.parametrize("runtime", ["deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.19"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_a_partition_and_those_on_their_way(tmp_path, runtime, stage):
    """With contiguous gradients each is copied into the bucket at once."""
    zero = {"stage": stage, "contiguous_gradients": True} | (ALL_PARTITIONED if stage == 3 else {})
    spec = resolved(tmp_path, runtime, zero=zero)
    kept = stage == 3 and not runtime.startswith("deepspeed-0.5")
    # Of the tied weight both parts, the second of which is added to the first.
    assert highest(spec, "gradients") == 2 * PSI // 4 * kept + 2 * 2 * WORDS
    # Kept for the whole run since buffers are preallocated, else taken when the first reduced slices are put down.
    assert taken(spec, "gradients")[0].key.phase == ("init" if kept else "backward")


@pytest.mark.parametrize(("runtime", "lane"), [("deepspeed-0.5.4", "reduce"), ("deepspeed-0.19", "reduce")])
def test_the_own_gradients_of_stage_2_are_whole_tensors_beside_each_other(tmp_path, runtime, lane):
    """`grads_in_partition` of stage_1_and_2.py: of all that begins in the rank's partition, once a micro-batch."""
    spec = resolved(tmp_path, runtime, zero={"stage": 2, "overlap_comm": True}, gradient_accumulation=2)
    parts = [op for op in taken(spec, "gradients") if op.buffer.startswith("gradients.")]
    assert [(op.nbytes, op.lane, op.key.micro) for op in parts] == [(2 * WORDS, lane, 0), (2 * WORDS, lane, 1)]
    freed = {op.buffer: op.key.phase for op in ops(spec) if isinstance(op, Free)}
    assert [freed[op.buffer] for op in parts] == ["step", "backward"]


def test_without_contiguous_gradients_they_wait_for_their_bucket(tmp_path):
    for runtime in ("deepspeed-0.5.4", "deepspeed-0.6.0"):
        for stage in (2, 3):
            zero = {"stage": stage, "contiguous_gradients": False, "reduce_bucket_size": 2 * BLOCK}
            spec = resolved(tmp_path, runtime, zero=zero | ({} if stage == 2 else ALL_PARTITIONED))
            # Of stage 2 the own ones stay where they are: the words, which come last. The tied weight has two parts.
            waiting = highest(spec, "gradients") - (2 * PSI // 4 if stage == 3 else 0)
            assert 2 * BLOCK < waiting / 2 <= 2 * BLOCK + 2 * WORDS + 4 * 256 * 256
            assert highest(spec, "buckets") == 0


@pytest.mark.parametrize(
    ("runtime", "stage", "overlap", "buckets"),
    [
        ("deepspeed-0.5.4", 2, False, 1),
        ("deepspeed-0.5.4", 2, True, 2),
        ("deepspeed-0.5.4", 3, True, 2),
        ("deepspeed-0.5.4", 3, False, 1),
        ("deepspeed-0.6.0", 3, True, 1),
        ("deepspeed-0.19", 3, True, 1),
        ("deepspeed-0.19", 2, True, 2),
        ("deepspeed-0.19", 1, False, 1),
    ],
)
def test_bucket_buffers(tmp_path, runtime, stage, overlap, buckets):
    zero = {"stage": stage, "overlap_comm": overlap, "contiguous_gradients": True}
    spec = resolved(tmp_path, runtime, zero=zero)
    assert highest(spec, "buckets") == buckets * 2 * 500_000_000
    at_the_end = [held for _, held in curve(spec)][-1].get("buckets", 0)
    kept = stage == 3 and not runtime.startswith("deepspeed-0.5")
    assert at_the_end == (2 * 500_000_000 if kept else 0)


def test_gathered_parameters_of_old_versions_are_those_of_one_module(tmp_path):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0} | ALL_PARTITIONED
    spec = resolved(tmp_path, "deepspeed-0.5.4", zero=zero, activation_checkpointing="full")
    assert highest(spec, "gathered") == 2 * (WORDS + VOCAB)
    # c10d's flat buffers beside them, until the host has waited for both.
    held, listed = 0, 0
    sizes = {}
    for op in ops(spec, "forward"):
        if isinstance(op, Alloc) and op.category == "temporary" and not op.by_operator:
            sizes[op.buffer] = op.nbytes
        held = sum(sizes.values())
        listed = max(listed, held)
        if isinstance(op, Free):
            sizes.pop(op.buffer, None)
    assert listed == 2 * (WORDS + VOCAB)


def test_live_parameters_bound_the_look_ahead(tmp_path):
    """Nominally; what a module needs is gathered anyway, and the last tensor of a prefetch may overshoot."""
    zero = {"stage": 3, "stage3_max_live_parameters": BLOCK, "stage3_max_reuse_distance": 0} | ALL_PARTITIONED
    bound = highest(resolved(tmp_path, "deepspeed-0.6.0", zero=zero), "gathered")
    free = highest(
        resolved(tmp_path, "deepspeed-0.6.0", zero=zero | {"stage3_max_live_parameters": 10 * PSI}), "gathered"
    )
    assert bound <= 2 * (BLOCK + 2 * WORDS + VOCAB)
    assert free >= 2 * (PSI - WORDS)


def test_coalesced_buffers_are_temporary(tmp_path):
    zero = {"stage": 3} | ALL_PARTITIONED
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero=zero, gradient_accumulation=2)
    scatters = [op.nbytes for op in taken(spec, "temporary") if ":reduce" in op.buffer]
    assert scatters == [2 * PSI] * 2


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_of_a_step(tmp_path, checkpointing):
    """s·b·h·(34 + 5as/h) bytes a layer (Korthikanti et al. 2022), or its input and one layer at a time."""
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero={"stage": 2}, activation_checkpointing=checkpointing)
    b, s, h, a = 2, 64, 256, 4
    layer = s * b * h * 34 + 5 * a * b * s * s
    # Logits and log-softmax; inputs of the head's dense, GELU, norm and decoder.
    head = (2 + 2) * b * s * VOCAB + 4 * 2 * b * s * h
    # The input of the norm, a mask, and what the first layer is called with.
    embedding = (2 + 1 + 2) * b * s * h
    # A layer is called with what the one in front has put out, which the formula counts there.
    state = 2 * b * s * h
    recomputed = embedding + (LAYERS - 1) * state + max(head, layer - state)
    expected = recomputed if checkpointing == "full" else embedding - state + LAYERS * layer + head
    assert highest(spec, "activations") == expected
    # All of it is gone when the step is over.
    assert [held for _, held in curve(spec)][-1]["activations"] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_activations_of_a_step_with_selective_checkpointing(tmp_path, stage):
    """34·s·b·h bytes a layer (Korthikanti et al. 2022, equation 6), and the scores of one layer at a time."""
    train = {"activation_checkpointing": "selective"}
    spec = resolved(tmp_path, "deepspeed-0.6.0", zero={"stage": stage}, **train)
    b, s, h, a = 2, 64, 256, 4
    head, embedding = (2 + 2) * b * s * VOCAB + 4 * 2 * b * s * h, (2 + 1) * b * s * h
    expected = embedding + LAYERS * 34 * s * b * h + max(head, 5 * a * b * s * s)
    assert highest(spec, "activations") == expected
    assert [held for _, held in curve(spec)][-1]["activations"] == 0


@pytest.mark.parametrize(("every", "num_checkpointed"), [(1, 3), (2, 1), (3, 1)])
def test_every_nth_layer_is_checkpointed(tmp_path, every, num_checkpointed):
    """Of every n blocks the last, as torchtitan counts them; the others keep all."""
    train = {"activation_checkpointing": "full", "checkpoint_every": every}
    found = ops(resolved(tmp_path, "deepspeed-0.6.0", zero={"stage": 2}, **train), "recompute")
    assert {op.key.layer for op in found} == {n for n in range(LAYERS) if (n + 1) % every == 0}
    held = taken(resolved(tmp_path, "deepspeed-0.6.0", zero={"stage": 2}, **train), "activations")
    kept = [op.buffer for op in held if op.key.phase == "forward"]
    assert sum(f"0.0.layer.{layer}.output:sum" not in kept for layer in range(LAYERS)) == num_checkpointed


def test_fp32_without_partitions_needs_no_master_copy(tmp_path):
    spec = resolved(tmp_path, "deepspeed-0.19", zero={"stage": 1})
    single = replace(spec, train=replace(spec.train, precision="fp32", communication_bytes=4))
    whole, divided = (reduced(each) for each in (replace(single, zero=replace(single.zero, stage=0)), single))
    assert sum(whole[name] for name in STATES) == (4 + 4 + 8) * PSI
    assert (divided["parameters"], divided["optimizer"]) == (4 * PSI, 12 * PSI // 4)
