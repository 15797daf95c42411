"""A module gradient by gradient: what it launches and keeps before it is known which parameters are trained.

`autograd` decides which of the gradients are computed in a run and turns layers into `modules.Module`.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from zsim.model.layers.operators import Operator, Operators, held
from zsim.model.modules import NOTHING, Kernels, Parameter, Tensor

Reads = Literal["sibling", "parent", "encoder"]
ENCODED: Final = "encoder:output"
"""Read by every block of a decoder, kept once: by its prologue."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """What computing a gradient takes: kernels, and activations kept since forward."""

    kernels: Kernels = NOTHING
    keeps: tuple[Tensor, ...] = ()

    def __add__(self, other: "Gradient") -> "Gradient":
        return Gradient(self.kernels + other.kernels, self.keeps + other.keeps)


NO_GRADIENT: Final = Gradient()


@dataclass(frozen=True, slots=True)
class Step:
    """Kernels in front of or behind a module, both ways."""

    forward: Kernels
    backward: Gradient
    operators: Operators = ()

    def __add__(self, other: "Step") -> "Step":
        return Step(self.forward + other.forward, self.backward + other.backward, self.operators + other.operators)

    def running(self, *operators: Operator) -> "Step":
        """With what it does to memory."""
        return replace(self, operators=self.operators + operators)


Passes = tuple[int, int]
"""Bytes and kernels."""


def memory_bound(forward: Passes, backward: Passes, *keeps: Tensor) -> Step:
    """Memory-bound work both ways."""
    return Step(Kernels((), *forward), Gradient(Kernels((), *backward), keeps))


@dataclass(frozen=True, slots=True)
class Layer:
    """One nn.Module: its gradients apart from each other."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    forward: Kernels = NOTHING
    core: Kernels = NOTHING
    """Of `forward`, the attention core: what selective checkpointing runs once more before this module's backward."""
    through: Gradient = NO_GRADIENT
    """Computed whenever its output has a gradient."""
    to_input: Gradient = NO_GRADIENT
    """Besides, when its input has one."""
    to_weights: tuple[Gradient, ...] = ()
    """Besides, one for each trained parameter."""
    children: tuple["Layer", ...] = ()
    late_gradients: tuple[str, ...] = ()
    """Parameters whose gradient is complete only at another module (tied weights)."""
    operators: Operators = ()
    """What it does to memory, in the order of forward; without any it puts out what it is called with."""
    reads: Reads = "sibling"
    """What the siblings in front of it put out, what its parent is given, or what the encoder puts out."""
    is_called: bool = True
    """Whether it is a module of its own, whose caller holds what it calls it with."""
    features: tuple[int, int] | None = None
    """Inputs and outputs of a linear layer, which an adapter may stand beside; None for other modules."""

    def followed_by(self, step: Step) -> "Layer":
        """With kernels on its output."""
        return replace(
            self,
            forward=self.forward + step.forward,
            through=self.through + step.backward,
            operators=self.operators + step.operators,
        )

    def preceded_by(self, step: Step) -> "Layer":
        """With kernels on its input, whose backward runs only if that has a gradient."""
        return replace(
            self,
            forward=self.forward + step.forward,
            to_input=self.to_input + step.backward,
            operators=step.operators + self.operators,
        )

    def running(self, *operators: Operator) -> "Layer":
        """With operators at its end whose kernels are booked elsewhere."""
        return replace(self, operators=self.operators + operators)

    def held(self, until: str) -> "Layer":
        """Its result held by a local name until a module is through."""
        return replace(self, operators=held(self.operators, until))

    def on_parents_input(self) -> "Layer":
        """Reading what its parent is given."""
        return replace(self, reads="parent")

    def keeping(self, *names: str) -> "Layer":
        """Counting of all activations, its own and those below it, only the ones of these names."""

        def counted(gradient: Gradient) -> Gradient:
            return replace(gradient, keeps=tuple(tensor for tensor in gradient.keeps if tensor.name in names))

        return replace(
            self,
            through=counted(self.through),
            to_input=counted(self.to_input),
            to_weights=tuple(counted(gradient) for gradient in self.to_weights),
            children=tuple(child.keeping(*names) for child in self.children),
        )

    def with_core(self, step: Step, *, dropout: Kernels = NOTHING) -> "Layer":
        """With the attention core in front of it; `dropout` is what `forward` has of the core already."""
        return replace(self.preceded_by(step), core=dropout + step.forward)


def container(name: str, *children: Layer) -> Layer:
    """A module that launches nothing itself."""
    return Layer(name, children=children)


def part(name: str, *children: Layer) -> Layer:
    """Modules that the model calls one by one."""
    return Layer(name, children=children, is_called=False)


@dataclass(frozen=True, slots=True)
class Prologue:
    """What runs between an encoder and a decoder: the end of the one, the beginning of the other's own stream."""

    encoder: Layer
    decoder: Layer


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """A transformer block; `prologue` runs in front of it and is never checkpointed."""

    layer: Layer
    prologue: Prologue | None = None

    @property
    def roots(self) -> tuple[Layer, ...]:
        """Everything of it, in the order of execution."""
        return (*((self.prologue.encoder, self.prologue.decoder) if self.prologue else ()), self.layer)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole model, before it is known what is trained."""

    embedding: Layer
    blocks: tuple[BlockLayers, ...]
    head: Layer
