"""A collective that cannot end ends anyway, in one line that names rank, operation, peer and seconds."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference import communication  # noqa: E402

LIMIT_S = 1.5
CARRIERS = ["sockets", "gloo"]
OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


def outcome(call, *arguments):
    """What it said, and after how many seconds."""
    start = time.monotonic()
    try:
        call(*arguments)
    except communication.CommunicationError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def connected(messages="sockets", *, ring=True, timeout_s=LIMIT_S):
    return communication.communicators(["x"], ring=ring, timeout_s=timeout_s, messages=messages)["x"]


def others_wait_for_rank_0(messages):
    """All operations at once, each over a communicator of its own."""
    communicators = communication.communicators(OPERATIONS, ring=True, timeout_s=LIMIT_S, messages=messages)
    if communicators["broadcast"].rank == 0:
        time.sleep(2.5 * LIMIT_S)
        return {}

    def call(operation):
        communicator, full = communicators[operation], torch.zeros(3 * 1000)
        arguments = {
            "all_gather": (full, full[:1000]),
            "reduce_scatter": (full[:1000], full),
            "all_reduce": (full,),
            "broadcast": (full, 0),
        }
        return outcome(getattr(communicator, operation), *arguments[operation])

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        return dict(zip(OPERATIONS, pool.map(call, OPERATIONS), strict=True))


@pytest.mark.parametrize("messages", CARRIERS)
def test_a_silent_rank_is_named(ranks, messages):
    _, first, second = ranks(3, others_wait_for_rank_0, messages)
    for operation in OPERATIONS:
        said, seconds = second[operation]
        assert said.startswith(f"rank 2: {operation}: rank 0 is silent for "), said
        assert "\n" not in said
        assert LIMIT_S <= seconds < 2.5 * LIMIT_S
        # Its next rank gives up at the same moment.
        assert first[operation][0].startswith(f"rank 1: {operation}: rank 2 is "), first[operation]


def others_lose_rank_0(messages):
    communicator = connected(messages, timeout_s=20.0)
    communicator.all_reduce(torch.zeros(2))
    if communicator.rank == 0:
        time.sleep(0.5)
        os._exit(1)
    return outcome(communicator.all_reduce, torch.zeros(1_000_000))


@pytest.mark.parametrize("messages", CARRIERS)
def test_a_dead_rank_is_named_before_the_limit(own_ranks, messages):
    with pytest.raises(AssertionError, match="rank 0 of 2: its process died"):
        own_ranks(2, others_lose_rank_0, messages)
    said, seconds = own_ranks.finished[1]
    assert said.startswith("rank 1: all_reduce: rank 0 is gone after "), said
    assert seconds < 20.0


def each_its_own():
    communicator = connected()
    tensor = torch.zeros(4 * communicator.size)
    if communicator.rank == 0:
        return outcome(communicator.all_reduce, tensor)[0]
    return outcome(communicator.all_gather, tensor, tensor[:4].clone())[0]


def test_ranks_in_different_collectives_are_told(ranks):
    said = ranks(2, each_its_own)
    assert said[0].startswith("rank 0: all_reduce of 32 bytes, collective 1: rank 1 is in all_gather of 32 bytes"), said
    assert any("rank 0 is in all_reduce" in line or "rank 0 is gone" in line for line in said[1:])


def gloo_itself():
    communicator = connected(ring=False)
    if communicator.rank == 0:
        time.sleep(2.5 * LIMIT_S)
        return "", 0.0
    return outcome(communicator.all_reduce, torch.zeros(10))


def test_gloo_speaks_the_same_way(ranks):
    said, seconds = ranks(2, gloo_itself)[1]
    assert said.startswith("rank 1: all_reduce: a peer is silent for "), said
    assert seconds < 2.5 * LIMIT_S


def wrong_interface():
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nonsense0"):
        return outcome(connected)[0]


def test_a_wrong_interface_is_named(ranks):
    for said in ranks(2, wrong_interface):
        assert "nonsense0" in said
        assert "\n" not in said
