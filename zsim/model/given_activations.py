"""Activations of models that are none of ours: so many bytes a sample, as measured, in place of the counts.

They are held by the blocks that backward reaches, in equal parts, each from its forward to its backward.
"""

from dataclasses import replace

from zsim.model.modules import Block, ModelGraph, Module, Tensor
from zsim.spec import TrainSpec


def with_given_activations(graph: ModelGraph, train: TrainSpec, bytes_per_sample: float) -> ModelGraph:
    """The model with `bytes_per_sample` of activations at the peak, and nothing that kernels hold while they run."""
    reached = [layer for layer, block in enumerate(graph.blocks) if block.module.has_gradient]
    share = -(-round(bytes_per_sample * train.micro_batch) // max(1, len(reached)))
    blocks = []
    for layer, block in enumerate(graph.blocks):
        # A checkpointed block keeps its input alone, so that is what stands for its part.
        is_checkpointed = train.checkpointing_of(layer) == "full"
        held = 0 if is_checkpointed else share * block.module.has_gradient
        module = replace(_emptied(block.module), saved=_tensors(held))
        prologue = _emptied(block.prologue) if block.prologue else None
        blocks.append(Block(module, share if is_checkpointed else block.input_bytes, prologue))
    head = replace(_emptied(graph.head), saved=() if reached else _tensors(share))
    return replace(graph, embedding=_emptied(graph.embedding), blocks=tuple(blocks), head=head)


def _tensors(nbytes: int) -> tuple[Tensor, ...]:
    return (Tensor("given", nbytes),) if nbytes else ()


def _emptied(module: Module) -> Module:
    children = tuple(_emptied(child) for child in module.children)
    return replace(module, saved=(), forward_scratch_bytes=0, backward_scratch_bytes=0, children=children)
