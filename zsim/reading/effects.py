"""What an experiment gives without effect on this run, said out loud: switches of the runtime, and the odd others.

The conditions are those of the strategies; a test holds them against the programs, both ways.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Final

from zsim.imports.deepspeed_config import DeepSpeedConfig
from zsim.model import build
from zsim.model.modules import ModelGraph
from zsim.model_spec import ModelSpec
from zsim.reading.config import Experiment
from zsim.software import StackSpec
from zsim.spec import Optimisations, RuntimeSpec, TrainSpec, ZeroSpec

_ONLY_STAGE_3: Final = frozenset(
    {
        "all_gather_sync",
        "reduce_sync",
        "separate_communicators",
        "limiter_depth",
        "cached_decisions",
        "broken_trace",
        "coalesced_collectives",
        "all_gather_form",
        "reduce_scatter_form",
        "debug_norms",
        "coalesced_persistents",
    }
)
_ONLY_STAGES_1_2: Final = frozenset({"parameter_gather_form", "bucket_sync", "multi_rank_all_reduce"})
_OF_THE_BUCKET: Final = frozenset({"reduce_sync", "limiter_depth", "coalesced_collectives", "reduce_scatter_form"})
"""Of stage 3 in DeepSpeed; the reference engine's stages 1 and 2 reduce as stage 3 does."""
_NOT_IN_REFERENCE: Final = frozenset({"bucket_sync", "multi_rank_all_reduce", "counting_hooks"})


@dataclass(frozen=True, slots=True)
class Rule:
    """Switches that have no effect where a condition holds."""

    names: frozenset[str]
    holds: bool
    reason: str


def without_effect(
    experiment: Experiment,
    config: DeepSpeedConfig | None,
    runtime: RuntimeSpec,
    zero: ZeroSpec,
    train: TrainSpec,
    *,
    model: ModelSpec,
) -> list[str]:
    """A line for each key outside `zero_optimization` that the user gave and that changes nothing in this run."""
    return [
        *_switches(experiment, runtime, zero, train),
        *_of_reduction(experiment, runtime, zero, partial(build, model, train)),
        *_noise_and_money(experiment, train, has_cache=isinstance(runtime.stack, StackSpec)),
        *_of_ddp(config, runtime),
        *_of_checkpointing(experiment),
        *_of_loading(experiment, runtime, zero),
    ]


def _switches(experiment: Experiment, runtime: RuntimeSpec, zero: ZeroSpec, train: TrainSpec) -> Iterator[str]:
    rules = (*_rules_of_stages(runtime, zero), *_rules_of_others(runtime.optimisations, runtime, zero, train))
    for name in sorted(experiment.settings.optimisations):
        reason = next((rule.reason for rule in rules if rule.holds and name in rule.names), None)
        if reason:
            yield f"optimisations.{name} has no effect: {reason}"


def _rules_of_stages(runtime: RuntimeSpec, zero: ZeroSpec) -> tuple[Rule, ...]:
    """What belongs to some stages only."""
    is_reference = runtime.framework == "reference"
    foreign = runtime.framework != "deepspeed" and not is_reference
    here = runtime.name if foreign else f"stage {zero.stage}"
    sliced = is_reference and zero.stage in {1, 2}
    only_stage_3 = _ONLY_STAGE_3 - _OF_THE_BUCKET if sliced else _ONLY_STAGE_3
    has_buffers = zero.stage == 3 or (sliced and (zero.stage == 2 or zero.contiguous_gradients))
    return (
        Rule(_NOT_IN_REFERENCE, is_reference, f"it belongs to DeepSpeed, {runtime.name} reduces as its stage 3 does"),
        Rule(frozenset({"ring_collectives"}), not is_reference, f"{runtime.name} has none of its own"),
        Rule(frozenset({"ring_collectives"}), isinstance(runtime.stack, StackSpec), "NCCL is used as it is"),
        Rule(
            frozenset(field.name for field in fields(Optimisations)),
            runtime.framework.startswith("fsdp") or runtime.framework == "megatron",
            f"it belongs to DeepSpeed, not to {here}, whose switches are in `{runtime.framework.rstrip('12')}`",
        ),
        Rule(only_stage_3, zero.stage < 3, f"it belongs to stage 3, not to {here}"),
        Rule(frozenset({"counting_hooks"}), zero.stage == 0, f"it belongs to stages 1 to 3, not to {here}"),
        Rule(_ONLY_STAGES_1_2, zero.stage not in {1, 2}, f"it belongs to stages 1 and 2, not to {here}"),
        Rule(
            frozenset({"preallocated_buffers"}),
            not has_buffers,
            f"it belongs to stage 3, not to {here}",
        ),
        Rule(
            frozenset({"defragmentation"}),
            zero.stage < 3 and not is_reference,
            f"it belongs to stage 3, whose partitions are made one by one, not to {here}",
        ),
    )


def _rules_of_others(
    switches: Optimisations, runtime: RuntimeSpec, zero: ZeroSpec, train: TrainSpec
) -> tuple[Rule, ...]:
    """What another setting overrules."""
    no_flags = runtime.framework == "ddp" and train.precision != "fp16"
    is_flat = runtime.framework == "deepspeed" and zero.stage == 0 and train.precision == "fp16"
    return (
        Rule(frozenset({"fused_gradient_norm"}), is_flat, "stage 0 in fp16 takes the norm of one flat gradient"),
        Rule(
            frozenset({"bucket_sync"}),
            not zero.overlap_comm and (switches.multi_rank_all_reduce or not zero.reduce_scatter),
            "overlap_comm is off",
        ),
        Rule(
            frozenset({"multi_rank_all_reduce"}),
            not zero.reduce_scatter,
            "reduce_scatter is off, all buckets are all-reduced",
        ),
        Rule(
            frozenset({"reduce_scatter_form"}),
            not zero.reduce_scatter and switches.reduce_sync == "host",
            "reduce_scatter is off, gradients are all-reduced",
        ),
        Rule(frozenset({"all_gather_form"}), zero.is_mics, "MiCS groups its all-gathers in one launch"),
        Rule(frozenset({"separate_communicators"}), zero.is_mics, "MiCS gathers and reduces within its shards"),
        Rule(
            frozenset({"debug_strings"}),
            zero.stage < 3 and (no_flags or is_flat or not switches.fused_gradient_norm),
            "parameters are not fetched, and flags and norms are read in any case",
        ),
        Rule(
            frozenset({"limiter_depth"}),
            (switches.all_gather_sync != "stream" or zero.stage < 3) and switches.reduce_sync != "stream",
            "the host waits for every collective",
        ),
    )


def _of_reduction(
    experiment: Experiment, runtime: RuntimeSpec, zero: ZeroSpec, graph: Callable[[], ModelGraph]
) -> Iterator[str]:
    """Without reduce_scatter later versions all-reduce whatever lies in their buffer."""
    given = "reduce_scatter_form" in experiment.settings.optimisations and zero.stage == 3
    in_buffer = zero.contiguous_gradients and runtime.optimisations.reduce_sync == "stream"
    if not (given and in_buffer) or zero.reduce_scatter:
        return
    if max(parameter.numel for parameter in graph().trained_parameters) <= zero.reduce_bucket_size:
        reason = "reduce_scatter is off, and every gradient fits the buffer that is all-reduced"
        yield f"optimisations.reduce_scatter_form has no effect: {reason}"


def _noise_and_money(experiment: Experiment, train: TrainSpec, *, has_cache: bool) -> Iterator[str]:
    settings = experiment.settings
    is_drawn = settings.noise.host_jitter or settings.noise.stray_memory is not None or settings.noise.shortest_seq_len
    if settings.noise.seed and not is_drawn:
        yield "noise.seed has no effect: noise.host_jitter is 0, no noise.stray_memory and no noise.shortest_seq_len"
    if settings.noise.stray_memory is not None and not has_cache:
        yield f"noise.stray_memory has no effect: {settings.cluster.topology} has no caching allocator"
    if train.empty_cache_every < settings.train.empty_cache_every:
        yield f"train.empty_cache_every has no effect: {settings.cluster.topology} has no caching allocator"
    elif train.empty_cache_every > settings.noise.steps:
        yield f"train.empty_cache_every has no effect: it is more than the noise.steps {settings.noise.steps} simulated"
    if settings.cluster.price_per_node_hour and not train.tokens:
        yield "cluster.price_per_node_hour has no effect: train.tokens is not given"


def _of_ddp(config: DeepSpeedConfig | None, runtime: RuntimeSpec) -> Iterator[str]:
    if runtime.framework == "ddp" and config is not None and config.communication is not None:
        reason = "DistributedDataParallel reduces gradients as they are"
        yield f"deepspeed.communication_data_type has no effect: {reason}"


def _of_loading(experiment: Experiment, runtime: RuntimeSpec, zero: ZeroSpec) -> Iterator[str]:
    given = "zero_init" in experiment.settings.train.model_fields_set
    if given and (runtime.framework != "deepspeed" or zero.stage < 3):
        here = f"stage {zero.stage}" if runtime.framework == "deepspeed" else runtime.name
        yield f"train.zero_init has no effect: it belongs to stage 3 of DeepSpeed, not to {here}"
    if experiment.settings.train.init_device == "cuda":
        if runtime.framework == "reference":
            yield f"train.init_device has no effect: {runtime.name} leaves construction out"
        elif runtime.framework == "deepspeed" and zero.stage == 3 and experiment.settings.train.zero_init:
            yield "train.init_device has no effect: under zero.Init partitions alone stay (train.zero_init)"
    if nbytes := experiment.settings.model.activation_bytes_per_sample:
        yield f"activations are taken as {nbytes / 1e9:g} GB a sample, as given, and not counted from the model"


def _of_checkpointing(experiment: Experiment) -> Iterator[str]:
    train, attention = experiment.settings.train, experiment.settings.model.attention
    if train.activation_checkpointing == "none" and "checkpoint_every" in train.model_fields_set:
        yield "train.checkpoint_every has no effect: train.activation_checkpointing is none"
    if train.activation_checkpointing in {"none", "selective"} and train.checkpoint_early_stop is not None:
        here = train.activation_checkpointing
        yield f"train.checkpoint_early_stop has no effect: train.activation_checkpointing is {here}"
    if train.activation_checkpointing == "selective" and attention != "eager":
        yield (
            f"train.activation_checkpointing: selective saves next to nothing: {attention} attention stores no scores,"
            " and its forward kernel runs once more in each backward"
        )
