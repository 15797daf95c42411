"""Operators of layers -> operations of modules: whose memory each reads, which gradients its node makes.

Layers are met in the order of forward. A tensor has a gradient if an operator made it that reads one with a gradient or
has trained parameters; a view has a gradient of its own, but no memory.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from zsim.model.layers.operators import INPUT, PREVIOUS, STREAM, Operator
from zsim.model.modules import Operation, Tensor


@dataclass(slots=True)
class Wiring:
    """The tensors that the layers so far have made."""

    names: dict[str, str] = field(default_factory=dict)
    """The tensor behind each name by which one is read or kept."""
    memory: dict[str, str] = field(default_factory=dict)
    """Whose memory each tensor is."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By their own names."""
    differentiable: set[str] = field(default_factory=set)
    """Tensors with a gradient."""

    def behind(self, name: str) -> Tensor:
        """The tensor whose memory is read under a name."""
        return self.tensors[self.memory[self.names[name]]]

    def enter_block(self, tensor: str) -> None:
        """The residual stream of a block begins with what the block is called with."""
        self.names[STREAM] = tensor

    def operations(
        self, operators: tuple[Operator, ...], entry: str, kept: Collection[str], *, trained: bool
    ) -> tuple[tuple[Operation, ...], str]:
        """Of one module, and the tensor that it puts out.

        Args:
            operators: of its layer.
            entry: the tensor that it is called with.
            kept: names of what its nodes keep at most.
            trained: whether a parameter of its own has a gradient.

        """
        self.names[INPUT] = self.names[PREVIOUS] = entry
        found: list[Operation] = []
        for operator in operators:
            reads = [self.names[name] for name in operator.reads]
            for name, tensor in zip(operator.binds, reads, strict=False):
                if name:
                    self.names[name] = tensor
            output = reads[0] if reads else ""
            if operator.writes or operator.views:
                output = self._made(operator, reads)
                found.append(self._operation(operator, reads, kept, trained=trained))
            elif operator.until and output:
                found.append(Operation(reads=(self.memory[output],), until=operator.until))
            self.names[PREVIOUS] = output
            if operator.named:
                self.names[operator.named] = output
            if operator.continues_stream:
                self.names[STREAM] = output
        return tuple(found), self.names[PREVIOUS]

    def _made(self, operator: Operator, reads: list[str]) -> str:
        """Notes what an operator makes; the tensor that it puts out."""
        for tensor in operator.writes:
            self.memory[tensor.name] = tensor.name
        for tensor in operator.views:
            self.memory[tensor.name] = self.memory[reads[0]]
        for tensor in (*operator.views, *operator.writes):
            self.names[tensor.name] = tensor.name
            self.tensors[tensor.name] = tensor
        return (*operator.views, *operator.writes)[0].name

    def _operation(self, operator: Operator, reads: list[str], kept: Collection[str], *, trained: bool) -> Operation:
        with_gradient = [tensor for tensor in reads if tensor in self.differentiable]
        has_weights = trained and operator.has_weights
        has_gradient = bool(with_gradient) or has_weights
        outputs = tuple(tensor.name for tensor in (*operator.views, *operator.writes)) if has_gradient else ()
        self.differentiable.update(outputs)
        keeps = dict.fromkeys(self.memory[self.names[name]] for name in operator.keeps if name in kept and has_gradient)
        gradients = tuple(self.tensors[name] for name in with_gradient)
        return Operation(
            writes=operator.writes,
            reads=tuple(
                self.memory[tensor] for tensor in (*reads, *map(self.names.__getitem__, operator.needs)) if tensor
            ),
            keeps=tuple(keeps),
            outputs=outputs,
            gradients=() if operator.hands_on else gradients,
            handed_on=gradients if operator.hands_on else (),
            gives_views=operator.flattens,
            scratch_bytes=operator.scratch_bytes if has_gradient else (),
            writes_weights=has_weights,
            core=operator.core,
            until=operator.until,
            within=operator.within,
        )
