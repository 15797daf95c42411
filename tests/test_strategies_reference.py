"""The reference engine's shardings: volume and memory of each stage by the papers' laws, and the order of events.

Ψ parameters, N ranks; elements moved per rank and step as in test_strategies_laws.
"""

from dataclasses import replace

import pytest
from strategy_cases import MATRIX, PSI, bert, collectives, curve, highest, moved, ops, resolved, switched

from zsim.figures.states import model_states
from zsim.model import build
from zsim.ops import COMPUTE, Collective, Copy, Sync, Wait
from zsim.strategies.sharding import padded

STATES = ("parameters", "gradients", "optimizer")
BUCKETS = {"reduce_bucket_size": 6 * MATRIX, "allgather_bucket_size": 6 * MATRIX}
FORMS = {"list": {"parameter_gather_form": "list", "reduce_scatter_form": "list"}, "base": {}}


def reference(folder, stage, *, zero=None, optimisations=None, **train):
    return resolved(
        folder, "reference", zero=BUCKETS | {"stage": stage} | (zero or {}), optimisations=optimisations, **train
    )


def test_stage_0_all_reduces_everything_once(tmp_path):
    spec = reference(tmp_path, 0, gradient_accumulation=2)
    assert moved(spec) == moved(spec, "all_reduce") == 2 * PSI


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_scatter_gradients_and_gather_parameters(
    tmp_path, stage, accumulation, overlap, coalesced, form
):
    """Stage 1 reduces once a step, stage 2 each micro-batch; both gather once."""
    switches = {"coalesced_collectives": coalesced} | FORMS[form]
    spec = reference(
        tmp_path,
        stage,
        zero={"overlap_comm": overlap},
        optimisations=switches,
        gradient_accumulation=accumulation,
    )
    num_reductions = 1 if stage == 1 else accumulation
    assert moved(spec, "reduce_scatter") == num_reductions * PSI
    assert moved(spec, "all_gather") == PSI
    assert moved(spec) == (num_reductions + 1) * PSI


def test_stage_1_reduces_at_the_last_micro_batch(tmp_path):
    spec = reference(tmp_path, 1, gradient_accumulation=3)
    assert {op.key.micro for op in collectives(spec) if op.kind == "reduce_scatter"} == {2}


def test_slices_are_padded_to_equal_parts(tmp_path):
    model = bert(hidden=252, heads=4, vocab=1001)
    spec = resolved(tmp_path, "reference", zero=BUCKETS | {"stage": 2}, model=model, nodes=1, gpus=8)
    numels = [parameter.numel for parameter in build(spec.model, spec.train).trained_parameters]
    whole = sum(padded(numel, 8) for numel in numels)
    assert whole > sum(numels)
    assert moved(spec, "reduce_scatter") == moved(spec, "all_gather") == whole


class TestGatherAfterTheStep:
    def gathers(self, spec):
        return [op for op in collectives(spec) if op.kind == "all_gather"]

    def test_one_for_each_parameter(self, tmp_path):
        spec = reference(tmp_path, 2, optimisations={"coalesced_collectives": False})
        names = [parameter.name for parameter in build(spec.model, spec.train).trained_parameters]
        assert [op.key.what for op in self.gathers(spec)] == [f"{name}:all_gather" for name in names]

    def test_groups_close_when_they_hold_a_bucket(self, tmp_path):
        gathers = self.gathers(reference(tmp_path, 2))
        assert all(op.num_elements >= 6 * MATRIX for op in gathers[:-1])
        (one,) = self.gathers(reference(tmp_path, 2, zero={"allgather_bucket_size": 10**9}))
        numels = len(build(reference(tmp_path, 2).model, reference(tmp_path, 2).train).trained_parameters)
        assert one.key.what.endswith(f"+{numels - 1}:all_gather")

    def test_all_are_issued_before_the_first_is_waited_for(self, tmp_path):
        found = [
            op
            for op in ops(reference(tmp_path, 2), "step")
            if (isinstance(op, Collective) and op.kind == "all_gather")
            or (isinstance(op, Wait) and op.key.what == "parameters:all_gather.wait")
        ]
        kinds = [type(op) for op in found]
        assert kinds == sorted(kinds, key=lambda kind: kind is Wait)
        assert kinds.count(Wait) == kinds.count(Collective) > 1
        assert {op.lane for op in found if isinstance(op, Wait)} == {COMPUTE}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_reduction_ordered_by_the_host_waits_for_what_it_reduces(tmp_path, stage):
    """No fetch synchronises the device here, so each bucket has to."""
    switches = {"reduce_sync": "host", "all_gather_sync": "per_parameter"}
    spec = reference(tmp_path, stage, optimisations=switches)
    num_buckets = sum(op.kind == "reduce_scatter" for op in collectives(spec))
    syncs = [op for op in ops(spec, "backward") if isinstance(op, Sync) and op.key.what.endswith(":reduce.sync")]
    assert len(syncs) == num_buckets
    assert all(not sync.lanes and sync.event is None for sync in syncs)


@pytest.mark.parametrize("stage", [1, 2])
def test_own_slices_are_written_or_added(tmp_path, stage):
    """Stage 2 adds from the second micro-batch on; stage 1 comes but once."""
    spec = reference(tmp_path, stage, gradient_accumulation=2)
    found = {0: 0, 1: 0}
    for op in ops(spec):
        if isinstance(op, Copy) and op.key.what.endswith(":reduce.partition"):
            found[op.key.micro] += op.nbytes
    slices = 2 * PSI // 4
    assert found == ({0: 0, 1: 2 * slices} if stage == 1 else {0: 2 * slices, 1: 3 * slices})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_that_stay(tmp_path, stage, precision):
    """What stage 1 keeps beside the formula's share is what autograd holds: no gradient between two steps."""
    zero = {"stage3_param_persistence_threshold": 0}
    spec = reference(tmp_path, stage, zero=zero, precision=precision)
    held = {}
    for op, now in curve(spec):
        if op.key.phase == "init":
            held = now
    element_bytes = 2 if precision == "bf16" else 4
    states = model_states(PSI, 4, stage, element_bytes)
    gradients = 0 if stage == 1 else states.gradients
    assert {name: held.get(name, 0) for name in STATES} == {
        "parameters": states.parameters,
        "gradients": gradients,
        "optimizer": states.optimizer,
    }


def test_stage_1_accumulates_whole_gradients(tmp_path):
    """Over two micro-batches all of them live, beside the slices; stage 2 lets go of each when it has been reduced."""
    first, second = (highest(reference(tmp_path, stage, gradient_accumulation=2), "gradients") for stage in (1, 2))
    whole, slices = 2 * PSI, 2 * PSI // 4
    assert first == whole + slices
    assert slices < second < first


@pytest.mark.parametrize(("momentum", "moments"), [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_what_it_needs(tmp_path, momentum, moments):
    spec = reference(tmp_path, 2)
    spec = replace(spec, optimizer=replace(spec.optimizer, kind="SGD", momentum=momentum))
    assert highest(spec, "optimizer") == (4 + 4 * moments) * PSI // 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_cpus_are_those_of_gpus(tmp_path, stage):
    """The program does not depend on the device."""
    on_gpus = switched(reference(tmp_path, stage), ring_collectives=True)
    on_cpus = resolved(tmp_path, "reference", zero=BUCKETS | {"stage": stage}, topology="lab", nodes=4, gpus=1)
    assert [(op.key, op.kind, op.num_elements) for op in collectives(on_cpus)] == [
        (op.key, op.kind, op.num_elements) for op in collectives(on_gpus)
    ]
