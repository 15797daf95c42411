"""States under FSDP, from construction to the first step: units are sharded one after the other, the root last.

Parameters that were made on the CPU reach the device unit by unit: fsdp1 moves those of a unit, concatenates them to a
flat parameter and copies its shard out of that (`_init_param_handle_from_module` in _init_utils.py, `flatten_tensors`
and `shard` in _flat_param.py); fsdp2 moves them and copies the shard of each (`_init_sharded_param` in
_fsdp_param.py). So it is with sync_module_states and with cpu_ram_efficient_loading, whose other ranks start with
empty tensors. Those on the meta device are materialised by fsdp1 unit by unit as well; under fsdp2 after sharding, so
that nothing is ever whole. A model that was made on the device is there as a whole before.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zsim.model import Parameter
from zsim.ops import Op
from zsim.strategies.loading import INIT, context, free_whole, give, load_whole, take, whole
from zsim.strategies.states import MOMENTS

if TYPE_CHECKING:
    from zsim.strategies.fsdp import FullySharded, Unit


class FsdpStates:
    """Writes construction and set-up of one rank."""

    def __init__(self, sharding: "FullySharded") -> None:
        self.sharding = sharding
        self.fsdp = sharding.fsdp
        self.init_device = sharding.spec.train.init_device
        self.is_flat = sharding.spec.runtime.framework == "fsdp1"

    def setup(self) -> Iterator[Op]:
        """Shards of all parameters, and two moments of the trained ones."""
        yield from context(self.sharding.spec)
        if self.init_device == "cuda":
            yield from load_whole(self.sharding.graph.parameters, self.fsdp.param_bytes)
        for unit in (*self.sharding.wrapped.values(), self.sharding.root):
            if unit.parameters:
                yield from self._shard_flat(unit) if self.is_flat else self._shard_each(unit)
        for name, numel in self.sharding.optimizer.tensors():
            for moment in MOMENTS:
                yield from take(INIT, f"optimizer.{moment}.{name}", numel * self.fsdp.param_bytes, "optimizer")

    def _load(self, unit: "Unit") -> Iterator[Op]:
        if self.init_device != "cuda":
            for parameter in unit.parameters:
                yield from take(INIT, whole(parameter), parameter.numel * self.fsdp.param_bytes, "parameters")

    def _shard_flat(self, unit: "Unit") -> Iterator[Op]:
        flat, nbytes = f"parameters.flat.{unit.name}", unit.numel * self.fsdp.param_bytes
        yield from self._load(unit)
        yield from take(INIT, flat, nbytes, "parameters")
        yield from free_whole(unit.parameters)
        if self.fsdp.shard_size > 1:
            shard = self.sharding.padded(unit.numel) // self.fsdp.shard_size
            yield from take(INIT, f"parameters.{unit.name}", shard * self.fsdp.param_bytes, "parameters")
            yield from give(INIT, flat)

    def _shard_each(self, unit: "Unit") -> Iterator[Op]:
        if self.init_device != "meta":
            yield from self._load(unit)
        for parameter in unit.parameters:
            yield from take(INIT, f"parameters.{parameter.name}", self._shard_bytes(parameter), "parameters")
            if self.init_device != "meta":
                yield from give(INIT, whole(parameter))

    def _shard_bytes(self, parameter: Parameter) -> int:
        return self.sharding.padded(parameter.numel) // self.fsdp.shard_size * self.fsdp.param_bytes
