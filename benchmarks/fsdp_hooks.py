"""What PyTorch's FSDP costs the host thread a unit, measured with torch on this machine's CPU.

Blocks of small parameters run forward and backward with and without FSDP; the differences between models of 4 and 12
blocks, fitted over the number of parameters of a block, give the cost of a unit and of a parameter in it. Copies and
collectives are replaced by nothing, since programs price them as operations of their own, and streams do not exist on a
CPU. Times are those of the thread, the least of many runs, because other work on the machine can only add.

`python benchmarks/fsdp_hooks.py fsdp1|fsdp1_orig|fsdp2`
"""

import os
import sys
from collections.abc import Callable
from time import thread_time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

NUM_RANKS = 8
WIDTH = 64
FEW, MANY = 4, 12
SIZES = (2, 4, 9, 12, 16)
RUNS = 120


class Block(nn.Module):
    """As many additions as it has parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses every parameter once."""
        for parameter in self.own:
            x = x + parameter
        return x


class Blocks(nn.Module):
    """Blocks in a row, and a parameter for the root."""

    def __init__(self, num_blocks: int, num_parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(num_parameters) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def seconds(model: nn.Module) -> np.ndarray:
    """Least thread time of forward and of backward."""
    best = np.full(2, np.inf)
    for _ in range(RUNS):
        x = torch.ones(WIDTH)
        times = [thread_time()]
        loss = model(x).sum()
        times.append(thread_time())
        loss.backward()
        times.append(thread_time())
        for parameter in model.parameters():
            parameter.grad = None
        best = np.minimum(best, np.diff(times))
    return best


class _Replaced:
    """A module with some of its names replaced."""

    def __init__(self, module: object, **names: object) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def _nothing(*_: object, **__: object) -> None:
    return None


def fsdp2(model: Blocks) -> nn.Module:
    """`fully_shard` on each block and the root, without its copies."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  only this case needs them
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives  # noqa: PLC0415

    def copy_in(_: object, out: torch.Tensor, __: object, numel: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return out.narrow(0, numel * rank, numel), out

    operations = _Replaced(None, all_gather_copy_in=copy_in, split_with_sizes_copy=_nothing, chunk_cat=_nothing)
    namespace = _Replaced(torch.ops, fsdp=operations)
    collectives.torch = _Replaced(torch, ops=namespace, _foreach_copy_=_nothing)
    collectives.dist = _Replaced(dist, all_gather_single=_nothing, reduce_scatter_single=_nothing)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp1(model: Blocks, *, use_orig_params: bool = False) -> nn.Module:
    """`FullyShardedDataParallel` around each block and the root; its gathers and reductions do nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision  # noqa: PLC0415
    from torch.distributed.fsdp import _flat_param as flat_param  # noqa: PLC0415
    from torch.distributed.fsdp import _runtime_utils as runtime  # noqa: PLC0415

    flat_param.dist = _Replaced(dist, all_gather=_nothing, all_gather_single=_nothing)
    runtime.dist = _Replaced(dist, reduce_scatter_single=_nothing)

    def wrap(module: nn.Module) -> nn.Module:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), mixed_precision=policy, use_orig_params=use_orig_params
        )

    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    return wrap(model)


def fsdp1_orig(model: Blocks) -> nn.Module:
    """With use_orig_params."""
    return fsdp1(model, use_orig_params=True)


def main(wrap: Callable[[Blocks], nn.Module]) -> None:
    """Prints microseconds of a unit and of each of its parameters, forward and backward."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    rows = []
    for size in SIZES:
        plain = [seconds(Blocks(blocks, size)) for blocks in (FEW, MANY)]
        sharded = [seconds(wrap(Blocks(blocks, size))) for blocks in (FEW, MANY)]
        rows.append((sharded[1] - sharded[0] - plain[1] + plain[0]) / (MANY - FEW) * 1e6)
        sys.stdout.write(f"{size:3} parameters: forward {rows[-1][0]:6.1f} us, backward {rows[-1][1]:6.1f} us\n")
    for name, times in zip(("forward", "backward"), np.array(rows).T, strict=True):
        slope, offset = np.polyfit(SIZES, times, 1)
        sys.stdout.write(f"{name}: {offset:.0f} us a unit and {slope:.1f} us a parameter\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main({"fsdp1": fsdp1, "fsdp1_orig": fsdp1_orig, "fsdp2": fsdp2}[sys.argv[1]])
