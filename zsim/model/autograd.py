"""Which gradients a run computes: layers and what is trained -> modules with the backward that autograd runs.

A gradient reaches a module if the module, or anything in front of it, is trained; within a block the order of the
modules and what each `reads` tell what is in front. Where none reaches there is no backward, no hook and nothing kept;
a frozen weight has no gradient and its linear layer keeps no input for it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from zsim.model.layers import NO_GRADIENT, Gradient, Layer, Tensor
from zsim.model.modules import Module


class Reached(NamedTuple):
    """A module, whether its output has a gradient, and what is kept for its backward."""

    module: Module
    has_gradient: bool
    kept: frozenset[Tensor]


def differentiate(layer: Layer, *, input_has_gradient: bool, encoded_has_gradient: bool = False) -> Reached:
    """The module of a layer and all below it; `encoded_has_gradient` where a decoder reads the output of an encoder."""
    reached = input_has_gradient
    children: list[Module] = []
    kept: set[Tensor] = set()
    for child in layer.children:
        enters = {"sibling": reached, "parent": input_has_gradient, "encoder": encoded_has_gradient}[child.reads]
        module, has_gradient, keeps = differentiate(
            child, input_has_gradient=enters, encoded_has_gradient=encoded_has_gradient
        )
        children.append(module)
        kept |= keeps
        reached = reached or has_gradient
    gradients = _computed(layer, input_has_gradient=input_has_gradient, reached=reached)
    kept |= {tensor for gradient in gradients for tensor in gradient.keeps}
    total = sum(gradients, NO_GRADIENT)
    module = Module(
        layer.name,
        layer.parameters,
        layer.forward,
        total.kernels,
        core=layer.core,
        children=tuple(children),
        late_gradients=layer.late_gradients,
        has_gradient=bool(gradients),
    )
    return Reached(module, bool(gradients), frozenset(kept))


def _computed(layer: Layer, *, input_has_gradient: bool, reached: bool) -> list[Gradient]:
    """Empty where no gradient comes by."""
    weights = [
        gradient for parameter, gradient in zip(layer.parameters, layer.to_weights, strict=True) if parameter.trained
    ]
    if not (input_has_gradient or reached or weights):
        return []
    return [layer.through, *([layer.to_input] if input_has_gradient else []), *weights]


def kept_bytes(kept: Iterable[Tensor]) -> int:
    """Bytes of what is kept, each name once; what a decoder reads of an encoder is counted where it is made."""
    return sum(nbytes for nbytes in {tensor.name: tensor.nbytes for tensor in kept}.values())
