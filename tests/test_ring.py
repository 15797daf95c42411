"""The ring collectives against gloo's own, bit by bit, and against the ring's law of bytes."""

import itertools
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference import communication  # noqa: E402
from reference.communication import ring as rings  # noqa: E402

SIZES = [1, 2, 5, 1000, 70_001]
"""Elements: fewer than ranks, uneven, several pieces, with small pieces more receives than are posted ahead."""
LARGE = 1_000_000
"""Elements of which gloo makes more than two segments a rank, and a ring pieces of full size."""
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def both(messages="sockets", timeout_s=20.0):
    """A ring and gloo's own collectives."""
    ring = communication.communicators(["ring"], ring=True, timeout_s=timeout_s, messages=messages)["ring"]
    own = communication.communicators(["own"], ring=False, timeout_s=timeout_s)["own"]
    return ring, own


def draw(seed, numel, dtype):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)


def differences(messages):
    """Names of cases in which a rank's ring and gloo differ."""
    ring, own = both(messages)
    found = []

    def compare(case, numel, dtype):
        for result, expected in zip(case(ring, numel, dtype), case(own, numel, dtype), strict=True):
            if not torch.equal(result, expected):
                found.append(f"{case.__name__}, {numel} × {dtype}")

    with mock.patch.multiple(rings, LARGEST_PIECE_BYTES=2**12, SMALLEST_PIECE_BYTES=2**10):
        for case, numel, dtype in itertools.product(CASES, SIZES, DTYPES):
            compare(case, numel, dtype)
    compare(all_reduced, LARGE, torch.float32)
    compare(reduce_scattered, LARGE // 2, torch.float32)
    return found


def gathered(communicator, numel, dtype):
    shard = draw(communicator.rank, numel, dtype)
    output = torch.empty(communicator.size * numel, dtype=dtype)
    communicator.all_gather(output, shard)
    aliased = torch.empty_like(output)
    slot = aliased[communicator.rank * numel : (communicator.rank + 1) * numel]
    slot.copy_(shard)
    communicator.all_gather(aliased, slot)
    outputs = [torch.empty_like(shard) for _ in range(communicator.size)]
    communicator.all_gather_list(outputs, shard)
    return output, aliased, *outputs


def all_reduced(communicator, numel, dtype):
    total = draw(communicator.rank, numel, dtype)
    largest = total.clone()
    communicator.all_reduce(total)
    communicator.all_reduce(largest, "max")
    return total, largest


def broadcast(communicator, numel, dtype):
    tensors = [draw(communicator.rank, numel, dtype) for _ in range(communicator.size)]
    for root, tensor in enumerate(tensors):
        communicator.broadcast(tensor, root)
    return tensors


def reduce_scattered(communicator, numel, dtype):
    """Slots of whole segments, where gloo's reduce-scatter adds in the ring's order."""
    numel = -(-numel // 64) * 64
    full = draw(communicator.rank, communicator.size * numel, dtype)
    aliased, output = full.clone(), torch.empty(numel, dtype=dtype)
    slot = aliased[communicator.rank * numel : (communicator.rank + 1) * numel]
    communicator.reduce_scatter(output, full)
    communicator.reduce_scatter(slot, aliased)
    return output, slot


def reduce_scattered_exactly(communicator, numel, dtype):
    """Whole numbers, whose sums are exact in any order: gloo's list form adds in another one, as do uneven slots."""
    full = (torch.arange(communicator.size * numel) % 7 + communicator.rank).to(dtype)
    output, from_list = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    communicator.reduce_scatter_list(from_list, list(full.clone().chunk(communicator.size)))
    communicator.reduce_scatter(output, full)
    return output, from_list


def coalesced(communicator, numel, dtype):
    """Two tensors of different sizes in one call."""
    shards = [draw(communicator.rank, size, dtype) for size in (numel, numel + 3)]
    outputs = [torch.empty(communicator.size * shard.numel(), dtype=dtype) for shard in shards]
    communicator.all_gather_coalesced(outputs, shards)
    fulls = [(output % 7).floor() for output in outputs]
    sums = [torch.empty_like(shard) for shard in shards]
    communicator.reduce_scatter_coalesced(sums, fulls)
    return *outputs, *sums


CASES = (coalesced, gathered, all_reduced, broadcast, reduce_scattered, reduce_scattered_exactly)


@pytest.mark.parametrize(
    ("size", "messages"), [(1, "sockets"), (2, "sockets"), (3, "sockets"), (4, "sockets"), (2, "gloo"), (3, "gloo")]
)
def test_ring_is_gloo_bit_by_bit(ranks, size, messages):
    assert ranks(size, differences, messages, timeout_s=120.0) == [[]] * size


def payloads(numel):
    """Bytes that a rank sends, by collective."""
    ring, _ = both()
    sent = []

    def count(call, *arguments):
        before = ring.bytes_sent
        call(*arguments)
        sent.append(ring.bytes_sent - before)

    full = torch.zeros(numel)
    shard = torch.zeros(numel // ring.size)
    count(ring.all_gather, full, shard)
    count(ring.reduce_scatter, shard, full)
    count(ring.all_reduce, full)
    count(ring.all_reduce, full, "max")
    count(ring.all_gather_list, list(full.chunk(ring.size)), shard)
    count(ring.reduce_scatter_list, shard, list(full.chunk(ring.size)))
    count(ring.broadcast, full, 0)
    return sent


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ring_sends_what_a_ring_must(ranks, size):
    numel = 12 * 4096
    one = 4 * numel * (size - 1) // size
    for rank, sent in enumerate(ranks(size, payloads, numel)):
        is_last = rank == 1 % size
        assert sent == [one, one, 2 * one, 2 * one, one, one, 0 if is_last else 4 * numel]


def uneven_payload(numel):
    ring, _ = both()
    ring.all_reduce(torch.zeros(numel))
    return ring.bytes_sent


@pytest.mark.parametrize("numel", [1, 7, 100_003])
def test_ranks_together_send_no_more_for_uneven_tensors(ranks, numel):
    assert sum(ranks(3, uneven_payload, numel)) == 2 * (3 - 1) * 4 * numel
