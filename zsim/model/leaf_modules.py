"""Leaf modules of ZeRO-3: a subtree of fine-grained modules is hooked, fetched and released as one.

DeepSpeed runtime/zero/parameter_offload.py, `_set_z3_leaf_modules_by_threshold`: the granularity of a module is its
parameters over the modules with parameters within it and itself; from the top, those at or below the threshold become
leaves. Plain layers and modules of more than 10⁹ parameters never do. Leaves out that a leaf's fetches are not limited.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add
from typing import Final, NamedTuple

from zsim.model.modules import NOTHING, Block, ModelGraph, Module, Operation
from zsim.units import InputError

_LARGEST: Final = 10**9


class WholeModelError(InputError):
    """The threshold leaves nothing to fetch in parts."""


class _Count(NamedTuple):
    """Modules with parameters, and parameters, of a subtree."""

    num_modules: int
    numel: int

    @property
    def granularity(self) -> float:
        """Parameters a module; never reached by the threshold where the subtree is too large."""
        return self.numel // self.num_modules if 0 < self.numel <= _LARGEST else float("inf")


def with_leaf_modules(graph: ModelGraph, threshold: int) -> ModelGraph:
    """The model as its hooks see it.

    Raises:
        WholeModelError: a ValueError: the threshold makes a leaf of the whole model, or of all of its blocks.

    """
    if not threshold:
        return graph
    _check_whole(graph, threshold)
    return replace(
        graph,
        embedding=_merged(graph.embedding, threshold),
        blocks=tuple(_block(block, threshold) for block in graph.blocks),
        head=_merged(graph.head, threshold),
    )


def _check_whole(graph: ModelGraph, threshold: int) -> None:
    blocks = [_count(root) for block in graph.blocks for root in (block.prologue, block.module) if root]
    everything = [*blocks, _count(graph.embedding), _count(graph.head)]
    for counts in (blocks, everything):
        # One module more: the one that holds them.
        whole = _Count(1 + sum(c.num_modules for c in counts), sum(c.numel for c in counts))
        if whole.granularity <= threshold:
            problem = f"with it all {whole.numel:,} parameters are one leaf module, which is not modelled yet"
            raise WholeModelError(f"given {threshold}; {problem}; allowed: below {whole.granularity:.0f}")


def _block(block: Block, threshold: int) -> Block:
    prologue = _merged(block.prologue, threshold) if block.prologue else None
    return replace(block, module=_merged(block.module, threshold), prologue=prologue)


def _count(module: Module) -> _Count:
    own = sum(parameter.numel for parameter in module.parameters)
    counts = [_count(child) for child in module.children]
    numel = own + sum(count.numel for count in counts)
    return _Count(1 + sum(count.num_modules for count in counts) if numel else 0, numel)


def _merged(module: Module, threshold: int) -> Module:
    """The module with every subtree at or below the threshold in one."""
    if not module.children:
        return module
    if _count(module).granularity > threshold:
        return replace(module, children=tuple(_merged(child, threshold) for child in module.children))
    forward, backward = list(module.in_forward_order()), list(module.in_backward_order())
    return Module(
        module.name,
        parameters=tuple(dict.fromkeys(chain.from_iterable(part.parameters for part in forward))),
        forward=reduce(add, (part.forward for part in forward), NOTHING),
        backward=reduce(add, (part.backward for part in backward), NOTHING),
        core=reduce(add, (part.core for part in forward), NOTHING),
        late_gradients=tuple(_late(forward)),
        has_gradient=module.has_gradient,
        num_calls=len(forward),
        saved=tuple(chain.from_iterable(part.saved for part in forward)),
        input=module.input,
        operations=tuple(_within(module.name, forward)),
    )


def _within(name: str, parts: list[Module]) -> Iterator[Operation]:
    """Local names of a part hold until the leaf is through."""
    inner = {part.name for part in parts}
    for part in parts:
        yield from (replace(op, until=name) if op.until in inner else op for op in part.operations)


def _late(parts: list[Module]) -> Iterator[str]:
    """Gradients that no module of the leaf completes."""
    complete = {p.name for part in parts for p in part.parameters if p.name not in part.late_gradients}
    for part in parts:
        yield from (name for name in part.late_gradients if name not in complete)
