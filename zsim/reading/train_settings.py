"""The section `train` with nothing left open."""

from typing import Final

from zsim.cpu_spec import CpuClusterSpec
from zsim.model_spec import ModelSpec
from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.fsdp_settings import checkpoints_around_units, init_device
from zsim.reading.presets import Where, longest_sequence
from zsim.reading.runtime import Runtime
from zsim.reading.zero_settings import ResolvedZero, communication_bytes, resolve_precision
from zsim.spec import ClusterSpec, TrainSpec

_LARGEST_TENSOR_BYTES: Final = 5e11
"""One activation of [micro-batch, sequence, hidden] that no GPU could hold."""


def resolve_train(
    experiment: Experiment,
    runtime: Runtime,
    zero: ResolvedZero,
    cluster: ClusterSpec | CpuClusterSpec,
    model: ModelSpec,
) -> TrainSpec:
    """The batch, what of it stands in the DeepSpeed configuration included.

    Raises:
        InputError: a size that is missing, does not divide the total, or that no GPU could hold.

    """
    train, where = experiment.settings.train, experiment.where
    config = zero.config
    micro_batch = train.micro_batch or (config.micro_batch if config else None)
    accumulation = train.gradient_accumulation or (config.gradient_accumulation if config else None)
    if micro_batch is None and config and config.train_batch:
        # As DeepSpeed does it: what is left over of the total is the micro-batch.
        micro_batch = _share(config.train_batch, (accumulation or 1) * cluster.num_ranks, where)
    if micro_batch is None:
        raise InputError(f"{where('train', 'micro_batch')} is missing; allowed: a whole number from 1")
    if accumulation is None:
        total = config.train_batch if config else None
        accumulation = _share(total, micro_batch * cluster.num_ranks, where) if total else 1
    precision = resolve_precision(experiment, config)
    if train.checkpoint_every > model.num_blocks:
        place = where("train", "checkpoint_every")
        raise InputError(f"{place}: given {train.checkpoint_every}; allowed: 1 to the {model.num_blocks} layers")
    _check_sequence(train.seq_len, micro_batch, model, experiment)
    return TrainSpec(
        micro_batch=micro_batch,
        gradient_accumulation=accumulation,
        seq_len=train.seq_len,
        precision=precision,
        activation_checkpointing=train.activation_checkpointing,
        checkpoint_every=train.checkpoint_every,
        checkpoint_early_stop=_stops_early(experiment, runtime),
        communication_bytes=communication_bytes(config, runtime, precision),
        tokens=train.tokens,
        empty_cache_every=train.empty_cache_every if isinstance(cluster, ClusterSpec) else 0,
        zero_init=train.zero_init,
        init_device=init_device(experiment, runtime),
    )


def _stops_early(experiment: Experiment, runtime: Runtime) -> bool:
    """FSDP and DDP want checkpoints without `use_reentrant`; those of Hugging Face's models have it."""
    train = experiment.settings.train
    if train.activation_checkpointing not in {"full", "selective_op"}:
        return False
    if train.checkpoint_early_stop is not None:
        return train.checkpoint_early_stop
    if checkpoints_around_units(experiment, runtime):
        return False
    return runtime.torch_early_stop and runtime.framework in {"ddp", "fsdp1", "fsdp2"}


def _share(total: int, factor: int, where: Where) -> int:
    if total % factor:
        raise InputError(f"{where('deepspeed', 'train_batch_size')}: given {total}; allowed: a multiple of {factor}")
    return total // factor


def _check_sequence(seq_len: int, micro_batch: int, model: ModelSpec, experiment: Experiment) -> None:
    longest = longest_sequence(model)
    if longest is not None and seq_len > longest:
        place = experiment.where("train", "seq_len")
        raise InputError(f"{place}: given {seq_len}; allowed: at most the {longest} positions of {model.name}")
    size = 2.0 * micro_batch * seq_len * model.hidden
    if size > _LARGEST_TENSOR_BYTES:
        place = experiment.where("train", "micro_batch")
        raise InputError(
            f"{place}: one activation of {micro_batch} x {seq_len} x {model.hidden} takes {size:.2g} bytes;"
            f" allowed: at most {_LARGEST_TENSOR_BYTES:.0e}, and no GPU holds that"
        )
