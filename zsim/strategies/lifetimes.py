"""How long Python holds what a forward pass puts out.

Whoever calls a module holds what it calls it with until it returns; other temporaries go with the last operator that
reads them, or with the module in whose forward a local name holds them. What autograd keeps is another matter.
"""

from collections.abc import Iterator

from zsim.model import Block, ModelGraph, Module, Tensor

Releases = dict[str, tuple[tuple[str, ...], ...]]
"""By module: the memory that Python lets go of behind each of its operations."""


def releases(graph: ModelGraph) -> Releases:
    """Of the whole forward pass; what nobody reads goes at once."""
    last: dict[str, int] = {}
    owners: list[str] = []
    ends: dict[str, int] = {}
    held: list[tuple[str, str]] = []

    def walk(module: Module, callers: tuple[str, ...] = ()) -> None:
        running = (*callers, module.name)
        ends[module.name] = len(owners) - 1
        for operation in module.operations:
            index = len(owners)
            owners.append(module.name)
            last.update(dict.fromkeys((*operation.reads, *(tensor.name for tensor in operation.writes)), index))
            if operation.until:
                # What else an operator writes has no name; one that writes nothing hands on what it reads.
                named = [tensor.name for tensor in operation.writes] or operation.reads
                held.append((named[0], operation.until))
            depth = running.index(operation.within) + 1 if operation.within in running else len(running)
            ends.update(dict.fromkeys(running[:depth], index))
        for child in module.children:
            walk(child, running)
        if module.input:
            last[module.input] = max(last[module.input], ends[module.name])

    for root in _roots(graph):
        walk(root)
    for name, until in held:
        last[name] = max(last[name], ends[until])
    behind: list[list[str]] = [[] for _ in owners]
    for name, index in last.items():
        behind[index].append(name)
    found: dict[str, list[tuple[str, ...]]] = {}
    for owner, names in zip(owners, behind, strict=True):
        found.setdefault(owner, []).append(tuple(names))
    return {owner: tuple(groups) for owner, groups in found.items()}


def kept_memory(graph: ModelGraph) -> dict[str, Tensor]:
    """What any node keeps."""
    operations = [op for root in _roots(graph) for module in root.in_forward_order() for op in module.operations]
    kept = {name for operation in operations for name in operation.keeps}
    return {tensor.name: tensor for operation in operations for tensor in operation.writes if tensor.name in kept}


def read_from_outside(block: Block) -> tuple[str, ...]:
    """The memory that a block is called with: what checkpointing it keeps."""
    operations = [operation for module in block.module.in_forward_order() for operation in module.operations]
    made = {tensor.name for operation in operations for tensor in operation.writes}
    return tuple(dict.fromkeys(name for operation in operations for name in operation.reads if name not in made))


def _roots(graph: ModelGraph) -> Iterator[Module]:
    yield graph.embedding
    for block in graph.blocks:
        if block.prologue:
            yield block.prologue
        yield block.module
    yield graph.head
