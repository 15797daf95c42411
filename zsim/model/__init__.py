"""A transformer as its modules: parameters, GEMMs, bytes, kernels and kept activations of each visit.

Legend: b micro-batch, s sequence length, T = b·s tokens, h hidden, f feed-forward width, a heads, d head dimension,
kv key/value heads, v vocabulary, e bytes of an activation element. N1 = T·h and N2 = b·a·s² elements.

A module is what `nn.Module` is to Hugging Face's models: containers and dropouts are modules too, because ZeRO-3 hooks
every one of them. Kernels that a container launches between its children are booked on the child next to them.
Leaves out: the position-id arithmetic, attention-mask construction, and kernels on tensors smaller than T elements.

`architectures` describes each family, `adapters` what of it is trained, `autograd` the gradients that follow and the
activations that each module saves for them. Over a block these add up to s·b·h·(34 + 5·a·s/h) bytes at two an element
for BERT and GPT-2 (Korthikanti et al. 2022, equation 2, without the attention matrix where it is never stored).
Of the embedding its output counts alone, of the head the logits, in the training precision and in fp32;
what the loss holds beside them while it runs is scratch (`layers.ends`).
"""

from dataclasses import replace
from typing import NamedTuple

from zsim.model.adapters import as_trained
from zsim.model.architectures import ARCHITECTURES
from zsim.model.autograd import differentiate
from zsim.model.given_activations import with_given_activations
from zsim.model.layers import ENCODED, LOG_SOFTMAX, LOGITS, BlockLayers, Gradient, Layer, Shape
from zsim.model.modules import Block, Kernels, ModelGraph, Module, Parameter, Tensor
from zsim.model_spec import ModelSpec
from zsim.spec import TrainSpec

__all__ = ["Block", "Kernels", "ModelGraph", "Module", "Parameter", "Tensor", "build"]


def build(model: ModelSpec, train: TrainSpec) -> ModelGraph:
    """The modules of a model at one batch shape.

    Raises:
        InputError: a ValueError: `model.lora` or `model.frozen` names nothing, or leaves nothing to train.

    """
    shape = Shape(model, train)
    architecture = as_trained(ARCHITECTURES[model.family](shape), shape)
    embedding = differentiate(_keeping_output(shape, architecture.embedding), input_has_gradient=False)
    stream = Stream(embedding.has_gradient, encoded_has_gradient=False)
    blocks: list[Block] = []
    for layers in architecture.blocks:
        block, stream = _block(shape, layers, stream)
        blocks.append(block)
    head = differentiate(architecture.head.keeping(LOGITS, LOG_SOFTMAX), input_has_gradient=stream.has_gradient)
    graph = ModelGraph(embedding.module, tuple(blocks), head.module, compile=model.compile)
    if model.activation_bytes_per_sample:
        return with_given_activations(graph, train, model.activation_bytes_per_sample)
    return graph


def _keeping_output(shape: Shape, embedding: Layer) -> Layer:
    """With its output as all that it keeps."""
    counted = embedding.keeping()
    return replace(
        counted, through=counted.through + Gradient(keeps=(Tensor("embeddings:output", shape.e * shape.n1),))
    )


class Stream(NamedTuple):
    """Whether what the blocks hand on has a gradient, and what the encoder has handed on."""

    has_gradient: bool
    encoded_has_gradient: bool


def _block(shape: Shape, layers: BlockLayers, stream: Stream) -> tuple[Block, Stream]:
    prologue = None
    if layers.prologue:
        encoder = differentiate(layers.prologue.encoder, input_has_gradient=stream.has_gradient)
        decoder = differentiate(layers.prologue.decoder, input_has_gradient=False)
        stream = Stream(decoder.has_gradient, encoder.has_gradient)
        prologue = Module("prologue", children=(encoder.module, decoder.module), has_gradient=any(stream))
    inner = differentiate(
        layers.layer,
        input_has_gradient=stream.has_gradient,
        encoded_has_gradient=stream.encoded_has_gradient,
        kept_elsewhere=frozenset({ENCODED}),
    )
    return Block(inner.module, shape.e * shape.n1, prologue), stream._replace(has_gradient=inner.has_gradient)
