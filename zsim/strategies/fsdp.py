"""What both versions of PyTorch's FSDP share: units, and where their hooks run around the visits of modules.

A unit is what one `FullyShardedDataParallel(...)` or `fully_shard(...)` wraps: each transformer block, and the root
with what is left, embeddings and head. A block's hooks run at its first and last module visit of a pass; the root's
around the whole forward, and at the end of backward. With `wrap_embeddings` the embeddings are a unit of their own, and
the root's parameters those of the head alone. Within recomputation no hook gathers anything: the pre-backward
hook, which runs before it, has done so. Not so where a model checkpoints its blocks itself, around the units
(`checkpoints_around_units`): then a recomputation is a forward with all of its hooks (transformers issue 30404).
"""

from collections.abc import Iterator
from typing import NamedTuple

from zsim.model import ModelGraph, Module, Parameter
from zsim.ops import COMPUTE, Alloc, CollectiveKind, Groups, Op, Phase
from zsim.spec import Spec
from zsim.strategies.communicators import REPLICA, SHARD, WORLD, one_part, replicas, shards
from zsim.strategies.fsdp_states import FsdpStates
from zsim.strategies.fsdp_step import FsdpStep
from zsim.strategies.gradients import LiveGradients
from zsim.strategies.sharding import NCCL_WORLD, Moment, Sharding, Visit, padded

ROOT = "root"
RESHARD = "reshard"
"""Neighbours that share parameters between forward and backward."""
NCCL_SHARD, NCCL_REPLICA, NCCL_RESHARD = "nccl.shard", "nccl.replica", "nccl.reshard"


class Unit(NamedTuple):
    """Parameters that are gathered together."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Its parameters with gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)


class FullySharded(Sharding):
    """Turns visits into the hooks of units; a version overrides what the hooks do."""

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        super().__init__(spec, graph)
        self.fsdp = spec.fsdp
        wrapped = {layer: (f"layer.{layer}", block.module) for layer, block in enumerate(graph.blocks)}
        if self.fsdp.wrap_embeddings:
            wrapped[-1] = ("embeddings", graph.embedding)
        self.wrapped = {layer: Unit(name, _parameters(module)) for layer, (name, module) in sorted(wrapped.items())}
        """Units but for the root, by layer in the order of forward."""
        self.backward_order = tuple(
            self.wrapped[layer] for layer in sorted(wrapped, reverse=True) if wrapped[layer][1].has_gradient
        )
        """Those that backward comes to, in the order in which it does."""
        elsewhere = {parameter.name for unit in self.wrapped.values() for parameter in unit.parameters}
        self.root = Unit(ROOT, tuple(p for p in graph.parameters if p.name not in elsewhere))
        self.units = (self.root, *self.wrapped.values())
        self._head_layer = len(graph.blocks)
        whole = self.fsdp.shard_size in {1, self.num_ranks}
        self.shard_group = WORLD if whole else SHARD
        self.communicator = NCCL_WORLD if whole else NCCL_SHARD
        self.gradients = LiveGradients(self)
        self.optimizer = FsdpStep(self)
        self.reduced: dict[str, str] = {}
        """Unit -> buffer of its sharded gradient, from its first reduction in a step to the optimizer."""
        self._first: frozenset[int] = frozenset()
        self._last: frozenset[int] = frozenset()

    @classmethod
    def groups(cls, spec: Spec) -> Groups:
        """All ranks, and where they are divided the groups that shard and those that replicate."""
        fsdp, ranks = spec.fsdp, spec.cluster.num_ranks
        found = {WORLD: one_part(ranks)}
        if 1 < fsdp.shard_size < ranks:
            found |= {SHARD: shards(ranks, fsdp.shard_size), REPLICA: replicas(ranks, fsdp.shard_size)}
        if 1 < fsdp.reshard_size < fsdp.shard_size:
            found[RESHARD] = shards(ranks, fsdp.reshard_size)
        return found

    # ------------------------------------------------------------------ hooks of units

    def root_pre_forward(self, at: Moment) -> Iterator[Op]:
        """Before the first hook of a forward pass."""
        raise NotImplementedError

    def pre_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Makes the unit's parameters whole."""
        raise NotImplementedError

    def post_forward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Gives them back, if they are not kept for backward."""
        raise NotImplementedError

    def pre_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Makes them whole again."""
        raise NotImplementedError

    def post_backward(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """Gives them back and reduces their gradients."""
        raise NotImplementedError

    def catch_all(self, at: Moment, unit: Unit) -> Iterator[Op]:
        """What is left of a unit that backward has not come to: nothing in front of it is trained."""
        raise NotImplementedError

    def final_callback(self, at: Moment) -> Iterator[Op]:
        """Behind the last post-backward hook of a micro-batch."""
        raise NotImplementedError

    # ------------------------------------------------------------------ hooks of visits

    def setup(self, visits: tuple[Visit, ...]) -> Iterator[Op]:
        """Sharded parameters and optimizer states; gradients exist from their reduction to the optimizer step only."""
        parts = [(visit.layer, self._hooked_as(visit)) for visit in visits]
        self._first = frozenset(i for i, part in enumerate(parts) if i == 0 or parts[i - 1] != part)
        self._last = frozenset(i for i, part in enumerate(parts) if i + 1 == len(parts) or parts[i + 1] != part)
        yield from FsdpStates(self).setup()

    def before_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """At the first visit of a unit's forward; with a recomputation it is backward that begins."""
        if visit.position == 0:
            yield from self.root_pre_forward(at)
        first_of_root = self._head_layer if self.fsdp.wrap_embeddings else -1
        if visit.position in self._first and visit.phase == "forward" and visit.layer == first_of_root:
            yield from self.pre_forward(at, self.root)
        if visit.position in self._first and (unit := self.wrapped.get(visit.layer)):
            hook = self.pre_backward if self._hooked_as(visit) == "backward" else self.pre_forward
            yield from hook(at, unit)
        yield from super().before_forward(at, visit)

    def after_forward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """At the last visit of a unit's forward."""
        if self._hooked_as(visit) == "backward" or visit.position not in self._last:
            return
        if unit := self.wrapped.get(visit.layer):
            yield from self.post_forward(at, unit)
        elif visit.layer == self._head_layer:
            yield from self.post_forward(at, self.root)

    def start_of_backward(self, at: Moment) -> Iterator[Op]:
        """The gradient of the root's output arrives."""
        yield from self.pre_backward(at, self.root)

    def before_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """At the first visit of a unit's backward, unless a recomputation has been before."""
        if visit.position in self._first and (unit := self.wrapped.get(visit.layer)):
            yield from self.pre_backward(at, unit)

    def gradient_begun(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """It stays until its unit is reduced."""
        yield from self.gradients.begin(at, parameter)

    def after_backward(self, at: Moment, visit: Visit) -> Iterator[Op]:
        """At the last visit of a unit's backward; the root's is the head's where the embeddings are another unit."""
        if visit.position not in self._last:
            return
        if unit := self.wrapped.get(visit.layer):
            yield from self.post_backward(at, unit)
        elif self.fsdp.wrap_embeddings:
            yield from self.post_backward(at, self.root)

    def end_of_backward(self, at: Moment) -> Iterator[Op]:
        """The root's gradients are complete last, with those of the embedding."""
        if not self.fsdp.wrap_embeddings:
            yield from self.post_backward(at, self.root)
        for unit in self.wrapped.values():
            if unit not in self.backward_order:
                yield from self.catch_all(at, unit)
        yield from self.final_callback(at)

    def update(self, at: Moment) -> Iterator[Op]:
        """The optimizer step on the shards, behind which the gradients are dropped (`zero_grad`)."""
        yield from self.optimizer.update(at)

    def _hooked_as(self, visit: Visit) -> Phase:
        """Recomputation is a part of backward, whose first hook runs before it, or a forward of its own."""
        if visit.phase == "recompute" and not self.fsdp.checkpoints_around_units:
            return "backward"
        return visit.phase

    # ------------------------------------------------------------------ sizes

    def is_synchronised(self, at: Moment) -> bool:
        """Whether this micro-batch reduces gradients."""
        return self.is_boundary(at) or not self.fsdp.no_sync

    @property
    def is_replicated(self) -> bool:
        """Whether several groups of ranks hold the same shards."""
        return 1 < self.fsdp.shard_size < self.num_ranks

    @property
    def casts(self) -> bool:
        """Whether parameters at rest have another type than in computation."""
        return self.fsdp.param_bytes != self.element_bytes

    def padded(self, numel: int) -> int:
        """Elements with equal shards."""
        return padded(numel, self.fsdp.shard_size)

    def sharded_numel(self, parameters: tuple[Parameter, ...]) -> int:
        """Elements of some parameters, each with equal shards."""
        return sum(self.padded(parameter.numel) for parameter in parameters)

    def all_gather(self, at: Moment, what: str, numel: int, *, lane: str, regather: bool = False) -> Iterator[Op]:
        """Parameters of `numel` padded elements in the type of computation; `lane` issues it and waits for it."""
        communicator = NCCL_RESHARD if regather else self.communicator
        yield from self.collective(
            at,
            what,
            "all_gather",
            issued_from=lane,
            communicator=communicator,
            num_elements=numel,
            element_bytes=self.element_bytes,
            group=RESHARD if regather else self.shard_group,
        )
        yield from self.wait_stream(at, lane, communicator, what)

    def reduce(
        self, at: Moment, what: str, kind: CollectiveKind, numel: int, *, lane: str, communicator: str = ""
    ) -> Iterator[Op]:
        """Gradients over the shard group, or all-reduced over the replicas; `lane` issues it and waits for it."""
        replicas_meet = kind == "all_reduce" and self.is_replicated
        communicator = NCCL_REPLICA if replicas_meet else communicator or self.communicator
        yield from self.collective(
            at,
            what,
            kind,
            issued_from=lane,
            communicator=communicator,
            num_elements=numel,
            element_bytes=self.fsdp.reduce_bytes,
            group=REPLICA if replicas_meet else self.shard_group,
        )
        yield from self.wait_stream(at, lane, communicator, what)

    def hold_gradient(self, at: Moment, unit: Unit, numel: int, element_bytes: int, lane: str) -> Iterator[Op]:
        """Memory of a unit's sharded gradient, which lives until the optimizer has used it."""
        name = f"gradients.{at.step}.{unit.name}.{element_bytes}"
        self.reduced[unit.name] = name
        yield Alloc(at.key(f"{unit.name}:gradient"), name, numel * element_bytes, "gradients", lane)

    def scalar_all_reduce(self, at: Moment, what: str) -> Iterator[Op]:
        """One fp32 number over the shard group, which compute waits for."""
        yield from self.collective(
            at,
            what,
            "all_reduce",
            issued_from=COMPUTE,
            communicator=self.communicator,
            num_elements=1,
            element_bytes=4,
            group=self.shard_group,
        )
        yield from self.wait_stream(at, COMPUTE, self.communicator, what)


def predivide_factor(num_ranks: int) -> int:
    """Gradients are divided by about the root of the ranks before the reduction, by the rest behind it."""
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return factor


def _parameters(module: Module) -> tuple[Parameter, ...]:
    """All below a module."""
    return tuple(parameter for one in module.in_forward_order() for parameter in one.parameters)
