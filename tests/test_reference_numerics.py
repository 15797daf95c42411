"""The reference engine trains as one process does: every stage with every switch, on 2 and on 4 ranks.

Two gradients have one sum, whatever the order, and a half is exact; so on two ranks, with one micro-batch a step and
nothing clipped, equality is one of bits. Four ranks, several micro-batches and norms are summed in different orders.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from sharded_training import ADAM, SGD, Case, alone, differences, joined, same_bits, train  # noqa: E402

STEPS = 20
EXACT = 1e-12
"""Of float64, after 20 steps."""
ON = "deepspeed-0.6.0"
OLD = "deepspeed-0.5.4"
LESS_OLD = "deepspeed-0.5.10"
LARGE = {
    "reduce_bucket_size": 10**6,
    "allgather_bucket_size": 10**6,
    "prefetch_bucket_size": 10**6,
    "param_persistence_threshold": 10**6,
    "max_live_parameters": 10**6,
    "max_reuse_distance": 10**6,
    "sub_group_size": 10**6,
}
TINY = dict.fromkeys(LARGE, 1) | {"param_persistence_threshold": 0}
HOST = {"reduce_sync": "host"}
NO_OVERLAP = {"overlap_comm": False}
REDUCING = [
    {"reduce_sync": "host"},
    {"limiter_depth": 0},
    {"coalesced_collectives": False},
    {"reduce_scatter_form": "list"},
    {"reduce_scatter_form": "list", "coalesced_collectives": False},
    {"reduce_scatter_form": "grouped"},
    {"preallocated_buffers": False},
    {"fused_gradient_norm": False},
    {"debug_strings": False},
]
GATHERING = [{"defragmentation": False}, {"all_gather_form": "list"}, {"all_gather_form": "grouped"}]
FETCHING = [
    {"all_gather_sync": "per_parameter"},
    {"all_gather_sync": "per_module"},
    {"separate_communicators": False},
    {"cached_decisions": False},
    {"cached_decisions": False, "broken_trace": True},
    {"debug_norms": True},
    {"all_gather_form": "list", "coalesced_collectives": False},
]
SWITCHES = {
    0: [{"fused_gradient_norm": False}, {"debug_strings": False}],
    1: [*REDUCING, *GATHERING],
    2: [*REDUCING, *GATHERING],
    3: [*REDUCING, *GATHERING, *FETCHING],
}
"""What each stage has, one turned at a time from the optimised runtime; what belongs together, together."""
SETTINGS = [
    Case(zero=LARGE),
    Case(zero=TINY),
    Case(zero=NO_OVERLAP),
    Case(zero={"contiguous_gradients": False}),
    Case(zero={"reduce_scatter": False}),
    Case(switches=HOST, zero=NO_OVERLAP),
    Case(switches=HOST | {"coalesced_collectives": False}, zero=NO_OVERLAP),
    Case(switches=HOST, zero={"reduce_scatter": False}),
    Case(switches=HOST, zero={"reduce_scatter": False} | NO_OVERLAP),
    Case(switches=HOST, zero={"reduce_scatter": False, "contiguous_gradients": False}),
    Case(switches=HOST | {"reduce_scatter_form": "grouped"}, zero={"contiguous_gradients": False}),
    Case(ring=False),
]
RECOMPUTED = [
    Case(checkpointing="full"),
    Case(checkpointing="full", reentrant=False),
    Case(checkpointing="selective"),
]
WHOLE_RUNTIMES = [Case(runtime=OLD), Case(runtime=LESS_OLD), Case(runtime=OLD, zero=NO_OVERLAP, checkpointing="full")]
IN_OTHER_ORDER = [
    Case(accumulation=3),
    Case(accumulation=3, checkpointing="full", runtime=OLD),
    Case(clipping=0.3),
    Case(clipping=0.3, runtime=LESS_OLD, accumulation=3),
]
ALONE = {}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(case, num_ranks):
    key = (case.numbers, num_ranks)
    if key not in ALONE:
        ALONE[key] = alone(case, num_ranks, STEPS)
    return ALONE[key]


def trained(ranks, num_ranks, cases):
    by_rank = ranks(num_ranks, train, cases, STEPS, timeout_s=300.0)
    return [joined([results[i] for results in by_rank], case, STEPS) for i, case in enumerate(cases)]


def complaints(cases, results, num_ranks, *, loss=EXACT, norm=EXACT, bits=False):
    """What is wrong with which case."""
    for case, result in zip(cases, results, strict=True):
        found = differences(result, expected(case, num_ranks))
        if found[0] > loss or found[1] > norm:
            yield f"{case}: losses differ by {found[0]:.1e}, parameters by {found[1]:.1e}"
        if bits and not same_bits(result, expected(case, num_ranks)):
            yield f"{case}: not the same bits"


def of_stage(stage, cases):
    return [replace(case, stage=stage) for case in cases]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_switch_on_two_ranks_gives_the_bits_of_one_process(stage, ranks):
    turned = [Case(), *(Case(switches=switches) for switches in SWITCHES[stage])]
    cases = of_stage(stage, [*turned, *(SETTINGS if stage else SETTINGS[:2]), *WHOLE_RUNTIMES, *RECOMPUTED])
    assert not list(complaints(cases, trained(ranks, 2, cases), 2, bits=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_and_clipping_on_two_ranks(stage, ranks):
    cases = of_stage(stage, IN_OTHER_ORDER)
    assert not list(complaints(cases, trained(ranks, 2, cases), 2))
    assert differences(expected(Case(), 2), expected(Case(clipping=0.3), 2))[1] > 1e-3  # it does clip


def test_four_ranks(ranks):
    chosen = [Case(), Case(runtime=OLD), Case(accumulation=3, checkpointing="full", clipping=0.3)]
    grouped = {"all_gather_form": "grouped", "reduce_scatter_form": "grouped"}
    cases = [case for stage in range(4) for case in of_stage(stage, chosen)]
    cases += [Case(switches=grouped, zero={"contiguous_gradients": False}), Case(zero={"reduce_scatter": False})]
    results = trained(ranks, 4, cases)
    assert not list(complaints(cases, results, 4))
    # One reducer: an element is summed from the same rank on.
    for case in chosen[:2]:
        one, two, three = (results[cases.index(replace(case, stage=stage))] for stage in (1, 2, 3))
        assert same_bits(one, three)
        assert same_bits(two, three)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_adam_in_fp32(implementation, ranks):
    """Its update is the gradient's sign where the gradient is small, so that rounding counts."""
    base = Case(dtype=torch.float32, optimizer=replace(ADAM, implementation=implementation))
    cases = [replace(base, stage=stage, clipping=clipping) for stage in range(4) for clipping in (0.0, 0.3)]
    assert not list(complaints(cases, trained(ranks, 2, cases), 2, loss=1e-6, norm=1e-5))


def test_bf16_with_fp32_masters(ranks):
    """Stage against stage, and each against one process, bit by bit; with clipping the norm's order counts."""
    base = Case(dtype=torch.bfloat16, optimizer=ADAM)
    cases = [replace(base, stage=stage, runtime=runtime) for stage in range(4) for runtime in (ON, OLD)]
    results = trained(ranks, 2, cases)
    assert not list(complaints(cases, results, 2, bits=True))
    assert results[0].losses[-1] < results[0].losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgd_without_momentum(dtype, ranks):
    base = Case(dtype=dtype, optimizer=replace(SGD, momentum=0.0, implementation="for_loop"))
    cases = [replace(base, stage=stage) for stage in range(4)]
    assert not list(complaints(cases, trained(ranks, 2, cases), 2, loss=1e-6, norm=1e-6, bits=True))
