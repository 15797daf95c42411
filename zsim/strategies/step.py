"""The schedule of a training step: which module is visited when, and the ops of the visit itself.

With full activation checkpointing a block keeps only its input; right before its backward it is run forward once more
(torch.utils.checkpoint around each block, as Hugging Face's models do it). With selective checkpointing it keeps all
but what the attention core stores between scores and context; the core runs forward once more right before its own
backward (Korthikanti et al. 2022, section 5; Megatron-LM's `recompute_granularity: selective`). Leaves out the hooks of
modules within the core, which have no parameters.
"""

from collections.abc import Iterator

from zsim.model import Kernels, ModelGraph, Module
from zsim.ops import Alloc, Compute, Free, Op, Phase, Sync
from zsim.spec import Checkpointing, Spec, TrainSpec
from zsim.strategies.sharding import Moment, Sharding, Visit


def visit_order(graph: ModelGraph, train: TrainSpec) -> tuple[Visit, ...]:
    """All module visits of one micro-batch in the order in which their hooks run."""
    num_layers = len(graph.blocks)
    visits: list[Visit] = []

    def add(phase: Phase, layer: int, root: Module) -> None:
        modules = root.in_backward_order() if phase == "backward" else root.in_forward_order()
        visits.extend([Visit(position, phase, layer, module) for position, module in enumerate(modules, len(visits))])

    visits.append(Visit(0, "forward", -1, Module("model")))
    add("forward", -1, graph.embedding)
    for layer, block in enumerate(graph.blocks):
        if block.prologue:
            add("forward", layer, block.prologue)
        add("forward", layer, block.module)
    add("forward", num_layers, graph.head)
    add("backward", num_layers, graph.head)
    for layer, block in reversed(tuple(enumerate(graph.blocks))):
        if train.checkpointing_of(layer) == "full" and block.module.has_gradient:
            add("recompute", layer, block.module)
        add("backward", layer, block.module)
        if block.prologue:
            add("backward", layer, block.prologue)
    add("backward", -1, graph.embedding)
    return tuple(visits)


def steps(spec: Spec, graph: ModelGraph, sharding: Sharding) -> Iterator[Op]:
    """The program of one rank: `noise.steps` optimizer steps."""
    visits = visit_order(graph, spec.train)
    memory = _Activations(spec, graph)
    yield from sharding.setup(visits)
    for step in range(spec.noise.steps):
        yield from sharding.start_of_step(Moment(step, 0, "forward", -1))
        for micro in range(spec.train.gradient_accumulation):
            yield from _micro_batch(step, micro, visits, sharding, memory)
        at = Moment(step, spec.train.gradient_accumulation - 1, "step", -1)
        yield from sharding.update(at)
        # The training loop reads the loss: the step ends when the device has finished it.
        yield Sync(at.key("loss:read"))


def _micro_batch(
    step: int, micro: int, visits: tuple[Visit, ...], sharding: Sharding, memory: "_Activations"
) -> Iterator[Op]:
    backward_begun = False
    for i, visit in enumerate(visits):
        at = Moment(step, micro, visit.phase, visit.layer)
        if visit.phase == "backward" and not backward_begun:
            backward_begun = True
            yield from sharding.start_of_backward(at)
        previous = visits[i - 1] if i else None
        if previous is None or (previous.layer, previous.phase) != (visit.layer, visit.phase):
            yield from memory.enter(at)
        yield from _visit(at, visit, sharding, memory)
        following = visits[i + 1] if i + 1 < len(visits) else None
        if following is None or (following.layer, following.phase) != (visit.layer, visit.phase):
            yield from memory.leave(at)
    yield from sharding.end_of_backward(Moment(step, micro, "backward", -1))


def _visit(at: Moment, visit: Visit, sharding: Sharding, memory: "_Activations") -> Iterator[Op]:
    module = visit.module
    if visit.phase == "backward":
        yield from sharding.before_backward(at, visit)
        yield from memory.recompute_core(at, module)
        yield from _compute(at, module, module.backward)
        yield from memory.free_core(at, module)
        for parameter in module.parameters:
            if not parameter.trained:
                continue
            hook = sharding.gradient_begun if parameter.name in module.late_gradients else sharding.gradient_ready
            yield from hook(at, parameter)
        yield from sharding.after_backward(at, visit)
    else:
        yield from sharding.before_forward(at, visit)
        yield from _compute(at, module, module.forward)
        yield from sharding.after_forward(at, visit)


def _compute(at: Moment, module: Module, kernels: Kernels) -> Iterator[Op]:
    if kernels.num_kernels:
        yield Compute(at.key(module.name), kernels.gemms, kernels.nbytes, kernels.num_kernels)


class _Activations:
    """Activation memory by part of the model: kept from its forward (or recomputation) to the end of its backward."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        self._train = spec.train
        self._graph = graph
        self._num_layers = len(graph.blocks)

    def enter(self, at: Moment) -> Iterator[Op]:
        """When the host comes to a part in a phase."""
        if at.phase == "backward":
            return
        graph = self._graph
        if at.layer == -1:
            yield from self._alloc(at, "saved", graph.embedding_saved_bytes, graph.embedding)
        elif at.layer == self._num_layers:
            yield from self._alloc(at, "saved", graph.head_saved_bytes, graph.head)
        else:
            block, mode = graph.blocks[at.layer], self._mode(at)
            if at.phase == "forward" and mode == "full":
                yield from self._alloc(at, "checkpoint", block.input_bytes, block.module)
            else:
                nbytes = block.saved_bytes - (block.core_saved_bytes if mode == "selective" else 0)
                yield from self._alloc(at, "saved", nbytes, block.module)

    def leave(self, at: Moment) -> Iterator[Op]:
        """When the host leaves a part in a phase."""
        if at.phase != "backward":
            return
        yield Free(at.key("activations:free"), self._name(at, "saved"))
        if self._mode(at) == "full":
            yield Free(at.key("activations:free"), self._name(at, "checkpoint"))

    def recompute_core(self, at: Moment, module: Module) -> Iterator[Op]:
        """Before the backward of the module that holds the attention core: the core once more, and what it stores."""
        if self._mode(at) == "selective" and module.core.num_kernels:
            yield from _compute(at._replace(phase="recompute"), module, module.core)
            if nbytes := self._graph.blocks[at.layer].core_saved_bytes:
                yield from self._alloc(at, "core", nbytes, module)

    def free_core(self, at: Moment, module: Module) -> Iterator[Op]:
        """After that backward."""
        is_core = self._mode(at) == "selective" and module.core.num_kernels
        if is_core and self._graph.blocks[at.layer].core_saved_bytes:
            yield Free(at.key("activations:free"), self._name(at, "core"))

    def _mode(self, at: Moment) -> Checkpointing:
        """What is recomputed of the part of the model; nothing outside the blocks."""
        return self._train.checkpointing_of(at.layer) if 0 <= at.layer < self._num_layers else "none"

    def _alloc(self, at: Moment, kind: str, nbytes: int, module: Module) -> Iterator[Op]:
        """Nothing is kept where no backward comes by."""
        if module.has_gradient:
            yield Alloc(at.key("activations:alloc"), self._name(at, kind), nbytes, "activations")

    @staticmethod
    def _name(at: Moment, kind: str) -> str:
        return f"{at.step}.{at.micro}.{at.layer}.{kind}"
