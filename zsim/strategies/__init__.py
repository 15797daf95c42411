"""From a spec to the programs of its roles.

Two independent choices multiply: the *schedule* (order of module visits, `step`) and the *sharding* (where states
live and what moves when: `data_parallel`, `zero12`, `zero3`, `fsdp`). A sharding is one module and one line in
`_SHARDINGS`.
"""

from dataclasses import replace

from zsim.model import ModelGraph, build
from zsim.ops import Groups, Program
from zsim.spec import Spec
from zsim.strategies.blocking import blocks, waited_for
from zsim.strategies.data_parallel import DistributedDataParallel, Zero0
from zsim.strategies.fsdp1 import Fsdp1
from zsim.strategies.fsdp2 import Fsdp2
from zsim.strategies.megatron import MegatronDataParallel
from zsim.strategies.sharding import Sharding
from zsim.strategies.step import steps
from zsim.strategies.zero3 import Zero3
from zsim.strategies.zero12 import Zero12, num_gather_shards
from zsim.strategies.zero12_sliced import SlicedZero12

_SHARDINGS: dict[tuple[str, int], type[Sharding]] = {
    ("ddp", 0): DistributedDataParallel,
    ("deepspeed", 0): Zero0,
    ("deepspeed", 1): Zero12,
    ("deepspeed", 2): Zero12,
    ("deepspeed", 3): Zero3,
    ("fsdp1", 0): Fsdp1,
    ("fsdp2", 0): Fsdp2,
    ("megatron", 0): MegatronDataParallel,
    ("reference", 0): Zero0,
    ("reference", 1): SlicedZero12,
    ("reference", 2): SlicedZero12,
    ("reference", 3): Zero3,
}


def groups(spec: Spec) -> Groups:
    """Communicators by name, as the sharding needs them."""
    return _sharding(spec).groups(spec)


def _sharding(spec: Spec) -> type[Sharding]:
    return _SHARDINGS[spec.runtime.framework, spec.zero.stage]


def programs(spec: Spec) -> list[Program]:
    """One program a role; under data parallelism all ranks are one role."""
    kind = _sharding(spec)

    def graph(seq_len: int) -> ModelGraph:
        return kind.view(build(spec.model, replace(spec.train, seq_len=seq_len)), spec)

    ranks = tuple(range(spec.cluster.num_ranks))
    sharding = kind(spec, graph(spec.train.seq_len))
    ops = steps(spec, graph, sharding)
    return [Program("data_parallel", ranks, tuple(waited_for(spec, ops) if blocks(spec) else ops))]


def num_gather_calls(spec: Spec) -> int:
    """All-gathers of updated parameters after a step; 0 where a stage has none."""
    if spec.zero.stage not in {1, 2} or spec.runtime.framework != "deepspeed":
        return 0
    return num_gather_shards(spec, build(spec.model, spec.train).num_trained_parameters)
