"""A model in the hands of a sharding: forward, backward, step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reference.communication import Communicator
from reference.device import Device
from reference.device.recorder import Recorder
from reference.sharding import external, states
from reference.sharding.hooks import Hooks
from reference.sharding.linear import keep_no_views
from reference.sharding.settings import Settings
from reference.sharding.sharding import (
    NCCL_DATA_PARALLEL,
    NCCL_WORLD,
    HookedModule,
    Moment,
    ShardedParameter,
    Sharding,
)
from reference.sharding.zero0 import Zero0
from reference.sharding.zero3 import Zero3
from reference.sharding.zero12 import Zero12

COMMUNICATORS = (NCCL_WORLD, NCCL_DATA_PARALLEL)
"""Names of the communicators that a sharding works with."""

_SHARDINGS: dict[int, type[Sharding]] = {0: Zero0, 1: Zero12, 2: Zero12, 3: Zero3}


class Named(NamedTuple):
    """What traces call a module, and what is booked on it."""

    layer: int
    name: str
    computes_forward: bool
    computes_backward: bool
    has_backward: bool = True
    """Whether its backward is a visit too."""


class ShardedModel:
    """What training calls instead of the model.

    `loss = sharded(inputs)`, `sharded.backward(loss)`, `sharded.step()`; a step takes place behind the last micro-batch
    of its accumulation, the others only count.
    """

    def __init__(
        self, module: nn.Module, sharding: Sharding, hooks: Hooks, parameters: list[ShardedParameter], device: Device
    ) -> None:
        self.module = module
        self.sharding = sharding
        self.parameters = parameters
        self.device = device
        self.num_skipped = 0
        """Steps that an overflow has skipped."""
        self.owned: tuple[Communicator, ...] = ()
        """Communicators that end with it."""
        self._hooks = hooks
        self._step = 0
        self._micro = 0

    @property
    def step_index(self) -> int:
        """Steps that have been taken, skipped ones included."""
        return self._step

    @step_index.setter
    def step_index(self, step: int) -> None:
        self._step = step

    @property
    def gradient_norm(self) -> float:
        """Of the last step, over all ranks, before clipping."""
        return self.sharding.optimizer.norm

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The forward of one micro-batch."""
        self._hooks.begin(self._step, self._micro)
        return self.module(*arguments, **named)

    def backward(self, loss: Tensor) -> None:
        """Its backward; gradients are averaged over the micro-batches of a step and over ranks."""
        accumulation = self.sharding.settings.gradient_accumulation
        self._hooks.begin_backward()
        (loss / accumulation if accumulation > 1 else loss).backward()
        self._hooks.end_backward()
        self._micro += 1

    def step(self) -> bool:
        """The optimizer step, if the micro-batch was the last of its step.

        Returns:
            False if an overflow has skipped it.

        """
        if self._micro < self.sharding.settings.gradient_accumulation:
            return True
        with torch.no_grad():
            done = self.sharding.update(Moment(self._step, self._micro - 1, "step", -1))
        self.num_skipped += not done
        self._step += 1
        self._micro = 0
        return done

    def whole_parameters(self) -> dict[str, Tensor]:
        """A copy of every parameter, whole and in its shape, by name; all ranks call it together."""
        self.device.settle()
        return {parameter.name: self.whole(parameter, parameter.shard) for parameter in self.parameters}

    @torch.no_grad()
    def whole(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """All ranks' parts of something that is divided as the parameter is."""
        if self.sharding.settings.zero.stage == 0:
            return part.view(parameter.shape).clone()
        world = self.device.communicators[NCCL_WORLD]
        flat = part.new_empty(parameter.shard_numel * world.size)
        world.all_gather(flat, part.contiguous())
        return flat[: parameter.numel].view(parameter.shape)

    def read(self, loss: Tensor) -> float:
        """The value of a loss behind the step: it is over when the device has finished it."""
        self.device.sync(
            Moment(self._step - 1, self.sharding.settings.gradient_accumulation - 1, "step", -1).key("loss:read")
        )
        return float(loss)

    def close(self) -> None:
        """Takes the hooks away, ends the lanes, and what was made for this model alone."""
        self._hooks.remove()
        external.unwatch(self.module)
        self.device.close()
        for each in self.owned:
            each.close()


def shard(
    module: nn.Module,
    settings: Settings,
    communicators: Mapping[str, Communicator],
    recorder: Recorder,
    *,
    names: Mapping[nn.Module, Named] | None = None,
    parameter_names: Mapping[str, nn.Parameter] | None = None,
) -> ShardedModel:
    """Hands a model over to the sharding of its stage.

    The model is the same on all ranks afterwards: rank 0's. Its modules are hooked, its parameters become views of flat
    tensors or, in stage 3, empty between their uses.

    Args:
        module: any module on one device; parameters of one floating dtype.
        settings: stage, switches, optimizer.
        communicators: one for each of `COMMUNICATORS`.
        recorder: is told of everything.
        names: how traces call modules; those that are not named are not hooked. By default all, by their place.
        parameter_names: how traces call parameters, in the order in which they are divided; likewise.

    """
    named = list((parameter_names or dict(module.named_parameters())).items())
    where = named[0][1].device if named else torch.device("cpu")
    world = communicators[NCCL_WORLD]
    with torch.no_grad():
        for tensor in (*(parameter for _, parameter in named), *module.buffers()):
            flat = tensor.reshape(-1)
            world.broadcast(flat, 0)
            tensor.copy_(flat.view_as(tensor))
    device = Device(where, communicators, recorder, timeout_s=settings.timeout_s)
    sharding = _SHARDINGS[settings.zero.stage](device, settings, world.rank, world.size)
    at = Moment(0, 0, "init", -1)
    parameters = _states(device, at, named, settings, world)
    by_parameter = {id(p.parameter): p for p in parameters}
    modules = {
        each: HookedModule(
            named_as.name,
            named_as.layer,
            _own(each, by_parameter),
            named_as.computes_forward,
            named_as.computes_backward,
            named_as.has_backward,
        )
        for each, named_as in (names or _by_place(module)).items()
    }
    keep_no_views(module)
    with torch.no_grad():
        sharding.setup(at, parameters)
    hooks = Hooks(sharding, device, modules, parameters)
    if settings.zero.stage == 3:
        external.watch(module, by_parameter, hooks.asked)
    return ShardedModel(module, sharding, hooks, parameters, device)


def _states(
    device: Device, at: Moment, named: list[tuple[str, nn.Parameter]], settings: Settings, world: Communicator
) -> list[ShardedParameter]:
    if settings.zero.stage == 0:
        return states.whole(device, at, named)
    divide = states.partitioned if settings.zero.stage == 3 else states.replicated
    one_buffer = settings.optimisations.defragmentation
    return divide(device, at, named, rank=world.rank, num_ranks=world.size, one_buffer=one_buffer)


def _own(module: nn.Module, by_parameter: Mapping[int, ShardedParameter]) -> tuple[ShardedParameter, ...]:
    return tuple(by_parameter[id(p)] for p in module.parameters(recurse=False) if id(p) in by_parameter)


def _by_place(module: nn.Module) -> dict[nn.Module, Named]:
    """Every module by its path; its layer is the first number in it. Kernels are booked on modules without children."""
    found: dict[nn.Module, Named] = {}
    for path, each in module.named_modules():
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        is_leaf = not any(True for _ in each.children())
        found[each] = Named(numbers[0] if numbers else -1, path or "model", is_leaf, is_leaf)
    return found
