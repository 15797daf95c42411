"""What a sharding may do around the visits of modules; the hooks have the names of `zsim.strategies.sharding`'s.

The base class does nothing but keep gradients where autograd puts them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from reference.device import Call, Device
from reference.sharding.settings import Settings
from zsim.ops import CollectiveKind, Key, Phase

if TYPE_CHECKING:
    from reference.sharding.optimizer_step import OptimizerStep

WORLD = "world"
NCCL_WORLD = "nccl.world"
NCCL_DATA_PARALLEL = "nccl.data_parallel"


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """A parameter and this rank's equal part of it, padded with what nobody reads."""

    name: str
    parameter: nn.Parameter
    numel: int
    shape: torch.Size
    trained: bool
    shard_numel: int
    """Of each rank; `numel` where parameters are not divided."""
    shard: Tensor
    """This rank's part, flat; where the whole parameter is kept, a view of it."""
    full: Tensor | None = None
    """All parts, flat, while they are here."""
    gradient: Tensor | None = None
    """Of `shard`; in the step's or the run's gradient partition."""
    has_gradient: bool = False
    """Whether backward has reached it in this step."""

    def use(self, full: Tensor) -> None:
        """Modules see the whole parameter."""
        self.full = full
        self.parameter.data = full[: self.numel].view(self.shape)

    def release(self) -> None:
        """Modules see nothing."""
        self.full = None
        self.parameter.data = self.parameter.data.new_empty(0)


@dataclass(slots=True, eq=False)
class HookedModule:
    """One nn.Module as the hooks know it."""

    name: str
    layer: int
    parameters: tuple[ShardedParameter, ...]
    """Its own, and those of other modules that it has been seen to use (DeepSpeed's external parameters)."""
    computes_forward: bool
    """Whether kernels are booked on it rather than on the modules within."""
    computes_backward: bool
    has_backward: bool = True
    """Whether its backward is a visit too; a root that has no parameters of its own needs none."""


class Visit(NamedTuple):
    """One module visit within a micro-batch; `position` counts them."""

    position: int
    phase: Phase
    layer: int
    module: HookedModule


class Moment(NamedTuple):
    """Where in the run something is issued."""

    step: int
    micro: int
    phase: Phase
    layer: int

    def key(self, what: str) -> Key:
        """The key of an event at this moment."""
        return Key(self.step, self.micro, self.phase, self.layer, what)


class Sharding:
    """Hooks that act on tensors; subclasses override the ones where they do."""

    optimizer: "OptimizerStep"
    """Made by `setup`."""

    def __init__(self, device: Device, settings: Settings, rank: int, num_ranks: int) -> None:
        self.device = device
        self.settings = settings
        self.zero = settings.zero
        self.switches = settings.optimisations
        self.rank = rank
        self.num_ranks = num_ranks
        self._whole_gradients: set[str] = set()

    def setup(self, at: Moment, parameters: list[ShardedParameter]) -> None:
        """Before the first step: buffers that stay."""

    def before_forward(self, at: Moment, visit: Visit) -> None:
        """Pre-forward hook, in forward and in recomputation."""

    def after_forward(self, at: Moment, visit: Visit) -> None:
        """Post-forward hook."""

    def external_parameter(self, at: Moment, visit: Visit, parameter: ShardedParameter) -> None:
        """The visited module asks for a parameter of another one that is not here."""

    def start_of_backward(self, at: Moment) -> None:
        """Before the first backward visit of a micro-batch."""

    def before_backward(self, at: Moment, visit: Visit) -> None:
        """Pre-backward hook."""

    def gradient_ready(self, at: Moment, parameter: ShardedParameter) -> None:
        """Accumulation hook of one parameter."""

    def keep_whole(self, parameter: ShardedParameter) -> None:
        """Its gradient stays where autograd has put it; counted once, whatever is added to it."""
        if parameter.name not in self._whole_gradients and parameter.parameter.grad is not None:
            self._whole_gradients.add(parameter.name)
            nbytes = parameter.parameter.grad.nbytes
            self.device.recorder.allocate(f"gradient.{parameter.name}", nbytes, "gradients")

    def give_up_whole(self, parameter: ShardedParameter) -> None:
        """It goes, or is counted by whoever takes it over."""
        if parameter.name in self._whole_gradients:
            self._whole_gradients.remove(parameter.name)
            self.device.recorder.free(f"gradient.{parameter.name}")

    def after_backward(self, at: Moment, visit: Visit) -> None:
        """Post-backward hook."""

    def end_of_backward(self, at: Moment) -> None:
        """After the last backward visit of a micro-batch."""

    def update(self, at: Moment) -> bool:
        """The optimizer step and what follows it; False if an overflow skipped it."""
        raise NotImplementedError

    def restored(self, at: Moment) -> None:
        """Parameters have been written from outside: parts in stage 3, whole ones below."""

    def is_boundary(self, at: Moment) -> bool:
        """Whether this micro-batch is the last of its step."""
        return at.micro == self.settings.gradient_accumulation - 1

    def call(self, kind: CollectiveKind, num_elements: int, element_bytes: int) -> Call:
        """How a trace describes a collective among all ranks."""
        return Call(kind, WORLD, num_elements, element_bytes)


def padded(numel: int, num_ranks: int) -> int:
    """Elements of a tensor whose partitions are equal: rounded up to a multiple of the ranks."""
    return -(-numel // num_ranks) * num_ranks
