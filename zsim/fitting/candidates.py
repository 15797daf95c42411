"""What one would try on a given cluster: stages x micro-batches that fit x checkpointing."""

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import product
from typing import Any, Final

from zsim.fitting.limits import largest_micro_batch
from zsim.reading import twins
from zsim.reading.config import Experiment
from zsim.reading.resolution import resolve, variant
from zsim.spec import Spec
from zsim.units import InputError

STAGE: Final = "deepspeed.zero_optimization.stage"
CHECKPOINTING: Final = "train.activation_checkpointing"
MICRO_BATCH: Final = "train.micro_batch"
ACCUMULATION: Final = "train.gradient_accumulation"
MOST_MICRO_BATCHES: Final = 3
"""Of each stage and checkpointing: the largest, then powers of two (or divisors of the total batch) below it."""
BATCH: Final = frozenset({MICRO_BATCH, ACCUMULATION})
_STAGES: Final = (1, 2, 3)

Assignments = dict[str, Any]


def candidates(experiment: Experiment, executor: Executor) -> list[Assignments]:
    """Settings that fit the experiment's cluster, each with the micro-batches that are worth a try.

    Where the DeepSpeed configuration gives a total batch, accumulation keeps it; else accumulation stays and the total
    follows.
    """
    spec = resolve(experiment)
    combinations = list(_combinations(spec))
    largest = executor.map(partial(_largest, experiment), combinations)
    return [
        {**combination, MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
        for combination, most in zip(combinations, largest, strict=True)
        for micro_batch, accumulation in _batches(experiment, spec, most)
    ]


def _combinations(spec: Spec) -> Iterator[Assignments]:
    stages = _STAGES if spec.runtime.framework == "deepspeed" else (None,)
    # Without materialised scores there is nothing that selective checkpointing would save.
    kinds = ("none", "selective", "full") if spec.model.attention == "eager" else ("none", "full")
    for stage, kind in product(stages, kinds):
        yield {STAGE: stage, CHECKPOINTING: kind} if stage is not None else {CHECKPOINTING: kind}


def _largest(experiment: Experiment, combination: Assignments) -> int:
    """The largest micro-batch that fits; 0 if none does, or if the settings do not go together."""
    try:
        return largest_micro_batch(variant(experiment, combination))
    except InputError:
        return 0


def _batches(experiment: Experiment, spec: Spec, most: int) -> list[tuple[int, int]]:
    """Micro-batches up to `most` with their accumulation, the largest first."""
    total = twins.get(experiment.raw, ("deepspeed", "train_batch_size"))
    if isinstance(total, int) and not isinstance(total, bool):
        share = total // spec.cluster.num_ranks
        divisors = [size for size in range(min(most, share), 0, -1) if share % size == 0]
        return [(size, share // size) for size in divisors[:MOST_MICRO_BATCHES]]
    powers = [2**exponent for exponent in reversed(range(most.bit_length())) if 2**exponent < most]
    sizes = [most, *powers] if most else []
    return [(size, spec.train.gradient_accumulation) for size in sizes[:MOST_MICRO_BATCHES]]
