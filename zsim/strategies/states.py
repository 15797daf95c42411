"""Model states tensor by tensor, from construction to the first step: phases "load" and "init".

DeepSpeed's engine casts the model to 16 bits where it lies, on the CPU as a rule, before it moves it to the device
(runtime/engine.py, `_configure_distributed_model`), so that a rank never holds it in fp32. Then stages 1 and 2 bring
the trained parameters into one flat buffer (runtime/zero/stage_1_and_2.py), stage 3 makes partitions of each and brings
those into flat buffers (runtime/zero/stage3.py). What is trained gets a master copy and Adam's moments, flat too, in
stage 3 one of each for every sub-group. Frozen parameters, or their partitions, stay as they are.

Leaves out: the placeholders of one element that released parameters have; that later versions make the moments in the
first step, behind the gradient in fp32, and not here; and that stage 1 and 2 of 0.19 flatten on the device where it has
room for both copies.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from zsim.model import Parameter
from zsim.ops import EmptyCache, Op
from zsim.strategies.loading import (
    FP32_BYTES,
    INIT,
    cast,
    context,
    free_whole,
    give,
    load_fp32,
    load_partitioned,
    load_whole,
    make_partition,
    partition,
    take,
)
from zsim.strategies.sharding import Sharding, padded

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class SubGroup(NamedTuple):
    """Trained parameters that the optimizer updates together."""

    parameters: tuple[Parameter, ...]
    numel: int
    """Of this rank's partitions of them."""


def sub_groups(sharding: Sharding) -> list[SubGroup]:
    """Of stage 3 parameters as constructed, until their partitions reach `sub_group_size`; else all trained ones."""
    trained, num_ranks = sharding.graph.trained_parameters, sharding.num_ranks
    if sharding.spec.zero.stage < 3:
        return [SubGroup(trained, sum(parameter.numel for parameter in trained))] if trained else []
    found: list[SubGroup] = []
    group: list[Parameter] = []
    numel = 0
    for parameter in trained:
        group.append(parameter)
        numel += padded(parameter.numel, num_ranks) // num_ranks
        if numel >= sharding.spec.zero.sub_group_size or parameter is trained[-1]:
            found.append(SubGroup(tuple(group), numel))
            group, numel = [], 0
    return found


def num_moments(sharding: Sharding) -> int:
    """Tensors of optimizer state for each parameter."""
    optimizer = sharding.spec.optimizer
    return len(MOMENTS) if optimizer.kind != "SGD" else int(optimizer.momentum > 0)


class States:
    """Everything on every rank, one tensor each: DistributedDataParallel with a master copy of 16-bit parameters."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.graph = sharding.graph
        self.element_bytes = sharding.element_bytes

    def setup(self) -> Iterator[Op]:
        """Construction and set-up."""
        yield from context(self.sharding.spec)
        yield from self._load()
        for parameter in self.graph.trained_parameters:
            if self.element_bytes < FP32_BYTES:
                yield from self._fp32(f"master.{parameter.name}", parameter.numel)
            yield from self._moments(parameter.name, parameter.numel)

    def _load(self) -> Iterator[Op]:
        """All parameters whole, in the type of training; cast on the CPU, or on the device where they were made."""
        if self.sharding.spec.train.init_device == "cuda" and self.element_bytes < FP32_BYTES:
            yield from load_fp32(self.graph.parameters)
            yield from cast(self.graph.parameters, self.element_bytes)
        else:
            yield from load_whole(self.graph.parameters, self.element_bytes)

    def _fp32(self, name: str, numel: int) -> Iterator[Op]:
        yield from take(INIT, f"optimizer.{name}", FP32_BYTES * numel, "optimizer")

    def _moments(self, name: str, numel: int) -> Iterator[Op]:
        for moment in MOMENTS[: num_moments(self.sharding)]:
            yield from self._fp32(f"{moment}.{name}", numel)

    def _flat_optimizer(self, numels: Sequence[int], *, has_master: bool) -> Iterator[Op]:
        """Of each flat partition a clone cast to fp32; then the moments, beside one gradient for the largest."""
        for i, numel in enumerate(numels if has_master else ()):
            clone_bytes = numel * self.element_bytes if self.element_bytes < FP32_BYTES else 0
            yield from take(INIT, f"clone.{i}", clone_bytes, "temporary")
            yield from self._fp32(f"master.{i}", numel)
            yield from give(INIT, f"clone.{i}", clone_bytes)
        gradient_bytes = FP32_BYTES * max(numels, default=0)
        yield from take(INIT, "optimizer.gradient", gradient_bytes, "temporary")
        for i, numel in enumerate(numels):
            yield from self._moments(str(i), numel)
        yield from give(INIT, "optimizer.gradient", gradient_bytes)


class FlatStates(States):
    """DeepSpeed's stages 0 to 2: trained parameters in one flat buffer, by way of the CPU; its partitions updated.

    Stage 0 clones the parameters into the flat buffer instead and updates all of it (runtime/fp16/fused_optimizer.py).
    """

    def setup(self) -> Iterator[Op]:
        """Construction and set-up."""
        yield from context(self.sharding.spec)
        yield from self._load()
        trained = self.graph.trained_parameters
        zero, num_ranks = self.sharding.spec.zero, self.sharding.num_ranks
        numel = sum(parameter.numel for parameter in trained)
        if zero.stage:
            # Padded so that partitions begin where NCCL's transfers are aligned: `nccl_start_alignment_factor`.
            numel = padded(numel, 2 * num_ranks)
            yield from free_whole(trained)
            if self.sharding.spec.runtime.persistence_inclusive:
                yield EmptyCache(INIT.key("parameters:empty_cache"))
        yield from take(INIT, "parameters.flat", numel * self.element_bytes, "parameters")
        if not zero.stage:
            yield from free_whole(trained)
        partition_numel = numel // num_ranks if zero.stage else numel
        # A partition has a master copy whatever its type; whole fp32 parameters need none.
        has_master = zero.stage > 0 or self.element_bytes < FP32_BYTES
        yield from self._flat_optimizer([partition_numel], has_master=has_master)


class PartitionedStates(States):
    """DeepSpeed's stage 3: partitions of each parameter, then of each sub-group in a flat buffer, or of all in one.

    `defragmentation` is DeepSpeed's function of that name (PR #1453): all partitions are moved to the CPU, the cache is
    emptied and one buffer allocated. Before, each sub-group took that way by itself, with the others' partitions and
    what else is cached in place.
    """

    def setup(self) -> Iterator[Op]:
        """Construction and set-up."""
        spec, num_ranks = self.sharding.spec, self.sharding.num_ranks
        yield from context(spec)
        if spec.train.zero_init:
            yield from load_partitioned(self.graph, num_ranks, self.element_bytes)
        else:
            yield from self._load()
            for parameter in self.graph.parameters:
                yield from make_partition(INIT, parameter, num_ranks, self.element_bytes)
        groups = sub_groups(self.sharding)
        if spec.runtime.optimisations.defragmentation:
            yield from self._flatten(groups, "parameters.flat", empties_cache=True)
        else:
            for i, group in enumerate(groups):
                yield from self._flatten([group], f"parameters.flat.{i}", empties_cache=False)
        yield from self._flat_optimizer([group.numel for group in groups], has_master=True)

    def _flatten(self, groups: Sequence[SubGroup], buffer: str, *, empties_cache: bool) -> Iterator[Op]:
        for parameter in (parameter for group in groups for parameter in group.parameters):
            yield from give(INIT, partition(parameter))
        if empties_cache:
            yield EmptyCache(INIT.key("parameters:empty_cache"))
        numel = sum(group.numel for group in groups)
        yield from take(INIT, buffer, numel * self.element_bytes, "parameters")


class ReferenceStates(States):
    """The reference engine: slices of each parameter, and with `defragmentation` one buffer of them all."""

    def __init__(self, sharding: Sharding, *, keeps_gradients: bool) -> None:
        super().__init__(sharding)
        self.keeps_gradients = keeps_gradients

    def setup(self) -> Iterator[Op]:
        """Construction leaves nothing; set-up takes all of it."""
        spec, num_ranks, graph = self.sharding.spec, self.sharding.num_ranks, self.graph
        stage, e = spec.zero.stage, self.element_bytes
        state_bytes = FP32_BYTES * ((e < FP32_BYTES) + num_moments(self.sharding))
        shares = {
            "parameters": (e, stage == 3, graph.parameters),
            "optimizer": (state_bytes, stage > 0, graph.trained_parameters),
        }
        if self.keeps_gradients:
            shares["gradients"] = (e, stage > 0, graph.trained_parameters)
        for category, (bytes_each, partitioned, parameters) in shares.items():
            sizes = [padded(p.numel, num_ranks) // num_ranks if partitioned else p.numel for p in parameters]
            if spec.runtime.optimisations.defragmentation or category == "optimizer":
                sizes = [sum(sizes)]
            for i, numel in enumerate(sizes):
                yield from take(INIT, f"{category}.states.{i}", numel * bytes_each, category)  # type: ignore[arg-type]
        yield from context(spec)
