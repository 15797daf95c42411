"""Any module in the hands of the reference engine; `reference.wrap` is its door."""

import os
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

import zsim
from reference.communication import communicators
from reference.device.recorder import Recorder
from reference.sharding import COMMUNICATORS, ShardedModel, shard
from reference.sharding.settings import from_spec
from reference.training import world
from reference.training.options import LONGEST_TIMEOUT_S
from zsim.reading.config import Experiment
from zsim.spec import Spec
from zsim.units import InputError

_WRAPPED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules with parameters of their own that are sharded, and so no longer whole."""


def wrapped(
    model: nn.Module, experiment: Spec | Experiment | str | Path, *, recorder: Recorder | None, timeout_s: float
) -> ShardedModel:
    """See `reference.wrap`."""
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise InputError(f"timeout_s: given {timeout_s:g}; allowed: more than 0, up to {LONGEST_TIMEOUT_S:g}")
    spec = experiment if isinstance(experiment, Spec) else zsim.resolve(experiment)
    settings = from_spec(spec, timeout_s=timeout_s)
    device = _checked(model, settings.dtype)
    _join(device, timeout_s)
    made = communicators(COMMUNICATORS, ring=settings.optimisations.ring_collectives, timeout_s=timeout_s)
    sharded = shard(model, settings, made, recorder or Recorder(dist.get_rank()))
    sharded.owned = tuple(made.values())
    _WRAPPED.update(_owners(model))
    return sharded


def _checked(model: nn.Module, dtype: torch.dtype) -> torch.device:
    """Where the model lies.

    Raises:
        InputError: on more than one device, without values, without anything to train, not in the experiment's
            precision, or sharded already.

    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: given {type(model).__name__}; allowed: a torch.nn.Module")
    if any(module in _WRAPPED for module in _owners(model)):
        raise InputError("model: it or a part of it is sharded already; allowed: wrap it once")
    named = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise InputError("model: no parameter requires a gradient; allowed: a model with something to train")
    for name, parameter in named.items():
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            raise InputError(f"model: parameter {name} has no values yet; allowed: a model that could compute")
        if parameter.dtype != dtype:
            raise InputError(
                f"model: parameter {name} is {parameter.dtype}, the experiment trains in {dtype}; "
                f"allowed: model.to({dtype}), or another train.precision"
            )
    devices = {str(parameter.device): parameter.device for parameter in named.values()}
    if len(devices) > 1:
        raise InputError(f"model: its parameters lie on {' and '.join(devices)}; allowed: one device")
    return next(iter(devices.values()))


def _owners(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]


def _join(device: torch.device, timeout_s: float) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        world.check_environment()
        world.meet(backend, timeout_s)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
