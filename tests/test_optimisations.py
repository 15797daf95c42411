"""Each optimisation of DeepSpeed PR #1453 as a switch of its own: it changes the program, in the stated direction."""

from dataclasses import asdict, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from strategy_cases import count, switched

from zsim import load, programs, resolve, simulate
from zsim.model import build
from zsim.ops import Collective, Copy, HostTask, Sync
from zsim.spec import Optimisations

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
LAYERS = 4

LADDER = {
    "no norms in debug strings": {"debug_norms": False},
    "cached fetch and release decisions": {"cached_decisions": True},
    "all-gather into one tensor": {"all_gather_form": "base"},
    "reduce-scatter from one tensor": {"reduce_scatter_form": "base"},
    "coalesced collectives": {"coalesced_collectives": True},
    "all-gathers ordered by streams": {"all_gather_sync": "stream", "limiter_depth": 2},
    "two communicators": {"separate_communicators": True},
    "reductions ordered by streams": {"reduce_sync": "stream"},
    "a trace that matches": {"broken_trace": False},
    "buffers kept, states in one piece": {"preallocated_buffers": True, "defragmentation": True},
    "fused gradient norm": {"fused_gradient_norm": True},
}
STEPS = [pytest.param(change, id=name) for name, change in LADDER.items()]


@cache
def measured(which):
    """The 10B experiment with fewer of its equal layers."""
    return resolve(load(EXPERIMENTS / f"roberta_10b_p4d_{which}.yaml", [f"model.layers={LAYERS}"]))


def ops(spec):
    (program,) = programs(spec)
    return program.ops


@cache
def step_time_s(spec):
    return simulate(spec).step_time_s


def cumulative():
    spec = measured("before")
    yield spec
    for change in LADDER.values():
        spec = switched(spec, **change)
        yield spec


def test_the_ladder_leads_from_before_to_after():
    *_, last = cumulative()
    assert asdict(last.runtime.optimisations) == asdict(measured("after").runtime.optimisations)
    assert ops(last) == ops(measured("after"))
    assert step_time_s(last) == step_time_s(measured("after"))


@pytest.mark.parametrize("change", STEPS)
def test_each_switch_alone_changes_the_program_of_before(change):
    before = measured("before")
    assert ops(switched(before, **change)) != ops(before)


@pytest.mark.parametrize("change", STEPS)
def test_each_switch_undone_alone_changes_the_program_of_after(change):
    old = asdict(measured("before").runtime.optimisations)
    after = measured("after")
    assert ops(switched(after, **{name: old[name] for name in change})) != ops(after)


def test_no_step_of_the_ladder_is_slower():
    times_s = [step_time_s(spec) for spec in cumulative()]
    assert all(later_s <= earlier_s for earlier_s, later_s in pairwise(times_s)), dict(
        zip(["before", *LADDER], times_s, strict=True)
    )


def test_synchronisation_coalescing_and_the_trace_make_the_gain():
    """Nine tenths of what is won; the buffers matter to the allocator, which is not part of this step."""
    times_s = [step_time_s(spec) for spec in cumulative()]
    won_s = dict(zip(LADDER, [one - other for one, other in pairwise(times_s)], strict=True))
    total_s = times_s[0] - times_s[-1]
    assert max(won_s, key=won_s.__getitem__) == "all-gathers ordered by streams"
    assert won_s["buffers kept, states in one piece"] < 0.01 * total_s
    assert total_s > 0.3 * times_s[0]


# ---------------------------------------------------------------------- the switches beyond that ladder


def test_debug_strings_cost_the_host_one_string_a_parameter():
    after = measured("after")
    strings = [op for op in ops(after) if isinstance(op, HostTask) and op.activity == "string"]
    assert strings
    without = ops(switched(after, debug_strings=False))
    assert not [op for op in without if isinstance(op, HostTask) and op.activity == "string"]


def test_limiter_depth_bounds_what_is_outstanding():
    def limits(depth):
        return count(ops(switched(measured("after"), limiter_depth=depth)), Sync, ".limit")

    assert limits(0) == 0
    assert limits(1) > limits(2) > limits(8) > 0


def test_one_device_synchronisation_a_module_instead_of_one_a_tensor():
    per_tensor = switched(measured("before"), all_gather_form="base")
    per_module = switched(per_tensor, all_gather_sync="per_module")
    assert ops(per_tensor) != ops(per_module)
    assert step_time_s(per_module) < step_time_s(per_tensor)


@pytest.mark.parametrize("which", ["before", "after"])
def test_grouped_calls_need_no_flattening_and_are_not_slower(which):
    spec = measured(which)
    grouped = switched(spec, coalesced_collectives=True, all_gather_form="grouped", reduce_scatter_form="grouped")
    flat = ("flatten", "unflatten", "interleave", "copy_in", "copy_out", "own_slice")
    assert [op for op in ops(spec) if isinstance(op, Copy) and op.key.what.endswith(flat)]
    assert not [op for op in ops(grouped) if isinstance(op, Copy) and op.key.what.endswith(flat)]
    assert max(op.num_tensors for op in ops(grouped) if isinstance(op, Collective)) > 1
    assert step_time_s(grouped) <= step_time_s(spec)


@pytest.mark.parametrize("switch", ["bucket_sync", "multi_rank_all_reduce", "parameter_gather_form"])
def test_switches_of_stage_2(switch):
    before = measured("before")
    stage_2 = replace(before, zero=replace(before.zero, stage=2, overlap_comm=True))
    other = {"bucket_sync": "stream", "multi_rank_all_reduce": True, "parameter_gather_form": "base"}
    base = switched(stage_2, multi_rank_all_reduce=switch == "bucket_sync")
    changed = switched(base, **{switch: other[switch]})
    assert ops(changed) != ops(base)
    assert simulate(changed).step_time_s != simulate(base).step_time_s


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counting_hooks_look_at_every_parameter_for_every_gradient(stage):
    after = measured("after")
    staged = replace(after, zero=replace(after.zero, stage=stage))
    counting = switched(staged, counting_hooks=True)
    looks = [op.count for op in ops(counting) if isinstance(op, HostTask) and op.activity == "counted_parameter"]
    num_tensors = len(build(after.model, after.train).trained_parameters)
    assert looks == [num_tensors] * num_tensors
    assert simulate(counting).metrics.breakdown_s["host"] >= simulate(staged).metrics.breakdown_s["host"]


def test_counting_hooks_are_why_many_tensors_are_slow_under_zero():
    """As reported of DDP and stage 2: backward takes five times as long (OpenTau issue #177)."""
    path = EXPERIMENTS / "field_reports" / "vla_many_tensors.yaml"
    stage_2 = ["runtime=deepspeed-0.18", "deepspeed={bf16: {enabled: true}, zero_optimization: {stage: 2}}"]
    ddp, plain, counting = (
        simulate(load(path, overrides)).metrics.phases_s["backward"]
        for overrides in ([], stage_2, [*stage_2, "optimisations={counting_hooks: true}"])
    )
    assert plain < 1.5 * ddp
    assert 4 < counting / ddp < 6.5


def test_every_switch_is_tested_here():
    in_ladder = {name for change in LADDER.values() for name in change}
    others = {"debug_strings", "bucket_sync", "multi_rank_all_reduce", "parameter_gather_form", "counting_hooks"}
    others |= {"coalesced_persistents", "ring_collectives"}
    assert in_ladder | others == {field.name for field in fields(Optimisations)}
