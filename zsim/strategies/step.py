"""The schedule of a training step: which module is visited when, and the ops of the visit itself.

With full activation checkpointing a block keeps only its input; right before its backward it is run forward once more
(torch.utils.checkpoint around each block, as Hugging Face's models do it), or as much of it as backward needs and
nobody has kept (`model.recomputation`). With selective checkpointing it keeps all but what the attention core stores
between scores and context; the core runs forward once more right before its own backward (Korthikanti et al. 2022,
section 5; Megatron-LM's `recompute_granularity: selective`). Leaves out the hooks of modules within the core, which
have no parameters.

torch.compile makes a graph of each block, or under hooks of every module of each module. Its kernels are launched by
Inductor's wrapper, modules inside it are not called, and its gradients are complete when it returns.
"""

from collections.abc import Callable, Iterator
from functools import cache

from zsim.model import Kernels, ModelGraph, Module, Parameter
from zsim.model_spec import CompileScope
from zsim.ops import Alloc, Compute, EmptyCache, Free, HostTask, Op, Phase, Sync
from zsim.spec import Spec, TrainSpec
from zsim.strategies.activations import Activations
from zsim.strategies.megatron_batch import next_batch
from zsim.strategies.sharding import Moment, Sharding, Visit


def visit_order(graph: ModelGraph, train: TrainSpec) -> tuple[Visit, ...]:
    """All module visits of one micro-batch in the order in which their hooks run."""
    num_layers = len(graph.blocks)
    visits: list[Visit] = []

    def add(phase: Phase, layer: int, root: Module) -> None:
        modules = root.in_backward_order() if phase == "backward" else root.in_forward_order()
        for position, module in enumerate(modules, len(visits)):
            is_traced = graph.compile == "block" and module is not root
            visits.append(Visit(position, phase, layer, module, is_traced))

    visits.append(Visit(0, "forward", -1, Module("model")))
    add("forward", -1, graph.embedding)
    for layer, block in enumerate(graph.blocks):
        if block.prologue:
            add("forward", layer, block.prologue)
        add("forward", layer, block.module)
    add("forward", num_layers, graph.head)
    add("backward", num_layers, graph.head)
    for layer, block in reversed(tuple(enumerate(graph.blocks))):
        if train.repeats_block(layer) and block.module.has_gradient:
            add("recompute", layer, block.module)
        add("backward", layer, block.module)
        if block.prologue:
            add("backward", layer, block.prologue)
    add("backward", -1, graph.embedding)
    return tuple(visits)


def steps(spec: Spec, graph: Callable[[int], ModelGraph], sharding: Sharding) -> Iterator[Op]:
    """The program of one rank: `noise.steps` optimizer steps, behind those that warm up.

    Args:
        spec: the experiment.
        graph: the model as the hooks see it, by length of the batch.
        sharding: its hooks.

    """
    train = spec.train

    @cache
    def batches(seq_len: int) -> tuple[_Passes, tuple[Visit, ...]]:
        of_length = graph(seq_len)
        passes = _Passes(sharding, Activations(spec, of_length), of_length.compile)
        return passes, visit_order(of_length, train)

    yield from sharding.setup(batches(train.seq_len)[1])
    stray = _Stray(spec.noise.stray_bytes)
    for step in range(-spec.noise.warm_up_steps, spec.noise.steps):
        at = Moment(step, 0, "forward", -1)
        yield from stray.next(at)
        yield from sharding.start_of_step(at)
        for micro in range(train.gradient_accumulation):
            passes, visits = batches(spec.noise.seq_len(step, micro, train.seq_len))
            yield from passes.micro_batch(step, micro, visits)
        at = Moment(step, train.gradient_accumulation - 1, "step", -1)
        yield from sharding.update(at)
        # The training loop reads the loss: the step ends when the device has finished it.
        yield Sync(at.key("loss:read"))
        if train.empties_cache(step):
            yield EmptyCache(at.key("cache:empty"))
    yield from stray.let_go(at)


class _Stray:
    """A tensor beside the program, of another size in each step; like a batch it comes before the last one goes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer = ""

    def next(self, at: Moment) -> Iterator[Op]:
        """At the beginning of a step."""
        if self._nbytes:
            buffer = f"{at.step}.stray"
            yield Alloc(at.key("stray:take"), buffer, self._nbytes, "temporary", by_operator=True, varies=True)
            yield from self.let_go(at)
            self._buffer = buffer

    def let_go(self, at: Moment) -> Iterator[Op]:
        """Of what is held, if anything is."""
        if self._buffer:
            yield Free(at.key("stray:let_go"), self._buffer, by_operator=True)


class _Passes:
    """Forward, recomputation and backward of one micro-batch."""

    def __init__(self, sharding: Sharding, memory: Activations, compile_scope: CompileScope) -> None:
        self._sharding = sharding
        self._memory = memory
        self._compile = compile_scope
        self._is_megatron = sharding.spec.model.implementation == "megatron"
        self._gradients: list[tuple[Moment, Parameter]] = []
        """Complete, but within a graph that has not returned yet."""
        self._carried_bytes = 0
        """Of modules fused into the next kernel."""

    def micro_batch(self, step: int, micro: int, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """All visits in order."""
        backward_begun = False
        if self._is_megatron:
            yield from next_batch(Moment(step, micro, "forward", -1), self._sharding.spec)
        for i, visit in enumerate(visits):
            at = Moment(step, micro, visit.phase, visit.layer)
            if visit.phase == "backward" and not backward_begun:
                backward_begun = True
                yield from self._sharding.start_of_backward(at)
            begins, ends = (_is_border(visit, visits, neighbour) for neighbour in (i - 1, i + 1))
            if begins:
                yield from self._memory.enter(at)
                if self._is_megatron and visit.phase == "recompute":
                    yield HostTask(at.key("checkpoint"), "checkpoint")
            visiting = self._backward if visit.phase == "backward" else self._forward
            yield from visiting(at, visit, begins=begins, ends=ends)
            if ends:
                yield from self._memory.leave(at)
        yield from self._sharding.end_of_backward(Moment(step, micro, "backward", -1))

    def _forward(self, at: Moment, visit: Visit, *, begins: bool, ends: bool) -> Iterator[Op]:
        yield from self._sharding.before_forward(at, visit)
        kernels = visit.module.again if visit.phase == "recompute" else visit.module.forward
        yield from self._graph_call(at, kernels, begins=begins)
        launched = self._compute(at, visit.module, kernels, ends=ends)
        yield from self._memory.forward(at, visit.module, launched)
        yield from self._sharding.after_forward(at, visit)

    def _backward(self, at: Moment, visit: Visit, *, begins: bool, ends: bool) -> Iterator[Op]:
        module = visit.module
        yield from self._sharding.before_backward(at, visit)
        yield from self._graph_call(at, module.backward, begins=begins)
        if self._memory.recomputes_core(at, module):
            again = at._replace(phase="recompute")
            if self._is_megatron:
                yield HostTask(again.key("checkpoint"), "checkpoint")
            yield from self._compute(again, module, module.core)
            yield from self._memory.recompute_core(again, module)
        yield from self._memory.backward(at, module, self._launched_backward(at, module, ends=ends))
        if ends or self._compile != "block":
            yield from self._gradient_hooks()
        yield from self._sharding.after_backward(at, visit)

    def _launched_backward(self, at: Moment, module: Module, *, ends: bool) -> Iterator[Op]:
        """Kernels and the gradients that they write; hooks come when the node has returned."""
        yield from self._compute(at, module, module.backward, ends=ends)
        for parameter in module.parameters:
            if parameter.trained:
                yield from self._sharding.gradient_begun(at, parameter)
                if parameter.name not in module.late_gradients:
                    self._gradients.append((at, parameter))

    def _gradient_hooks(self) -> Iterator[Op]:
        """Autograd accumulates what a node returns when it returns: of a compiled block all gradients at once."""
        for at, parameter in self._gradients:
            yield from self._sharding.gradient_ready(at, parameter)
        self._gradients.clear()

    def _graph_call(self, at: Moment, kernels: Kernels, *, begins: bool) -> Iterator[Op]:
        """Guards and wrapper of a compiled graph: once a block and pass, or once a module that launches anything."""
        if (self._compile == "block" and begins) or (self._compile == "module" and kernels.num_kernels):
            yield HostTask(at.key("graph:call"), "compiled_call")

    def _compute(self, at: Moment, module: Module, kernels: Kernels, *, ends: bool = False) -> Iterator[Op]:
        """What the module launches; in a compiled graph it may only add bytes to a kernel that another one launches."""
        nbytes, num_kernels = kernels.nbytes + self._carried_bytes, kernels.num_kernels
        if not num_kernels and ends and nbytes:
            num_kernels = 1
        self._carried_bytes = 0 if num_kernels else nbytes
        if kernels.num_wrapped:
            activity = "wrapped_backward" if at.phase == "backward" else "wrapped_forward"
            yield HostTask(at.key(f"{module.name}:python"), activity, kernels.num_wrapped)
        if num_kernels:
            yield Compute(at.key(module.name), kernels.gemms, nbytes, num_kernels, compiled=self._compile != "none")


def _is_border(visit: Visit, visits: tuple[Visit, ...], neighbour: int) -> bool:
    """Whether the visit beside belongs to another part or pass."""
    if not 0 <= neighbour < len(visits):
        return True
    return (visits[neighbour].layer, visits[neighbour].phase) != (visit.layer, visit.phase)
