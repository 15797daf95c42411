"""Activations of models that are none of ours: so many bytes a sample, as measured, in place of the counts.

They are held by the blocks that backward reaches, in equal parts, each from its forward to its backward.
"""

from dataclasses import replace

from zsim.model.modules import Block, ModelGraph, Module, Operation, Tensor
from zsim.spec import TrainSpec


def with_given_activations(graph: ModelGraph, train: TrainSpec, bytes_per_sample: float) -> ModelGraph:
    """The model with `bytes_per_sample` of activations at the peak, and no tensor of its operators besides."""
    num_reached = sum(block.module.has_gradient for block in graph.blocks)
    share = -(-round(bytes_per_sample * train.micro_batch) // max(1, num_reached))
    head = _emptied(graph.head)
    if not num_reached:
        given = Tensor("given", share)
        held = Operation(writes=(given,), keeps=(given.name,), outputs=(given.name,))
        head = replace(head, saved=(given,), operations=(held,))
    blocks = tuple(_block(layer, block, share) for layer, block in enumerate(graph.blocks))
    return replace(graph, embedding=_emptied(graph.embedding), blocks=blocks, head=head)


def _block(layer: int, block: Block, share: int) -> Block:
    given = (Tensor(f"layer.{layer}:given", share),) if block.module.has_gradient and share else ()
    prologue = _emptied(block.prologue) if block.prologue else None
    return replace(block, module=_emptied(block.module), output="", prologue=prologue, given=given)


def _emptied(module: Module) -> Module:
    children = tuple(_emptied(child) for child in module.children)
    return replace(module, saved=(), input="", operations=(), children=children)
