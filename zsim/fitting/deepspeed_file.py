"""A resolved experiment -> the DeepSpeed configuration that runs it: every value explicit, no key that zsim made up.

What the user's own configuration says beside stage, sizes, batch and precision (optimizer, clipping, scheduler,
logging) stays as it was written, comments aside.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any, Final

from zsim.imports import deepspeed_keys as keys
from zsim.imports import deepspeed_sections as sections
from zsim.imports.deepspeed_reading import AUTO
from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.resolution import resolve
from zsim.reading.runtime import open_runtime
from zsim.spec import Spec, ZeroSpec

_SPELLINGS: Final = {field_name: spelling for spelling, field_name in keys.ALIASES.items()}
"""Field -> its name in configuration files, where the two differ."""


def deepspeed_config(experiment: Experiment) -> dict[str, Any]:
    """The configuration of an experiment.

    Raises:
        InputError: a ValueError: it does not run on DeepSpeed.

    """
    spec = resolve(experiment)
    check_reads_configuration(experiment)
    grammar = open_runtime(experiment.settings.runtime, experiment.base, experiment.where("runtime")).grammar
    written = _kept(experiment.settings.deepspeed or {})
    train = spec.train
    return {
        "train_batch_size": train.micro_batch * train.gradient_accumulation * spec.cluster.num_ranks,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.gradient_accumulation,
        **_precision(written, spec),
        "zero_optimization": _zero(written.pop("zero_optimization", None), spec, grammar),
        **{name: value for name, value in written.items() if name not in {*sections.BATCH, *sections.PRECISIONS}},
    }


def check_reads_configuration(experiment: Experiment, runtimes: Sequence[str] = ()) -> None:
    """Some runtime that a row may have runs on DeepSpeed.

    Args:
        experiment: what the rows are variants of.
        runtimes: those of an axis, names or paths; by default that of the experiment.

    Raises:
        InputError: a ValueError: none of them does.

    """
    where = experiment.where("runtime")
    opened = [open_runtime(name, experiment.base, where) for name in runtimes or (experiment.settings.runtime,)]
    if not any(runtime.framework == "deepspeed" for runtime in opened):
        names = " and ".join(runtimes or (experiment.settings.runtime,))
        verb = "reads" if len(opened) == 1 else "read"
        raise InputError(f"{where}: {names} {verb} no DeepSpeed configuration; allowed: a deepspeed runtime")


def left_to_the_trainer(config: Mapping[str, Any], above: str = "") -> list[str]:
    """Dotted keys that are still "auto": learning rates and the like, which no part of a prediction decides."""
    found = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += left_to_the_trainer(value, f"{above}{name}.")
        elif value == AUTO:
            found.append(f"{above}{name}")
    return found


def _kept(written: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys without comments and without what present DeepSpeed refuses, which is off in any case."""
    config = {
        name: deepcopy(value)
        for name, value in written.items()
        if not name.startswith(("_", "//")) and name not in keys.REMOVED_SECTIONS_IN_0_19
    }
    if "fp32_allreduce" in config and config.pop("fp32_allreduce") is True:
        config.setdefault("communication_data_type", "fp32")
    return config


def _precision(written: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """Both sections, one of them enabled; their further keys stay."""
    found: dict[str, Any] = {}
    for name in ("bf16", "fp16"):
        section = written.get(name) or (written.get("bfloat16") if name == "bf16" else None) or {}
        kept = {key: value for key, value in section.items() if value != AUTO}
        found[name] = {**kept, "enabled": spec.train.precision == name}
    return found


def _zero(written: object, spec: Spec, grammar: keys.Grammar) -> dict[str, Any]:
    """What belongs to the stage, and what the user gave for another, under the names that all versions know."""
    given = _given(written) if isinstance(written, dict) else {}
    other_stages = keys.ONLY_STAGE_1_2 if spec.zero.stage == 3 else keys.ONLY_STAGE_3
    found: dict[str, Any] = {}
    for field in fields(ZeroSpec):
        spelling, value = _SPELLINGS.get(field.name, field.name), getattr(spec.zero, field.name)
        # The newest release refuses these even where they are off.
        is_off = field.name in keys.REMOVED_IN_0_19 and value == field.default
        if spelling in grammar.zero and not is_off and (field.name not in other_stages or field.name in given):
            found[spelling] = value
    multi_rank = "use_multi_rank_bucket_allreduce"
    if multi_rank in given or (spec.zero.stage in {1, 2} and multi_rank in grammar.zero):
        found[multi_rank] = spec.runtime.optimisations.multi_rank_all_reduce
    known = keys.GRAMMARS["2026"].zero
    for name, value in given.items():
        spelling = _SPELLINGS.get(name, name)
        if spelling not in found and spelling in known and value not in (None, AUTO):
            found[spelling] = value
    return found


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys under the fields' own names, old ones under their present name."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        present = keys.RENAMED.get(name, name)
        # The old switches of offload are off; a switch is no section.
        if present not in keys.OFFLOAD_SECTIONS or isinstance(value, dict):
            found[keys.ALIASES.get(present, present)] = value
    return found
