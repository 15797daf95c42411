"""Activation memory of a micro-batch, tensor by tensor: who holds what in forward, recomputation and backward.

Memory goes when nobody holds it: Python (`lifetimes`), a node of autograd that has not run backward yet, a checkpoint.
A node takes the gradients of what it has put out, makes those of what it has read, and lets go of both and of what it
kept. Two gradients of one tensor are added into the first of them, unless something shares its memory: what it is a
view of, or another tensor (torch/csrc/autograd/input_buffer.cpp). Leaves out tensors of a few numbers a token, and
workspaces of kernels.

A checkpointed block keeps what it is called with, and of its results what a policy says. Its recomputation holds what
it puts out, and the gradient that it was given, until its backward is through (torch/utils/checkpoint.py,
`CheckpointFunction`, which is `use_reentrant`). With selective checkpointing the attention core's tensors are not kept;
it runs once more in front of its backward.
"""

from collections.abc import Iterable, Iterator

from zsim.model import ModelGraph, Module, Operation, Tensor
from zsim.ops import Alloc, Free, MemoryCategory, Op
from zsim.spec import Checkpointing, Spec
from zsim.strategies.lifetimes import kept_memory, read_from_outside, releases
from zsim.strategies.sharding import Moment


class Activations:
    """What is held, by whom; every method yields what the allocator is asked for at that moment."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        self._train = spec.train
        self._graph = graph
        self._releases = releases(graph)
        self._checkpoints = [read_from_outside(block) for block in graph.blocks]
        self._kept = kept_memory(graph)
        # What a block puts out is kept by others, whether it runs again or not.
        self._checkpointed = {block.output for block in graph.blocks if block.output in self._kept} | {
            name
            for layer, names in enumerate(self._checkpoints)
            for name in names
            if self._is_checkpointed(Moment(0, 0, "forward", layer))
        }
        prologues = [block.prologue for block in graph.blocks if block.prologue]
        self._never_checkpointed = {module.name for root in prologues for module in root.in_forward_order()}
        self._holders: dict[str, int] = {}
        """Of each memory, gradients included."""
        self._named: dict[str, bool] = {}
        """Memory that Python holds, and whether recomputation made it."""
        self._gradients: dict[str, str] = {}
        """Of each tensor, the memory of its gradient so far."""
        self._views: set[str] = set()
        """Gradients that are views."""
        self._given: str = ""
        """The gradient that a recomputed block was given."""

    def enter(self, at: Moment) -> Iterator[Op]:
        """When the host comes to a part in a phase: a block that runs again holds the gradient of what it puts out."""
        if at.phase == "recompute":
            self._given = self._gradients.get(self._graph.blocks[at.layer].output, "")
            self._hold([self._given] if self._given else [])
        yield from ()

    def leave(self, at: Moment) -> Iterator[Op]:
        """When the host leaves a part in a phase."""
        if at.phase != "backward" or not 0 <= at.layer < len(self._graph.blocks):
            return
        yield from self._let_go(at, [tensor.name for tensor in self._graph.blocks[at.layer].given])
        if not self._is_checkpointed(at):
            return
        yield from self._release(at, [name for name, recomputed in self._named.items() if recomputed])
        held = [*self._checkpoints[at.layer], *self._kept_in_order(at.layer), *([self._given] if self._given else [])]
        yield from self._let_go(at, held)
        self._given = ""

    def forward(self, at: Moment, module: Module, launched: Iterator[Op]) -> Iterator[Op]:
        """A forward visit; what it launches comes behind the last of its allocations.

        A block that will run again keeps what it is called with.
        """
        if at.phase == "forward" and self._is_block(at, module):
            for tensor in self._graph.blocks[at.layer].given:
                yield self._alloc(at, tensor.name, tensor.nbytes, stays=True)
            if self._is_checkpointed(at):
                self._hold(self._checkpoints[at.layer])
        stopped = at.phase == "recompute" and module.is_behind_stop
        for i, operation in enumerate(module.operations, 1):
            if stopped:
                self._hold(self._keeps(at, module, operation))
            else:
                yield from self._run(at, module, operation)
            if i == len(module.operations):
                yield from launched
            yield from self._release(at, self._releases[module.name][i - 1])
        yield from launched

    def recomputes_core(self, at: Moment, module: Module) -> bool:
        """Whether the module holds an attention core that runs once more before its backward."""
        return self._mode(at) == "selective" and module.core.num_kernels > 0

    def recompute_core(self, at: Moment, module: Module) -> Iterator[Op]:
        """The core once more, now keeping what its nodes need."""
        for operation, released in zip(module.operations, self._releases[module.name], strict=True):
            if operation.core:
                yield from self._run(at, module, operation)
                yield from self._release(at, released)
            else:
                self._hold(self._keeps(at, module, operation))
        yield from self._release(at, [tensor.name for op in module.operations if op.core for tensor in op.writes])

    def backward(self, at: Moment, module: Module, launched: Iterator[Op]) -> Iterator[Op]:
        """A backward visit, its nodes from the last to the first.

        What it launches, and the gradients of its parameters, come with the node that makes the latter.
        """
        operations = module.operations[::-1]
        last = max(
            (i for i, operation in enumerate(operations) if operation.writes_weights), default=len(operations) - 1
        )
        for i, operation in enumerate(operations):
            yield from self._node(at, operation, launched if i == last else iter(()))
        yield from launched

    def _run(self, at: Moment, module: Module, operation: Operation) -> Iterator[Op]:
        kept_results = self._kept_results(at)
        for tensor in operation.writes:
            if tensor.name in kept_results and at.phase == "recompute":
                # The policy hands out what it has kept.
                continue
            stays = tensor.name in self._checkpointed or self._is_kept(at, module, tensor.name)
            yield self._alloc(at, tensor.name, tensor.nbytes, stays=stays or tensor.name in kept_results)
            self._named[tensor.name] = at.phase != "forward"
            if tensor.name in kept_results:
                self._hold([tensor.name])
        self._hold(self._keeps(at, module, operation))

    def _node(self, at: Moment, operation: Operation, launched: Iterator[Op]) -> Iterator[Op]:
        arrived = [self._gradients.pop(name) for name in operation.outputs if name in self._gradients]
        scratch = [f"{operation.outputs[0]}:scratch.{i}" for i in range(len(operation.scratch_bytes))]
        for name, nbytes in zip(scratch, operation.scratch_bytes, strict=True):
            yield self._alloc(at, name, nbytes)
        made = [(tensor, self._free_name(f"{tensor.name}:grad")) for tensor in operation.gradients]
        for tensor, name in made:
            yield self._alloc(at, name, tensor.nbytes)
            if operation.gives_views:
                self._views.add(name)
        yield from launched
        handed = [(tensor, arrived[0]) for tensor in operation.handed_on if arrived]
        self._hold(name for _, name in handed)
        if operation.gives_views:
            self._views.update(name for _, name in handed)
        yield from self._let_go(at, [*scratch, *arrived, *operation.keeps])
        for tensor, name in (*made, *handed):
            yield from self._add(at, tensor, name)

    def _add(self, at: Moment, tensor: Tensor, gradient: str) -> Iterator[Op]:
        """One more gradient of a tensor: into the first where that is its alone, else into a new one."""
        first = self._gradients.setdefault(tensor.name, gradient)
        if first == gradient:
            return
        if self._holders[first] > 1 or first in self._views:
            self._gradients[tensor.name] = self._free_name(f"{tensor.name}:grad")
            yield self._alloc(at, self._gradients[tensor.name], tensor.nbytes)
            yield from self._let_go(at, [first])
        yield from self._let_go(at, [gradient])

    def _keeps(self, at: Moment, module: Module, operation: Operation) -> list[str]:
        return [name for name in operation.keeps if self._is_kept(at, module, name)]

    def _is_kept(self, at: Moment, module: Module, name: str) -> bool:
        """Whether a node keeps this at such a visit: nothing of what will run again, then what it was run again for."""
        if name not in self._kept:
            return False
        if self._mode(at) == "selective":
            return self._kept[name].core == (at.phase == "recompute")
        return at.phase == "recompute" or not self._is_checkpointed(at) or module.name in self._never_checkpointed

    def _hold(self, names: Iterable[str]) -> None:
        for name in names:
            self._holders[name] += 1

    def _release(self, at: Moment, names: Iterable[str]) -> Iterator[Op]:
        """Python lets go of what it holds of these."""
        yield from self._let_go(at, [name for name in names if self._named.pop(name, None) is not None])

    def _let_go(self, at: Moment, names: Iterable[str]) -> Iterator[Op]:
        for name in names:
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                self._views.discard(name)
                yield Free(at.key(f"{name}:let_go"), self._buffer(at, name), by_operator=True)

    def _alloc(self, at: Moment, name: str, nbytes: int, *, stays: bool = False) -> Alloc:
        """With one holder."""
        self._holders[name] = 1
        category: MemoryCategory = "activations" if stays else "temporary"
        key = at.key(f"{name}:{'save' if stays else 'put_out'}")
        return Alloc(key, self._buffer(at, name), nbytes, category, by_operator=True)

    def _free_name(self, name: str) -> str:
        """Of memory that does not exist yet."""
        return name if name not in self._holders else self._free_name(f"{name}'")

    def _mode(self, at: Moment) -> Checkpointing:
        """What is recomputed of the part of the model; nothing outside the blocks."""
        return self._train.checkpointing_of(at.layer) if 0 <= at.layer < len(self._graph.blocks) else "none"

    def _is_block(self, at: Moment, module: Module) -> bool:
        return 0 <= at.layer < len(self._graph.blocks) and module is self._graph.blocks[at.layer].module

    def _is_checkpointed(self, at: Moment) -> bool:
        """Nothing is kept where no backward comes by."""
        return self._mode(at) in {"full", "selective_op"} and self._graph.blocks[at.layer].module.has_gradient

    def _kept_results(self, at: Moment) -> frozenset[str]:
        """What a checkpointed block keeps beside what it is called with."""
        return self._graph.blocks[at.layer].kept_results if 0 <= at.layer < len(self._graph.blocks) else frozenset()

    def _kept_in_order(self, layer: int) -> list[str]:
        return sorted(self._graph.blocks[layer].kept_results)

    @staticmethod
    def _buffer(at: Moment, name: str) -> str:
        return f"{at.step}.{at.micro}.{name}"
