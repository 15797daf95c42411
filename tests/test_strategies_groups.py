"""Laws of hpZ and MiCS: who gathers from whom, how often, how many bytes cross which links, and what memory it takes.

f(n) = (n - 1) / n is what a ring of n ranks sends of each byte. The weights are untied and all of them partitioned, and
nothing is kept or prefetched, so that stage 3 gathers everything twice and reduces it once.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from strategy_cases import HIDDEN, MATRIX, VOCAB, count, curve, ops, resolved, set_up

from zsim import load, simulate
from zsim.costs.collective import alone_with, num_on_same_nodes
from zsim.figures.states import Counts, model_states, ways_to_fit, zero_states
from zsim.model import build
from zsim.ops import SETUP, Alloc, Collective, Copy, Sync
from zsim.strategies import groups
from zsim.writing.report import states_table

LLAMA = {"family": "llama", "layers": 3, "hidden": HIDDEN, "heads": 4, "ffn": 704, "vocab": VOCAB}
PSI = 3 * (4 * MATRIX + 3 * HIDDEN * 704 + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
TENSORS = 3 * 9 + 3
BARE = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
BARE |= {"stage3_prefetch_bucket_size": 0}
HPZ = {"zero_hpz_partition_size": 8}
MICS = {"mics_shard_size": 8}
BYTES = 2


def f(num_ranks):
    return (num_ranks - 1) / num_ranks


def spec_of(tmp_path, zero, *, nodes=2, runtime="deepspeed-0.18", **changes):
    case = {"model": LLAMA, "nodes": nodes, "gpus": 8} | changes
    return resolved(tmp_path, runtime, zero=BARE | zero, **case)


def elements(spec, kind, group):
    """S of all collectives of a kind over a group, in one step; flags and norms are single elements."""
    found = [op for op in ops(spec) if isinstance(op, Collective) and op.num_elements > 1]
    return sum(op.num_elements for op in found if (op.kind, op.group) == (kind, group))


def link_bytes(spec, kinds=("all_gather", "reduce_scatter", "all_reduce")):
    """Payload of rings on the NICs and NVLinks of the first node in one step, all its GPUs together."""
    found = dict.fromkeys(("nic[0]", "nvlink[0]"), 0.0)
    for op in ops(spec):
        if isinstance(op, Collective) and op.num_elements > 1 and op.kind in kinds:
            partition = groups(spec)[op.group]
            cost = alone_with(op.kind, op.nbytes, partition[0], spec.cluster, ("ring", "simple"))
            num_rings = num_on_same_nodes(partition, spec.cluster.gpus_per_node)
            for link, nbytes in cost.link_bytes:
                if link in found:
                    found[link] += num_rings * nbytes
    return found


def test_the_model_of_these_tests(tmp_path):
    spec = spec_of(tmp_path, {})
    assert build(spec.model, spec.train).num_parameters == PSI
    assert PSI % 64 == 0
    assert elements(spec, "all_gather", "world") == 2 * PSI
    assert elements(spec, "reduce_scatter", "world") == PSI
    assert link_bytes(spec)["nic[0]"] == pytest.approx(3 * f(16) * BYTES * PSI)


# ---------------------------------------------------------------------- hpZ


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("runtime", ["deepspeed-0.18", "deepspeed-0.19"])
def test_only_the_first_gather_after_a_step_goes_over_all_ranks(tmp_path, runtime, micro_batches):
    spec = spec_of(tmp_path, HPZ, runtime=runtime, gradient_accumulation=micro_batches)
    assert elements(spec, "all_gather", "world") == PSI
    assert elements(spec, "all_gather", "secondary") == (2 * micro_batches - 1) * PSI
    assert elements(spec, "reduce_scatter", "world") == micro_batches * PSI


def test_recomputation_reads_the_secondary_partition_too(tmp_path):
    plain = spec_of(tmp_path, HPZ)
    checkpointed = spec_of(tmp_path, HPZ, activation_checkpointing="full")
    assert elements(checkpointed, "all_gather", "world") == elements(plain, "all_gather", "world")
    blocks = PSI - 2 * VOCAB * HIDDEN - HIDDEN
    gathered = (elements(spec, "all_gather", "secondary") for spec in (checkpointed, plain))
    assert next(gathered) - next(gathered) == blocks


def test_hpz_takes_a_third_of_the_traffic_off_the_network(tmp_path):
    """Wang et al. 2023, section 3: 3M across nodes become 2M, and M within them."""
    links = link_bytes(spec_of(tmp_path, HPZ))
    psi_bytes = BYTES * PSI
    assert links["nic[0]"] == pytest.approx(2 * f(16) * psi_bytes)
    # A ring over two nodes leaves the node at one of eight GPUs; one within the node at none.
    assert links["nvlink[0]"] == pytest.approx(2 * 7 * f(16) * psi_bytes + 8 * f(8) * psi_bytes)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_memory_of_the_secondary_partition(tmp_path, size):
    """2Ψ/z on top of 2Ψ/N; made anew each step."""
    spec = spec_of(tmp_path, {"zero_hpz_partition_size": size})
    most = max(held.get("parameters", 0) for op, held in curve(spec) if op.key.phase not in SETUP)
    assert most == BYTES * PSI // 16 + BYTES * PSI // size
    assert zero_states(spec, Counts(PSI, PSI)).parameters == most
    *_, (_, at_end) = curve(spec)
    assert at_end["parameters"] == BYTES * PSI // 16
    assert count(ops(spec), Alloc, ":secondary") == TENSORS


def test_each_slice_costs_a_copy_and_a_synchronisation_of_compute(tmp_path):
    spec = spec_of(tmp_path, HPZ)
    syncs = [op for op in ops(spec) if isinstance(op, Sync) and ":secondary" in op.key.what]
    assert len(syncs) == TENSORS
    assert {op.lanes for op in syncs} == {("compute",)}
    copied = sum(op.nbytes for op in ops(spec) if isinstance(op, Copy) and ":secondary" in op.key.what)
    assert copied == 3 * BYTES * PSI // 8


def test_persistent_parameters_are_gathered_over_all_ranks(tmp_path):
    spec = spec_of(tmp_path, HPZ | {"stage3_param_persistence_threshold": HIDDEN})
    gathers = [op for op in ops(spec, "step") if isinstance(op, Collective) and op.kind == "all_gather"]
    assert {op.group for op in gathers} == {"world"}
    assert len(gathers) == 7


def test_a_secondary_partition_of_all_ranks_is_no_larger_than_the_world(tmp_path):
    spec = spec_of(tmp_path, {"zero_hpz_partition_size": 64})
    assert groups(spec)["secondary"] == (tuple(range(16)),)


# ---------------------------------------------------------------------- MiCS


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_mics_moves_everything_within_its_shards_and_slices_between_replicas(tmp_path, micro_batches):
    spec = spec_of(tmp_path, MICS, gradient_accumulation=micro_batches)
    assert elements(spec, "all_gather", "shard") == 2 * micro_batches * PSI
    assert elements(spec, "reduce_scatter", "shard") == micro_batches * PSI
    # Only at the boundary of the accumulation.
    assert elements(spec, "all_reduce", "replica") == PSI // 8
    assert not [op for op in ops(spec) if isinstance(op, Collective) and op.group == "world"]


def test_mics_loads_the_network_with_slices_only(tmp_path):
    links = link_bytes(spec_of(tmp_path, MICS))
    assert links["nic[0]"] == pytest.approx(8 * 2 * f(2) * BYTES * PSI / 8)
    assert links["nvlink[0]"] == pytest.approx(3 * 8 * f(8) * BYTES * PSI)


def test_states_of_mics_are_divided_by_the_shard(tmp_path):
    spec = spec_of(tmp_path, MICS)
    held = set_up(spec)
    states = sum(held[name] for name in ("parameters", "gradients", "optimizer"))
    assert states == model_states(PSI, 8, 3).total == zero_states(spec, Counts(PSI, PSI)).total


def test_what_would_make_groups_fit(tmp_path):
    """16Ψ bytes over 8, 16 and 32 ranks: Ψ less, then half of that less."""
    counts, mics = Counts(PSI, PSI), spec_of(tmp_path, MICS, nodes=4)
    key = "deepspeed.zero_optimization"
    assert ways_to_fit(mics, counts, 0.0, PSI)[0] == f"{key}.mics_shard_size=16"
    assert ways_to_fit(mics, counts, 0.0, 1.1 * PSI)[0] == f"{key}.mics_shard_size=32"
    assert not [way for way in ways_to_fit(mics, counts, 0.0, 10 * PSI) if "nodes" in way]
    hpz = spec_of(tmp_path, HPZ)
    assert ways_to_fit(hpz, counts, 0.0, PSI / 4)[0] == f"{key}.zero_hpz_partition_size=1"


def test_memory_tables_name_the_groups(tmp_path, capsys):
    for zero, name in ((MICS, "3, MiCS of 8 (this run)"), (HPZ, "3, hpZ of 8 (this run)")):
        console = Console(width=100)
        console.print(states_table(spec_of(tmp_path, zero), Counts(10**9, 10**9)))
        assert name in capsys.readouterr().out


def test_mics_groups_launches_and_flattens_no_parameters(tmp_path):
    mics = spec_of(tmp_path, MICS | {"stage3_prefetch_bucket_size": 4 * MATRIX})
    gathers = [op for op in ops(mics) if isinstance(op, Collective) and op.kind == "all_gather"]
    assert max(op.num_tensors for op in gathers) > 1
    assert not count(ops(mics), Copy, "flatten")
    reduces = [op for op in ops(mics) if isinstance(op, Collective) and op.group == "replica"]
    assert sum(op.num_tensors for op in reduces) == TENSORS


def test_flags_and_norms_of_mics_meet_within_the_shard(tmp_path):
    scalars = [op for op in ops(spec_of(tmp_path, MICS), "step") if isinstance(op, Collective) and op.num_elements == 1]
    assert {op.group for op in scalars} == {"shard"}


def test_one_shard_of_all_ranks_is_stage_3_without_replicas(tmp_path):
    spec = spec_of(tmp_path, {"mics_shard_size": 16})
    assert elements(spec, "all_gather", "shard") == 2 * PSI
    assert elements(spec, "all_reduce", "replica") == 0


def test_hierarchical_gathers_cross_the_network_once_a_node(tmp_path):
    """Of a shard of 16: S/8 between nodes by each of eight places, then S within the node."""
    spec = spec_of(tmp_path, {"mics_shard_size": 16, "mics_hierarchical_params_gather": True}, nodes=4)
    assert elements(spec, "all_gather", "shard_inter") == 2 * PSI // 8
    assert elements(spec, "all_gather", "shard_intra") == 2 * PSI
    assert groups(spec)["shard_inter"][:2] == ((0, 8), (1, 9))
    assert groups(spec)["shard_intra"][1] == tuple(range(8, 16))
    links = link_bytes(spec, ("all_gather",))
    assert links["nic[0]"] == pytest.approx(2 * 8 * f(2) * BYTES * PSI / 8)
    assert links["nvlink[0]"] == pytest.approx(2 * 8 * f(8) * BYTES * PSI)


# ---------------------------------------------------------------------- both


def test_the_figures_of_the_page():
    """docs/optimisations.md, the table of the section on groups."""
    page = (Path(__file__).parents[1] / "docs" / "optimisations.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+\.\d+ s \| \d+\.\d GB) \|$", page, re.MULTILINE))
    hierarchical = {"mics_shard_size": 16, "mics_hierarchical_params_gather": "true"}
    cases = {
        "stage 3": {},
        "`zero_hpz_partition_size=8`": {"zero_hpz_partition_size": 8},
        "`mics_shard_size=16`": {"mics_shard_size": 16},
        "the same, hierarchical": hierarchical,
        "`mics_shard_size=8`": {"mics_shard_size": 8},
    }
    assert rows.keys() == cases.keys()
    for name, settings in cases.items():
        wanted = [f"deepspeed.zero_optimization.{key}={value}" for key, value in settings.items()]
        overrides = ["runtime=deepspeed-0.18", "train.micro_batch=4", *wanted]
        metrics = simulate(load("roberta_10b_p4d_after", overrides)).metrics
        assert rows[name] == f"{metrics.step_time_s:.2f} s | {metrics.memory.peak_allocated / 1e9:.1f} GB", name


@pytest.mark.parametrize(
    "zero", [HPZ, {"zero_hpz_partition_size": 2}, MICS, {"mics_shard_size": 4}], ids=["hpz 8", "hpz 2", "mics 8", "4"]
)
def test_one_rank_stands_for_all(tmp_path, zero):
    """Without noise all ranks of a folded run do the same at the same time."""
    spec = spec_of(tmp_path, zero, model=LLAMA | {"layers": 2})
    spec = replace(spec, train=replace(spec.train, gradient_accumulation=2))
    folded, expanded = (simulate(spec, expand_ranks=expand) for expand in (False, True))
    assert expanded.step_time_s == pytest.approx(folded.step_time_s, rel=1e-6)
    ends_s = {span.rank: span.end_s for span in expanded.trace.spans if span.key.what == "loss:read"}
    assert len(ends_s) == 16
    assert max(ends_s.values()) == pytest.approx(min(ends_s.values()), rel=1e-6)


@pytest.mark.parametrize(
    ("runtime", "zero", "text"),
    [
        ("deepspeed-0.6.0", HPZ, "deepspeed-0.6.0 does not have it: ZeRO\\+\\+ came with DeepSpeed 0.10"),
        ("deepspeed-0.6.0", MICS, "deepspeed-0.6.0 does not have it: DeepSpeed had MiCS from 0.9 to 0.19.6"),
        ("deepspeed-0.19", MICS, "mics_shard_size: given 8; deepspeed-0.19 does not have it.*; allowed: -1"),
        ("deepspeed-0.19", {"zero_hpz_partition_size": 3}, "given 3; allowed: 1, 2, 4, 8, 16 .divisors of 16 ranks"),
        ("deepspeed-0.18", {"mics_shard_size": 12}, "given 12; allowed: 1, 2, 4, 8, 16 .divisors of 16 ranks"),
        ("deepspeed-0.18", MICS | HPZ, "given with mics_shard_size; allowed: one of them"),
        ("deepspeed-0.18", MICS | {"mics_hierarchical_params_gather": True}, "lies within a node of 8 GPUs"),
        ("deepspeed-0.18", {"zero_quantized_weights": True}, "zero_quantized_weights: .*not modelled yet"),
        ("deepspeed-0.18", {"zero_quantized_gradients": True}, "zero_quantized_gradients: .*not modelled yet"),
    ],
)
def test_what_a_version_lacks_or_ranks_forbid_is_refused(tmp_path, runtime, zero, text):
    with pytest.raises(ValueError, match=text):
        spec_of(tmp_path, zero, runtime=runtime)


@pytest.mark.parametrize(
    ("runtime", "zero", "text"),
    [
        ("deepspeed-0.18", {"mics_hierarchical_params_gather": True}, "mics_shard_size is not given"),
        ("deepspeed-0.18", MICS | {"stage3_use_all_reduce_for_fetch_params": True}, "MiCS groups its all-gathers"),
        (
            "deepspeed-0.19",
            {"stage3_allgather_sequential": True, "stage3_use_all_reduce_for_fetch_params": True},
            "for_fetch_params has no effect: allgather_sequential fetches one parameter at a time",
        ),
    ],
)
def test_what_another_key_overrules_is_said(tmp_path, runtime, zero, text):
    *others, last = zero.items()
    spec = spec_of(tmp_path, zero, runtime=runtime)
    assert [line for line in spec.warnings if "has no effect" in line and text in line]
    assert ops(spec) == ops(spec_of(tmp_path, dict(others), runtime=runtime)), last


def test_off_values_ask_for_nothing(tmp_path):
    off = {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "mics_hierarchical_params_gather": False}
    assert ops(spec_of(tmp_path, off)) == ops(spec_of(tmp_path, {}))
