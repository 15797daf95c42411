"""A model as a tree of modules with what a visit of each launches; `model` builds it, strategies walk it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.ops import Gemm


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor; `name` is unique in the model."""

    name: str
    numel: int
    trained: bool = True
    """Whether it has a gradient; a frozen one is gathered and computed with all the same."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one visit launches: GEMMs, bytes of memory-bound kernels, launches in all."""

    gemms: tuple[Gemm, ...] = ()
    nbytes: int = 0
    num_kernels: int = 0

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(self.gemms + other.gemms, self.nbytes + other.nbytes, self.num_kernels + other.num_kernels)


@dataclass(frozen=True, slots=True)
class Module:
    """One nn.Module with what a forward and a backward visit of it cost."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    forward: Kernels = Kernels()
    backward: Kernels = Kernels()
    children: tuple["Module", ...] = ()
    late_gradients: tuple[str, ...] = ()
    """Parameters whose gradient is complete only at another module (tied weights)."""

    def plus(self, extra: tuple[Kernels, Kernels]) -> "Module":
        """The module with further kernels booked on its forward and backward visits."""
        forward, backward = extra
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)

    def in_forward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-forward hooks run."""
        yield self
        for child in self.children:
            yield from child.in_forward_order()

    def in_backward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-backward hooks run: outer first, last child first."""
        yield self
        for child in reversed(self.children):
            yield from child.in_backward_order()


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Embedding, equal blocks and head, with the bytes that each keeps for its backward."""

    embedding: Module
    blocks: tuple[Module, ...]
    head: Module
    embedding_saved_bytes: int
    block_input_bytes: int
    block_saved_bytes: int
    head_saved_bytes: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, in order of construction (DeepSpeed's ds_id)."""
        seen: dict[str, Parameter] = {}
        for root in (self.embedding, *self.blocks, self.head):
            for module in root.in_forward_order():
                seen.update((parameter.name, parameter) for parameter in module.parameters)
        return tuple(seen.values())

    @property
    def trained_parameters(self) -> tuple[Parameter, ...]:
        """Those with gradients and optimizer states."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    @property
    def num_parameters(self) -> int:
        """Ψ: tied weights counted once."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained_parameters(self) -> int:
        """Elements that gradients and optimizer states have."""
        return sum(parameter.numel for parameter in self.trained_parameters)
