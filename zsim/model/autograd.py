"""Which gradients a run computes: layers and what is trained -> modules with the backward that autograd runs.

A gradient reaches a module if the module, or anything in front of it, is trained; within a block the order of the
modules and what each `reads` tell what is in front. Where none reaches there is no backward, no hook and nothing kept;
a frozen weight has no gradient and its linear layer keeps no input for it. A tensor that several modules keep is one:
it belongs to the first of them, which runs last in backward. What a decoder reads of an encoder belongs to its maker.
"""

from typing import NamedTuple

from zsim.model.layers import NO_GRADIENT, Gradient, Layer
from zsim.model.modules import Module, Tensor


class Reached(NamedTuple):
    """A module, whether its output has a gradient, and what it and all below it keep for their backward."""

    module: Module
    has_gradient: bool
    kept: frozenset[Tensor]


def differentiate(
    layer: Layer,
    *,
    input_has_gradient: bool,
    encoded_has_gradient: bool = False,
    kept_elsewhere: frozenset[str] = frozenset(),
) -> Reached:
    """The module of a layer and all below it.

    Args:
        layer: what may be trained of it has been decided.
        input_has_gradient: whether its input has one.
        encoded_has_gradient: whether the output of an encoder has one, which a decoder reads.
        kept_elsewhere: tensors that belong to others already.

    """
    reached = input_has_gradient
    children: list[Module] = []
    kept: frozenset[Tensor] = frozenset()
    for child in layer.children:
        enters = {"sibling": reached, "parent": input_has_gradient, "encoder": encoded_has_gradient}[child.reads]
        module, has_gradient, keeps = differentiate(
            child,
            input_has_gradient=enters,
            encoded_has_gradient=encoded_has_gradient,
            kept_elsewhere=kept_elsewhere | {tensor.name for tensor in kept},
        )
        children.append(module)
        kept |= keeps
        reached = reached or has_gradient
    gradients = _computed(layer, input_has_gradient=input_has_gradient, reached=reached)
    total = sum(gradients, NO_GRADIENT)
    elsewhere = kept_elsewhere | {tensor.name for tensor in kept}
    own = {tensor.name: tensor for tensor in total.keeps if tensor.name not in elsewhere}.values()
    module = Module(
        layer.name,
        layer.parameters,
        layer.forward,
        total.kernels,
        core=layer.core,
        children=tuple(children),
        late_gradients=layer.late_gradients,
        has_gradient=bool(gradients),
        saved=tuple(own),
        forward_scratch_bytes=layer.forward_scratch_bytes,
        backward_scratch_bytes=layer.backward_scratch_bytes,
    )
    return Reached(module, bool(gradients), kept | frozenset(own))


def _computed(layer: Layer, *, input_has_gradient: bool, reached: bool) -> list[Gradient]:
    """Empty where no gradient comes by."""
    weights = [
        gradient for parameter, gradient in zip(layer.parameters, layer.to_weights, strict=True) if parameter.trained
    ]
    if not (input_has_gradient or reached or weights):
        return []
    return [layer.through, *([layer.to_input] if input_has_gradient else []), *weights]
