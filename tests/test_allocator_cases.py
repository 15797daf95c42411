"""Flushes and fragmentation that users reported: docs/memory_cases.md. Every case is an experiment file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import allocator_cases as cases
from benchmarks import predict
from zsim import load, resolve
from zsim.cli import app

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FILES = sorted((EXPERIMENTS / "memory").glob("*.yaml"))


def memory_of(experiment, *overrides):
    """What `zsim memory --json -` says."""
    sets = [argument for override in overrides for argument in ("--set", override)]
    ran = CliRunner().invoke(app, ["memory", str(EXPERIMENTS / f"{experiment}.yaml"), *sets, "--json", "-"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_what_it_assumes(path):
    warnings = " ".join(resolve(load(path)).warnings)
    for key in load(path).settings.assumed:
        assert f"assumed: {key} = " in warnings


def test_every_bar_is_met():
    missed = [f"{bar.what}: {bar.figure}, allowed {bar.allowed}" for bar in cases.bars() if not bar.met]
    assert not missed


def test_two_gathers_in_flight_bound_what_is_reserved():
    """PR 98354: 38.8 GB without, 8.0 GB with the limiter, and not slower."""
    limited, unlimited = (predict(cases.LIMITER, override) for override in (cases.LIMITED, cases.UNLIMITED))
    live, unit = cases.live_gb(cases.LIMITER), cases.unit_gb(cases.LIMITER)
    assert cases.allocated_gb(limited) == pytest.approx(cases.allocated_gb(unlimited), rel=0.001)
    assert live < cases.reserved_gb(limited) <= live + 2 * unit
    assert cases.reserved_gb(unlimited) > live + 30 * unit
    assert not limited.num_alloc_retries
    assert not unlimited.num_alloc_retries


def test_fsdp_slows_down_before_memory_ends():
    """OpenTau #273: 7.0, 6.2 and 4.9 samples/s at 8, 10 and 12 a GPU, 61 of 84 GB allocated at the last."""
    points = cases.fitting(cases.ZONE, cases.UNLIMITED)
    quiet = [metrics for _, metrics in points if not metrics.num_alloc_retries]
    assert len(quiet) >= 3
    assert len(points) < len(cases.MICRO_BATCHES), "memory ends within the sweep"
    reserved = [cases.reserved_gb(metrics) for metrics in quiet]
    assert reserved == sorted(reserved)
    last = points[-1][1]
    assert last.num_alloc_retries >= 2
    assert last.breakdown_s["allocator"] > 0.1 * last.step_time_s
    assert last.memory.peak_allocated < 0.95 * last.memory.capacity


def test_the_limiter_or_stage_2_keep_throughput_to_the_last_that_fits():
    (size, limited), (_, unlimited) = (
        cases.fitting(cases.ZONE, override)[-1] for override in (cases.LIMITED, cases.UNLIMITED)
    )
    assert limited.samples_per_s > 1.2 * unlimited.samples_per_s
    assert limited.samples_per_s > 0.95 * max(m.samples_per_s for _, m in cases.fitting(cases.ZONE, cases.LIMITED))
    assert size == cases.fitting(cases.ZONE, cases.UNLIMITED)[-1][0]


def test_the_command_tells_where_the_step_is_lost():
    flushes = memory_of(cases.ZONE)["flushes_per_step"]
    assert flushes["num_retries"] >= 2
    assert flushes["free_s"] > 0.1
    assert memory_of(cases.ZONE, cases.LIMITED)["flushes_per_step"]["num_retries"] == 0


def test_7b_flushes_without_its_limiter_alone():
    """Issue 104509: 46 retries without, none with it."""
    seven = "field_reports/gpt_7b_rate_limiter"
    assert predict(seven, cases.UNLIMITED).memory.peak_reserved > 0.97 * predict(seven).memory.capacity
    off, on = (predict(seven, one, cases.SEVEN) for one in (cases.UNLIMITED, cases.LIMITED))
    assert off.num_alloc_retries > on.num_alloc_retries == 0
    assert off.step_time_s > on.step_time_s
    assert off.memory.peak_reserved > 0.97 * off.memory.capacity
    assert any("limit_all_gathers=true" in warning for warning in off.warnings)


def test_t5_11b_has_all_of_its_40_gb_reserved():
    """Issue 86165: 24 and 20 retries on the two nodes at 35.2 GB active."""
    metrics = predict("field_reports/t5_11b_fsdp_efa")
    assert metrics.memory.peak_reserved > 0.97 * metrics.memory.capacity
    assert metrics.memory.peak_allocated < 0.6 * metrics.memory.capacity
    assert predict("field_reports/t5_11b_fsdp_efa", cases.LIMITED).memory.peak_reserved < 0.7 * metrics.memory.capacity


def test_reserved_hardly_falls_while_states_are_divided_further():
    """Issue 82001: reserved 28, 26, 25 and 24 GB on one to four nodes."""
    nodes = [predict("field_reports/t5_3b_fsdp_nodes", f"cluster.nodes={number}") for number in (1, 2, 3, 4)]
    reserved = [cases.reserved_gb(metrics) for metrics in nodes]
    assert reserved == sorted(reserved, reverse=True)
    assert reserved[-1] / reserved[0] == pytest.approx(24 / 28, rel=0.1)
    assert cases.states_gb(nodes[-1]) < 0.3 * cases.states_gb(nodes[0])


def test_batches_of_unequal_length_do_not_fit_where_the_longest_would():
    """LLaMA-Factory #2744: gigabytes reserved but unallocated, and a smaller request fails."""
    document = memory_of(cases.RAGGED)
    failed = document["cache"]["failed_request"]
    assert not document["fits"]
    assert document["memory_bytes"]["peak_allocated"] < 0.95 * document["memory_bytes"]["capacity"]
    assert any("cannot be given back" in reason for reason in failed["reasons"])
    assert predict(cases.RAGGED, cases.EQUAL_LENGTHS).fits
    grown = predict(cases.RAGGED, cases.EXPANDABLE).memory
    assert grown.fits
    assert grown.peak_reserved - grown.peak_allocated < 0.02 * grown.capacity


def test_record_stream_keeps_blocks_alive():
    """Megatron-LM #6885: 21 GB more reserved at the same allocated."""
    first, second = predict(cases.RECORDED), predict(cases.RECORDED, "runtime=fsdp2", "fsdp={}")
    assert cases.allocated_gb(first) == pytest.approx(cases.allocated_gb(second), rel=0.05)
    assert cases.reserved_gb(first) > 1.1 * cases.reserved_gb(second)
