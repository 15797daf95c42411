"""ZeRO++ hpZ: a second copy of the parameters, partitioned within small groups, that later gathers read.

The first gather after a step goes over all ranks. When the parameter is released, each rank keeps its slice of it
by the small group; until the next step that slice serves all gathers (DeepSpeed runtime/zero/partition_parameters.py,
`_partition_param_sec`). Making it synchronises the compute stream. Frozen parameters keep theirs for ever. Leaves out
that DeepSpeed 0.18 copies without filling with zeros first, a small kernel less for each parameter and step.
"""

from collections.abc import Iterator
from typing import Final

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, Copy, Free, Op, Sync
from zsim.strategies.communicators import SECONDARY
from zsim.strategies.sharding import Communicator, Moment, Sharding, padded

NCCL_SECONDARY: Final = "nccl.secondary"


def secondary_size(num_ranks: int, partition_size: int) -> int:
    """Ranks of a secondary group: not more than there are."""
    return min(num_ranks, partition_size)


class SecondaryPartition:
    """Which parameters have a slice at present."""

    def __init__(self, sharding: Sharding) -> None:
        zero = sharding.spec.zero
        self._sharding = sharding
        self._size = secondary_size(sharding.num_ranks, zero.zero_hpz_partition_size)
        self.communicator = Communicator(NCCL_SECONDARY, SECONDARY, self._size)
        self._enabled = zero.has_secondary_partition
        self._present: dict[str, Parameter] = {}
        self._kept: frozenset[str] = frozenset()

    def holds(self, parameter: Parameter) -> bool:
        """Whether the next gather of the parameter can stay within the small group."""
        return parameter.name in self._present

    def setup(self, at: Moment) -> Iterator[Op]:
        """The slices of frozen parameters are there from the first step on."""
        frozen = [p for p in self._sharding.graph.parameters if not p.trained] if self._enabled else []
        self._present.update((parameter.name, parameter) for parameter in frozen)
        self._kept = frozenset(self._present)
        for parameter in frozen:
            buffer = f"secondary.{parameter.name}"
            yield Alloc(at.key("secondary:alloc"), buffer, self._slice_bytes(parameter), "parameters")

    def before_release(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Makes the slice if there is none: zeros, the slice copied over them, and the host waits for it."""
        if not self._enabled or self.holds(parameter):
            return
        what, nbytes = f"{parameter.name}:secondary", self._slice_bytes(parameter)
        self._present[parameter.name] = parameter
        yield Alloc(at.key(what), f"secondary.{parameter.name}", nbytes, "parameters")
        yield Copy(at.key(what), COMPUTE, 3 * nbytes, 2)
        yield Sync(at.key(f"{what}.sync"), (COMPUTE,))

    def invalidate(self, at: Moment) -> Iterator[Op]:
        """After a step the slices of what was trained are old."""
        for name in [name for name in self._present if name not in self._kept]:
            del self._present[name]
            yield Free(at.key(f"{name}:secondary.free"), f"secondary.{name}")

    def _slice_bytes(self, parameter: Parameter) -> int:
        return padded(parameter.numel, self._sharding.num_ranks) // self._size * self._sharding.element_bytes
