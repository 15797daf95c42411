"""Every number of a trace that can be checked on paper."""

import json
import math
import random
from dataclasses import replace

import pytest
from traces import WORK, memory_curve, one_step, span, spec, trace

from zsim.errors import ImpossibleResultError
from zsim.figures.breakdown import CAUSES, break_down, cause, idle_gaps_s, total_s, union
from zsim.figures.metrics import ModelWork, measure
from zsim.figures.planner import bill
from zsim.figures.states import Counts, model_states, ways_to_fit

PROMISED = {
    "schema",
    "name",
    "parameters",
    "step_time_s",
    "step_time_interval_s",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "fits",
    "breakdown_s",
    "bubbles",
    "memory_bytes",
    "collectives",
    "days",
    "gpu_hours",
    "cost",
    "warnings",
    "provenance",
}
"""Keys of `zsim run --json` that scripts rely on."""


def test_each_cause_owns_its_part_of_the_step():
    assert measure(trace(), WORK).breakdown_s == {
        "compute": 30,
        "optimizer": 5,
        "exposed_all_gather": 15,
        "exposed_reduce": 10,
        "exposed_other_communication": 10,
        "copies": 5,
        "allocator": 0,
        "sync": 10,
        "host": 15,
    }


def test_breakdown_sums_to_the_step_and_agrees_with_a_naive_sweep():
    chance = random.Random(7)
    kinds = [("compute", "compute"), ("gather", "all_gather"), ("reduce", "reduce"), ("gather", "copy")]
    kinds += [("host", "sync"), ("host", "queue"), ("host", "host"), ("reduce", "send_recv")]
    spans = []
    for _ in range(300):
        lane, kind = chance.choice(kinds)
        start = chance.randrange(1000)
        spans.append(span(lane, kind, start, start + chance.randrange(30), phase=chance.choice(["forward", "step"])))
    naive = dict.fromkeys(CAUSES, 0)
    for second in range(1030):
        running = {cause(s) for s in spans if s.start_s <= second < s.end_s}
        naive[next((name for name in CAUSES if name in running), "host")] += 1
    parts = break_down(spans, 0, 1030)
    assert parts == naive
    assert math.fsum(parts.values()) == 1030


def test_union_merges_what_overlaps_or_touches():
    merged = union([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9), (5.5, 5.7)])
    assert merged.tolist() == [[0, 4], [5, 6]]
    assert total_s(merged) == 5
    assert total_s(union([])) == 0


def test_rates_follow_from_the_step_time():
    metrics = measure(trace(micro_batch=4), WORK)
    assert metrics.step_time_s == 100
    assert metrics.samples_per_s == 4 * 4 / 100
    assert metrics.tokens_per_s_per_gpu == 4 * 16 / 100
    assert metrics.model_tflops_per_gpu == 30
    assert metrics.hardware_tflops_per_gpu == 40
    assert (metrics.mfu, metrics.hfu) == (0.3, 0.4)
    assert metrics.num_syncs == 1


def test_steps_are_averaged_and_initialisation_is_left_out():
    spans = [span("compute", "compute", 0, 1000, phase="init")]
    spans += [s._replace(start_s=s.start_s + 1000, end_s=s.end_s + 1000) for s in one_step()]
    for late in one_step():
        key = late.key._replace(step=1)
        stretched = late._replace(key=key, start_s=1100 + late.start_s * 1.2, end_s=1100 + late.end_s * 1.2)
        spans.append(stretched)
    metrics = measure(trace(spans, steps=2), WORK)
    assert metrics.step_time_s == pytest.approx(110)
    assert metrics.step_time_interval_s == pytest.approx((100, 120))
    assert sum(metrics.breakdown_s.values()) == pytest.approx(110, rel=1e-12)
    assert metrics.breakdown_s["compute"] == pytest.approx(33)
    assert [row.count for row in metrics.collectives] == [1, 1, 1]
    assert metrics.num_syncs == 1


def test_only_the_first_rank_is_measured():
    spans = [*one_step(), span("compute", "compute", 0, 500, rank=1)]
    assert measure(trace(spans), WORK).step_time_s == 100


def test_bubbles_are_gaps_of_the_compute_lane():
    metrics = measure(trace(), WORK)
    assert metrics.bubbles.count == 4  # 0-10, 30-70, 80-90, 95-100
    assert metrics.bubbles.total_s == 65
    assert metrics.bubbles.longest_s == 40
    kernels = [span("compute", "compute", 0, 1), span("compute", "compute", 1 + 5e-7, 2)]
    assert len(idle_gaps_s(kernels, 0, 2)) == 0


def test_waits_between_the_kernels_of_a_visit_are_no_compute():
    visit = [span("compute", "compute", 0, 10, stalled_s=4), span("host", "launch", 0, 9)]
    metrics = measure(trace(visit), ModelWork(1.0, 1.0, 1.0, 1, 1, 1))
    assert (metrics.breakdown_s["compute"], metrics.breakdown_s["host"]) == (6, 4)
    assert metrics.bubbles.total_s == 4


def test_an_all_reduce_moves_its_tensor_twice():
    rows = {row.kind: row for row in measure(trace(), WORK).collectives}
    assert rows["all_gather"].bytes_per_gpu == 1000
    assert rows["all_reduce"].bytes_per_gpu == 1000
    assert (rows["all_reduce"].phase, rows["all_reduce"].seconds) == ("backward", 10)


def test_memory_is_taken_at_the_peak():
    memory = measure(trace(memory=memory_curve()), WORK).memory
    assert memory.categories["parameters"] == 300
    assert memory.categories["activations"] == 500
    assert memory.peak_allocated == 810
    assert memory.peak_reserved == 900
    assert memory.categories["context"] == 10
    assert memory.fits


def test_what_does_not_fit_says_by_how_much_and_what_to_change():
    metrics = measure(trace(memory=memory_curve(scale=200), stage=1), WORK)
    assert not metrics.fits
    assert metrics.step_time_s == 100
    (warning,) = metrics.warnings
    assert "does not fit" in warning
    assert "train.micro_batch=" in warning


def test_ways_to_fit_are_single_changes_that_suffice():
    ways = ways_to_fit(spec(stage=0), Counts(1000, 1000), activation_bytes=8000, excess_bytes=3000)
    assert "deepspeed.zero_optimization.stage=1" in ways
    assert "train.micro_batch=2" in ways
    assert "train.activation_checkpointing=full" in ways
    assert all("not enough" not in way for way in ways)
    hopeless = ways_to_fit(spec(stage=3, micro_batch=1, checkpointing="full"), Counts(1000, 1000), 10, 1e9)
    assert all("alone not enough" in way for way in hopeless)


def test_flushes_are_a_warning_only():
    samples = memory_curve()
    retried = [sample._replace(num_alloc_retries=2) for sample in samples[-3:]]
    metrics = measure(trace(memory=[*samples[:-3], *retried]), WORK)
    assert metrics.fits
    assert metrics.num_alloc_retries == 2
    assert any("cache flushes: 2 times a step" in warning for warning in metrics.warnings)


def test_bill_needs_tokens_and_price():
    free = measure(trace(), WORK)
    assert (free.days, free.gpu_hours, free.cost) == (None, None, None)
    billed = measure(trace(tokens=256 * 864.0, price=10.0), WORK)  # 256 tokens a step, 864 steps of 100 s
    assert billed.days == pytest.approx(1)
    assert billed.gpu_hours == pytest.approx(96)
    assert billed.cost == pytest.approx(24 * 2 * 10)
    assert measure(trace(tokens=1e6), WORK).cost is None


def test_a_bill_is_as_uncertain_as_its_step():
    billed = bill(trace(tokens=256 * 864.0, price=10.0).spec, 100.0, (90.0, 120.0))
    assert billed.days_interval == pytest.approx((0.9, 1.2))
    assert billed.cost_interval == pytest.approx((0.9 * billed.cost, 1.2 * billed.cost))
    certain = bill(trace(tokens=256 * 864.0).spec, 100.0, (100.0, 100.0))
    assert (certain.days_interval, certain.cost_interval, certain.cost) == (None, None, None)


@pytest.mark.parametrize(
    ("spans", "work", "said"),
    [
        ([], WORK, "no spans"),
        ([span("compute", "compute", 0, 1, phase="init")], WORK, "initialisation"),
        ([span("compute", "compute", 1, 1)], WORK, "step_time_s"),
        ([span("compute", "compute", 0, math.nan)], WORK, "step_time_s"),
        (None, ModelWork(1e16, 1e16, 2e16, 1, 1, 1), "above the peak of 100.0 of paper-gpu"),
        (None, ModelWork(-1.0, 1e15, 1e15, 1, 1, 1), "model_tflops_per_gpu"),
    ],
)
def test_impossible_results_are_errors(spans, work, said):
    with pytest.raises(ImpossibleResultError, match=said):
        measure(trace(spans), work)


def test_utilisation_above_one_is_no_error_where_kernels_execute_less():
    """Causal kernels skip half of what the field counts."""
    metrics = measure(trace(), replace(WORK, model_flop_per_rank=2e16, hardware_flop_per_rank=2e16))
    assert metrics.mfu == metrics.hfu > 1


def test_json_has_the_keys_of_the_interface():
    document = measure(trace(memory=memory_curve()), WORK).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document.keys() >= PROMISED
    assert set(document["bubbles"]) == {"count", "total_s", "longest_s"}
    assert set(document["collectives"][0]) == {"kind", "phase", "count", "bytes_per_gpu", "seconds"}
    assert {"peak_allocated", "peak_reserved", "capacity"} <= set(document["memory_bytes"])
    assert document["provenance"]["num_assumed"] == 1
    assert document["provenance"]["assumed"] == ["runtime.host.launch_s"]


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_states_of_7_5_billion_parameters_on_64_ranks(stage, gigabytes):
    assert f"{model_states(7_500_000_000, 64, stage).total / 1e9:.1f}" == gigabytes


def test_states_of_a_trillion_parameters_and_of_gpt2_small():
    assert f"{model_states(10**12, 1024, 3).total / 1e9:.0f}" == "16"
    saved = model_states(124_475_904, 4, 0).total - model_states(124_475_904, 4, 1).total
    assert f"{saved / 2**20:.0f}" == "1068"
    with pytest.raises(ValueError, match="stage: 4 given"):
        model_states(1, 1, 4)
