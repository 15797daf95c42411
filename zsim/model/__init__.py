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

from typing import NamedTuple

from zsim.model.adapters import as_trained
from zsim.model.architectures import architecture_of
from zsim.model.autograd import differentiate
from zsim.model.given_activations import with_given_activations
from zsim.model.layers import ENCODED, BlockLayers, Shape
from zsim.model.modules import Block, Kernels, ModelGraph, Module, Operation, Parameter, Tensor
from zsim.model.recomputation import with_recomputation
from zsim.model.wiring import Wiring
from zsim.model_spec import ModelSpec
from zsim.spec import TrainSpec

__all__ = ["Block", "Kernels", "ModelGraph", "Module", "Operation", "Parameter", "Tensor", "build"]


def build(model: ModelSpec, train: TrainSpec) -> ModelGraph:
    """The modules of a model at one batch shape.

    Raises:
        InputError: a ValueError: `model.lora` or `model.frozen` names nothing, or leaves nothing to train.

    """
    shape = Shape(model, train)
    architecture = as_trained(architecture_of(model)(shape), shape)
    wiring = Wiring()
    embedding = differentiate(architecture.embedding, wiring, input_has_gradient=False)
    stream = Stream(embedding.output, embedding.has_gradient, encoded_has_gradient=False)
    blocks: list[Block] = []
    for number, layers in enumerate(architecture.blocks):
        block, stream = _block(shape, layers, wiring, stream)
        mode = train.checkpointing_of(number)
        blocks.append(with_recomputation(block, model, mode, stops_early=train.checkpoint_early_stop))
    head = differentiate(architecture.head, wiring, stream.tensor, input_has_gradient=stream.has_gradient)
    graph = ModelGraph(embedding.module, tuple(blocks), head.module, compile=model.compile)
    if model.activation_bytes_per_sample:
        return with_given_activations(graph, train, model.activation_bytes_per_sample)
    return graph


class Stream(NamedTuple):
    """What the blocks hand on, whether it has a gradient, and whether what the encoder has handed on has."""

    tensor: str
    has_gradient: bool
    encoded_has_gradient: bool


def _block(shape: Shape, layers: BlockLayers, wiring: Wiring, stream: Stream) -> tuple[Block, Stream]:
    prologue = None
    if layers.prologue:
        encoder = differentiate(layers.prologue.encoder, wiring, stream.tensor, input_has_gradient=stream.has_gradient)
        decoder = differentiate(layers.prologue.decoder, wiring, input_has_gradient=False)
        stream = Stream(decoder.output, decoder.has_gradient, encoder.has_gradient)
        has_gradient = decoder.has_gradient or encoder.has_gradient
        saved = (wiring.behind(ENCODED),) if encoder.has_gradient else ()
        children = (encoder.module, decoder.module)
        prologue = Module("prologue", children=children, has_gradient=has_gradient, saved=saved)
    wiring.enter_block(stream.tensor)
    inner = differentiate(
        layers.layer,
        wiring,
        stream.tensor,
        input_has_gradient=stream.has_gradient,
        encoded_has_gradient=stream.encoded_has_gradient,
        kept_elsewhere=frozenset({wiring.behind(ENCODED).name} if ENCODED in wiring.names else ()),
    )
    block = Block(inner.module, shape.e * shape.n1, inner.output, prologue=prologue)
    return block, stream._replace(tensor=inner.output, has_gradient=inner.has_gradient)
