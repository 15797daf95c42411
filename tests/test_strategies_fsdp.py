"""What FSDP moves and in which order, counted over the programs of both versions."""

import pytest
from strategy_cases import BLOCK, EMBEDDINGS, LAYERS, PSI, WORDS, bert, collectives, count, moved, ops, resolved, set_up

from zsim import programs, simulate
from zsim.check import check
from zsim.figures.states import Counts, fsdp_states, ways_to_fit
from zsim.ops import COMPUTE, Alloc, Collective, Compute, Copy, Free, HostTask, Record, Sync, Wait
from zsim.strategies import groups
from zsim.writing.report import sharding

ROOT = PSI - LAYERS * BLOCK
VERSIONS = ("fsdp1", "fsdp2")
KEPT = {"fsdp1": {"sharding_strategy": "SHARD_GRAD_OP"}, "fsdp2": {"reshard_after_forward": False}}
HYBRID = {"fsdp1": {"sharding_strategy": "HYBRID_SHARD"}, "fsdp2": {"mesh": [2, 4]}}


def spec_of(folder, runtime, fsdp=None, **changes):
    return resolved(folder, runtime, fsdp=fsdp, **{"precision": "bf16"} | changes)


# ---------------------------------------------------------------------- payload


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("runtime", VERSIONS)
def test_full_shard_gathers_blocks_twice_and_reduces_once(runtime, checkpointing, tmp_path):
    """Zhao et al. 2023, section 3.2: recomputation uses what backward has gathered; the root stays for it."""
    spec = spec_of(tmp_path, runtime, activation_checkpointing=checkpointing)
    assert moved(spec, "all_gather", "forward") == PSI
    assert moved(spec, "all_gather", "backward") + moved(spec, "all_gather", "recompute") == LAYERS * BLOCK
    assert moved(spec, "reduce_scatter") == PSI
    assert len(collectives(spec)) == 3 * LAYERS + 2


def test_a_model_that_checkpoints_its_blocks_itself_gathers_them_thrice(tmp_path):
    """transformers, training_args.py: `gradient_checkpointing` with FSDP introduces a redundant all-gather."""
    spec = spec_of(tmp_path, "fsdp1", {"activation_checkpointing": False}, activation_checkpointing="full")
    assert moved(spec, "all_gather", "forward") == PSI
    # Of each block but the last one the recomputation finds what backward has prefetched for it.
    assert moved(spec, "all_gather", "recompute") + moved(spec, "all_gather", "backward") == 2 * LAYERS * BLOCK
    assert moved(spec, "reduce_scatter") == PSI
    assert not spec.train.checkpoint_early_stop
    assert any("gathered for the recomputation and once more for backward" in line for line in spec.warnings)
    inside = spec_of(tmp_path, "fsdp1", {"activation_checkpointing": True}, activation_checkpointing="full")
    assert simulate(spec).step_time_s > simulate(inside).step_time_s


@pytest.mark.parametrize("runtime", VERSIONS)
def test_parameters_that_are_kept_are_gathered_once(runtime, tmp_path):
    spec = spec_of(tmp_path, runtime, KEPT[runtime], gradient_accumulation=3)
    assert moved(spec, "all_gather", "forward") == 3 * PSI
    assert moved(spec, "all_gather", "backward") == 0
    assert moved(spec, "reduce_scatter") == 3 * PSI


def test_no_shard_all_reduces(tmp_path):
    spec = spec_of(tmp_path, "fsdp1", {"sharding_strategy": "NO_SHARD"})
    assert {op.kind for op in collectives(spec)} == {"all_reduce"}
    assert moved(spec) == 2 * PSI


@pytest.mark.parametrize("runtime", VERSIONS)
def test_hybrid_shards_in_the_node_and_all_reduces_shards_across(runtime, tmp_path):
    """Zhao et al. 2023, section 3.2.2: 2 Ψ / p across nodes, where p ranks share the states."""
    spec = spec_of(tmp_path, runtime, HYBRID[runtime], nodes=2)
    assert groups(spec)["shard"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups(spec)["replica"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {(op.kind, op.group) for op in collectives(spec)} == {
        ("all_gather", "shard"),
        ("reduce_scatter", "shard"),
        ("all_reduce", "replica"),
    }
    assert moved(spec, "all_reduce") == 2 * PSI // 4
    assert moved(spec, "reduce_scatter") == PSI


def test_resharding_to_fewer_ranks_gathers_there_in_backward(tmp_path):
    spec = spec_of(tmp_path, "fsdp2", {"reshard_after_forward": 4}, nodes=2)
    assert {op.group for op in collectives(spec, "forward")} == {"world"}
    gathered = [op for op in collectives(spec, "backward") if op.kind == "all_gather"]
    assert {op.group for op in gathered} == {"reshard"}
    assert sum(op.num_elements for op in gathered) == LAYERS * BLOCK
    held = [op for op in ops(spec) if isinstance(op, Alloc) and op.buffer.startswith("resharded.")]
    assert sum(op.nbytes for op in held) == 2 * LAYERS * BLOCK // 4


@pytest.mark.parametrize("settings", [{}, {"no_sync": True}])
@pytest.mark.parametrize("runtime", VERSIONS)
def test_no_sync_reduces_once_a_step(runtime, settings, tmp_path):
    spec = spec_of(tmp_path, runtime, settings, gradient_accumulation=3)
    assert moved(spec, "reduce_scatter") == (1 if settings else 3) * PSI
    # Parameters are gathered for each micro-batch all the same.
    assert moved(spec, "all_gather") == 3 * (PSI + LAYERS * BLOCK)


def test_shard_grad_op_without_synchronisation_keeps_parameters_across_micro_batches(tmp_path):
    """`_should_free_in_backward`."""
    spec = spec_of(tmp_path, "fsdp1", KEPT["fsdp1"] | {"no_sync": True}, gradient_accumulation=3)
    assert moved(spec, "all_gather") == PSI


@pytest.mark.parametrize("runtime", VERSIONS)
def test_wire_types(runtime, tmp_path):
    spec = spec_of(tmp_path, runtime, {"mixed_precision": {"reduce_dtype": "fp32"}})
    assert {(op.kind, op.element_bytes) for op in collectives(spec)} == {("all_gather", 2), ("reduce_scatter", 4)}


@pytest.mark.parametrize("runtime", VERSIONS)
def test_the_norm_takes_one_all_reduce(runtime, tmp_path):
    def scalars(settings, precision="bf16"):
        spec = spec_of(tmp_path, runtime, settings, precision=precision)
        return [op.key.what for op in ops(spec) if isinstance(op, Collective) and op.num_elements == 1]

    assert scalars({}) == ["gradients:norm_all_reduce"]
    assert scalars({"clip_grad_norm": False}) == []
    assert scalars({}, "fp16") == ["overflow:all_reduce", "gradients:norm_all_reduce"]


@pytest.mark.parametrize("runtime", VERSIONS)
def test_one_gpu_moves_nothing(runtime, tmp_path):
    spec = spec_of(tmp_path, runtime, gpus=1)
    assert collectives(spec) == []
    assert simulate(spec).step_time_s > 0


# ---------------------------------------------------------------------- order


def issued(spec, lane="nccl.world"):
    """Collectives of a lane as (kind, unit), in the order of issue."""
    found = [op for op in ops(spec) if isinstance(op, Collective) and op.lane == lane and op.num_elements > 1]
    return [(op.kind, op.key.what.partition(":")[0]) for op in found]


@pytest.mark.parametrize(
    ("settings", "backward"),
    [
        ({"backward_prefetch": "BACKWARD_PRE"}, ["ag 2", "ag 1", "rs 2", "ag 0", "rs 1", "rs 0", "rs root"]),
        ({"backward_prefetch": "BACKWARD_POST"}, ["ag 2", "ag 1", "rs 2", "ag 0", "rs 1", "rs 0", "rs root"]),
        ({"backward_prefetch": "NO_PREFETCH"}, ["ag 2", "rs 2", "ag 1", "rs 1", "ag 0", "rs 0", "rs root"]),
    ],
)
def test_order_of_collectives_in_backward(settings, backward, tmp_path):
    """Without prefetching a gather waits in the process group behind the reduction of the unit before."""
    spec = spec_of(tmp_path, "fsdp1", settings)
    short = {"all_gather": "ag", "reduce_scatter": "rs"}
    found = [f"{short[kind]} {unit.removeprefix('layer.')}" for kind, unit in issued(spec)]
    assert found[:4] == ["ag root", "ag 0", "ag 1", "ag 2"]
    assert found[4:] == backward


def test_backward_pre_issues_the_next_gather_before_the_computation_post_behind_it(tmp_path):
    def gather_and_compute(mode):
        spec = spec_of(tmp_path, "fsdp1", {"backward_prefetch": mode})
        listed = ops(spec)
        gather = next(
            i
            for i, op in enumerate(listed)
            if isinstance(op, Collective) and op.key.phase == "backward" and op.key.what == "layer.1:all_gather"
        )
        computed = [i for i, op in enumerate(listed) if isinstance(op, Compute) and op.key[2:4] == ("backward", 2)]
        return gather, computed

    gather, computed = gather_and_compute("BACKWARD_PRE")
    assert gather < computed[0]
    gather, computed = gather_and_compute("BACKWARD_POST")
    assert gather > computed[-1]


def test_forward_prefetch_issues_the_next_gather_before_the_computation(tmp_path):
    def gather(settings):
        listed = ops(spec_of(tmp_path, "fsdp1", settings))
        names = [op.key.what for op in listed if isinstance(op, Collective | Compute)]
        return names.index("layer.1:all_gather") - names.index("layer.0.attention.self.query")

    assert gather({"forward_prefetch": True}) < 0 < gather({})


def test_fsdp2_prefetches_one_unit_in_backward_and_waits_for_the_reduction_before(tmp_path):
    spec = spec_of(tmp_path, "fsdp2")
    assert issued(spec)[4:] == [
        ("all_gather", "layer.2"),
        ("all_gather", "layer.1"),
        ("reduce_scatter", "layer.2"),
        ("all_gather", "layer.0"),
        ("reduce_scatter", "layer.1"),
        ("reduce_scatter", "layer.0"),
        ("reduce_scatter", "root"),
    ]
    lanes = {op.lane for op in ops(spec) if isinstance(op, Collective | Copy)}
    assert lanes == {COMPUTE, "all_gather_copy_in", "nccl.world", "reduce_scatter"}
    waits = [op for op in ops(spec) if isinstance(op, Wait) and op.key.what.endswith("reduce.input.wait")]
    assert [(op.lane, op.key.layer) for op in waits] == [(COMPUTE, 1), (COMPUTE, 0), (COMPUTE, -1), (COMPUTE, -1)]


def test_a_separate_group_for_reduce_scatters(tmp_path):
    spec = spec_of(tmp_path, "fsdp2", {"separate_reduce_scatter_group": True})
    assert {kind for kind, _ in issued(spec)} == {"all_gather"}
    assert {kind for kind, _ in issued(spec, "nccl.reduce_scatter")} == {"reduce_scatter"}


def test_embeddings_and_head_apart(tmp_path):
    """torchtitan: the head, used last, stays whole for backward and is reduced first; the embeddings are a unit."""
    model = bert(tied_embeddings=False)
    whole = spec_of(tmp_path, "fsdp2", model=model)
    apart = spec_of(tmp_path, "fsdp2", {"wrap_embeddings": True}, model=model)
    assert moved(apart, "all_gather", "forward") == moved(whole, "all_gather", "forward") == PSI + WORDS
    assert moved(apart, "all_gather", "backward") == LAYERS * BLOCK + EMBEDDINGS
    assert moved(apart, "reduce_scatter") == moved(whole, "reduce_scatter") == PSI + WORDS
    reduced = [unit for kind, unit in issued(apart) if kind == "reduce_scatter"]
    assert reduced == ["root", "layer.2", "layer.1", "layer.0", "embeddings"]
    assert [unit for _, unit in issued(apart)[:5]] == ["embeddings", "layer.0", "layer.1", "layer.2", "root"]
    check(programs(apart), groups(apart))


def test_no_program_of_fsdp2_makes_the_host_wait_but_for_the_loss(tmp_path):
    assert [op.key.what for op in ops(spec_of(tmp_path, "fsdp2")) if isinstance(op, Sync)] == ["loss:read"]


# ---------------------------------------------------------------------- rate limiter and memory


def test_the_rate_limiter_waits_for_the_second_last_unit(tmp_path):
    """`_FreeEventQueue`: with two events queued the older one is waited for before the next unit is gathered."""
    listed = ops(spec_of(tmp_path, "fsdp1", model=bert(layers=6)))
    freed = {op.event: op.key for op in listed if isinstance(op, Record) and op.key.what.endswith(":reshard")}
    waited = [
        (op.key.what.partition(":")[0], freed[op.event].what.partition(":")[0])
        for op in listed
        if isinstance(op, Sync) and op.event is not None and op.key.phase == "forward"
    ]
    assert waited == [(f"layer.{i}", f"layer.{i - 2}") for i in range(2, 6)]


def test_without_the_rate_limiter_the_host_never_waits(tmp_path):
    spec = spec_of(tmp_path, "fsdp1", {"limit_all_gathers": False})
    assert [op.key.what for op in ops(spec) if isinstance(op, Sync)] == ["loss:read"]


WIDE = {"family": "gpt2", "layers": 12, "hidden": 4096, "heads": 32, "vocab": 1024, "max_positions": 2048}
WIDE_BLOCK = 12 * 4096**2 + 13 * 4096


def test_the_rate_limiter_bounds_what_is_reserved(tmp_path):
    """PyTorch issue #98354: without it the reserved memory grows with the units that the host runs ahead."""

    def reserved(runtime, settings, layers):
        spec = spec_of(
            tmp_path, runtime, settings, model=WIDE | {"layers": layers}, topology="p4de.24xlarge", nodes=8,
            gpus=8, seq_len=2048, activation_checkpointing="full",
        )  # fmt: skip
        memory = simulate(spec).metrics.memory
        # What grows with the layers by itself: shards of 16 bytes a parameter and checkpoints of 2 bytes an element.
        grows = layers * (16 * WIDE_BLOCK / 64 + 2 * 2 * 2048 * 4096)
        return (memory.peak_reserved - grows) / (2 * WIDE_BLOCK)

    def both(runtime, settings):
        return [reserved(runtime, settings, layers) for layers in (6, 12)]

    for runtime, settings in (("fsdp1", {}), ("fsdp2", {})):
        few, many = both(runtime, settings)
        # Less, if anything: what the steps cache fits into what more states have left behind.
        assert -2 < many - few < 1
    few, many = both("fsdp1", {"limit_all_gathers": False})
    assert many - few > 10
    assert many > reserved("fsdp1", {}, 12) + 20


@pytest.mark.parametrize("runtime", VERSIONS)
def test_gathered_memory_of_fsdp_by_the_host_is_two_units_and_the_root(runtime, tmp_path):
    spec = spec_of(tmp_path, runtime, model=bert(layers=8, vocab=512))
    live, most = {}, 0
    for op in ops(spec):
        if isinstance(op, Alloc) and op.category == "gathered":
            live[op.buffer] = op.nbytes
        elif isinstance(op, Free):
            live.pop(op.buffer, None)
        most = max(most, sum(nbytes for name, nbytes in live.items() if "layer." in name))
    assert most == 2 * 2 * BLOCK


@pytest.mark.parametrize("runtime", VERSIONS)
def test_states_are_sixteen_bytes_a_parameter_and_no_gradient_outlives_the_step(runtime, tmp_path):
    """fp32 parameters, gradients and two moments, each divided over the ranks."""
    spec = spec_of(tmp_path, runtime)
    states = set_up(spec)
    assert (states["parameters"], states["optimizer"]) == (4 * PSI // 4, 8 * PSI // 4)
    gradients = [op for op in ops(spec) if isinstance(op, Alloc) and op.buffer.startswith("gradients.")]
    assert sum(op.nbytes for op in gradients) == 4 * PSI // 4
    freed = {op.buffer for op in ops(spec, "step") if isinstance(op, Free)}
    assert {op.buffer for op in gradients} <= freed


def test_low_precision_gradients_are_kept_if_so_wished(tmp_path):
    settings = {"mixed_precision": {"keep_low_precision_grads": True}}
    spec = spec_of(tmp_path, "fsdp1", settings)
    freed = [op.buffer for op in ops(spec, "step") if isinstance(op, Free) and op.buffer.startswith("gradients.")]
    sizes = {op.buffer: op.nbytes for op in ops(spec) if isinstance(op, Alloc)}
    assert sum(sizes[buffer] for buffer in freed) == 2 * PSI // 4


@pytest.mark.parametrize("runtime", VERSIONS)
def test_gradients_accumulate_whole_without_synchronisation(runtime, tmp_path):
    def whole(settings):
        spec = spec_of(
            tmp_path, runtime, settings | {"mixed_precision": {"reduce_dtype": "fp32"}}, gradient_accumulation=2
        )
        end = next(i for i, op in enumerate(ops(spec)) if op.key.micro == 1)
        live = {}
        for op in ops(spec)[:end]:
            if isinstance(op, Alloc):
                live[op.buffer] = op
            elif isinstance(op, Free):
                del live[op.buffer]
        return sum(op.nbytes for op in live.values() if op.category == "gradients")

    # FSDP1 keeps autograd's type, FSDP2 that of the reduction.
    assert whole({"no_sync": True}) == {"fsdp1": 2, "fsdp2": 4}[runtime] * PSI
    assert whole({}) == 4 * PSI // 4


# ---------------------------------------------------------------------- switches

ALWAYS = {"no_sync": True, "clip_grad_norm": False, "mixed_precision": {"reduce_dtype": "fp32"}}
SWITCHES = {
    "fsdp1": ALWAYS
    | {
        "sharding_strategy": "SHARD_GRAD_OP",
        "limit_all_gathers": False,
        "backward_prefetch": "BACKWARD_POST",
        "forward_prefetch": True,
        "use_orig_params": True,
        "mixed_precision": {"keep_low_precision_grads": True},
    },
    "fsdp2": ALWAYS | {"reshard_after_forward": False, "mesh": [2, 4], "separate_reduce_scatter_group": True},
}


@pytest.mark.parametrize("runtime", VERSIONS)
def test_every_rank_by_itself_takes_as_long_as_the_one_that_stands_for_all(runtime, tmp_path):
    """Shard groups, replicas and smaller groups for resharding, folded and not."""
    settings = {"fsdp1": HYBRID["fsdp1"], "fsdp2": {"mesh": [2, 4], "reshard_after_forward": 2}}[runtime]
    spec = spec_of(tmp_path, runtime, settings, nodes=2, model=bert(layers=2))
    assert simulate(spec, expand_ranks=True).step_time_s == pytest.approx(simulate(spec).step_time_s, rel=1e-9)


@pytest.mark.parametrize(("runtime", "name"), [(one, name) for one, names in SWITCHES.items() for name in names])
def test_every_switch_changes_the_program(runtime, name, tmp_path):
    usual = spec_of(tmp_path, runtime, {}, nodes=2, gradient_accumulation=2)
    changed = spec_of(tmp_path, runtime, {name: SWITCHES[runtime][name]}, nodes=2, gradient_accumulation=2)
    assert ops(usual) != ops(changed)
    assert simulate(changed).step_time_s > 0


@pytest.mark.parametrize("runtime", VERSIONS)
def test_hooks_cost_the_host_a_visit_each_way_and_unit(runtime, tmp_path):
    found = [op.activity for op in ops(spec_of(tmp_path, runtime)) if isinstance(op, HostTask)]
    assert found.count("visit") == found.count("visit_backward") == LAYERS + 1


def test_units_end_with_the_parts_that_hold_them(tmp_path):
    """The root holds what no block does, the tied embedding once."""
    sizes = [op.num_elements for op in collectives(spec_of(tmp_path, "fsdp1")) if op.kind == "reduce_scatter"]
    assert sizes == [BLOCK] * LAYERS + [ROOT]
    assert ROOT > WORDS
    assert count(ops(spec_of(tmp_path, "fsdp1")), Copy, ":reduce.cat") == LAYERS + 1


@pytest.mark.parametrize(
    ("runtime", "settings", "shown", "ways"),
    [
        ("fsdp1", {}, "sharded over 8 GPUs", ["cluster.nodes="]),
        ("fsdp1", HYBRID["fsdp1"], "sharded over 4 GPUs, 2 replicas", ["fsdp.sharding_strategy=FULL_SHARD"]),
        ("fsdp1", {"sharding_strategy": "NO_SHARD"}, "data parallel", ["fsdp.sharding_strategy=FULL_SHARD"]),
        ("fsdp2", HYBRID["fsdp2"], "sharded over 4 GPUs, 2 replicas", ["fsdp.mesh=[8]"]),
        (
            "fsdp2",
            {"reshard_after_forward": 4},
            "sharded over 8 GPUs, over 4 between forward and backward",
            ["fsdp.reshard_after_forward=true", "cluster.nodes="],
        ),
        (
            "fsdp2",
            KEPT["fsdp2"],
            "sharded over 8 GPUs, whole between forward and backward",
            ["fsdp.reshard_after_forward=true", "cluster.nodes="],
        ),
    ],
)
def test_the_report_says_where_the_states_are_and_what_would_save_memory(runtime, settings, shown, ways, tmp_path):
    spec = spec_of(tmp_path, runtime, settings, nodes=2, micro_batch=1, activation_checkpointing="full")
    assert sharding(spec) == shown
    allocated = set_up(spec)
    states = fsdp_states(spec, Counts(PSI, PSI))
    assert (allocated["parameters"], allocated["optimizer"]) == (states.parameters, states.optimizer)
    found = ways_to_fit(spec, Counts(PSI, PSI), activation_bytes=0, excess_bytes=1e15)
    assert [any(one.startswith(way) for one in found) for way in ways] == [True] * len(ways)
    assert sum("fsdp" in one or "nodes" in one for one in found) == len(ways)
