"""What "auto" in a DeepSpeed configuration becomes, by the rules of Hugging Face's Trainer.

Source: transformers 5.24 integrations/deepspeed.py, `trainer_config_process` and `trainer_config_finalize`. What the
Trainer does not fill, DeepSpeed replaces by its default (runtime/config_utils.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from zsim.auto_values import AutoValue
from zsim.imports.deepspeed_keys import ALIASES, SIZES, SWITCHES
from zsim.imports.deepspeed_reading import AUTO
from zsim.imports.deepspeed_sections import PRECISIONS
from zsim.model_spec import ModelSpec
from zsim.spec import TrainSpec, ZeroSpec

HIDDEN_RULES: Final = {
    "reduce_bucket_size": "hidden^2",
    "stage3_prefetch_bucket_size": "0.9 x hidden^2, rounded down",
    "stage3_param_persistence_threshold": "10 x hidden",
}
"""Sizes that follow from the width of the model; in another spelling the Trainer does not see them."""
TRAINER_ARGUMENTS: Final = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Keys that have no part in time or memory -> the argument of the Trainer that fills them."""


def size_of(spelling: str, hidden: int, stage: int) -> int | None:
    """A size of `zero_optimization` that the Trainer works out; None where it leaves that to DeepSpeed."""
    if spelling not in HIDDEN_RULES or (spelling.startswith("stage3_") and stage < 3):
        return None
    values = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    return values[spelling]


def filled(
    config: Mapping[str, Any], zero: ZeroSpec, model: ModelSpec, train: TrainSpec, num_ranks: int
) -> tuple[AutoValue, ...]:
    """Every "auto" of a configuration, with its value in this run and the rule that gave it."""
    return tuple(_filled(path, zero, model, train, num_ranks) for path in _places(config))


def _places(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _places(value, (*above, name))
        elif value == AUTO:
            yield (*above, name)


def _filled(path: tuple[str, ...], zero: ZeroSpec, model: ModelSpec, train: TrainSpec, num_ranks: int) -> AutoValue:
    name = ".".join(path)
    batch = train.micro_batch * train.gradient_accumulation * num_ranks
    batches = {
        "train_micro_batch_size_per_gpu": (train.micro_batch, "train.micro_batch"),
        "gradient_accumulation_steps": (train.gradient_accumulation, "train.gradient_accumulation"),
        "train_batch_size": (
            batch,
            f"{train.micro_batch} (micro-batch) x {train.gradient_accumulation} (accumulation) x {num_ranks} (ranks)",
        ),
    }
    if name in batches:
        return AutoValue(name, *batches[name])
    if path[0] in PRECISIONS and path[1:] == ("enabled",):
        return AutoValue(name, PRECISIONS[path[0]] == train.precision, "train.precision")
    if name in TRAINER_ARGUMENTS:
        return AutoValue(name, None, f"the Trainer's {TRAINER_ARGUMENTS[name]}")
    field_name = ALIASES.get(path[-1], path[-1])
    if path[0] == "zero_optimization" and len(path) == 2 and field_name in {*SIZES, *SWITCHES}:
        return _zero(path[-1], field_name, zero, model)
    return AutoValue(name, None, "left to DeepSpeed, which takes its default")


def _zero(spelling: str, field_name: str, zero: ZeroSpec, model: ModelSpec) -> AutoValue:
    name = f"zero_optimization.{spelling}"
    if size_of(spelling, model.hidden, zero.stage) is not None:
        return AutoValue(name, getattr(zero, field_name), HIDDEN_RULES[spelling])
    rule = "default of the version; the Trainer leaves it to DeepSpeed"
    return AutoValue(name, getattr(zero, field_name, None), rule)
