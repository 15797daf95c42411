"""Megatron-LM's arguments with nothing left open, and its modules in place of Hugging Face's.

Rules between arguments: megatron/arguments.py of Megatron-LM 2 to 4 (`validate_args`), the vocabulary's padding:
megatron/tokenizer/tokenizer.py (`_vocab_size_with_padding`), buckets: megatron-core 0.16, core/distributed/
distributed_data_parallel.py.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from zsim.megatron_spec import MegatronSpec
from zsim.model_spec import ModelSpec
from zsim.reading.config import Experiment, MegatronSettings
from zsim.reading.documents import InputError
from zsim.reading.runtime import Runtime
from zsim.spec import TrainSpec

_FAMILIES: Final = ("gpt2",)
_DIVISOR: Final = 128
"""`--make-vocab-size-divisible-by`."""
_FP32_BYTES: Final = 4
_LEAST_BUCKET: Final = 40_000_000
_BUCKET_PER_RANK: Final = 1_000_000
_ONLY_MODEL: Final = ("make_vocab_size_divisible_by",)
"""What is left of the arguments where DeepSpeed has the gradients."""


@dataclass(frozen=True, slots=True)
class ResolvedMegatron:
    """The arguments and what to tell the user."""

    spec: MegatronSpec
    warnings: tuple[str, ...] = ()


def check_parallel(experiment: Experiment) -> None:
    """Tensor and pipeline parallelism.

    Raises:
        InputError: more than one rank shares a layer or the layers.

    """
    for name in ("tensor", "pipeline"):
        if (given := getattr(experiment.settings.parallel, name)) > 1:
            place = experiment.where("parallel", name)
            raise InputError(f"{place}: given {given}; allowed: 1, {name} parallelism is not simulated")


def with_modules(model: ModelSpec, experiment: Experiment, runtime: Runtime) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model made of the runtime's modules: Megatron-LM's with its fused kernels and a padded vocabulary.

    Raises:
        InputError: a model that Megatron-LM's GPT cannot be, the section `megatron` with another runtime, or ranks that
            share layers.

    """
    check_parallel(experiment)
    settings, where, name = experiment.settings, experiment.where, experiment.settings.runtime
    if runtime.modules != "megatron":
        if settings.megatron is not None:
            raise InputError(f"{where('megatron')}: given with {name}; allowed: with megatron-lm, megatron-deepspeed")
        return model, ()
    if model.family not in _FAMILIES:
        raise InputError(f"{where('model')}: {model.name} is of family {model.family}; allowed with {name}: gpt2")
    if settings.model.lora is not None:
        raise InputError(f"{where('model', 'lora')}: given with {name}; allowed: none")
    if settings.model.compile:
        raise InputError(f"{where('model', 'compile')}: given true with {name}; allowed: false, its kernels are fused")
    divisor = (settings.megatron or MegatronSettings()).make_vocab_size_divisible_by or _DIVISOR
    vocab = -(-model.vocab // divisor) * divisor
    is_fused = settings.model.fused_kernels or "fused_kernels" not in settings.model.model_fields_set
    notes = (f"model.vocab {model.vocab} is padded to {vocab}, a multiple of {divisor}",) * (vocab != model.vocab)
    return replace(model, implementation="megatron", fused_kernels=is_fused, vocab=vocab), notes


def resolve_megatron(
    experiment: Experiment, runtime: Runtime, train: TrainSpec, num_ranks: int
) -> tuple[TrainSpec, ResolvedMegatron]:
    """Fill every argument; gradients on the wire have the type of the buffer.

    Raises:
        InputError: arguments that exclude each other, or that the runtime leaves to DeepSpeed.

    """
    settings = experiment.settings.megatron or MegatronSettings()
    values: dict[str, Any] = dict(runtime.megatron)
    if runtime.framework != "megatron":
        for name in settings.model_fields_set - {*_ONLY_MODEL}:
            place = experiment.where("megatron", name)
            raise InputError(f"{place}: given with {experiment.settings.runtime}; allowed: with megatron-lm alone")
        return train, ResolvedMegatron(MegatronSpec(**values))
    if experiment.settings.deepspeed is not None:
        place, name = experiment.where("deepspeed"), experiment.settings.runtime
        raise InputError(f"{place}: given with {name}; allowed: `megatron`, or the runtime megatron-deepspeed")
    given = settings.model_dump(exclude_none=True)
    values["bucket_size"] = given.pop("ddp_bucket_size", max(_LEAST_BUCKET, _BUCKET_PER_RANK * num_ranks))
    given["use_contiguous_buffers"] = given.pop("use_contiguous_buffers_in_local_ddp", values["use_contiguous_buffers"])
    # bf16 sums badly: gradients are accumulated and reduced in fp32.
    values["accumulate_allreduce_grads_in_fp32"] = train.precision == "bf16"
    values |= {name: value for name, value in given.items() if name in {field.name for field in fields(MegatronSpec)}}
    spec = MegatronSpec(**values)
    _check(spec, experiment)
    if spec.accumulate_allreduce_grads_in_fp32:
        train = replace(train, communication_bytes=_FP32_BYTES)
    return train, ResolvedMegatron(spec, tuple(_without_effect(settings, spec)))


def _check(spec: MegatronSpec, experiment: Experiment) -> None:
    """As `validate_args` asserts."""
    needs = {
        "overlap_param_gather": spec.use_distributed_optimizer and spec.overlap_grad_reduce,
        "use_distributed_optimizer": spec.use_contiguous_buffers,
        "overlap_grad_reduce": spec.use_contiguous_buffers,
        "gradient_accumulation_fusion": spec.use_contiguous_buffers,
        "accumulate_allreduce_grads_in_fp32": spec.use_contiguous_buffers,
    }
    for name, holds in needs.items():
        if getattr(spec, name) and not holds:
            needed = (
                "use_distributed_optimizer and overlap_grad_reduce"
                if name == "overlap_param_gather"
                else "use_contiguous_buffers_in_local_ddp"
            )
            place = experiment.where("megatron", name)
            raise InputError(f"{place} is true; allowed: with megatron.{needed} true")


def _without_effect(settings: MegatronSettings, spec: MegatronSpec) -> list[str]:
    overlaps = spec.overlap_grad_reduce or spec.overlap_param_gather
    if settings.ddp_bucket_size is not None and not overlaps:
        return ["megatron.ddp_bucket_size has no effect: without overlap_grad_reduce the whole buffer is one bucket"]
    return []
