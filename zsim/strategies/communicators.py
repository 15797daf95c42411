"""Which ranks talk to each other: groups of ranks as partitions, numbered node by node."""

from typing import Final

from zsim.ops import Partition

WORLD: Final = "world"
"""All ranks."""
SHARD: Final = "shard"
"""Neighbours that hold the states once between them."""
REPLICA: Final = "replica"
"""The ranks at one place of each shard group: they hold the same part of the states."""

SHARD_INTRA: Final = "shard_intra"
"""Of a shard group over several nodes: the ranks on one node."""
SHARD_INTER: Final = "shard_inter"
"""Of a shard group over several nodes: the ranks at one place of each node."""
SECONDARY: Final = "secondary"
"""Neighbours that hold a second copy of the parameters once between them."""


def one_part(num_ranks: int) -> Partition:
    """All ranks together."""
    return (tuple(range(num_ranks)),)


def shards(num_ranks: int, size: int) -> Partition:
    """Consecutive ranks, `size` in each part."""
    _check_divides(num_ranks, size)
    return tuple(tuple(range(first, first + size)) for first in range(0, num_ranks, size))


def replicas(num_ranks: int, size: int) -> Partition:
    """The ranks at the same position of each part of `shards`."""
    _check_divides(num_ranks, size)
    return tuple(tuple(range(position, num_ranks, size)) for position in range(size))


def across_nodes(num_ranks: int, size: int, gpus_per_node: int) -> Partition:
    """Within each part of `shards`, the ranks at the same place of each node."""
    _check_divides(size, gpus_per_node)
    return tuple(
        tuple(range(first + place, first + size, gpus_per_node))
        for first in range(0, num_ranks, size)
        for place in range(gpus_per_node)
    )


def lies_even(size: int, gpus_per_node: int) -> bool:
    """Whether consecutive groups of that size lie alike on all nodes: several in each, or each on whole nodes."""
    return size >= 1 and (gpus_per_node % size == 0 or size % gpus_per_node == 0)


def _check_divides(num_ranks: int, size: int) -> None:
    if size < 1 or num_ranks % size:
        raise ValueError(f"size of a group: {size} given, allowed are divisors of the {num_ranks} ranks")
