"""How long programs get: what no memory would hold is refused before any of it is built."""

from collections.abc import Sequence
from dataclasses import replace

from zsim import strategies
from zsim.model_spec import ModelSpec
from zsim.ops import Program
from zsim.spec import Spec
from zsim.units import InputError
from zsim.workers import num_cores

MAX_OPS = 5_000_000
"""Ops of a program: each takes a kilobyte and 30 us from strategy to metrics, so these take 5 GB and three minutes."""
MAX_EXECUTED_OPS = 20_000_000
"""Ops of all executed ranks together: a further rank costs 5 us and 250 bytes an op."""
MAX_LOCKSTEP_OPS = 5_000_000_000
"""The same in the lockstep engine: 70 ns an op on one core, and 60 kB a rank."""
_LAYERS_OF_PROBES = (2, 4)
_FEW_PASSES = 1_000
"""Passes through a layer: no layer's pass takes more than 1,000 ops."""


def check_size(spec: Spec) -> None:
    """Refuses what would take hours and all of the memory, before any of it is spent.

    Raises:
        InputError: a ValueError: the programs would have more than `MAX_OPS` ops.

    """
    layers, micro_batches, num_steps = spec.model.num_blocks, spec.train.gradient_accumulation, spec.noise.steps
    if (num_shards := strategies.num_gather_calls(spec)) * num_steps > MAX_OPS:
        given = spec.zero.allgather_bucket_size
        raise InputError(
            f"deepspeed.zero_optimization.allgather_bucket_size: given {given}: the parameters would be gathered in"
            f" {num_shards:,} calls; allowed: at most {MAX_OPS:,} in all steps"
        )
    num_ops = estimated_ops(spec)
    if num_ops > MAX_OPS:
        raise InputError(
            f"about {num_ops:.2g} ops: model.layers {layers} x train.gradient_accumulation {micro_batches}"
            f" x noise.steps {num_steps}; allowed: at most {MAX_OPS:,} ops"
        )


def estimated_ops(spec: Spec) -> float:
    """Ops of one rank's program: exactly those of small models, extended along layers, micro-batches and steps.

    0 where the program is certainly small. The all-gathers of stages 1 and 2 after the step are not among them.
    """
    micro_batches, num_steps = spec.train.gradient_accumulation, spec.noise.steps
    if spec.model.num_blocks * micro_batches * num_steps <= _FEW_PASSES and spec.cluster.num_ranks <= _FEW_PASSES:
        return 0.0
    fewer, more = _LAYERS_OF_PROBES
    num_ops: dict[int, int] = {}
    for layers in _LAYERS_OF_PROBES:
        one, two = (_num_ops_of_one_step(spec, layers, count) for count in (1, 2))
        num_ops[layers] = one + (two - one) * (micro_batches - 1)
    smallest, larger = (_probed(spec.model, layers).num_blocks for layers in _LAYERS_OF_PROBES)
    each = (num_ops[more] - num_ops[fewer]) / (larger - smallest)
    return num_steps * (num_ops[fewer] + each * (spec.model.num_blocks - smallest))


def _probed(model: ModelSpec, num_layers: int) -> ModelSpec:
    """A model of few blocks, with a decoder as deep where there is one.

    Patterns and targets may name blocks that it has not: it is trained as a whole, but for the base of adapters.
    """
    targets = tuple(target.rpartition(".")[2] for target in model.lora.targets)
    return replace(
        model,
        num_layers=num_layers,
        num_decoder_layers=num_layers if model.num_decoder_layers else 0,
        lora=replace(model.lora, targets=targets),
        frozen=(),
    )


def _num_ops_of_one_step(spec: Spec, num_layers: int, micro_batches: int) -> int:
    probe = replace(
        spec,
        model=_probed(spec.model, num_layers),
        # Small models have no n-th block: the probe checkpoints each, which gives the larger program.
        train=replace(spec.train, gradient_accumulation=micro_batches, checkpoint_every=1),
        noise=replace(spec.noise, steps=1),
        zero=replace(spec.zero, allgather_bucket_size=max(spec.zero.allgather_bucket_size, 10**9)),
    )
    return sum(len(program.ops) for program in strategies.programs(probe))


def check_expansion(roles: Sequence[Program], *, lockstep: bool = False, repeated: float = 1.0) -> None:
    """Refuses to execute more ranks than memory holds, so many times what the programs are.

    Raises:
        InputError: a ValueError: more ops on all ranks together than the engine is given.

    """
    num_ops = round(repeated * sum(len(program.ops) * len(program.ranks) for program in roles))
    limit = MAX_LOCKSTEP_OPS if lockstep else MAX_EXECUTED_OPS
    if num_ops > limit:
        num_ranks = sum(len(program.ranks) for program in roles)
        raise InputError(
            f"{num_ops:,} ops on {num_ranks:,} ranks, each executed; allowed: at most {limit:,}, fewer nodes"
            " or layers, or folded ranks without noise"
        )


def num_workers(specs: Sequence[Spec], num_runs: int) -> int:
    """Processes for runs like these: as many as there are cores, runs, and room for, at least one."""
    longest = max((estimated_ops(spec) for spec in specs), default=0.0) or 1
    return max(1, min(num_cores(), num_runs, int(2 * MAX_OPS / longest)))
