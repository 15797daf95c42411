"""Training of a small model by the reference engine on some ranks, and by one process that sees what all see."""

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from strategy_cases import bert, resolved

from reference.communication import communicators
from reference.device.recorder import Recorder
from reference.engines.reference import names_of
from reference.model import build
from reference.sharding import shard
from reference.sharding.engine import COMMUNICATORS
from reference.sharding.settings import OptimizerSettings, Settings
from reference.training.data import DataSettings, batch

MODEL = bert(layers=1, hidden=16, heads=2, vocab=61, max_positions=11, dropout=False)
"""Sizes that no number of ranks divides among them: 61 words, 11 positions."""
SGD = OptimizerSettings("SGD", lr=0.2, momentum=0.9, weight_decay=0.01, implementation="foreach")
ADAM = OptimizerSettings("AdamW", lr=3e-3, weight_decay=0.1, implementation="fused")
SMALL = {
    "reduce_bucket_size": 900,
    "allgather_bucket_size": 700,
    "prefetch_bucket_size": 800,
    "param_persistence_threshold": 17,
    "max_live_parameters": 3000,
    "max_reuse_distance": 1000,
    "sub_group_size": 400,
}
"""Elements: several parameters fit into each, some fit into none, biases of `hidden` persist."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    stage: int = 3
    runtime: str = "deepspeed-0.6.0"
    switches: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerSettings = SGD
    dtype: torch.dtype = torch.float64
    accumulation: int = 1
    clipping: float = 0.0
    checkpointing: str = "none"
    reentrant: bool = True
    ring: bool = True
    model: tuple[tuple[str, Any], ...] = tuple(MODEL.items())

    def spec(self):
        with tempfile.TemporaryDirectory() as folder:
            return resolved(Path(folder), self.runtime, model=dict(self.model), micro_batch=2, seq_len=8)

    def settings(self, spec):
        zero = replace(spec.zero, stage=self.stage, **{"contiguous_gradients": True} | SMALL | self.zero)
        return Settings(
            zero=zero,
            optimisations=replace(spec.runtime.optimisations, **self.switches),
            optimizer=replace(self.optimizer, gradient_clipping=self.clipping),
            dtype=self.dtype,
            gradient_accumulation=self.accumulation,
            persistence_inclusive=spec.runtime.persistence_inclusive,
            timeout_s=20.0,
        )

    @property
    def numbers(self):
        """What decides the results, however the work is divided."""
        return (self.model, self.optimizer, self.dtype, self.accumulation, self.clipping)


@dataclass
class Result:
    losses: list[list[float]]
    """Of each step, each rank's micro-batches after those of the rank before."""
    parameters: dict[str, torch.Tensor]
    """Whole."""


def sharded_case(case, groups, recorder=None):
    """The sharded model of a case, and the spec."""
    spec = case.spec()
    model = build(spec.model, dtype=case.dtype, checkpointing=case.checkpointing, reentrant=case.reentrant)
    recorder = recorder or Recorder(groups[COMMUNICATORS[0]].rank)
    names = names_of(model, spec)
    parameter_names = model.parameters_by_name()
    return (
        shard(model, case.settings(spec), groups, recorder, names=names, parameter_names=parameter_names),
        spec,
    )


def train(cases, steps=20, around=nullcontext):
    """In each rank: (losses by step and micro-batch, all parameters of rank 0) of each case."""
    groups = {ring: communicators(COMMUNICATORS, ring=ring, timeout_s=20.0) for ring in {case.ring for case in cases}}
    results = []
    for case in cases:
        world = groups[case.ring][COMMUNICATORS[0]]
        with around():
            sharded, spec = sharded_case(case, groups[case.ring])
            data = DataSettings.of(spec)
            losses = []
            for step in range(steps):
                for micro in range(case.accumulation):
                    loss = sharded(*batch(data, step, micro, world.rank))
                    sharded.backward(loss)
                    losses.append(loss.item())
                assert sharded.step()
            found = sharded.whole_parameters()
            sharded.close()
        results.append((losses, found if world.rank == 0 else None))
    return results


def joined(by_rank, case, steps=20):
    """The results of one case, from those of its ranks."""
    losses = [
        [losses[step * case.accumulation + micro] for losses, _ in by_rank for micro in range(case.accumulation)]
        for step in range(steps)
    ]
    return Result(losses, by_rank[0][1])


def _optimizer(settings, parameters):
    chosen = settings
    how = {"fused": chosen.implementation == "fused", "foreach": chosen.implementation == "foreach"}
    common = {"lr": chosen.lr, "weight_decay": chosen.weight_decay} | how
    if chosen.kind == "SGD":
        return torch.optim.SGD(parameters, momentum=chosen.momentum, **common)
    kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[chosen.kind]
    return kind(parameters, betas=chosen.betas, eps=chosen.eps, **common)


def alone(case, num_ranks, steps=20):
    """The same training by plain torch in one process; with fp32 masters in bf16, gradients averaged in bf16."""
    spec = case.spec()
    model = build(spec.model, dtype=case.dtype)
    data = DataSettings.of(spec)
    named = model.parameters_by_name()
    wide = torch.promote_types(case.dtype, torch.float32)
    masters = {name: p if wide == p.dtype else p.detach().to(wide).requires_grad_() for name, p in named.items()}
    optimizer = _optimizer(case.optimizer, list(masters.values()))
    losses = []
    for step in range(steps):
        totals: dict[str, torch.Tensor] = {}
        of_step = []
        for rank in range(num_ranks):
            for micro in range(case.accumulation):
                loss = model(*batch(data, step, micro, rank))
                (loss / case.accumulation).backward()
                of_step.append(loss.item())
            for name, p in named.items():
                if p.grad is not None:
                    part = p.grad / num_ranks
                    totals[name] = totals[name] + part if name in totals else part
                    p.grad = None
        for name, total in totals.items():
            masters[name].grad = total.to(wide)
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(masters.values(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        if wide != case.dtype:
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(masters[name])
        losses.append(of_step)
    return Result(losses, {name: p.detach() for name, p in named.items()})


NOISE = ".key.bias"
"""A bias of the keys adds the same to all scores of a query, which softmax ignores: its gradient is rounding alone."""


def differences(found, expected):
    """Largest relative difference of a loss, and of a parameter in norm; key biases, all noise, are left out."""
    loss = max(
        abs(a - b) / abs(b)
        for of_step, others in zip(found.losses, expected.losses, strict=True)
        for a, b in zip(of_step, others, strict=True)
    )
    assert found.parameters.keys() == expected.parameters.keys()
    norm = max(
        float((found.parameters[name] - other).norm() / other.norm())
        for name, other in expected.parameters.items()
        if not name.endswith(NOISE)
    )
    return loss, norm


def same_bits(one, other):
    """Whether two results are equal in every bit."""
    return one.losses == other.losses and all(
        torch.equal(one.parameters[name], tensor) for name, tensor in other.parameters.items()
    )


def rank():
    """Of this process."""
    return int(os.environ["RANK"])
