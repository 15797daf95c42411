"""What other engines do with streams where there are none: on a CPU the host thread waits for what it has issued.

PyTorch's streams of a CPU are empty shells, and gloo returns from a collective when it is over, unless it was asked for
with `async_op`. Of the engines only these ask: DeepSpeed's stage 3 for gathered parameters (partition_parameters.py,
`_dist_allgather_fn`), DDP for its buckets (c10d's reducer.cpp). The reference engine has threads for lanes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zsim.cpu_spec import CpuClusterSpec
from zsim.ops import COMPUTE, Collective, Copy, Op, Sync
from zsim.spec import Spec


def blocks(spec: Spec) -> bool:
    """Whether side lanes of this run are the host thread's own work."""
    return isinstance(spec.cluster, CpuClusterSpec) and spec.runtime.framework != "reference"


def waited_for(spec: Spec, ops: Iterable[Op]) -> Iterator[Op]:
    """The ops, and behind each that blocks the wait for its lane; collectives that block take gloo's second thread."""
    for op in ops:
        if not isinstance(op, Copy | Collective) or op.lane == COMPUTE or _is_asynchronous(spec, op):
            yield op
            continue
        lane = f"{op.lane}.2" if isinstance(op, Collective) else op.lane
        yield replace(op, lane=lane)
        yield Sync(op.key, lanes=(lane,))


def _is_asynchronous(spec: Spec, op: Copy | Collective) -> bool:
    if not isinstance(op, Collective):
        return False
    if spec.runtime.framework == "ddp":
        return op.key.phase == "backward"
    return spec.runtime.framework == "deepspeed" and spec.zero.stage == 3 and op.kind == "all_gather"
