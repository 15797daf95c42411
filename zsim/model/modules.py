"""A model as a tree of modules with what a visit of each launches; `model` builds it, strategies walk it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from zsim.model_spec import CompileScope
from zsim.ops import Product


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor; `name` is unique in the model."""

    name: str
    numel: int
    trained: bool = True
    """Whether it has a gradient; a frozen one is gathered and computed with all the same."""
    inactive: int = 0
    """Elements that a token does not meet: those of the experts to which it is not sent."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one visit launches: GEMMs, bytes of memory-bound kernels, launches in all."""

    gemms: tuple[Product, ...] = ()
    nbytes: int = 0
    num_kernels: int = 0
    num_wrapped: int = 0
    """Of the launches, those from within Megatron-LM's modules and autograd functions, whose Python comes on top."""

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(
            self.gemms + other.gemms,
            self.nbytes + other.nbytes,
            self.num_kernels + other.num_kernels,
            self.num_wrapped + other.num_wrapped,
        )


NOTHING: Final = Kernels()


class Tensor(NamedTuple):
    """An activation kept from forward to backward; the same name is the same memory."""

    name: str
    nbytes: int
    core: bool = False
    """Stored between the attention scores and the context: what selective checkpointing drops."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator as memory sees it: what it makes and keeps in forward, and what its node makes in backward.

    Memory bears the name of the tensor for which it was made; views of it have names of their own for their gradients.
    """

    writes: tuple[Tensor, ...] = ()
    """Memory that it makes."""
    reads: tuple[str, ...] = ()
    """Memory that is needed until it has run."""
    keeps: tuple[str, ...] = ()
    """Memory that its node keeps until it has run backward."""
    outputs: tuple[str, ...] = ()
    """Tensors whose gradients its node uses up."""
    gradients: tuple[Tensor, ...] = ()
    """Gradients that its node makes, under the names of the tensors that they belong to."""
    handed_on: tuple[Tensor, ...] = ()
    """Tensors whose gradient is the very one that the node was given."""
    gives_views: bool = False
    """Whether the gradients that it makes are views, into which autograd adds nothing."""
    scratch_bytes: tuple[int, ...] = ()
    """What the node makes and lets go of besides."""
    writes_weights: bool = False
    """Whether its node makes the gradients of the module's parameters."""
    core: bool = False
    """Whether selective checkpointing runs it once more."""
    until: str = ""
    """The module through whose forward a local name holds what it puts out; otherwise the last who reads it."""
    within: str = ""
    """The module whose own code runs it, where that is one around the module that it is booked on."""


@dataclass(frozen=True, slots=True)
class Module:
    """One nn.Module with what a forward and a backward visit of it cost."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    forward: Kernels = NOTHING
    backward: Kernels = NOTHING
    core: Kernels = NOTHING
    """Of `forward`, the attention core: what selective checkpointing runs once more before this module's backward."""
    children: tuple["Module", ...] = ()
    late_gradients: tuple[str, ...] = ()
    """Parameters whose gradient is complete only at another module (tied weights)."""
    has_gradient: bool = True
    """Whether backward comes by: not where neither it nor anything in front of it is trained."""
    num_calls: int = 1
    """nn.Module calls of a forward visit; more than its own where its descendants are hooked as one with it."""
    saved: tuple[Tensor, ...] = ()
    """Activations that its own autograd nodes save, its children's apart; what several modules of a block save is one
    tensor, held by the first of them in forward, which lets go of it last in backward."""
    input: str = ""
    """The memory that it is called with, which its caller holds until it returns."""
    operations: tuple[Operation, ...] = ()
    """In the order of forward, its children's apart."""
    recomputed: Kernels | None = None
    """What a recomputation of its block launches here; None for all of `forward`."""
    is_behind_stop: bool = False
    """Whether a recomputation has ended before this module makes anything."""

    @property
    def again(self) -> Kernels:
        """What it launches when its block runs forward once more."""
        return self.forward if self.recomputed is None else self.recomputed

    @property
    def saved_bytes(self) -> int:
        """Of all that its own autograd nodes save."""
        return sum(tensor.nbytes for tensor in self.saved)

    @property
    def core_saved_bytes(self) -> int:
        """Of these, what the attention core stores and selective checkpointing drops."""
        return sum(tensor.nbytes for tensor in self.saved if tensor.core)

    def in_forward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-forward hooks run."""
        yield self
        for child in self.children:
            yield from child.in_forward_order()

    def in_backward_order(self) -> Iterator["Module"]:
        """This module and its descendants as their pre-backward hooks run: outer first, last child first."""
        if not self.has_gradient:
            return
        yield self
        for child in reversed(self.children):
            yield from child.in_backward_order()


@dataclass(frozen=True, slots=True)
class Block:
    """A transformer block."""

    module: Module
    input_bytes: int
    """Kept instead of what its modules save when the block is checkpointed."""
    output: str = ""
    """The tensor that it puts out."""
    given: tuple[Tensor, ...] = ()
    """Held from its forward to its backward in place of all that its modules would hold."""
    prologue: Module | None = None
    """Runs in front of it, never checkpointed."""
    kept_results: frozenset[str] = frozenset()
    """Tensors that a checkpoint of the block keeps although it runs forward once more."""

    @property
    def saved_bytes(self) -> int:
        """Activations that all its modules save, where nothing is checkpointed."""
        roots = (self.prologue, self.module) if self.prologue else (self.module,)
        return sum(module.saved_bytes for root in roots for module in root.in_forward_order())


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Embedding, blocks and head."""

    embedding: Module
    blocks: tuple[Block, ...]
    head: Module
    compile: CompileScope = "none"
    """What torch.compile makes one graph of."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, in order of construction (DeepSpeed's ds_id)."""
        seen: dict[str, Parameter] = {}
        for root in self._roots():
            for module in root.in_forward_order():
                seen.update((parameter.name, parameter) for parameter in module.parameters)
        return tuple(seen.values())

    def _roots(self) -> Iterator[Module]:
        yield self.embedding
        for block in self.blocks:
            if block.prologue:
                yield block.prologue
            yield block.module
        yield self.head

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

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token meets; of experts only those to which it is sent, of embeddings all."""
        return sum(parameter.numel - parameter.inactive for parameter in self.parameters)
