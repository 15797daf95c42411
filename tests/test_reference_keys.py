"""One experiment simulated and measured: the same events, so that predicted against measured is a join by key."""

import os
from pathlib import Path

import pytest

import zsim
from zsim.ops import SETUP
from zsim.pipeline import load

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")

from reference import engines  # noqa: E402
from reference.device.recorder import Recorder  # noqa: E402
from reference.training.data import DataSettings, batch  # noqa: E402

EXPERIMENT = Path(__file__).parent.parent / "experiments" / "lab_zero3.yaml"
ZERO = "deepspeed.zero_optimization"
SMALL = [
    *("model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn=256", "model.vocab=300"),
    *("train.micro_batch=2", "train.seq_len=32"),
    *(f"{ZERO}.reduce_bucket_size=20000", f"{ZERO}.allgather_bucket_size=30000", f"{ZERO}.sub_group_size=30000"),
    *(f"{ZERO}.stage3_prefetch_bucket_size=20000", f"{ZERO}.stage3_param_persistence_threshold=200"),
    *(f"{ZERO}.stage3_max_live_parameters=100000", f"{ZERO}.stage3_max_reuse_distance=20000"),
]
"""Buckets smaller than a block, some parameters persistent, some used again near enough to be kept."""
STEP = 2
"""The first records the trace of modules, the second is the first that looks ahead along it."""

OLD = {
    "all_gather_sync": "per_parameter",
    "reduce_sync": "host",
    "separate_communicators": "false",
    "cached_decisions": "false",
    "broken_trace": "true",
    "coalesced_collectives": "false",
    "all_gather_form": "list",
    "reduce_scatter_form": "list",
    "parameter_gather_form": "list",
    "defragmentation": "false",
    "preallocated_buffers": "false",
    "fused_gradient_norm": "false",
    "debug_norms": "true",
    "debug_strings": "true",
    "coalesced_persistents": "false",
}
"""Everything as DeepSpeed 0.5.4 did it."""
SWITCHES = [(name, value) for name, value in OLD.items() if name not in {"broken_trace", "parameter_gather_form"}] + [
    ("all_gather_sync", "per_module"),
    ("limiter_depth", "0"),
    ("all_gather_form", "base"),
    ("reduce_scatter_form", "base"),
]
CASES = {
    **{f"stage {stage}": [f"{ZERO}.stage={stage}"] for stage in range(4)},
    **{
        f"stage {stage}, two micro-batches": [f"{ZERO}.stage={stage}", "train.gradient_accumulation=2"]
        for stage in range(4)
    },
    **{f"stage {stage}, one lane": [f"{ZERO}.stage={stage}", f"{ZERO}.overlap_comm=false"] for stage in range(4)},
    **{
        f"stage {stage}, recomputing": [f"{ZERO}.stage={stage}", "train.activation_checkpointing=full"]
        for stage in (1, 3)
    },
    **{f"{name}={value}": [f"optimisations.{name}={value}"] for name, value in SWITCHES},
    "all old": [f"optimisations.{name}={value}" for name, value in OLD.items()],
    **{
        f"stage 2, gathered by {form}": [f"{ZERO}.stage=2", f"optimisations.parameter_gather_form={form}"]
        for form in ("list", "base")
    },
    **{
        f"stage {stage}, reductions ordered by the host": [
            *(f"{ZERO}.stage={stage}", "optimisations.reduce_sync=host", "optimisations.all_gather_sync=per_parameter")
        ]
        for stage in (1, 2)
    },
    "reductions ordered by the host, one lane": ["optimisations.reduce_sync=host", f"{ZERO}.overlap_comm=false"],
    "lists with short tails": [
        *("model.ffn=257", "optimisations.coalesced_collectives=false", "optimisations.reduce_scatter_form=list")
    ],
    "gradients where they lie": [f"{ZERO}.contiguous_gradients=false"],
    "buckets all-reduced": [f"{ZERO}.reduce_scatter=false"],
    "half precision": ["train.precision=bf16"],
}


def spec_of(overrides):
    """The small experiment, of which a case may change what it has changed already."""
    chosen = {override.partition("=")[0]: override for override in SMALL + overrides}
    return zsim.resolve(load(EXPERIMENT, list(chosen.values())))


def simulated(overrides):
    return {str(span.key) for span in zsim.simulate(spec_of(overrides)).trace.spans if span.key.phase not in SETUP}


def measured(overrides):
    """Of this rank: the keys of one step, as text."""
    spec = spec_of(overrides)
    recorder = Recorder(int(os.environ["RANK"]))
    engine = engines.create("reference", spec, seed=0, recorder=recorder, timeout_s=20)
    data = DataSettings.of(spec, seed=0)
    for step in range(STEP + 1):
        if step == STEP:
            recorder.start()
        engine.step([batch(data, step, micro, recorder.rank) for micro in range(spec.train.gradient_accumulation)])
    recorder.stop()
    engine.close()
    return sorted({str(span.key._replace(step=0)) for span in recorder.spans})


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_simulated_and_measured_keys_are_the_same(ranks, overrides):
    first, second = ranks(2, measured, overrides)
    assert first == second
    assert set(first) == simulated(overrides)
