"""What an operator, a module and the engine's hooks cost the host, beside the kernels.

Between two samples megabytes are read and written, as kernels do between two operators of a step: neither the
interpreter's code nor its data are where a loop over nothing else would find them.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from reference.communication import Communicator
from reference.device.recorder import Recorder
from reference.sharding import shard
from reference.sharding.settings import Settings

_FLUSHED_ELEMENTS: Final = 2**20
_WIDTH: Final = 8
_CHAIN: Final = 8
"""Modules one behind the other."""


class Flush:
    """Reads and writes some megabytes; keeps the times between its calls."""

    def __init__(self) -> None:
        self._memory = torch.ones(_FLUSHED_ELEMENTS)
        self._left_s = 0.0
        self.between_s: list[float] = []

    def __call__(self) -> None:
        """What was since the last call is a sample."""
        now_s = time.perf_counter()
        self.between_s.append(now_s - self._left_s)
        self._memory.add_(1.0)
        self._left_s = time.perf_counter()

    def begin(self) -> None:
        """Forgets what was before."""
        self()
        self.between_s.clear()


class _Flushing(torch.autograd.Function):
    """Hands on what it is given; flushes in both directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, flush: Flush) -> Tensor:
        ctx.flush = flush
        flush()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.flush()
        return gradients[0], None


class _FlushingModule(nn.Module):
    def __init__(self, flush: Flush) -> None:
        super().__init__()
        self._flush = flush

    def forward(self, value: Tensor) -> Tensor:
        return _flushed(value, self._flush)


def _flushed(value: Tensor, flush: Flush) -> Tensor:
    found: Tensor = _Flushing.apply(value, flush)  # type: ignore[no-untyped-call]
    return found


def operators(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Of a transformer, too small to take time."""
    shapes = ((_WIDTH, _WIDTH), (_WIDTH,), (_WIDTH,))
    weight, bias, scale = (nn.Parameter(torch.ones(*shape, dtype=dtype, device=device)) for shape in shapes)
    return (
        lambda x: F.linear(x, weight, bias),
        lambda x: F.layer_norm(x, (_WIDTH,), scale, bias),
        F.gelu,
        lambda x: x.softmax(-1),
        lambda x: x * 0.5,
        lambda x: x + bias,
    )


class OperatorCosts:
    """What an operator costs and a module without hooks; a sample is the median of a chain."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flush = Flush()
        self._operators = operators(dtype, device)
        self._value = torch.ones(4, _WIDTH, dtype=dtype, device=device, requires_grad=True)
        self.modules = tuple(_FlushingModule(self._flush) for _ in range(_CHAIN))
        self._bare = nn.Sequential(*self.modules)

    def seconds(self) -> dict[str, float]:
        """Of one round, in both directions."""
        nothing = self.nothing()
        operator = self.through(lambda value: self._operated(value, self._operators))
        module = self.through(self._bare)
        return {
            "op_forward": operator[0] - nothing[0],
            "op_backward": operator[1] - nothing[1],
            "module_call": module[0] - nothing[0],
        }

    def nothing(self) -> tuple[float, float]:
        """Seconds between two flushes with nothing in between, forward and backward."""
        return self.through(lambda value: self._operated(value, [_same] * _CHAIN))

    def through(
        self, chain: Callable[[Tensor], Tensor], backward: Callable[[Tensor], object] = torch.autograd.backward
    ) -> tuple[float, float]:
        """Median seconds between two flushes of a chain, forward and backward."""
        flush = self._flush
        flush.begin()
        last = chain(self._value)
        forward_s = median(flush.between_s[1:])
        flush.begin()
        backward(last.sum())
        self._value.grad = None
        # The first begins with the loss.
        return forward_s, median(flush.between_s[1:])

    def _operated(self, value: Tensor, operators: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        last = _flushed(value, self._flush)
        for operator in operators:
            last = _flushed(operator(last), self._flush)
        return last


class VisitCosts:
    """What a module costs in the hands of the engine, hooks and all."""

    def __init__(self, settings: Settings, communicators: dict[str, Communicator]) -> None:
        self._costs = OperatorCosts(settings.dtype, torch.device("cpu"))
        chain = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *self._costs.modules)
        self._sharded = shard(chain.to(settings.dtype), settings, communicators, Recorder(0))

    def seconds(self) -> dict[str, float]:
        """Of one round, in both directions."""
        nothing = self._costs.nothing()
        hooked = self._costs.through(self._sharded, self._sharded.backward)
        self._sharded.step()
        return {"visit_forward": hooked[0] - nothing[0], "visit_backward": hooked[1] - nothing[1]}

    def close(self) -> None:
        """Ends the engine's threads."""
        self._sharded.close()


def _same(value: Tensor) -> Tensor:
    return value
