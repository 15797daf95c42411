"""Any module in the hands of the reference engine; `reference.wrap` is its door."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zsim
from reference.communication import communicators
from reference.recorder import Recorder
from reference.settings import from_spec
from reference.sharding import COMMUNICATORS, ShardedModel, shard
from zsim.reading.config import Experiment
from zsim.spec import Spec
from zsim.units import InputError


def wrapped(
    model: nn.Module, experiment: Spec | Experiment | str | Path, *, recorder: Recorder | None, timeout_s: float
) -> ShardedModel:
    """See `reference.wrap`."""
    spec = experiment if isinstance(experiment, Spec) else zsim.resolve(experiment)
    settings = from_spec(spec, timeout_s=timeout_s)
    device = _checked(model, settings.dtype)
    _join(device, timeout_s)
    made = communicators(COMMUNICATORS, ring=settings.optimisations.ring_collectives, timeout_s=timeout_s)
    sharded = shard(model, settings, made, recorder or Recorder(dist.get_rank()))
    sharded.owned = tuple(made.values())
    return sharded


def _checked(model: nn.Module, dtype: torch.dtype) -> torch.device:
    """Where the model lies.

    Raises:
        InputError: on more than one device, without anything to train, or not in the experiment's precision.

    """
    named = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise InputError("model: no parameter requires a gradient; allowed: a model with something to train")
    for name, parameter in named.items():
        if parameter.dtype != dtype:
            raise InputError(
                f"model: parameter {name} is {parameter.dtype}, the experiment trains in {dtype}; "
                f"allowed: model.to({dtype}), or another train.precision"
            )
    devices = {str(parameter.device): parameter.device for parameter in named.values()}
    if len(devices) > 1:
        raise InputError(f"model: its parameters lie on {' and '.join(devices)}; allowed: one device")
    return next(iter(devices.values()))


def _join(device: torch.device, timeout_s: float) -> None:
    if dist.is_initialized():
        return
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
