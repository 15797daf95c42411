"""Which gradients a run computes: layers and what is trained -> modules with the backward that autograd runs.

A gradient reaches a module if the module, or anything in front of it, is trained; within a block the order of the
modules and what each `reads` tell what is in front. Where none reaches there is no backward, no hook and nothing kept;
a frozen weight has no gradient and its linear layer keeps no input for it. A tensor that several modules keep is one:
it belongs to the first of them, which runs last in backward. What a decoder reads of an encoder belongs to its maker.
"""

from typing import NamedTuple

from zsim.model.layers import ENCODED, NO_GRADIENT, Gradient, Layer
from zsim.model.modules import Module
from zsim.model.wiring import Wiring


class Reached(NamedTuple):
    """A module, what it puts out and whether that has a gradient, and what it and all below it keep for backward."""

    module: Module
    output: str
    has_gradient: bool
    kept: frozenset[str]


def differentiate(
    layer: Layer,
    wiring: Wiring,
    entry: str = "",
    *,
    input_has_gradient: bool,
    encoded_has_gradient: bool = False,
    kept_elsewhere: frozenset[str] = frozenset(),
) -> Reached:
    """The module of a layer and all below it.

    Args:
        layer: what may be trained of it has been decided.
        wiring: of the model so far.
        entry: the tensor that it is called with; "" for one without a gradient that counts nowhere.
        input_has_gradient: whether its input has one.
        encoded_has_gradient: whether the output of an encoder has one, which a decoder reads.
        kept_elsewhere: tensors that belong to others already.

    """
    trained = [parameter.trained for parameter in layer.parameters]
    keepable = _kept(layer, trained)
    operations, output = wiring.operations(layer.operators, entry, keepable, trained=any(trained))
    reached = input_has_gradient
    children: list[Module] = []
    kept: frozenset[str] = frozenset()
    for child in layer.children:
        enters = {"sibling": reached, "parent": input_has_gradient, "encoder": encoded_has_gradient}[child.reads]
        entries = {"sibling": output, "parent": entry, "encoder": wiring.names.get(ENCODED, "")}
        module, output, has_gradient, keeps = differentiate(
            child,
            wiring,
            entries[child.reads],
            input_has_gradient=enters,
            encoded_has_gradient=encoded_has_gradient,
            kept_elsewhere=kept_elsewhere | kept,
        )
        children.append(module)
        kept |= keeps
        reached = reached or has_gradient
    gradients = _computed(layer, input_has_gradient=input_has_gradient, reached=reached)
    total = sum(gradients, NO_GRADIENT)
    own = dict.fromkeys(name for operation in operations for name in operation.keeps)
    saved = tuple(wiring.tensors[name] for name in own if name not in kept_elsewhere | kept)
    module = Module(
        layer.name,
        layer.parameters,
        layer.forward,
        total.kernels,
        core=layer.core,
        children=tuple(children),
        late_gradients=layer.late_gradients,
        has_gradient=bool(gradients),
        saved=saved,
        input=wiring.memory.get(entry, "") if layer.is_called else "",
        operations=operations,
    )
    return Reached(module, output, bool(gradients), kept | frozenset(own))


def _kept(layer: Layer, trained: list[bool]) -> set[str]:
    """Names of what its nodes keep where every gradient but those of frozen parameters is computed."""
    weights = [gradient for gradient, is_trained in zip(layer.to_weights, trained, strict=True) if is_trained]
    return {tensor.name for gradient in (layer.through, layer.to_input, *weights) for tensor in gradient.keeps}


def _computed(layer: Layer, *, input_has_gradient: bool, reached: bool) -> list[Gradient]:
    """Empty where no gradient comes by."""
    weights = [
        gradient for parameter, gradient in zip(layer.parameters, layer.to_weights, strict=True) if parameter.trained
    ]
    if not (input_has_gradient or reached or weights):
        return []
    return [layer.through, *([layer.to_input] if input_has_gradient else []), *weights]
