"""Small experiments through the public door, and counts over the programs that become of them."""

import json
from collections import Counter
from dataclasses import replace

from zsim import programs
from zsim.ops import SETUP, Alloc, Collective, Free, Op
from zsim.reading.resolution import load, resolve
from zsim.spec import Spec

HIDDEN = 256
LAYERS = 3
VOCAB = 4096
POSITIONS = 128
"""Every tensor of this model is a multiple of 64 elements, so that padding changes nothing; the word embedding is
larger than a block, so that nothing of a block survives from forward to backward at the distances used here."""

MATRIX = HIDDEN * HIDDEN
VECTORS = 13 * HIDDEN
"""A block's biases and norms: q, k, v, o, LN (2), 4 of the intermediate, output, LN (2)."""
BLOCK = 12 * MATRIX + VECTORS
WORDS = VOCAB * HIDDEN
EMBEDDINGS = WORDS + POSITIONS * HIDDEN + 2 * HIDDEN + 2 * HIDDEN
"""Words, positions, two types, LayerNorm."""
HEAD = MATRIX + HIDDEN + 2 * HIDDEN + VOCAB
"""Dense, LayerNorm, bias of the decoder; its weight is the word embedding's."""
PSI = LAYERS * BLOCK + EMBEDDINGS + HEAD

WEIGHT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "reduce": 1}
"""Elements a rank moves for one element of the tensor (Rajbhandari et al. 2020, section 7)."""


def bert(layers=LAYERS, **changes):
    """A block as Hugging Face's BertLayer, small."""
    shape = {"family": "bert", "layers": layers, "hidden": HIDDEN, "heads": 4, "vocab": VOCAB}
    return shape | {"max_positions": POSITIONS, "type_vocab": 2} | changes


def gpt(layers=LAYERS, **changes):
    """The same shape as Megatron-LM's GPT."""
    shape = {"family": "gpt2", "layers": layers, "hidden": HIDDEN, "heads": 4, "vocab": VOCAB}
    return shape | {"max_positions": POSITIONS} | changes


def resolved(
    folder,
    runtime,
    *,
    zero=None,
    fsdp=None,
    megatron=None,
    model=None,
    topology="p4d.24xlarge",
    nodes=1,
    gpus=4,
    optimisations=None,
    **train,
) -> Spec:
    """An experiment written into `folder`, loaded and resolved; `zero` is DeepSpeed's section."""
    is_reference = runtime == "reference"
    experiment = {
        "question": "How many?",
        "model": model or bert(),
        "cluster": {
            "topology": topology,
            "nodes": nodes,
            "ranks_per_node" if topology == "lab" else "gpus_per_node": gpus,
        },
        "runtime": runtime,
        "train": {"micro_batch": 2, "seq_len": 64, "precision": "bf16" if is_reference else "fp16"} | train,
        "optimisations": optimisations or {},
    }
    if fsdp is not None:
        experiment["fsdp"] = fsdp
    if megatron is not None:
        experiment["megatron"] = megatron
    if is_reference:
        experiment["deepspeed"] = {"zero_optimization": zero or {}}
    if "deepspeed" in runtime:
        experiment["deepspeed"] = {"fp16": {"enabled": True}, "zero_optimization": zero or {}}
    path = folder / "small.yaml"
    path.write_text(json.dumps(experiment), encoding="utf-8")
    return resolve(load(path))


def ops(spec: Spec, phase=None, layer=None) -> list[Op]:
    """The ops of the only role, of one phase and layer if so wished."""
    (program,) = programs(spec)
    return [op for op in program.ops if phase in {None, op.key.phase} and layer in {None, op.key.layer}]


def collectives(spec: Spec, phase=None, layer=None) -> list[Collective]:
    """Collectives that carry tensors; flags and norms are single elements."""
    return [op for op in ops(spec, phase, layer) if isinstance(op, Collective) and op.num_elements > 1]


def moved(spec: Spec, kind=None, phase=None, layer=None) -> int:
    """Elements that a rank moves in a step."""
    found = collectives(spec, phase, layer)
    return sum(WEIGHT[op.kind] * op.num_elements for op in found if kind in {None, op.kind})


def count(found: list[Op], kind: type, what: str = "") -> int:
    """Ops of one kind whose key says `what`."""
    return sum(isinstance(op, kind) and what in op.key.what for op in found)


def switched(spec: Spec, **switches) -> Spec:
    """The same experiment with other optimisations."""
    runtime = replace(spec.runtime, optimisations=replace(spec.runtime.optimisations, **switches))
    return replace(spec, runtime=runtime)


def curve(spec):
    """Bytes by category after each Alloc and Free, with the op."""
    live: dict[str, Alloc] = {}
    held: Counter[str] = Counter()
    for op in ops(spec):
        if isinstance(op, Alloc):
            live[op.buffer] = op
            held[op.category] += op.nbytes
        elif isinstance(op, Free):
            held[live[op.buffer].category] -= live.pop(op.buffer).nbytes
        else:
            continue
        yield op, dict(held)


def set_up(spec) -> dict[str, int]:
    """Bytes by category before the first step."""
    held: dict[str, int] = {}
    for op, now in curve(spec):
        if op.key.phase in SETUP:
            held = now
    return held


def reduced(spec) -> dict[str, int]:
    """Bytes by category when the last gradient has arrived, with which the optimizer begins."""
    before: dict[str, int] = {}
    for op, now in curve(spec):
        if op.key.phase == "step":
            return before
        before = now
    raise AssertionError


def highest(spec, *categories):
    """The most that some categories hold together."""
    return max(sum(held.get(name, 0) for name in categories) for _, held in curve(spec))
