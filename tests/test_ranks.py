"""The processes in which tests of several ranks run: a rank that fails or hangs fails the test, and nothing hangs."""

import os
import time

import pytest

pytest.importorskip("torch", reason="torch is not installed")


def place():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()


def misbehave(how):
    if os.environ["RANK"] == "1":
        if how == "raises":
            raise ValueError("on purpose")
        if how == "hangs":
            time.sleep(60.0)
    return "well"


def test_processes_serve_calls_of_different_sizes(ranks):
    three = ranks(3, place)
    assert [found[:2] for found in three] == [(0, 3), (1, 3), (2, 3)]
    assert ranks(2, place) == [(rank, 2, three[rank][2]) for rank in range(2)]


def test_an_exception_is_told_with_its_rank(own_ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2: Traceback.*on purpose"):
        own_ranks(2, misbehave, "raises")
    assert own_ranks(2, misbehave, "not at all") == ["well", "well"]
    with pytest.raises(AssertionError, match=r"rank 1 of 2 did not end in time \(2 s\)"):
        own_ranks(2, misbehave, "hangs", timeout_s=2.0)
