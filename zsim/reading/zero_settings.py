"""`zero_optimization` with nothing left open: file, "auto" rules, defaults of the version, and what has no effect."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal

from zsim.cpu_spec import CpuClusterSpec
from zsim.imports import deepspeed_keys as keys
from zsim.imports.deepspeed_config import DeepSpeedConfig, parse
from zsim.imports.deepspeed_reading import AUTO, Reader, whole
from zsim.imports.deepspeed_zero import other_stage
from zsim.model_spec import ModelSpec
from zsim.reading.autos import size_of
from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.hardware import aligned_sizes
from zsim.reading.runtime import Runtime
from zsim.spec import ClusterSpec, Optimisations, ZeroSpec
from zsim.units import shown

Precision = Literal["bf16", "fp16", "fp32"]

_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class ResolvedZero:
    """The settings, the configuration they come from (None without one), and what to tell the user."""

    spec: ZeroSpec
    config: DeepSpeedConfig | None
    multi_rank_all_reduce: bool | None
    """Of the configuration; None where it leaves that to the version."""
    warnings: tuple[str, ...]


def resolve_zero(
    experiment: Experiment, runtime: Runtime, optimisations: Optimisations, model: ModelSpec
) -> ResolvedZero:
    """Fill every setting of `zero_optimization`."""
    raw, where = experiment.settings.deepspeed, partial(experiment.where, "deepspeed")
    if raw is None and runtime.framework == "deepspeed":
        raise InputError(f"{experiment.where('deepspeed')} is missing; {experiment.settings.runtime} needs one")
    reader = _reader(experiment, runtime)
    config = parse(raw, reader) if raw is not None else None
    stage = config.stage if config else 0
    if runtime.framework == "ddp" and stage:
        place = where("zero_optimization", "stage")
        raise InputError(
            f"{place}: given {stage}; allowed: 0 with {experiment.settings.runtime}, or a deepspeed runtime"
        )
    values: dict[str, Any] = {"stage": stage}
    for name in (field.name for field in fields(ZeroSpec)):
        if name != "stage":
            by_trainer = size_of(_spelling(name, experiment), model.hidden, stage)
            values[name] = _value(name, config, runtime, stage, by_trainer)
    spec = ZeroSpec(**values)
    warnings = list(config.notes) if config else []
    if config:
        warnings += _strangers(config, spec)
        warnings += _without_effect(config, runtime, optimisations, experiment, reader)
    multi_rank = config.switches.get("use_multi_rank_bucket_allreduce") if config else None
    return ResolvedZero(spec, config, multi_rank if isinstance(multi_rank, bool) else None, tuple(warnings))


def check_groups(zero: ZeroSpec, cluster: ClusterSpec | CpuClusterSpec, experiment: Experiment) -> None:
    """Groups of hpZ and MiCS: as DeepSpeed demands them, and alike on all nodes.

    Raises:
        InputError: a ValueError: a size that does not divide the ranks or lies askew of the nodes, or both of them.

    """
    where = partial(experiment.where, "deepspeed", "zero_optimization")
    if zero.is_mics and zero.has_secondary_partition:
        raise InputError(f"{where('zero_hpz_partition_size')}: given with mics_shard_size; allowed: one of them")
    if zero.has_secondary_partition and zero.zero_hpz_partition_size < cluster.num_ranks:
        _check_group_size(zero.zero_hpz_partition_size, cluster, where("zero_hpz_partition_size"))
    if zero.is_mics:
        _check_group_size(zero.mics_shard_size, cluster, where("mics_shard_size"))
        if zero.mics_hierarchical_params_gather and zero.mics_shard_size <= cluster.gpus_per_node:
            place = where("mics_hierarchical_params_gather")
            raise InputError(
                f"{place}: given true, but mics_shard_size {zero.mics_shard_size} lies within a node of"
                f" {cluster.gpus_per_node} GPUs; allowed: false, or shards of several nodes"
            )


def _check_group_size(size: int, cluster: ClusterSpec | CpuClusterSpec, where: str) -> None:
    ranks, gpus = cluster.num_ranks, cluster.gpus_per_node
    sizes = aligned_sizes(ranks, gpus)
    if size not in sizes:
        listed = ", ".join(map(str, sizes))
        raise InputError(
            f"{where}: given {size}; allowed: {listed}"
            f" (divisors of {ranks} ranks that do not lie askew of {gpus} a node)"
        )


def _fixed(runtime: Runtime, stage: int) -> dict[str, bool]:
    """Switches that a version takes as they are here at a stage, whatever it is given."""
    found: dict[str, bool] = runtime.fixed.get(str(stage), {})
    return found


def _reader(experiment: Experiment, runtime: Runtime) -> Reader:
    return Reader(
        where=partial(experiment.where, "deepspeed"),
        runtime=str(runtime.document.data["runtime"]),
        grammar=runtime.grammar,
        is_ours=partial(experiment.places.is_ours, "deepspeed"),
    )


def _strangers(config: DeepSpeedConfig, spec: ZeroSpec) -> list[str]:
    """Keys that the version ignores, with what is in effect instead of them."""
    lines = []
    for stranger in config.strangers:
        name = keys.ALIASES.get(stranger.meant, stranger.meant)
        value = getattr(spec, name, None) if name in {"stage", *keys.SIZES, *keys.SWITCHES} else None
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()
        lines.append(stranger.note + (f" It is {text} in this run" if value is not None else ""))
    return lines


def _value(
    name: str, config: DeepSpeedConfig | None, runtime: Runtime, stage: int, by_trainer: int | None
) -> int | bool:
    """From the file, from the Trainer for an "auto" that it fills, else the default."""
    if name in _fixed(runtime, stage):
        return _fixed(runtime, stage)[name]
    given = config.sizes.get(name, config.switches.get(name)) if config else None
    if stage == 1 and name in runtime.grammar.off_in_stage_1:
        return False
    if given == AUTO and by_trainer is not None:
        return by_trainer
    if given is not None and given != AUTO:
        return given
    return _default(name, runtime, stage)


def _default(name: str, runtime: Runtime, stage: int) -> int | bool:
    own = runtime.defaults.get(name)
    where = runtime.document.where("defaults", name)
    if isinstance(own, dict):
        where, own = runtime.document.where("defaults", name, str(stage)), own.get(str(stage))
    if own is None:
        return keys.SIZES[name][0] if name in keys.SIZES else keys.SWITCHES[name]
    if name in keys.SIZES:
        return whole(own, where, keys.SIZES[name][1], 10**15)
    if not isinstance(own, bool):
        raise InputError(f"{where}: given {shown(own)}; allowed: true or false")
    return own


def _without_effect(
    config: DeepSpeedConfig, runtime: Runtime, optimisations: Optimisations, experiment: Experiment, reader: Reader
) -> list[str]:
    """A line for each setting of the file that changes nothing in this run."""
    reasons: dict[str, str] = {}
    broken = experiment.settings.optimisations.get("broken_trace", optimisations.broken_trace)
    gather_form = experiment.settings.optimisations.get("parameter_gather_form", optimisations.parameter_gather_form)
    for name in sorted(config.given):
        if runtime.framework == "ddp":
            reasons[name] = "DistributedDataParallel has buckets of its own"
        elif reason := other_stage(name, config.stage, reader):
            reasons[name] = reason
        elif name in (fixed := _fixed(runtime, config.stage)):
            value = str(fixed[name]).lower()
            reasons[name] = f"{experiment.settings.runtime} takes it as {value} in stage {config.stage}"
        elif name in keys.ONLY_WITH_PREFETCH and config.stage == 3 and broken is True:
            reasons[name] = f"the module trace of {experiment.settings.runtime} is broken: no prefetch, no reuse"
        elif name == "use_multi_rank_bucket_allreduce" and config.switches.get("reduce_scatter") is False:
            reasons[name] = "reduce_scatter is off, all buckets are all-reduced"
        elif name == "allgather_bucket_size" and gather_form == "base":
            reasons[name] = f"{experiment.settings.runtime} gathers all partitions in one call"
        elif reason := _overruled(name, config):
            reasons[name] = reason
    names = {name: reader.name(("zero_optimization", _spelling(name, experiment))) for name in reasons}
    return [f"{names[name]} has no effect: {reason}" for name, reason in reasons.items()]


def _overruled(name: str, config: DeepSpeedConfig) -> str:
    """Why a way of fetching has no effect beside the others that the file gives; empty if it has."""
    size = config.sizes.get("mics_shard_size", -1)
    is_mics = isinstance(size, int) and size > 0
    if name == "mics_hierarchical_params_gather":
        return "" if is_mics else "mics_shard_size is not given"
    if name not in {"use_all_reduce_for_fetch_params", "allgather_sequential"}:
        return ""
    if is_mics:
        return "MiCS groups its all-gathers in one launch"
    sequential = name != "allgather_sequential" and config.switches.get("allgather_sequential") is True
    return "allgather_sequential fetches one parameter at a time" if sequential else ""


def _spelling(name: str, experiment: Experiment) -> str:
    """The name under which the file gives a setting."""
    section = (experiment.settings.deepspeed or {}).get("zero_optimization")
    aliases = [alias for alias, field_name in keys.ALIASES.items() if field_name == name]
    return next((alias for alias in aliases if isinstance(section, dict) and alias in section), name)


def resolve_precision(experiment: Experiment, config: DeepSpeedConfig | None) -> Precision:
    """From `train`, else from what the configuration enables; DeepSpeed trains in fp32 if it enables nothing."""
    given, where = experiment.settings.train.precision, experiment.where
    enabled = config.enabled if config else {}
    on = next((kind for kind in ("bf16", "fp16") if enabled.get(kind) is True), None)
    if given is None and (fsdp := experiment.settings.fsdp) is not None:
        given = fsdp.mixed_precision.param_dtype
    if given is not None:
        return given
    if on is not None:
        return "bf16" if on == "bf16" else "fp16"
    if config is None or AUTO in enabled.values():
        raise InputError(f"{where('train', 'precision')} is missing; allowed: bf16, fp16 or fp32")
    return "fp32"


def communication_bytes(config: DeepSpeedConfig | None, runtime: Runtime, precision: Precision) -> int:
    """Bytes of a gradient element on the wire: `communication_data_type`, else the version's rule."""
    if config is not None and config.communication is not None and runtime.framework != "ddp":
        return _BYTES[config.communication]
    kind = runtime.communication_data_type
    return _BYTES[precision if kind == "precision" else kind]
