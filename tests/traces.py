"""Traces built by hand, small enough to check every number on paper."""

from zsim import spec as s
from zsim.figures.metrics import ModelWork
from zsim.ops import Key
from zsim.spec import Constant
from zsim.trace import MemorySample, Span, Trace

WORK = ModelWork(
    model_flop_per_rank=3e15,
    hardware_flop_per_rank=4e15,
    executed_flop_per_rank=4e15,
    num_parameters=1000,
    num_trained_parameters=1000,
    num_active_parameters=1000,
)


def filled(record, **given):
    """A record of the spec in which whatever the tests do not care about is 1 or False."""
    return record(**(dict.fromkeys(record.__dataclass_fields__, 1) | given))


def device() -> s.DeviceSpec:
    return filled(
        s.DeviceSpec,
        name="paper-gpu",
        generation="ampere",
        peak_flop_per_s=100e12,
        memory_bytes=100_000.0,
    )


def constants() -> tuple[Constant, ...]:
    return (
        Constant("cluster.device.peak_flop_per_s", 100e12, "FLOP/s", "datasheet", "paper", 100e12, 100e12),
        Constant("runtime.host.launch_s", 1e-6, "s", "assumed", "a guess", 5e-7, 2e-6),
    )


def spec(
    *,
    stage=3,
    micro_batch=4,
    steps=1,
    tokens=0.0,
    price=0.0,
    checkpointing="none",
    framework="deepspeed",
    nccl_version="2.10",
):
    """Two nodes of two GPUs."""
    return s.Spec(
        name="paper",
        question="Do the numbers add up?",
        model=filled(s.ModelSpec, name="tiny", family="gpt2", num_layers=4, num_decoder_layers=0, attention="eager"),
        cluster=s.ClusterSpec("paper", 2, 2, device(), filled(s.NetworkSpec), 1.0, price),
        runtime=filled(
            s.RuntimeSpec,
            name="paper-runtime",
            framework=framework,
            host=filled(s.HostCosts),
            stack=filled(s.StackSpec, nccl_version=nccl_version),
            optimisations=filled(
                s.Optimisations, all_gather_form="base", reduce_scatter_form="base", parameter_gather_form="base"
            ),
        ),
        zero=filled(s.ZeroSpec, stage=stage, mics_shard_size=-1),
        train=s.TrainSpec(micro_batch, 1, 16, "bf16", checkpointing, 2, tokens),
        noise=filled(s.NoiseSpec, seed=0, steps=steps),
        constants=constants(),
    )


def span(
    lane, kind, start_s, end_s, *, phase="forward", what="x", layer=0, step=0, nbytes=0, rank=0, issued_s=None, **more
):
    issued_s = start_s if issued_s is None else issued_s
    return Span(rank, lane, Key(step, 0, phase, layer, what), kind, start_s, end_s, nbytes, issued_s, **more)


def one_step() -> list[Span]:
    """A step of 100 s: every cause owns a known part of it.

    0-10 launch; 10-30 forward kernel; 20-40 all-gather (10 exposed); 40-45 flatten of the all-gather; 45-50 plain copy;
    50-70 sync, a reduction during 55-65; 70-80 backward kernel; 80-90 broadcast; 90-95 optimizer; 95-100 host.
    """
    return [
        span("host", "launch", 0, 10),
        span("host", "host", 10, 50),
        span("compute", "compute", 10, 30),
        span("gather", "all_gather", 20, 40, what="w:all_gather", nbytes=1000),
        span("gather", "copy", 40, 45, what="w:all_gather.flatten", nbytes=400),
        span("gather", "copy", 45, 50, what="w:fill", nbytes=400),
        span("host", "sync", 50, 70, what="w:wait"),
        span("reduce", "all_reduce", 55, 65, phase="backward", what="bucket:reduce", nbytes=500),
        span("compute", "compute", 70, 80, phase="backward"),
        span("gather", "broadcast", 80, 90, phase="step", nbytes=70),
        span("compute", "compute", 90, 95, phase="step", what="adam"),
        span("host", "host", 95, 100, phase="step", what="zero_grad"),
    ]


def trace(spans=None, *, memory=(), **options) -> Trace:
    return Trace(
        origin="simulated",
        spec=spec(**options),
        versions={"simpy": "4.1.1"},
        num_ranks=4,
        spans=one_step() if spans is None else spans,
        memory=list(memory),
        num_events=12,
    )


def memory_curve(scale=1) -> list[MemorySample]:
    """Peak at the fourth sample: 10 context, 300 parameters, 500 activations."""
    changes = [("context", 10), ("parameters", 300), ("activations", 200), ("activations", 300), ("activations", -500)]
    allocated = 0
    samples = []
    for time_s, (category, delta) in enumerate(changes):
        allocated += delta * scale
        samples.append(MemorySample(0, float(time_s), category, delta * scale, allocated, 900 * scale))
    return samples
