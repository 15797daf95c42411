"""What to call experiments that stand side by side: by what tells them apart, with what they share said once."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from zsim.spec import Spec


class Labels(NamedTuple):
    """Names of a few experiments."""

    shared: str
    """Facts that hold for all of them, with commas."""
    each: tuple[str, ...]
    """One label an experiment, no two alike."""


def tell_apart(specs: Sequence[Spec], ignored: AbstractSet[str] = frozenset()) -> Labels:
    """Labels of the experiments.

    Args:
        specs: one or more.
        ignored: facts that the picture shows itself, of "nodes", "sharding" and "micro-batch".

    """
    facts = [_facts(spec) for spec in specs]
    for spec, fact in zip(specs, facts, strict=True):
        if "nodes" in ignored and not spec.runtime.has_stages:
            fact["sharding"] = ""  # over so many GPUs, which changes with the nodes
    names = [name for name in facts[0] if name not in ignored]
    shared = [name for name in names if len({fact[name] for fact in facts}) == 1]
    own = [", ".join(fact[name] for name in names if name not in shared and fact[name]) for fact in facts]
    if len(set(own)) < len(own) or len(own) == 1:
        own = [spec.name for spec in specs]
    if len(set(own)) < len(own):
        own = [f"{label} ({number})" for number, label in enumerate(own, start=1)]
    return Labels(_in_line({name: facts[0][name] for name in shared}), tuple(own))


def _in_line(facts: dict[str, str]) -> str:
    if "nodes" in facts and "topology" in facts:
        number = facts.pop("nodes").split()[0]
        facts["topology"] = f"{number} × {facts['topology']}"
    return ", ".join(text for text in facts.values() if text)


def _facts(spec: Spec) -> dict[str, str]:
    """Name -> text, empty where it says nothing."""
    train, cluster = spec.train, spec.cluster
    accumulation = f" × {train.gradient_accumulation}" if train.gradient_accumulation > 1 else ""
    return {
        "model": spec.model.name,
        "nodes": f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}",
        "topology": cluster.topology,
        "runtime": spec.runtime.name,
        "sharding": sharding(spec),
        "micro-batch": f"micro-batch {train.micro_batch}{accumulation}",
        "sequence": f"{train.seq_len} tokens",
        "precision": train.precision,
    }


def sharding(spec: Spec) -> str:
    """Where the states are, in words."""
    fsdp, ranks = spec.fsdp, spec.cluster.num_ranks
    if spec.runtime.has_stages:
        return f"ZeRO stage {spec.zero.stage}"
    if spec.megatron.use_distributed_optimizer:
        return "distributed optimizer"
    if fsdp.shard_size == 1:
        return "data parallel"
    replicas = f", {ranks // fsdp.shard_size} replicas" if fsdp.shard_size < ranks else ""
    if fsdp.reshard_size == fsdp.shard_size:
        return f"sharded over {fsdp.shard_size} GPUs{replicas}"
    behind = f"over {fsdp.reshard_size}" if fsdp.reshard_size > 1 else "whole"
    return f"sharded over {fsdp.shard_size} GPUs{replicas}, {behind} between forward and backward"


def with_fit(label: str, fits: bool) -> str:
    """A label that does not pass a step for real that no GPU could hold."""
    return label if fits else f"{label} (does not fit)"


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
