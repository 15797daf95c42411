"""Experiments side by side: two steps, stages of ZeRO, numbers of nodes."""

from collections.abc import Sequence
from typing import Final

from zsim.figures.findings.fits import StageBar, StageMemory
from zsim.figures.findings.labels import tell_apart
from zsim.figures.findings.scaling import Scaling, ScalingLine, ScalingPoint
from zsim.figures.findings.steps import Contrast, step_bar
from zsim.figures.metrics import Metrics
from zsim.figures.states import STAGES
from zsim.spec import Spec
from zsim.studies.runs import Progress, Source, metrics_of_variant, predict_all, workers
from zsim.units import InputError
from zsim.workers import counted

NODES: Final = (1, 2, 4, 8, 16, 32)
_STRATEGIES: Final = ("NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "FULL_SHARD")
"""Of FullyShardedDataParallel."""


def contrast(before: Source, after: Source, progress: Progress | None = None) -> Contrast:
    """Where the steps of two experiments go."""
    specs = [before.spec(), after.spec()]
    labels = tell_apart(specs)
    bars = [step_bar(*pair) for pair in zip(labels.each, predict_all(specs, progress), strict=True)]
    return Contrast(labels.shared, *bars)


def scaling(sources: Sequence[Source], nodes: Sequence[int] = NODES, progress: Progress | None = None) -> Scaling:
    """Throughput of each experiment on each number of nodes, its batch per GPU unchanged.

    Raises:
        InputError: a ValueError: a number of nodes that no cluster has, or an experiment that is wrong.

    """
    nodes = checked("nodes", nodes)
    specs = [source.spec(f"cluster.nodes={nodes[0]}") for source in sources]
    labels = tell_apart(specs, ignored={"nodes"})
    variants = [(source, (f"cluster.nodes={number}",)) for source in sources for number in nodes]
    with workers(specs, len(variants)) as pool:
        # The longest runs, those on many nodes, do not come last of all where experiments alternate.
        found = counted(pool.map(metrics_of_variant, *zip(*variants, strict=True)), len(variants), progress)
    rows = [found[start : start + len(nodes)] for start in range(0, len(found), len(nodes))]
    gpus = {spec.cluster.gpus_per_node for spec in specs}
    return Scaling(
        labels.shared,
        gpus.pop() if len(gpus) == 1 else None,
        tuple(
            ScalingLine(label, tuple(_point(number, metrics) for number, metrics in zip(nodes, row, strict=True)))
            for label, row in zip(labels.each, rows, strict=True)
        ),
    )


def _point(num_nodes: int, metrics: Metrics) -> ScalingPoint:
    return ScalingPoint(num_nodes, metrics.tokens_per_s_per_gpu, metrics.hardware_tflops_per_gpu, metrics.fits)


def memory_by_stage(source: Source, progress: Progress | None = None) -> StageMemory:
    """Memory of one GPU at its peak under each stage of ZeRO, or each way of FSDP to shard; of DDP as it is."""
    spec = source.spec()
    ways = _ways_to_shard(spec)
    variants = [source.spec(*overrides) for overrides in ways.values()]
    found = predict_all(variants, progress)
    bars = [
        StageBar(label, metrics.memory.categories, _sharding(variant) == _sharding(spec))
        for label, variant, metrics in zip(ways, variants, found, strict=True)
    ]
    shared = tell_apart([spec], ignored={"sharding"}).shared
    return StageMemory(shared, spec.cluster.device.name, int(spec.cluster.device.memory_bytes), tuple(bars))


def _sharding(spec: Spec) -> tuple[object, ...]:
    return spec.zero, spec.fsdp, spec.megatron


def _ways_to_shard(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Label -> overrides, from what is held whole to what is divided most."""
    match spec.runtime.framework:
        case "deepspeed" | "reference":
            return {f"stage {stage}": (f"deepspeed.zero_optimization.stage={stage}",) for stage in STAGES}
        case "fsdp1":
            return {strategy: (f"fsdp.sharding_strategy={strategy}",) for strategy in _STRATEGIES}
        case "fsdp2":
            words = {"kept after forward": "false", "resharded": "true"}
            return {label: (f"fsdp.reshard_after_forward={word}",) for label, word in words.items()}
        case "megatron":
            words = {"all of it": "false", "distributed optimizer": "true"}
            return {label: (f"megatron.use_distributed_optimizer={word}",) for label, word in words.items()}
        case "ddp":
            return {spec.runtime.name: ()}


def checked(what: str, numbers: Sequence[int]) -> list[int]:
    """Whole numbers from one, each once and in rising order."""
    if not numbers or min(numbers) < 1:
        raise InputError(f"{what}: given {', '.join(map(str, numbers)) or 'none'}; allowed: whole numbers from 1")
    return sorted(set(numbers))
