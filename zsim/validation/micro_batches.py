"""Steps of many micro-batches by steps of few: the middle ones are alike, so each adds the same.

A micro-batch between the first and the last reduction finds the same buffers and the same queues as the one before it;
from the third on, a step grows by the same amount to the last digit (tests/test_validation_micro_batches.py). Where the
allocator gives memory back that need not be so, and the whole step is simulated.

Left out: what the allocator's cache still grows by behind the fourth micro-batch, one segment in ten where tensors wait
for other streams.
"""

from dataclasses import fields, replace
from typing import Final

from zsim.pipeline import simulate
from zsim.spec import Spec
from zsim.validation.conventions import Prediction, prediction

FEW: Final = 3
"""Of micro-batches: the first, the last, and one in the middle."""
_WORTH_IT: Final = 2 * FEW + 2
"""From here on two short steps are quicker than the whole one."""
_GROWING: Final = frozenset(
    {"step_time_s", "forward_s", "backward_s", "model_flop", "hardware_flop", "tokens_per_gpu", "samples_per_gpu"}
)


def predicted(spec: Spec) -> Prediction:
    """What an experiment comes to.

    Raises:
        ValueError: the experiment cannot be run.

    """
    number = spec.train.gradient_accumulation
    if number < _WORTH_IT or spec.noise.differs:
        return prediction(spec, simulate(spec).metrics)
    few, more = (_with(spec, each) for each in (FEW, FEW + 1))
    found, next_found = simulate(few), simulate(more)
    if next_found.metrics.num_alloc_retries:
        return prediction(spec, simulate(spec).metrics)
    return _continued(prediction(few, found.metrics), prediction(more, next_found.metrics), number)


def _with(spec: Spec, number: int) -> Spec:
    return replace(spec, train=replace(spec.train, gradient_accumulation=number))


def _continued(found: Prediction, next_found: Prediction, number: int) -> Prediction:
    """A line through two steps, at `number` micro-batches."""
    values = {}
    for field in fields(Prediction):
        last = getattr(next_found, field.name)
        if field.name in _GROWING:
            last += (number - FEW - 1) * (last - getattr(found, field.name))
        values[field.name] = last
    return Prediction(**values)
