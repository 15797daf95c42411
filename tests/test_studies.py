"""Studies of many runs, on models of two layers: each answer is that of single runs, whatever process made it."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import zsim
from zsim.reading.constants import with_node_bandwidth
from zsim.studies import (
    LADDER,
    Source,
    ablation,
    changes,
    contrast,
    fit_map,
    memory_by_stage,
    required_bandwidth,
    scaling,
)
from zsim.studies.bandwidth import exposed_share, nominal_bytes_per_s, useful_bytes_per_s
from zsim.studies.runs import workers

ROOT = Path(__file__).parents[1]
GBIT = 1e9 / 8
SMALL = ("model.layers=2", "cluster.nodes=2", "train.micro_batch=4")


def source(name="roberta_10b_p4d_after", *overrides):
    keys = {override.partition("=")[0] for override in overrides}
    small = (override for override in SMALL if override.partition("=")[0] not in keys)
    return Source(ROOT / "experiments" / f"{name}.yaml", (*small, *overrides))


def metrics(given, *overrides):
    return zsim.simulate(given.spec(*overrides)).metrics


class Counter:
    """Progress that may only rise, up to its total."""

    def __init__(self):
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))

    @property
    def is_complete(self):
        rises = all(one[0] <= other[0] and one[1] == other[1] for one, other in pairwise(self.calls))
        return rises and self.calls[-1][0] == self.calls[-1][1]


def test_two_steps_side_by_side():
    before, after = source("roberta_10b_p4d_before"), source()
    count = Counter()
    found = contrast(before, after, count)
    assert (found.before.label, found.after.label) == ("deepspeed-0.5.4", "deepspeed-0.6.0")
    assert found.before.step_s == metrics(before).step_time_s
    assert found.after.seconds == metrics(after).breakdown_s
    assert sum(found.saved_s.values()) == pytest.approx(found.before.step_s - found.after.step_s)
    assert count.is_complete
    largest = max(found.saved_s, key=found.saved_s.get)
    assert f"{found.before.step_s / found.after.step_s:.2f} times as fast" in found.headline
    assert found.headline.endswith(zsim.figures.breakdown.LABELS[largest])


def test_a_measurement_is_shown_where_the_experiment_has_one():
    before = Source(ROOT / "experiments" / "bert_5b_one_node_stage2.yaml")
    found = contrast(before, before)
    assert found.before.measured is None
    assert found.headline.startswith("Both steps take")


def test_a_step_that_does_not_fit_says_so():
    large = source("roberta_10b_p4d_after", "train.micro_batch=2000")
    found = contrast(source(), large)
    assert (found.before.label, found.after.label) == ("micro-batch 4", "micro-batch 2000 (does not fit)")
    before = source("roberta_10b_p4d_before", "train.micro_batch=2000")
    assert ablation(before, large).start.label == "deepspeed-0.5.4 (does not fit)"
    assert required_bandwidth([large]).curves[0].label.endswith("(does not fit)")


def test_the_ladder_leads_from_before_to_after():
    before, after = source("roberta_10b_p4d_before"), source()
    found = ablation(before, after)
    assert [rung.what for rung in found.rungs] == [change.what for change in LADDER]
    assert found.rungs[0].step_s == metrics(before, *LADDER[0].overrides).step_time_s
    assert found.rungs[-1].step_s == pytest.approx(found.end.step_s, rel=1e-9)
    assert sum(found.gains_s) == pytest.approx(found.start.step_s - found.end.step_s)
    assert sum(found.gains_tflops) == pytest.approx(found.end.tflops - found.start.tflops)


def test_what_no_switch_explains_is_the_last_rung():
    switch = "optimisations.fused_gradient_norm=false"
    found = ablation(source("roberta_10b_p4d_after", switch), source("roberta_10b_p4d_after", "cluster.nodes=4"))
    assert [rung.what for rung in found.rungs] == ["one read for overflow and norm", "all else: cluster"]
    assert found.rungs[-1].step_s == found.end.step_s


def test_a_ladder_without_a_switch_is_refused():
    with pytest.raises(ValueError, match=r"both run with the same optimisations .* allowed: .* differ in a switch"):
        ablation(source(), source("roberta_10b_p4d_after", "cluster.nodes=4"))


def test_changes_are_in_words_where_the_ladder_has_none():
    before = source("roberta_10b_p4d_before").spec().runtime.optimisations
    after = source().spec().runtime.optimisations
    assert changes(before, after) == LADDER
    back = changes(after, before)
    assert len(back) == len(LADDER)
    assert back[0].what == "debug norms: true"
    assert changes(before, before) == ()
    odd = replace(before, bucket_sync="stream", limiter_depth=3)
    assert {change.what for change in changes(before, odd)} == {"limiter depth: 3", "bucket sync: stream"}


def test_scaling_runs_each_number_of_nodes():
    one, other = source(), source("roberta_10b_dgx_after")
    found = scaling([one, other], [4, 1, 2, 2])
    assert [line.label for line in found.lines] == ["p4d.24xlarge", "dgx-a100-40gb"]
    assert [point.num_nodes for point in found.lines[0].points] == [1, 2, 4]
    assert found.gpus_per_node == 8
    expected = metrics(other, "cluster.nodes=4")
    assert found.lines[1].points[2].tokens_per_s_per_gpu == expected.tokens_per_s_per_gpu
    assert found.lines[1].points[2].tflops_per_gpu == expected.hardware_tflops_per_gpu
    assert found.lines[0].efficiencies[0] == 1


def test_efficiency_is_relative_to_the_fewest_nodes_that_fit():
    found = scaling([Source(ROOT / "experiments" / "roberta_50b_p4d_after.yaml", ("model.layers=28",))], [1, 8])
    assert not found.lines[0].points[0].fits
    assert found.lines[0].base.num_nodes == 8
    assert found.lines[0].efficiencies[1] == 1


@pytest.mark.parametrize("nodes", [[], [0], [2, -1]])
def test_impossible_numbers_of_nodes_are_refused(nodes):
    with pytest.raises(ValueError, match="allowed: whole numbers from 1"):
        scaling([source()], nodes)


def test_the_present_bandwidth_changes_nothing():
    spec = source().spec()
    same = with_node_bandwidth(spec, nominal_bytes_per_s(spec.cluster))
    assert same.cluster == spec.cluster
    assert zsim.simulate(same).step_time_s == zsim.simulate(spec).step_time_s


def test_another_bandwidth_keeps_every_proportion():
    spec = source().spec()
    twice = with_node_bandwidth(spec, 800 * GBIT)
    old, new = spec.cluster.network, twice.cluster.network
    assert nominal_bytes_per_s(twice.cluster) == pytest.approx(800 * GBIT)
    assert new.inter_bus_bytes_per_s / new.nic_bytes_per_s == pytest.approx(
        old.inter_bus_bytes_per_s / old.nic_bytes_per_s
    )
    assert new.channel_inter_bytes_per_s == pytest.approx(2 * old.channel_inter_bytes_per_s)
    names = ("nic_bytes_per_s", "inter_bus_bytes_per_s", "channel_inter_bytes_per_s")
    assert replace(new, **{name: getattr(old, name) for name in names}) == old
    scaled = {
        constant.path.rpartition(".")[2]: constant
        for constant in twice.constants
        if constant.source.endswith("; times 2")
    }
    assert set(scaled) == set(names)
    assert all(constant.origin == "derived" for constant in scaled.values())
    assert scaled["nic_bytes_per_s"].value == new.nic_bytes_per_s


def test_the_answer_was_simulated_and_a_little_less_is_not_enough():
    count = Counter()
    given = source("roberta_10b_p4d_after", "train.micro_batch=16")
    (curve,) = required_bandwidth([given], progress=count).curves
    shares = {point.bytes_per_s: point.exposed_share for point in curve.points}
    needed = curve.required_bytes_per_s[0.2]
    assert shares[needed] < 0.2
    assert exposed_share(zsim.simulate(with_node_bandwidth(given.spec(), needed)).metrics) == shares[needed]
    below = max(bandwidth for bandwidth in shares if bandwidth < needed)
    assert shares[below] >= 0.2
    assert needed / below < 1.11
    assert all(shares[bandwidth] < 0.2 for bandwidth in shares if bandwidth >= needed)
    assert curve.present.bytes_per_s == 400 * GBIT
    assert curve.points[-1].bytes_per_s == pytest.approx(curve.limit_bytes_per_s)
    assert count.calls


def test_nics_beyond_pcie_bring_nothing_to_a_collective():
    spec = source().spec()
    limit = useful_bytes_per_s(spec.cluster)
    at, beyond = (zsim.simulate(with_node_bandwidth(spec, limit * factor)).metrics for factor in (1, 1.5))
    seconds = [sum(total.seconds for total in found.collectives) for found in (at, beyond)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


def test_what_cannot_be_reached_is_said():
    (curve,) = required_bandwidth([source("roberta_10b_p4d_before")], [0.01]).curves
    assert curve.required_bytes_per_s == {0.01: None}
    assert "below 1% never" in "\n".join(curve.lines())


def test_one_node_needs_no_network():
    with pytest.raises(ValueError, match=r"after\.yaml: cluster\.nodes: given 1"):
        required_bandwidth([source("roberta_10b_p4d_after", "cluster.nodes=1")])
    with pytest.raises(ValueError, match="between 0 and 1"):
        required_bandwidth([source()], [1.5])


def test_memory_of_each_stage_is_that_of_its_run():
    found = memory_by_stage(source())
    assert [bar.label for bar in found.bars] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert [bar.present for bar in found.bars] == [False, False, False, True]
    expected = metrics(source(), "deepspeed.zero_optimization.stage=1").memory
    assert found.bars[1].categories == expected.categories
    assert found.bars[1].total_bytes == expected.peak_allocated
    assert found.fits(found.bars[3])


@pytest.mark.parametrize(
    ("runtime", "labels"),
    [
        ("fsdp1", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "FULL_SHARD"]),
        ("fsdp2", ["kept after forward", "resharded"]),
        ("ddp", ["ddp"]),
    ],
)
def test_other_frameworks_have_their_own_ways(runtime, labels, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        f"question: q\nmodel: {{preset: gpt2-124m, layers: 2}}\ncluster: {{topology: p4d.24xlarge, nodes: 2}}\n"
        f"runtime: {runtime}\ntrain: {{micro_batch: 1, seq_len: 64, precision: bf16}}\n"
    )
    found = memory_by_stage(Source(file))
    assert [bar.label for bar in found.bars] == labels
    assert [bar.label for bar in found.bars if bar.present] == labels[-1:]
    totals = [bar.total_bytes for bar in found.bars]
    assert totals[0] == max(totals)


@pytest.mark.parametrize("typed", [(), ("fsdp.fsdp_reshard_after_forward=false",)])
def test_ways_to_shard_replace_accelerates_spelling(typed, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "question: q\nmodel: {preset: gpt2-124m, layers: 2}\ncluster: {topology: p4d.24xlarge, nodes: 2}\n"
        "runtime: fsdp2\nfsdp: {fsdp_reshard_after_forward: true}\n"
        "train: {micro_batch: 1, seq_len: 64, precision: bf16}\n"
    )
    found = memory_by_stage(Source(file, typed))
    assert [bar.present for bar in found.bars] == ([True, False] if typed else [False, True])
    assert "sharded" not in found.shared


def test_a_map_holds_single_runs_and_skips_what_cannot_fit():
    given = source("roberta_10b_p4d_after", "model.layers=12")
    count = Counter()
    found = fit_map(given, [4, 64, 512, 1024], [1, 2], progress=count)
    fits = [[cell.fits for cell in row] for row in found.rows]
    assert fits == [[True, True], [True, True], [False, False], [False, False]]
    assert found.rows[1][1].value == metrics(given, "train.micro_batch=64", "cluster.nodes=2").tokens_per_s_per_gpu
    assert found.rows[2][0].needed_bytes > found.capacity_bytes
    assert [cell.needed_bytes for cell in found.rows[3]] == [None, None]
    assert found.best == max((cell for row in found.rows[:2] for cell in row), key=lambda cell: cell.value)
    assert count.is_complete


def test_skipped_cells_would_not_have_fit():
    given = source("roberta_10b_p4d_after", "model.layers=12")
    assert not metrics(given, "train.micro_batch=1024", "cluster.nodes=2").fits


def test_days_and_cost_need_tokens_and_a_price():
    found = fit_map(source(), [4], [1, 2], unit="cost")
    assert found.rows[0][1].value == metrics(source(), "cluster.nodes=2").cost
    assert found.best.num_nodes == 1
    with pytest.raises(ValueError, match=r"price_per_node_hour is missing"):
        fit_map(source("roberta_10b_dgx_after"), [4], [1], unit="cost")
    with pytest.raises(ValueError, match=r"train\.tokens is missing"):
        fit_map(source("bert_5b_one_node_stage2"), [4], [1], unit="days")


def test_the_default_map_surrounds_the_experiment():
    found = fit_map(source("roberta_10b_p4d_after", "model.layers=1", "train.micro_batch=6", "cluster.nodes=3"))
    assert [row[0].micro_batch for row in found.rows] == [3, 6, 12, 24, 48]
    assert [cell.num_nodes for cell in found.rows[0]] == [3, 6, 12, 24]


def test_a_killed_process_is_told_as_want_of_memory():
    with pytest.raises(MemoryError), workers([source().spec()], 2) as pool:
        pool.submit(os._exit, 1).result()


def test_an_error_in_a_process_is_the_users_line():
    with pytest.raises(ValueError, match=r"train\.seq_len.*positions"):
        scaling([source("roberta_10b_p4d_after", "train.seq_len=100000")], [1, 2])
