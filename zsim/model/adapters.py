"""What is trained of a model: low-rank adapters beside frozen linear layers, and parameters frozen by name.

LoRA (Hu et al. 2021) as PEFT builds it: `lora.Linear` holds `base_layer`, `lora_dropout`, `lora_A` and `lora_B`; only
the latter two are trained. Its result is base + B(A(dropout(x)))·scale, with the product and the sum as kernels of
their own. Adapters have the precision of training: DeepSpeed casts them, where PEFT by itself would keep fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from zsim.model.layers import (
    NO_GRADIENT,
    Architecture,
    BlockLayers,
    Gradient,
    Layer,
    Operator,
    Prologue,
    Shape,
    Tensor,
    container,
    dropout,
    elementwise,
    linear,
)
from zsim.model.layers.operators import PREVIOUS
from zsim.model.modules import Kernels
from zsim.model_spec import LoraSpec
from zsim.units import InputError

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output head."""


class UntrainableError(InputError):
    """`model.lora` or `model.frozen` names nothing, or leaves nothing to train; `keys` says which of them is wrong."""

    def __init__(self, keys: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{'.'.join(keys)}: {problem}")
        self.keys = keys
        self.problem = problem


def as_trained(architecture: Architecture, shape: Shape) -> Architecture:
    """The model with its adapters, and with every parameter trained or not.

    Raises:
        UntrainableError: a target or pattern that names nothing, or nothing left to train.

    """
    lora, frozen = shape.model.lora, shape.model.frozen
    if lora.rank:
        _check_targets(architecture, lora)
        architecture = _mapped(architecture, lambda layer: _adapted(shape, layer, lora))
    if frozen:
        names = {parameter.name for layer in _layers(architecture) for parameter in layer.parameters}
        for pattern in frozen:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:3])
                raise UntrainableError(("model", "frozen"), f"{pattern!r} names no parameter; names are like {some}")
        architecture = _mapped(architecture, lambda layer: _frozen(layer, frozen))
        if not any(parameter.trained for layer in _layers(architecture) for parameter in layer.parameters):
            raise UntrainableError(("model", "frozen"), "nothing is left to train")
    return architecture


def _layers(architecture: Architecture) -> Iterator[Layer]:
    def walk(layer: Layer) -> Iterator[Layer]:
        yield layer
        for child in layer.children:
            yield from walk(child)

    yield from walk(architecture.embedding)
    for block in architecture.blocks:
        for root in block.roots:
            yield from walk(root)
    yield from walk(architecture.head)


def _mapped(architecture: Architecture, change: Callable[[Layer], Layer]) -> Architecture:
    """Every layer changed, children first."""

    def walk(layer: Layer) -> Layer:
        return change(replace(layer, children=tuple(walk(child) for child in layer.children)))

    return Architecture(
        walk(architecture.embedding),
        tuple(
            BlockLayers(
                walk(block.layer),
                Prologue(walk(block.prologue.encoder), walk(block.prologue.decoder)) if block.prologue else None,
            )
            for block in architecture.blocks
        ),
        walk(architecture.head),
    )


def _frozen(layer: Layer, patterns: tuple[str, ...]) -> Layer:
    parameters = tuple(
        replace(parameter, trained=False)
        if any(fnmatchcase(parameter.name, pattern) for pattern in patterns)
        else parameter
        for parameter in layer.parameters
    )
    return replace(layer, parameters=parameters)


def _check_targets(architecture: Architecture, lora: LoraSpec) -> None:
    known = {layer.name.rpartition(".")[2] for layer in _layers(architecture) if layer.features}
    for target in lora.targets:
        if target != ALL_LINEAR and not any(_is_target(layer, (target,)) for layer in _layers(architecture)):
            allowed = ", ".join(sorted(known))
            raise UntrainableError(
                ("model", "lora", "targets"), f"{target!r} names no linear layer; allowed: {ALL_LINEAR}, {allowed}"
            )


def _is_target(layer: Layer, targets: tuple[str, ...]) -> bool:
    """Its name, or the end of it behind a dot; the decoder of the head is no linear layer of ours."""
    return layer.features is not None and any(
        target in {ALL_LINEAR, layer.name} or layer.name.endswith(f".{target}") for target in targets
    )


def _adapted(shape: Shape, layer: Layer, lora: LoraSpec) -> Layer:
    """The layer frozen; a target inside a container with its adapter."""
    frozen = _frozen(layer, ("*",))
    if not _is_target(layer, lora.targets) or layer.features is None:
        return frozen
    n_in, n_out = layer.features
    name, e, tokens = layer.name, shape.e, shape.tokens
    base = replace(
        frozen,
        name=f"{name}.base_layer",
        parameters=tuple(
            replace(parameter, name=parameter.name.replace(name, f"{name}.base_layer"))
            for parameter in frozen.parameters
        ),
        reads="sibling",
    )
    first = next(i for i, operator in enumerate(layer.operators) if operator.has_weights)
    before, multiplied, behind = layer.operators[:first], layer.operators[first], layer.operators[first + 1 :]
    base = replace(base, operators=(*before, multiplied), through=NO_GRADIENT)
    # Base and adapter read one input: two gradients of it are added.
    joined = Gradient(Kernels((), 3 * e * tokens * n_in, 1))
    dropped = dropout(shape, f"{name}.lora_dropout.default", tokens * n_in, active=lora.dropout)
    # With dropout the adapter keeps an input of its own, without it that of the base layer.
    kept_as = f"{name}.lora_dropout.default:output" if lora.dropout else _input_name(layer)
    down = linear(shape, f"{name}.lora_A.default", n_in, lora.rank, bias=False, kept_as=kept_as)
    up = linear(shape, f"{name}.lora_B.default", lora.rank, n_out, bias=False)
    output = e * tokens * n_out
    scaled_and_added = elementwise(5 * output, 2 * output, 2, 1).running(
        Operator((Tensor(f"{name}:scaled", output),)),
        Operator((Tensor(f"{name}:added", output),), reads=(multiplied.writes[0].name, PREVIOUS), hands_on=True),
        *behind,
    )
    # What runs behind the layer runs behind the sum.
    scaled_and_added = replace(scaled_and_added, backward=scaled_and_added.backward + layer.through)
    return replace(
        container(
            name,
            base,
            _reading(replace(dropped, to_input=dropped.to_input + joined).on_parents_input(), _input_name(layer)),
            down if lora.dropout else _reading(down.on_parents_input(), _input_name(layer)),
            up.followed_by(scaled_and_added),
        ),
        reads=layer.reads,
    )


def _reading(layer: Layer, name: str) -> Layer:
    """Its first operator reads what the base layer multiplies, which another operator may have put in front of it."""
    return replace(
        layer, operators=tuple(replace(op, reads=(name,)) if i == 0 else op for i, op in enumerate(layer.operators))
    )


def _input_name(layer: Layer) -> str:
    """The name of the activation that the weight's gradient would keep."""
    return layer.to_weights[0].keeps[0].name
