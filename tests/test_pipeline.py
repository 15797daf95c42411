"""The whole pipeline: equal ranks folded or executed, determinism, and figures that hang together."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from strategy_cases import ops, resolved

from zsim import load, resolve, simulate
from zsim.ops import Collective, Compute, Copy
from zsim.reading.constants import with_constant

ROOT = Path(__file__).parents[1]
RUNTIMES = ["deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.19"]
CASES = [(runtime, stage) for runtime in RUNTIMES for stage in (0, 1, 2, 3)] + [("ddp", 0)]


def small(tmp_path, runtime, stage, **train):
    """Two nodes of two GPUs, small buckets, so that collectives of both directions are on their way at once."""
    zero = {"stage": stage, "reduce_bucket_size": 500_000, "overlap_comm": True}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 2_000, "stage3_prefetch_bucket_size": 200_000}
    return resolved(tmp_path, runtime, zero=zero, nodes=2, gpus=2, **train)


@pytest.mark.parametrize(("runtime", "stage"), CASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_equal_ranks_folded_and_executed_agree(tmp_path, runtime, stage, micro_batches):
    spec = small(tmp_path, runtime, stage, gradient_accumulation=micro_batches, activation_checkpointing="full")
    folded, expanded = simulate(spec), simulate(spec, expand_ranks=True)
    assert {span.rank for span in folded.trace.spans} == {0}
    assert {span.rank for span in expanded.trace.spans} == {0, 1, 2, 3}
    assert expanded.step_time_s == pytest.approx(folded.step_time_s, rel=1e-9)
    for rank in range(4):
        mine = [span for span in expanded.trace.spans if span.rank == rank]
        for one, other in zip(mine, folded.trace.spans, strict=True):
            assert (one.lane, one.key, one.kind, one.nbytes) == (other.lane, other.key, other.kind, other.nbytes)
            assert one.start_s == pytest.approx(other.start_s, rel=1e-9, abs=1e-12)
            assert one.end_s == pytest.approx(other.end_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("runtime", "stage"), CASES)
def test_every_op_of_a_lane_leaves_one_span(tmp_path, runtime, stage):
    spec = small(tmp_path, runtime, stage)
    expected = sorted((op.lane, op.key) for op in ops(spec) if isinstance(op, Compute | Copy | Collective))
    found = sorted((span.lane, span.key) for span in simulate(spec).trace.spans if span.lane != "host")
    assert found == expected


def test_a_lane_does_one_thing_at_a_time_in_order_of_issue(tmp_path):
    spec = small(tmp_path, "deepspeed-0.6.0", 3, activation_checkpointing="full")
    spans = simulate(spec).trace.spans
    for lane in {span.lane for span in spans} - {"host"}:
        mine = [span for span in spans if span.lane == lane]
        assert [span.key for span in mine] == [
            op.key for op in ops(spec) if isinstance(op, Compute | Copy | Collective) and op.lane == lane
        ]
        for one, other in pairwise(mine):
            assert other.start_s >= one.end_s - 1e-12
        assert all(span.start_s >= span.issued_s for span in mine)


@pytest.mark.parametrize(("runtime", "stage"), CASES)
def test_figures_hang_together(tmp_path, runtime, stage):
    spec = small(tmp_path, runtime, stage, activation_checkpointing="full", gradient_accumulation=2)
    metrics = simulate(spec).metrics
    assert sum(metrics.breakdown_s.values()) == pytest.approx(metrics.step_time_s, rel=1e-9)
    assert metrics.samples_per_s == pytest.approx(2 * 2 * 4 / metrics.step_time_s)
    assert metrics.tokens_per_s_per_gpu == pytest.approx(2 * 2 * 64 / metrics.step_time_s)
    assert metrics.model_tflops_per_gpu < metrics.hardware_tflops_per_gpu < spec.cluster.device.peak_flop_per_s / 1e12


def test_recomputation_is_hardware_work_only(tmp_path):
    whole, recomputed = (
        simulate(small(tmp_path, "deepspeed-0.6.0", 3, activation_checkpointing=checkpointing)).metrics
        for checkpointing in ("none", "full")
    )
    assert whole.model_tflops_per_gpu == whole.hardware_tflops_per_gpu
    model_flop = whole.model_tflops_per_gpu * whole.step_time_s
    assert recomputed.model_tflops_per_gpu * recomputed.step_time_s == pytest.approx(model_flop)
    # Blocks run forward twice, embedding and head once: at most 4/3.
    assert 1.2 < recomputed.hardware_tflops_per_gpu / recomputed.model_tflops_per_gpu < 4 / 3


def test_steps_repeat(tmp_path):
    """Each step of a run begins with an empty device, so all take the same time."""
    spec = small(tmp_path, "deepspeed-0.6.0", 3)
    one = simulate(spec)
    three = simulate(replace(spec, noise=replace(spec.noise, steps=3)))
    assert three.step_time_s == pytest.approx(one.step_time_s, rel=1e-6)


def test_jitter_is_seeded_and_slows_the_whole(tmp_path):
    spec = small(tmp_path, "deepspeed-0.5.4", 3)

    def step_s(seed, jitter):
        return simulate(replace(spec, noise=replace(spec.noise, seed=seed, host_jitter=jitter))).step_time_s

    assert step_s(1, 0.05) == step_s(1, 0.05)
    assert step_s(1, 0.05) != step_s(2, 0.05)
    # A host-bound run waits for its slowest rank at each collective.
    assert sum(step_s(seed, 0.1) for seed in range(4)) / 4 > step_s(0, 0.0)


def test_the_same_bytes_whatever_the_hash_seed(tmp_path):
    """Result and trace of a run, written by three processes."""
    experiment = tmp_path / "small.yaml"
    small(tmp_path, "deepspeed-0.6.0", 3, activation_checkpointing="full")
    assert experiment.exists()
    written = []
    for seed in ("0", "1", "12345"):
        out = tmp_path / f"{seed}.json"
        trace = tmp_path / f"{seed}.trace.json"
        command = [sys.executable, "-m", "zsim", "run", str(experiment), "--json", str(out), "--trace", str(trace)]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=tmp_path)
        written.append((out.read_bytes(), trace.read_bytes()))
    assert written[0] == written[1] == written[2]
    assert json.loads(written[0][0])["step_time_s"] > 0


def test_programs_do_not_depend_on_what_ran_before(tmp_path):
    specs = [small(tmp_path, runtime, stage) for runtime, stage in CASES]
    first = [simulate(spec).step_time_s for spec in specs]
    assert [simulate(spec).step_time_s for spec in reversed(specs)] == first[::-1]


@pytest.mark.parametrize("name", ["roberta_10b_p4d_before", "roberta_10b_p4d_after"])
def test_all_ranks_of_the_measured_cluster(name):
    """64 GPUs with two of the equal layers: as many processes, the same time."""
    spec = resolve(load(ROOT / "experiments" / f"{name}.yaml", ["model.layers=2"]))
    assert simulate(spec, expand_ranks=True).step_time_s == pytest.approx(simulate(spec).step_time_s, rel=1e-9)


def test_one_gpu_trains_without_anybody_to_wait_for(tmp_path):
    for runtime, stage in CASES:
        spec = resolved(tmp_path, runtime, zero={"stage": stage}, gpus=1)
        assert 0 < simulate(spec).step_time_s < 1


def test_a_thousand_nodes_and_a_slow_network_are_priced():
    spec = resolve(load("roberta_10b_p4d_after", ["cluster.nodes=1000", "model.layers=2"]))
    slow = with_constant(spec, "cluster.network.hop_latency_s", 0.1)
    assert simulate(slow).step_time_s > simulate(spec).step_time_s > 0


def test_shards_of_the_parameter_gather_end_with_the_partition():
    """However small the shards, together they are the partition: the payload does not depend on their size."""
    small = ["model.layers=1", "model.hidden=64", "model.heads=2", "model.ffn=256", "model.vocab=512"]
    moved = set()
    for size in (100, 777, 50_000, 500_000_000):
        zero = ["deepspeed.zero_optimization.stage=2", f"deepspeed.zero_optimization.allgather_bucket_size={size}"]
        rows = simulate(load("roberta_10b_p4d_after", [*small, *zero, "cluster.nodes=1"])).metrics.collectives
        moved.add(sum(row.bytes_per_gpu for row in rows if row.kind == "all_gather"))
    assert len(moved) == 1
