"""The operators of a model's forward and backward, each timed where autograd calls it.

Operands, layouts, sizes and what caches hold of them are those of training: a pass runs every operator once, so none
finds its operands where a loop of its own would have left them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reference.calibration.clock import Clock, CoreClock, clock
from reference.model import build
from reference.training.data import DataSettings, batch
from zsim.spec import Spec

PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
ATTENTION: Final = "scaled_dot_product"
"""In the names of all kernels of `scaled_dot_product_attention`, forward and backward."""
FEW_LAYERS: Final = 2
"""That are run; the others are like the last of them."""

_TINY, _FLOOR_CALLS = 8, 50

Kind = Literal["product", "attention", "kernel"]
Phase = Literal["forward", "backward"]
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward")


class Operator(NamedTuple):
    """One operator as autograd calls it; the same one has the same time."""

    phase: Phase
    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Of its tensors."""

    @property
    def kind(self) -> Kind:
        """What the simulator counts it as."""
        if ATTENTION in self.name:
            return "attention"
        return "product" if self.name in PRODUCTS else "kernel"


class Watch(TorchDispatchMode):
    """Times every operator within; calls of `phase` tell forward from backward."""

    def __init__(self, timer: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.operators: list[Operator] = []
        self._timer = timer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        self._timer.start()
        found = func(*args, **(kwargs or {}))
        self._timer.stop()
        shapes = tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))
        self.operators.append(Operator(self.phase, func.overloadpacket.__name__, shapes))
        return found


class Passes:
    """Forward and backward of an experiment's model, cut to a few of its layers, in one precision."""

    def __init__(self, spec: Spec, dtype: torch.dtype, device: torch.device) -> None:
        self._timer = clock(device)
        self._batch = tuple(tensor.to(device) for tensor in batch(DataSettings.of(spec), 0, 0, 0))
        layers = spec.model.num_layers
        one, few = (
            build(replace(spec.model, num_layers=number), dtype=dtype, device=device)
            for number in (1, min(FEW_LAYERS, layers))
        )
        of_one, of_few = ([operator for operator, _ in self._run(model)] for model in (one, few))
        self._counts = whole_counts(of_one, of_few, layers)
        self._model = few
        self._few = torch.ones(_TINY, device=device)

    def seconds(self) -> dict[tuple[Phase, Kind], float]:
        """Of one pass of the whole model, by phase and kind, without what any operator costs its host."""
        floor_s = self.floor_s()
        times: dict[Operator, list[float]] = {}
        for operator, taken in self._run(self._model):
            times.setdefault(operator, []).append(max(0.0, taken - floor_s))
        found: dict[tuple[Phase, Kind], float] = {}
        for operator, samples in times.items():
            place = operator.phase, operator.kind
            found[place] = found.get(place, 0.0) + self._counts[operator] * fmean(samples)
        return found

    def floor_s(self) -> float:
        """Of an operator without work: on a core all of it is its host's, on a stream the two events are left."""
        if isinstance(self._timer, CoreClock):
            return self.tiny_s()
        self._timer.prepare()
        for _ in range(_FLOOR_CALLS):
            self._timer.start()
            self._timer.stop()
        return median(self._timer.samples())

    def tiny_s(self) -> float:
        """Of an operator on a handful of elements."""
        return median(taken for _, taken in watched(self._timer, self._tiny))

    def _run(self, model: torch.nn.Module) -> list[tuple[Operator, float]]:
        found = watched(self._timer, lambda: model(*self._batch), backward=True)
        # As behind a step: gradients are made anew, not added to.
        model.zero_grad(set_to_none=True)
        return found

    def _tiny(self) -> Tensor:
        value = self._few
        for _ in range(_FLOOR_CALLS):
            value = torch.neg(self._few)
        return value


def watched(timer: Clock, run: Callable[[], Tensor], *, backward: bool = False) -> list[tuple[Operator, float]]:
    """Seconds of each operator of a call, and of the backward of the scalar that it returns."""
    timer.prepare()
    with Watch(timer) as watch:
        found = run()
        if backward:
            watch.phase = "backward"
            found.backward()
    return list(zip(watch.operators, timer.samples(), strict=True))


def whole_counts(one: Sequence[Operator], few: Sequence[Operator], num_layers: int) -> Counter[Operator]:
    """How often a model of many layers calls each operator, from the calls of one with one layer and one with two."""
    counts = Counter(few)
    if num_layers > FEW_LAYERS:
        layer = Counter(few)
        layer.subtract(Counter(one))
        for operator, more in layer.items():
            counts[operator] += (num_layers - FEW_LAYERS) * more
    return counts
