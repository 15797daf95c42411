"""The `fsdp` section with nothing left open: defaults of PyTorch's two versions, and what has no effect.

Defaults: torch/distributed/fsdp/fully_sharded_data_parallel.py and _fully_shard/_fully_shard.py, torch 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from zsim.cpu_spec import CpuClusterSpec
from zsim.model.modules import ModelGraph
from zsim.model_spec import ModelSpec
from zsim.reading.config import Experiment, FsdpSettings
from zsim.reading.documents import InputError
from zsim.reading.hardware import aligned_sizes
from zsim.reading.runtime import Runtime
from zsim.spec import ClusterSpec, FsdpSpec, InitDevice, TrainSpec

_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
_MASTER_BYTES: Final = 4
"""Parameters at rest are fp32 in either version; `param_dtype` is what they are cast to before they are gathered."""

_ONLY_FSDP1: Final = {
    "sharding_strategy": "reshard_after_forward, true for FULL_SHARD, false for SHARD_GRAD_OP, and mesh",
    "limit_all_gathers": "nothing, its memory is bounded without",
    "backward_prefetch": "nothing, it prefetches one module",
    "forward_prefetch": "nothing, the host runs ahead",
    "use_orig_params": "nothing, it keeps them always",
}
_ONLY_FSDP2: Final = {
    "reshard_after_forward": "sharding_strategy",
    "mesh": "sharding_strategy",
    "separate_reduce_scatter_group": "nothing, it has one process group",
    "wrap_embeddings": "nothing, what is not in a block is the root's",
}
_NO_EFFECT: Final = {
    "state_dict_type": "checkpoints are not written",
    "cpu_ram_efficient_loading": "it saves host memory; on the device units are sharded one by one either way",
    "sync_module_states": "it fills parameters that are on the device already",
    "transformer_layer_cls_to_wrap": "each transformer block is a unit, what is left is the root's",
}


@dataclass(frozen=True, slots=True)
class ResolvedFsdp:
    """The settings and what to tell the user."""

    spec: FsdpSpec
    warnings: tuple[str, ...] = ()


def resolve_fsdp(
    experiment: Experiment, runtime: Runtime, cluster: ClusterSpec | CpuClusterSpec, train: TrainSpec, model: ModelSpec
) -> ResolvedFsdp:
    """Fill every setting of the section.

    Raises:
        InputError: a key of the other version, groups that do not divide the ranks, or a section of another framework.

    """
    given, name = experiment.settings.fsdp, experiment.settings.runtime
    if not runtime.framework.startswith("fsdp"):
        if given is not None:
            raise InputError(f"{experiment.where('fsdp')}: given with {name}; allowed: with fsdp1 and fsdp2")
        return ResolvedFsdp(FsdpSpec())
    if experiment.settings.deepspeed is not None:
        raise InputError(f"{experiment.where('deepspeed')}: given with {name}; allowed: `fsdp`, or a deepspeed runtime")
    settings = given or FsdpSettings()
    _check_version(experiment, settings, runtime)
    _check_checkpointing(experiment, settings, runtime)
    fsdp1 = runtime.framework == "fsdp1"
    sizes = _sizes_of_strategy if fsdp1 else _sizes_of_mesh
    shard_size, reshard_size = sizes(experiment, settings, cluster)
    reduce_bytes = _reduce_bytes(experiment, settings, train)
    keep = settings.mixed_precision.keep_low_precision_grads
    spec = FsdpSpec(
        shard_size=shard_size,
        reshard_size=reshard_size,
        param_bytes=_MASTER_BYTES,
        reduce_bytes=reduce_bytes,
        gradient_bytes=train.element_bytes if keep else _MASTER_BYTES,
        limit_all_gathers=fsdp1 and settings.limit_all_gathers is not False,
        backward_prefetch=(settings.backward_prefetch or "BACKWARD_PRE") if fsdp1 else "NO_PREFETCH",
        forward_prefetch=bool(settings.forward_prefetch),
        use_orig_params=bool(settings.use_orig_params) or not fsdp1,
        separate_reduce_scatter_group=bool(settings.separate_reduce_scatter_group),
        wrap_embeddings=_wraps_embeddings(experiment, settings, model),
        no_sync=settings.no_sync,
        clip_grad_norm=settings.clip_grad_norm,
        checkpoints_around_units=checkpoints_around_units(experiment, runtime),
    )
    return ResolvedFsdp(spec, (*_gathered_thrice(spec), *_without_effect(settings, spec, train, fsdp1=fsdp1)))


def check_flattened(graph: ModelGraph, fsdp: FsdpSpec, where: Callable[..., str]) -> None:
    """One requires_grad for all that fsdp1 flattens (FlatParamHandle._validate_tensors_to_flatten).

    Raises:
        InputError: a unit has trained and frozen parameters, without `use_orig_params`.

    """
    blocks = {
        f"layer.{layer}": [parameter for module in block.module.in_forward_order() for parameter in module.parameters]
        for layer, block in enumerate(graph.blocks)
    }
    elsewhere = {parameter.name for parameters in blocks.values() for parameter in parameters}
    root = [parameter for parameter in graph.parameters if parameter.name not in elsewhere]
    for name, parameters in {"root": root, **blocks}.items():
        if not fsdp.use_orig_params and len({parameter.trained for parameter in parameters}) > 1:
            place = where("fsdp", "use_orig_params")
            raise InputError(f"{place}: false, but {name} has trained and frozen parameters; allowed: true")


def init_device(experiment: Experiment, runtime: Runtime) -> InitDevice:
    """Where the model is constructed; parameters on the meta device are nothing that DeepSpeed or DDP could take over.

    Raises:
        InputError: `meta` for another framework than FSDP.

    """
    given = experiment.settings.train.init_device
    if given == "meta" and not runtime.framework.startswith("fsdp"):
        place = experiment.where("train", "init_device")
        raise InputError(f"{place}: meta given with {experiment.settings.runtime}; allowed: cpu, cuda")
    return given


def with_wire_type(train: TrainSpec, runtime: Runtime, fsdp: FsdpSpec) -> TrainSpec:
    """Gradients on the wire have FSDP's `reduce_dtype`."""
    return replace(train, communication_bytes=fsdp.reduce_bytes) if runtime.framework.startswith("fsdp") else train


def _wraps_embeddings(experiment: Experiment, settings: FsdpSettings, model: ModelSpec) -> bool:
    """Not with a weight that both share: fully_shard manages it in one group."""
    if settings.wrap_embeddings and model.tied_embeddings:
        place = experiment.where("fsdp", "wrap_embeddings")
        raise InputError(
            f"{place}: given true; allowed: false, {model.name} shares the embedding's weight with its head"
        )
    return bool(settings.wrap_embeddings)


def _check_version(experiment: Experiment, settings: FsdpSettings, runtime: Runtime) -> None:
    """No key of the other version: both refuse them too."""
    name = experiment.settings.runtime
    version = int(runtime.framework.removeprefix("fsdp"))
    if settings.version not in {None, version}:
        raise InputError(
            f"{experiment.where('fsdp', 'version')}: given {settings.version}; allowed: {version} ({name})"
        )
    for key, instead in (_ONLY_FSDP2 if version == 1 else _ONLY_FSDP1).items():
        if getattr(settings, key) is not None:
            raise InputError(f"{experiment.where('fsdp', key)}: given with {name}; it has {instead}")
    if settings.offload_params:
        raise InputError(f"{experiment.where('fsdp', 'offload_params')}: given true; not modelled, allowed: false")
    if version == 2 and settings.mixed_precision.keep_low_precision_grads:
        place = experiment.where("fsdp", "mixed_precision", "keep_low_precision_grads")
        raise InputError(f"{place}: given true with {name}; allowed: false, its gradients have the parameters' type")


def _check_checkpointing(experiment: Experiment, settings: FsdpSettings, runtime: Runtime) -> None:
    """Accelerate's switch and `train.activation_checkpointing` say the same thing, or the model does it itself."""
    train = experiment.settings.train
    if settings.activation_checkpointing is None or checkpoints_around_units(experiment, runtime):
        return
    if settings.activation_checkpointing != (train.activation_checkpointing != "none"):
        place = experiment.where("fsdp", "activation_checkpointing")
        raise InputError(
            f"{place} is {str(settings.activation_checkpointing).lower()}, but"
            f" {experiment.where('train', 'activation_checkpointing')} is {train.activation_checkpointing};"
            " allowed: the same in both"
        )


def checkpoints_around_units(experiment: Experiment, runtime: Runtime) -> bool:
    """Accelerate's switch is off, and blocks are checkpointed all the same: by the model, around fsdp1's units.

    So do `gradient_checkpointing` of transformers' Trainer and `model.gradient_checkpointing_enable()`.
    """
    settings, train = experiment.settings.fsdp, experiment.settings.train
    is_off = settings is not None and settings.activation_checkpointing is False
    return runtime.framework == "fsdp1" and is_off and train.activation_checkpointing == "full"


def _gathered_thrice(spec: FsdpSpec) -> tuple[str, ...]:
    if not spec.checkpoints_around_units or spec.reshard_size == 1:
        return ()
    line = "fsdp.activation_checkpointing: false, so the model checkpoints its blocks around FSDP's units, which are"
    return (f"{line} gathered for the recomputation and once more for backward; true spares the one",)


def _sizes_of_strategy(
    experiment: Experiment, settings: FsdpSettings, cluster: ClusterSpec | CpuClusterSpec
) -> tuple[int, int]:
    """fsdp1: ranks that share parameters, and ranks that share them between forward and backward."""
    strategy = settings.sharding_strategy or "FULL_SHARD"
    if strategy == "NO_SHARD":
        return 1, 1
    shard_size = cluster.gpus_per_node if strategy.startswith("HYBRID") else cluster.num_ranks
    if shard_size == 1 < cluster.num_ranks:
        place = experiment.where("fsdp", "sharding_strategy")
        raise InputError(f"{place}: given {strategy}; allowed: with more than one GPU a node, which it shards over")
    return shard_size, shard_size if strategy in {"FULL_SHARD", "HYBRID_SHARD"} else 1


def _sizes_of_mesh(
    experiment: Experiment, settings: FsdpSettings, cluster: ClusterSpec | CpuClusterSpec
) -> tuple[int, int]:
    """fsdp2: the last dimension of the mesh shards, a first one replicates; and what is left after forward."""
    ranks = cluster.num_ranks
    mesh = settings.mesh if settings.mesh is not None else [ranks]
    place = experiment.where("fsdp", "mesh")
    shard_size = mesh[-1]
    if prod(mesh) != ranks:
        given = " x ".join(map(str, mesh))
        raise InputError(f"{place}: given {given}; allowed: [{ranks}], or [replicate, shard] with product {ranks}")
    if shard_size == 1 < ranks:
        raise InputError(f"{place}: given {mesh}; allowed: a last dimension above 1; ddp replicates everything")
    gpus = cluster.gpus_per_node
    if shard_size not in (sizes := aligned_sizes(ranks, gpus)):
        allowed = (
            f"a last dimension of {', '.join(map(str, sizes[1:]))}, which does not lie askew of {gpus} GPUs a node"
        )
        raise InputError(f"{place}: given {mesh}; allowed: {allowed}")
    reshard = settings.reshard_after_forward
    if reshard is None or isinstance(reshard, bool):
        return shard_size, 1 if reshard is False else shard_size
    if reshard not in (sizes := aligned_sizes(shard_size, gpus)[1:-1]):
        place = experiment.where("fsdp", "reshard_after_forward")
        listed = f", or one of {', '.join(map(str, sizes))}" if sizes else ""
        raise InputError(
            f"{place}: given {reshard}; allowed: true, false{listed}: divisors of the {shard_size} ranks of a shard"
            f" group between 1 and {shard_size} that do not lie askew of {gpus} GPUs a node"
        )
    return shard_size, reshard


def _reduce_bytes(experiment: Experiment, settings: FsdpSettings, train: TrainSpec) -> int:
    policy = settings.mixed_precision
    if policy.param_dtype not in {None, train.precision}:
        raise InputError(
            f"{experiment.where('train', 'precision')} is {train.precision}, but"
            f" {experiment.where('fsdp', 'mixed_precision', 'param_dtype')} is {policy.param_dtype};"
            " allowed: the same in both"
        )
    return _BYTES[policy.reduce_dtype or train.precision]


def _without_effect(settings: FsdpSettings, spec: FsdpSpec, train: TrainSpec, *, fsdp1: bool) -> list[str]:
    """A line for each key given that changes nothing in this run."""
    reasons = {name: reason for name, reason in _NO_EFFECT.items() if getattr(settings, name) is not None}
    if settings.mixed_precision.buffer_dtype is not None:
        reasons["mixed_precision.buffer_dtype"] = "a transformer's buffers are small and not modelled"
    if settings.mixed_precision.keep_low_precision_grads and train.precision == "fp32":
        reasons["mixed_precision.keep_low_precision_grads"] = "parameters and gradients are fp32"
    if settings.no_sync and train.gradient_accumulation == 1:
        reasons["no_sync"] = "a step has one micro-batch"
    if fsdp1 and spec.shard_size == 1:
        for name in ("limit_all_gathers", "backward_prefetch", "forward_prefetch"):
            if getattr(settings, name) is not None:
                reasons[name] = "nothing is gathered"
    return [f"fsdp.{name} has no effect: {reason}" for name, reason in reasons.items()]
