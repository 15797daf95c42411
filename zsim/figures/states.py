"""Memory of the model states by formula, and what to change when a run does not fit.

Ψ is the number of parameters and N the number of ranks (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", SC20, section 3 and figure 1). With 16-bit training and Adam a rank without ZeRO
holds 2Ψ parameters, 2Ψ gradients and KΨ optimizer states with K = 12: master copy, momentum and variance in 32 bits.
Stage 1 divides the optimizer states by N, stage 2 the gradients as well, stage 3 also the parameters. Frozen parameters
have neither gradients nor optimizer states: these follow the trained ones alone, 2Ψ + (2 + K)Ψ_trained without ZeRO.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from zsim.display import size
from zsim.spec import Spec

STAGES = (0, 1, 2, 3)
NODE_LIMIT = 4096


class Counts(NamedTuple):
    """Parameters of a model."""

    total: int
    """Ψ."""
    trained: int
    """Ψ_trained: those with gradients and optimizer states."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All states together."""
        return self.parameters + self.gradients + self.optimizer


def model_states(num_parameters: int | Counts, num_ranks: int, stage: int, element_bytes: int = 2) -> ModelStates:
    """Model states of one rank.

    Args:
        num_parameters: Ψ, all of them trained, or Ψ and Ψ_trained.
        num_ranks: N, the degree of data parallelism.
        stage: 0 to 3.
        element_bytes: of a parameter and of a gradient; with 4 no master copy is needed (K = 8).

    """
    if stage not in STAGES:
        raise ValueError(f"stage: {stage!r} given, allowed are 0, 1, 2, 3")
    counts = num_parameters if isinstance(num_parameters, Counts) else Counts(num_parameters, num_parameters)
    optimizer_bytes = 8 if element_bytes == 4 else 12
    return ModelStates(
        parameters=element_bytes * counts.total / (num_ranks if stage >= 3 else 1),
        gradients=element_bytes * counts.trained / (num_ranks if stage >= 2 else 1),
        optimizer=optimizer_bytes * counts.trained / (num_ranks if stage >= 1 else 1),
    )


def zero_states(spec: Spec, counts: Counts, num_ranks: int | None = None) -> ModelStates:
    """Model states of one rank as DeepSpeed divides them in this run, on so many ranks instead if given.

    With MiCS a shard of p ranks holds them once, N is p; with hpZ a secondary partition of 2Ψ/z comes on top.
    """
    zero, ranks = spec.zero, num_ranks or spec.cluster.num_ranks
    element_bytes = spec.train.element_bytes
    states = model_states(counts, zero.mics_shard_size if zero.is_mics else ranks, zero.stage, element_bytes)
    if not zero.has_secondary_partition:
        return states
    secondary = element_bytes * counts.total / min(ranks, zero.zero_hpz_partition_size)
    return replace(states, parameters=states.parameters + secondary)


def megatron_states(spec: Spec, counts: Counts) -> ModelStates:
    """Model states of one rank under Megatron-LM: gradients as accumulated, masters and moments perhaps divided.

    6Ψ + 12Ψ/N with a buffer in fp32 and the distributed optimizer (megatron/training/theoretical_memory_usage.py).
    """
    train, ranks = spec.train, spec.cluster.num_ranks
    states = model_states(counts, ranks, int(spec.megatron.use_distributed_optimizer), train.element_bytes)
    return replace(states, gradients=float(train.communication_bytes * counts.trained))


def fsdp_states(spec: Spec, counts: Counts) -> ModelStates:
    """Model states of one rank under FSDP: all fp32, divided by the shard group; gradients from their reduction on."""
    fsdp = spec.fsdp
    return ModelStates(
        parameters=fsdp.param_bytes * counts.total / fsdp.shard_size,
        gradients=fsdp.gradient_bytes * counts.trained / fsdp.shard_size,
        optimizer=2 * fsdp.param_bytes * counts.trained / fsdp.shard_size,
    )


def ways_to_fit(spec: Spec, counts: Counts, activation_bytes: float, excess_bytes: float) -> list[str]:
    """Single changes of the experiment that are estimated to save `excess_bytes`, the cheapest in throughput first.

    Activations are taken as proportional to the micro-batch, states as the formulas above; when no single change
    saves enough, all that save something are named with what they save.
    """
    options = [
        *_other_construction(spec, counts, activation_bytes),
        *_higher_stages(spec, counts),
        *_more_sharding(spec, counts),
        *_larger_groups(spec, counts, excess_bytes),
        *_smaller_micro_batch(spec, activation_bytes, excess_bytes),
        *_flash_attention(spec),
        *_checkpointing(spec, activation_bytes),
        *_more_nodes(spec, counts, excess_bytes),
    ]
    sufficient = [text for text, saved in options if saved >= excess_bytes]
    if sufficient:
        return sufficient
    return [f"{text} (alone not enough: saves about {size(saved)})" for text, saved in options if saved > 0]


def _other_construction(spec: Spec, counts: Counts, activation_bytes: float) -> list[tuple[str, float]]:
    """Where the model is whole before it is divided, and most is allocated before there are activations."""
    if activation_bytes:
        return []
    if spec.runtime.framework == "deepspeed" and spec.zero.stage == 3 and not spec.train.zero_init:
        whole = spec.train.element_bytes * counts.total
        return [("train.zero_init=true", whole * (1 - 1 / spec.cluster.num_ranks))]
    if spec.train.init_device == "cuda":
        return [("train.init_device=cpu", 4 * counts.total - _first_states(spec, counts))]
    return []


def _first_states(spec: Spec, counts: Counts) -> float:
    """Parameters of a rank when the framework has taken them over."""
    if spec.fsdp.shard_size > 1:
        return fsdp_states(spec, counts).parameters
    return zero_states(spec, counts).parameters


def _states(spec: Spec, counts: Counts, stage: int, num_ranks: int) -> float:
    return model_states(counts, num_ranks, stage, spec.train.element_bytes).total


def _higher_stages(spec: Spec, counts: Counts) -> list[tuple[str, float]]:
    if not spec.runtime.has_stages:
        return []
    ranks = spec.cluster.num_ranks
    now = zero_states(spec, counts).total
    return [
        (f"deepspeed.zero_optimization.stage={stage}", now - _states(spec, counts, stage, ranks))
        for stage in STAGES
        if stage > spec.zero.stage
    ]


def _more_sharding(spec: Spec, counts: Counts) -> list[tuple[str, float]]:
    """FSDP: parameters freed after forward; states over all ranks."""
    if not spec.runtime.framework.startswith("fsdp"):
        return []
    fsdp, ranks = spec.fsdp, spec.cluster.num_ranks
    kept = 0 if fsdp.reshard_size == fsdp.shard_size else spec.train.element_bytes * counts.total / fsdp.reshard_size
    states = fsdp_states(spec, counts).total * (1 - fsdp.shard_size / ranks)
    if spec.runtime.framework == "fsdp1":
        return [("fsdp.sharding_strategy=FULL_SHARD", kept + states)]
    return [("fsdp.reshard_after_forward=true", kept), (f"fsdp.mesh=[{ranks}]", states)]


def _larger_groups(spec: Spec, counts: Counts, excess_bytes: float) -> list[tuple[str, float]]:
    """MiCS: the smallest larger shard that saves enough, or all ranks. hpZ: no secondary partition."""
    zero, now = spec.zero, zero_states(spec, counts).total
    key = "deepspeed.zero_optimization"
    if zero.has_secondary_partition:
        without = replace(spec, zero=replace(zero, zero_hpz_partition_size=1))
        return [(f"{key}.zero_hpz_partition_size=1", now - zero_states(without, counts).total)]
    if not zero.is_mics:
        return []
    ranks, gpus = spec.cluster.num_ranks, spec.cluster.gpus_per_node
    sizes = [n for n in range(zero.mics_shard_size + 1, ranks + 1) if ranks % n == 0 and not (gpus % n and n % gpus)]
    options = []
    for n in sizes:
        saved = now - zero_states(replace(spec, zero=replace(zero, mics_shard_size=n)), counts).total
        options.append((f"{key}.mics_shard_size={n}", saved))
        if saved >= excess_bytes:
            break
    return options[-1:]


def _smaller_micro_batch(spec: Spec, activation_bytes: float, excess_bytes: float) -> list[tuple[str, float]]:
    now = spec.train.micro_batch
    if now <= 1:
        return []
    per_sample = activation_bytes / now
    room = (activation_bytes - excess_bytes) / per_sample if per_sample else 0.0
    smaller = min(now - 1, max(1, int(room)))
    return [(f"train.micro_batch={smaller}", (now - smaller) * per_sample)]


def _flash_attention(spec: Spec) -> list[tuple[str, float]]:
    """Without eager attention the probabilities of each live layer are never stored: softmax, mask and dropout."""
    if spec.model.attention != "eager":
        return []
    layers = range(spec.model.num_blocks)
    num_kept = sum(spec.train.checkpointing_of(layer) == "none" for layer in layers)
    # The layers that recompute have theirs one at a time.
    num_live = num_kept + (num_kept < len(layers))
    return [("model.attention=flash", _scores_bytes(spec) * num_live)]


def _scores_bytes(spec: Spec) -> float:
    """What one layer stores of its attention scores."""
    elements = spec.train.micro_batch * spec.model.heads * spec.train.seq_len**2
    return float((2 * spec.train.element_bytes + 1) * elements)


def _checkpointing(spec: Spec, activation_bytes: float) -> list[tuple[str, float]]:
    """Selective: the scores of all layers but one. Full: one hidden state a layer and the insides of one layer."""
    if spec.train.activation_checkpointing == "full":
        return []
    options = []
    if spec.model.attention == "eager" and spec.train.activation_checkpointing == "none":
        saved = _scores_bytes(spec) * (spec.model.num_blocks - 1)
        options.append(("train.activation_checkpointing=selective", saved))
    saved = activation_bytes * max(0.0, 1 - 2 / spec.model.num_blocks)
    return [*options, ("train.activation_checkpointing=full", saved)]


def _more_nodes(spec: Spec, counts: Counts, excess_bytes: float) -> list[tuple[str, float]]:
    """Only where all ranks divide states."""
    ranks = spec.cluster.num_ranks
    if spec.runtime.has_stages and spec.zero.stage and not spec.zero.is_mics:
        now = zero_states(spec, counts).total
    elif 1 < spec.fsdp.shard_size == ranks:
        now = fsdp_states(spec, counts).total
    else:
        return []
    nodes = spec.cluster.num_nodes
    saved = 0.0
    while saved < excess_bytes and nodes < NODE_LIMIT:
        nodes *= 2
        if spec.zero.stage:
            saved = now - zero_states(spec, counts, nodes * spec.cluster.gpus_per_node).total
        else:
            saved = now * (1 - spec.cluster.num_nodes / nodes)
    return [(f"cluster.nodes={nodes}", saved)]
