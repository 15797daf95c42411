"""Gradients between autograd and what takes them in: a bucket, a flat gradient, the optimizer."""

from collections.abc import Iterable, Iterator

from zsim.model import Parameter
from zsim.ops import COMPUTE, Alloc, Free, Op, Record
from zsim.strategies.sharding import Moment, Sharding


class LiveGradients:
    """Memory of gradients that autograd has made and nothing has taken over yet, one tensor each."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._buffers: dict[str, str] = {}
        self._added: dict[str, str] = {}
        """What this micro-batch adds to those of earlier ones, while it is not complete."""

    def begin(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """Autograd has written it, or of a tied weight what one place gives; the other's is added to that and goes."""
        name, what = parameter.name, f"{parameter.name}:gradient"
        buffer = f"gradient.{at.step}.{at.micro}.{name}"
        first = name not in self._buffers
        if not first and self._sharding.spec.runtime.framework == "reference":
            return
        has_part = buffer in {self._buffers.get(name), self._added.get(name)}
        if has_part:
            buffer = f"{buffer}.tied"
        nbytes = parameter.numel * self._sharding.element_bytes
        yield Alloc(at.key(what), buffer, nbytes, "gradients", by_operator=True)
        if has_part:
            yield Free(at.key(what), buffer, by_operator=True)
        else:
            (self._buffers if first else self._added)[name] = buffer

    def complete(self, at: Moment, parameter: Parameter) -> Iterator[Op]:
        """It is added to that of earlier micro-batches, if there is one (`AccumulateGrad`)."""
        if buffer := self._added.pop(parameter.name, None):
            yield Free(at.key(f"{parameter.name}:gradient.add"), buffer, by_operator=True)

    def end(self, at: Moment, parameters: Iterable[Parameter], used_on: str = COMPUTE) -> Iterator[Op]:
        """They have been copied or reduced; those that were copied before have gone already.

        Where another lane than that of autograd used them (`record_stream`), their memory waits for it.
        """
        for parameter in parameters:
            if buffer := self._buffers.pop(parameter.name, None):
                event = None
                if used_on != COMPUTE:
                    event = self._sharding.new_event()
                    yield Record(at.key(f"{parameter.name}:gradient.record_stream"), used_on, event)
                yield Free(at.key(f"{parameter.name}:gradient"), buffer, event)
