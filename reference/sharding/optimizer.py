"""The optimizer of torch.optim that an experiment asks for; the same for every engine."""

from collections.abc import Iterable

import torch
from torch import nn

from reference.sharding.settings import OptimizerSettings


def make(chosen: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of these parameters, one group."""
    how = {"fused": chosen.implementation == "fused", "foreach": chosen.implementation == "foreach"}
    if chosen.kind == "SGD":
        return torch.optim.SGD(
            parameters, lr=chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay, **how
        )
    kind = torch.optim.AdamW if chosen.kind == "AdamW" else torch.optim.Adam
    return kind(parameters, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, weight_decay=chosen.weight_decay, **how)
