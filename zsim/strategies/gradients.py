"""Gradients between autograd and the bucket that takes them in."""

from collections.abc import Iterable, Iterator

from zsim.model import Parameter
from zsim.ops import Alloc, Free, Op
from zsim.strategies.sharding import Moment


class LiveGradients:
    """Memory of gradients that autograd has made and nothing has taken over yet."""

    def __init__(self, element_bytes: int) -> None:
        self._element_bytes = element_bytes
        self._buffers: dict[str, str] = {}

    def begin(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """The first part of the gradient exists; a tied weight's further parts are added to it."""
        if parameter.name not in self._buffers:
            buffer = f"gradient.{at.step}.{at.micro}.{parameter.name}"
            self._buffers[parameter.name] = buffer
            nbytes = parameter.numel * self._element_bytes
            yield Alloc(at.key(f"{parameter.name}:gradient"), buffer, nbytes, "gradients", by_operator=True)

    def end(self, at: Moment, parameters: Iterable[Parameter]) -> Iterator[Op]:
        """They have been copied or reduced; those that were copied before have gone already."""
        for parameter in parameters:
            if buffer := self._buffers.pop(parameter.name, None):
                yield Free(at.key(f"{parameter.name}:gradient"), buffer)
