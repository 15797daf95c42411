"""What model construction holds, tensor by tensor: phase "load"; and what set-up frees of it again."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from zsim.model import ModelGraph, Parameter
from zsim.ops import Alloc, Free, MemoryCategory, Op
from zsim.spec import Spec
from zsim.strategies.sharding import Moment, padded

LOAD: Final = Moment(0, 0, "load", -1)
INIT: Final = Moment(0, 0, "init", -1)
FP32_BYTES: Final = 4


def context(spec: Spec) -> Iterator[Op]:
    """CUDA's context and the communicators' buffers, outside the caching allocator; there before any tensor."""
    if nbytes := int(spec.cluster.device.context_bytes):
        yield Alloc(LOAD.key("context:alloc"), "context", nbytes, "context")


def take(at: Moment, buffer: str, nbytes: int, category: MemoryCategory) -> Iterator[Op]:
    """One tensor on the default stream; of an empty one nothing is allocated."""
    if nbytes:
        yield Alloc(at.key(f"{buffer}:alloc"), buffer, nbytes, category)


def give(at: Moment, buffer: str, nbytes: int = 1) -> Iterator[Op]:
    """The counterpart of `take`, of as many bytes."""
    if nbytes:
        yield Free(at.key(f"{buffer}:free"), buffer)


def whole(parameter: Parameter) -> str:
    """Buffer of a parameter as it was constructed."""
    return f"parameter.{parameter.name}"


def partition(parameter: Parameter) -> str:
    """Buffer of this rank's part of a parameter (`ds_tensor`)."""
    return f"partition.{parameter.name}"


def load_whole(parameters: Iterable[Parameter], element_bytes: int) -> Iterator[Op]:
    """`module.to(device)`: each parameter by itself, in the type that it has by then."""
    for parameter in parameters:
        yield from take(LOAD, whole(parameter), parameter.numel * element_bytes, "parameters")


def load_fp32(parameters: Iterable[Parameter]) -> Iterator[Op]:
    """The model is constructed on the device, in torch's default type."""
    for parameter in parameters:
        yield from take(LOAD, f"loaded.{parameter.name}", parameter.numel * FP32_BYTES, "parameters")


def cast(parameters: Iterable[Parameter], element_bytes: int) -> Iterator[Op]:
    """`module.half()` on the device: one parameter after the other gets its new type."""
    for parameter in parameters:
        yield from take(INIT, whole(parameter), parameter.numel * element_bytes, "parameters")
        yield from give(INIT, f"loaded.{parameter.name}")


def free_whole(parameters: Iterable[Parameter]) -> Iterator[Op]:
    """They have been copied elsewhere."""
    for parameter in parameters:
        yield from give(INIT, whole(parameter))


def load_partitioned(graph: ModelGraph, num_ranks: int, element_bytes: int) -> Iterator[Op]:
    """`zero.Init`: the parameters of a module are made whole on the device, and partitioned when it is constructed.

    DeepSpeed runtime/zero/partition_parameters.py, `_post_init_method`. So whole tensors that are freed and partitions
    that stay follow each other through the same segments.
    """
    for _, constructed in groupby(graph.parameters, lambda parameter: parameter.name.rpartition(".")[0]):
        together = tuple(constructed)
        yield from load_whole(together, element_bytes)
        for parameter in together:
            yield from make_partition(LOAD, parameter, num_ranks, element_bytes)


def make_partition(at: Moment, parameter: Parameter, num_ranks: int, element_bytes: int) -> Iterator[Op]:
    """`param.partition()` for the first time: the own part is copied, the whole goes."""
    nbytes = padded(parameter.numel, num_ranks) // num_ranks * element_bytes
    yield from take(at, partition(parameter), nbytes, "parameters")
    yield from give(at, whole(parameter))
