"""Where states live: parameters whole or in equal parts, and the flat tensors that hold them."""

from collections.abc import Sequence

import torch
from torch import nn

from reference.device import Device
from reference.sharding.sharding import Moment, ShardedParameter, padded


def whole(device: Device, at: Moment, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[ShardedParameter]:
    """Nothing divided: every rank has every parameter (stage 0)."""
    found = []
    for i, (name, parameter) in enumerate(parameters):
        flat = device.empty(
            at.key("parameters:alloc"), f"parameters.{i}", parameter.numel(), parameter.dtype, "parameters"
        )
        found.append(_sharded(name, parameter, flat, num_ranks=1, rank=0))
    return found


def replicated(
    device: Device,
    at: Moment,
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    rank: int,
    num_ranks: int,
    one_buffer: bool,
) -> list[ShardedParameter]:
    """Every rank has every parameter, of which it updates its own part (stages 1 and 2)."""
    sizes = [padded(p.numel(), num_ranks) for _, p in parameters]
    flats = _buffers(device, at, sizes, parameters, one_buffer=one_buffer)
    return [
        _sharded(name, parameter, flat, num_ranks=num_ranks, rank=rank)
        for (name, parameter), flat in zip(parameters, flats, strict=True)
    ]


def partitioned(
    device: Device,
    at: Moment,
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    rank: int,
    num_ranks: int,
    one_buffer: bool,
) -> list[ShardedParameter]:
    """Every rank has its own part of every parameter only (stage 3)."""
    sizes = [padded(p.numel(), num_ranks) // num_ranks for _, p in parameters]
    flats = _buffers(device, at, sizes, parameters, one_buffer=one_buffer)
    found = []
    for (name, parameter), flat in zip(parameters, flats, strict=True):
        own = parameter.detach().reshape(-1)[rank * flat.numel() : (rank + 1) * flat.numel()]
        flat.zero_()[: own.numel()].copy_(own)
        sharded = ShardedParameter(
            name, parameter, parameter.numel(), parameter.shape, parameter.requires_grad, flat.numel(), flat
        )
        sharded.release()
        found.append(sharded)
    return found


def _sharded(name: str, parameter: nn.Parameter, flat: torch.Tensor, *, num_ranks: int, rank: int) -> ShardedParameter:
    """Whole in `flat`, of which the rank's own part is a view."""
    size = flat.numel() // num_ranks
    flat.zero_()[: parameter.numel()].copy_(parameter.detach().reshape(-1))
    shard = flat[rank * size : (rank + 1) * size]
    sharded = ShardedParameter(
        name, parameter, parameter.numel(), parameter.shape, parameter.requires_grad, size, shard
    )
    sharded.use(flat)
    return sharded


def _buffers(
    device: Device,
    at: Moment,
    sizes: list[int],
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    one_buffer: bool,
) -> list[torch.Tensor]:
    """A flat tensor each, or for each a part of one (defragmented, as DeepSpeed calls it)."""
    key = at.key("parameters:alloc")
    dtypes = {p.dtype for _, p in parameters}
    if one_buffer and len(dtypes) == 1:
        flat = device.empty(key, "parameters.states.0", sum(sizes), dtypes.pop(), "parameters")
        return list(flat.split(sizes))
    return [
        device.empty(key, f"parameters.states.{i}", size, parameter.dtype, "parameters")
        for i, (size, (_, parameter)) in enumerate(zip(sizes, parameters, strict=True))
    ]
