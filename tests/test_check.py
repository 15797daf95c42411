"""Each static check finds the fault planted for it, and names the place."""

import pytest

from zsim.check import ProgramError, check
from zsim.ops import Alloc, Collective, Compute, Copy, EmptyCache, Free, Gemm, HostTask, Program, Record, Sync, Wait

GROUPS = {"world": ((0, 1),)}


@pytest.fixture
def ops(key):
    """A sound program with every kind of op."""
    return (
        Alloc(key("states", phase="init"), "states", 64, "parameters"),
        Alloc(key("gathered"), "gathered", 64, "gathered"),
        HostTask(key("hook"), "visit"),
        Collective(key("weight:all_gather"), "gather", "all_gather", "world", 32, 2),
        Record(key("ready"), "gather", 1),
        Wait(key("ready"), "compute", 1),
        Compute(key("linear"), (Gemm(2, 3, 4),), 10, 2),
        Copy(key("copy"), "gather", 10),
        Sync(key("event"), event=1),
        Sync(key("drain"), ("compute",)),
        Free(key("gathered"), "gathered"),
        EmptyCache(key("cache")),
    )


def test_a_sound_program_passes(ops):
    check([Program("data", (0, 1), ops)], GROUPS)


def faults(key):
    """Name, what is put at the end of the sound program, and the text of its fault."""
    gather = Collective(key("g"), "gather", "all_gather", "world", 32, 2)
    return {
        "event twice": (Record(key(), "compute", 1), "recorded already"),
        "wait for nothing": (Wait(key(), "compute", 9), "not been recorded"),
        "sync for nothing": (Sync(key(), event=9), "not been recorded"),
        "sync for both": (Sync(key(), ("compute",), 1), "not both"),
        "free without alloc": (Free(key(), "other"), "not allocated"),
        "free twice": (Free(key(), "gathered"), "not allocated"),
        "alloc twice": (Alloc(key(), "states", 1, "gathered"), "allocated already"),
        "alloc of nothing": (Alloc(key(), "empty", 0, "gathered"), "must be positive"),
        "live buffer": (Alloc(key(), "left", 1, "gathered"), "never freed"),
        "unknown group": (Collective(key(), "gather", "all_gather", "tensor", 32, 2), "unknown group 'tensor'"),
        "empty collective": (Collective(key(), "gather", "all_gather", "world", 0, 2), "must be positive"),
        "no kernels": (Compute(key(), num_kernels=0), "must be positive"),
        "fewer kernels than GEMMs": (Compute(key(), (Gemm(1, 1, 1), Gemm(1, 1, 1))), "a kernel for each GEMM"),
        "empty GEMM": (Compute(key(), (Gemm(0, 1, 1),)), "must be positive"),
        "empty copy": (Copy(key(), "gather", 0), "must be positive"),
        "no host work": (HostTask(key(), "visit", 0), "must be positive"),
        "no lane": (Compute(key(), lane=""), "name of a lane"),
        "kernel on the host": (Compute(key(), lane="host"), "name of a lane"),
        "sync of no lane": (Sync(key(), ("",)), "name of a lane"),
        "record on no lane": (Record(key(), "", 7), "name of a lane"),
        "collective on no lane": (Collective(key(), "", gather.kind, "world", 1, 1), "name of a lane"),
    }


@pytest.mark.parametrize("name", faults(lambda *_: None))
def test_a_planted_fault_is_found(name, ops, key):
    fault, text = faults(key)[name]
    with pytest.raises(ProgramError, match=text) as caught:
        check([Program("data", (0, 1), (*ops, fault))], GROUPS)
    assert "role data" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("programs", "groups", "text"),
    [
        ([("one", (0, 1)), ("two", (1,))], {}, "rank 1: is in role one and again in role two"),
        ([("one", (0,)), ("one", (1,))], {}, "two programs"),
        ([("one", ())], {}, "has no ranks"),
        ([("one", (0,))], {"world": ((0, 1),)}, "group world: rank 1 is in no role"),
        ([("one", (0,))], {"world": ((),)}, "group world: has no ranks"),
        ([("one", (0,))], {"world": ((0, 0),)}, "names a rank twice"),
        ([("one", (0, 1))], {"pair": ((0,), (0,))}, "group pair: names a rank twice"),
        ([("one", (0, 1, 2))], {"pair": ((0, 1), (2,))}, "group pair: has parts of different sizes"),
        ([("one", (0, 1))], {"pair": ()}, "group pair: has no ranks"),
    ],
)
def test_roles_and_groups_are_disjoint_and_complete(programs, groups, text):
    with pytest.raises(ProgramError, match=text):
        check([Program(role, ranks, ()) for role, ranks in programs], groups)


def test_a_rank_outside_the_group_is_found(ops):
    with pytest.raises(ProgramError, match="rank 2 of the role is not in the group"):
        check([Program("data", (0, 1, 2), ops)], GROUPS)


@pytest.mark.parametrize("change", ["kind", "bytes", "count", "order"])
def test_roles_must_issue_the_same_collectives(key, change):
    first = Collective(key("a"), "nccl", "all_gather", "world", 32, 2)
    second = Collective(key("b"), "nccl", "reduce_scatter", "world", 64, 2)
    other = {
        "kind": (first, Collective(key("b"), "nccl", "all_reduce", "world", 64, 2)),
        "bytes": (first, Collective(key("b"), "nccl", "reduce_scatter", "world", 65, 2)),
        "count": (first,),
        "order": (second, first),
    }[change]
    with pytest.raises(ProgramError, match="group world, collective"):
        check([Program("one", (0,), (first, second)), Program("two", (1,), other)], GROUPS)
