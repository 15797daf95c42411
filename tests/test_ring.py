"""The ring collectives against gloo's own, bit by bit, and against the ring's law of bytes."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference import communication  # noqa: E402

SIZES = [1, 2, 5, 1000, 70_001, 1_200_000]
"""Elements: fewer than ranks, uneven, several pieces, more receives than are posted ahead."""
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def both(timeout_s=20.0):
    """A ring and gloo's own collectives."""
    ring = communication.communicators(["ring"], ring=True, timeout_s=timeout_s)["ring"]
    own = communication.communicators(["own"], ring=False, timeout_s=timeout_s)["own"]
    return ring, own


def draw(seed, numel, dtype):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)


def differences():
    """Names of cases in which a rank's ring and gloo differ."""
    ring, own = both()
    found = []
    for numel in SIZES:
        for dtype in DTYPES:
            for name, case in CASES.items():
                for result, expected in zip(case(ring, numel, dtype), case(own, numel, dtype), strict=True):
                    if not torch.equal(result, expected):
                        found.append(f"{name}, {numel} × {dtype}")
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


CASES = {
    "all_gather": gathered,
    "all_reduce": all_reduced,
    "broadcast": broadcast,
    "reduce_scatter": reduce_scattered,
    "reduce_scatter, exact": reduce_scattered_exactly,
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ring_is_gloo_bit_by_bit(ranks, size):
    assert ranks(size, differences, timeout_s=120.0) == [[]] * size


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
