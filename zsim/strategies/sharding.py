"""What a sharding may do around the visits of modules; the base class does nothing, like training on one device.

The hooks have the names of DeepSpeed's.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from zsim.model import ModelGraph, Module, Parameter
from zsim.ops import Collective, CollectiveKind, Free, Groups, HostTask, Key, Op, Phase, Record, Sync, Wait
from zsim.software import StackSpec
from zsim.spec import Spec
from zsim.strategies.communicators import WORLD, one_part

NCCL_WORLD = "nccl.world"
NCCL_DATA_PARALLEL = "nccl.data_parallel"


class Communicator(NamedTuple):
    """A process group of this rank: the stream on which NCCL serves it, its name, and its ranks."""

    lane: str
    group: str
    num_ranks: int


class Visit(NamedTuple):
    """One module visit within a micro-batch; `position` counts them."""

    position: int
    phase: Phase
    layer: int
    module: Module
    is_traced: bool = False
    """Part of a compiled graph: Python calls the graph, not this module."""


class Moment(NamedTuple):
    """Where in the run an op is issued."""

    step: int
    micro: int
    phase: Phase
    layer: int

    def key(self, what: str) -> Key:
        """The key of an event at this moment."""
        return Key(self.step, self.micro, self.phase, self.layer, what)


class Sharding:
    """Hooks that yield ops; subclasses override the ones where they act."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        self.spec = spec
        self.graph = graph
        self.num_ranks = spec.cluster.num_ranks
        """Ranks over which states are partitioned."""
        self.element_bytes = spec.train.element_bytes
        stack = spec.runtime.stack
        self.records_streams = isinstance(stack, StackSpec) and stack.collectives_record_stream
        """Whether c10d does, on the communicator's stream, for what a collective reads and writes."""
        self._events = count()

    @classmethod
    def groups(cls, spec: Spec) -> Groups:
        """The communicators that the hooks use, by name."""
        return {WORLD: one_part(spec.cluster.num_ranks)}

    @classmethod
    def view(cls, graph: ModelGraph, _spec: Spec, /) -> ModelGraph:
        """The model as the hooks see it."""
        return graph

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Before the first step: states and buffers that stay."""
        yield from ()

    def start_of_step(self, at: Moment) -> Iterator[Op]:
        """Before the first micro-batch of a step."""
        yield from ()

    def before_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Pre-forward hook, in forward and in recomputation."""
        if not visit.is_traced:
            yield HostTask(at.key(f"{visit.module.name}:call"), "module_call", visit.module.num_calls)

    def after_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Post-forward hook."""
        yield from ()

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """Before the first backward visit of a micro-batch."""
        yield from ()

    def before_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Pre-backward hook."""
        yield from ()

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Autograd has written the gradient of a parameter, or what one visit gives to a tied one's."""
        yield from ()

    def gradient_ready(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Accumulation hook of one parameter."""
        yield from ()

    def after_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """Post-backward hook."""
        yield from ()

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """After the last backward visit of a micro-batch."""
        yield from ()

    def update(self, at: Moment) -> Iterator[Op]:
        """The optimizer step and what follows it."""
        yield from ()

    def count_parameters(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """What DeepSpeed 0.18.3 to 0.18.6 add to an accumulation hook: a look at every trained parameter."""
        if self.spec.runtime.optimisations.counting_hooks and self.spec.runtime.framework == "deepspeed":
            num_looks = len(self.graph.trained_parameters)
            yield HostTask(at.key(f"{parameter.name}:gradient.count"), "counted_parameter", num_looks)

    def is_boundary(self, at: Moment) -> bool:
        """Whether this micro-batch is the last of its step."""
        return at.micro == self.spec.train.gradient_accumulation - 1

    def new_event(self) -> int:
        """A number for an event."""
        return next(self._events)

    def wait_stream(self, at: Moment, lane: str, other: str, what: str) -> Iterator[Op]:
        """`lane` waits for all that `other` holds now; nothing between lanes that are one."""
        if lane != other:
            event = self.new_event()
            yield Record(at.key(what), other, event)
            yield Wait(at.key(what), lane, event)

    def collective(
        self,
        at: Moment,
        what: str,
        kind: CollectiveKind,
        *,
        issued_from: str,
        communicator: str,
        num_elements: int,
        element_bytes: int,
        num_tensors: int = 1,
        group: str = WORLD,
        before: Iterable[Op] = (),
        after: Iterable[Op] = (),
    ) -> Iterator[Op]:
        """A c10d call: the communicator's stream waits for the issuing stream, then runs.

        `before` and `after` are copies that c10d queues on the communicator's stream around the kernel (list form).
        The caller waits for the result with `wait_stream(lane, communicator)` or an event of its own.
        """
        yield from self.wait_stream(at, communicator, issued_from, what)
        yield from before
        yield Collective(at.key(what), communicator, kind, group, num_elements, element_bytes, num_tensors)
        yield from after

    def free_behind(self, at: Moment, buffer: str, lane: str | None, what: str = "") -> Iterator[Op]:
        """The last reference is dropped; behind `record_stream` on a lane, memory waits until that has come so far."""
        event, what = None, what or buffer
        if lane is not None:
            event = self.new_event()
            yield Record(at.key(f"{what}:record_stream"), lane, event)
        yield Free(at.key(f"{what}:free"), buffer, event)

    def device_sync(self, at: Moment, what: str) -> Sync:
        """torch.cuda.synchronize()."""
        return Sync(at.key(what))


def partition_order(parameters: tuple[Parameter, ...], num_ranks: int, *, round_robin: bool) -> tuple[Parameter, ...]:
    """Parameters as they lie in the flat buffer of stages 1 and 2: as constructed, or dealt to the ranks in turn.

    DeepSpeed runtime/zero/stage_1_and_2.py, `_round_robin_reorder`; the buffer is then cut into equal partitions.
    """
    if not round_robin:
        return parameters
    return tuple(parameter for first in range(num_ranks) for parameter in parameters[first::num_ranks])


def padded(numel: int, num_ranks: int) -> int:
    """Elements of a tensor whose partitions are equal: rounded up to a multiple of the ranks."""
    return -(-numel // num_ranks) * num_ranks
