"""Collectives as PyTorch's profiler shows them: kernel names of NCCL, names and arguments of c10d.

Kernel names are those of the symbols in NCCL's shared libraries. All of them say LL: NCCL compiles one kernel a
function, type and algorithm, for LL, and the other protocols are functions that it calls (NCCL 2.10
src/collectives/device/common.h, "Only generate kernels for LL"; since 2.19 src/device/generate.py, `best_kernel`).
What ran is in the arguments `Algorithm` and `Protocol`. The others are what PyTorch records since 2.1
(torch/csrc/profiler/util.h), whatever the generation of the runtime.
"""

from typing import Any, Final

from zsim.cpu_spec import CpuStackSpec
from zsim.figures.breakdown import COLLECTIVE_CAUSE
from zsim.software import StackSpec
from zsim.spec import Spec
from zsim.trace import Span, Trace

_FUNCTIONS: Final = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "reduce": "Reduce",
    "broadcast": "Broadcast",
    "send_recv": "SendRecv",
}
_REDUCING: Final = frozenset({"ReduceScatter", "AllReduce", "Reduce"})

_TYPES: Final = {
    "Byte": ("uint8_t", "u8"),
    "Half": ("half", "f16"),
    "BFloat16": ("__nv_bfloat16", "bf16"),
    "Float": ("float", "f32"),
}
"""ScalarType of PyTorch -> in the names of kernels before and since NCCL 2.19."""

_PARAMETERS: Final = (
    ((2, 22), "(ncclDevKernelArgsStorage<4096ul>)"),
    ((2, 13), "(ncclDevComm*, unsigned long, ncclWork*)"),
    ((2, 11), "(ncclDevComm*, ncclWorkElem)"),
    ((0,), "(ncclWorkElem)"),
)
"""Of kernels, by the first version of NCCL that has them."""

_C10D: Final = {
    ("all_gather", "list"): ("allgather", "nccl:all_gather"),
    ("all_gather", "base"): ("_allgather_base", "nccl:_all_gather_base"),
    ("all_gather", "grouped"): ("allgather_into_tensor_coalesced", "nccl:all_gather_into_tensor_coalesced"),
    ("reduce_scatter", "list"): ("reduce_scatter", "nccl:reduce_scatter"),
    ("reduce_scatter", "base"): ("_reduce_scatter_base", "nccl:_reduce_scatter_base"),
    ("reduce_scatter", "grouped"): ("reduce_scatter_tensor_coalesced", "nccl:reduce_scatter_tensor_coalesced"),
    ("all_reduce", ""): ("allreduce", "nccl:all_reduce"),
    ("reduce", ""): ("reduce", "nccl:reduce"),
    ("broadcast", ""): ("broadcast", "nccl:broadcast"),
    ("send_recv", ""): ("send", "nccl:send"),
}
"""Kind and form -> collective name, title of the annotation on the host (ProcessGroupNCCL.cpp)."""

KIND_OF: Final = {name: kind for (kind, _), (name, _) in _C10D.items()}
"""Collective name -> kind, for whoever reads such a trace."""

_MOST_RANKS: Final = 30
"""Longer lists of ranks are cut as PyTorch cuts them: all but the last of those left out."""


class ProcessGroups:
    """Communicators as c10d numbers them: one a stream and group, in order of first use."""

    def __init__(self, trace: Trace, rank: int) -> None:
        self._rank = rank
        self._trace = trace
        self._names: dict[tuple[str, str], str] = {}
        for span in trace.spans:
            if span.kind in COLLECTIVE_CAUSE and span.rank == rank:
                self._names.setdefault((span.lane, span.group), str(len(self._names)))

    def arguments(self, span: Span) -> dict[str, Any]:
        """Of the group in which a span's collective meets."""
        ranks = self._ranks(span.group)
        return {
            "Group size": len(ranks),
            "Process Group Name": self._names[span.lane, span.group],
            "Process Group Description": span.lane,
            "Process Group Ranks": _shown(ranks),
        }

    def configuration(self) -> list[dict[str, Any]]:
        """`pg_config` of the trace's head."""
        return [
            {
                "pg_name": name,
                "pg_desc": lane,
                "backend_config": "cpu:gloo"
                if isinstance(self._trace.spec.runtime.stack, CpuStackSpec)
                else "cuda:nccl",
                "pg_size": len(self._ranks(group)),
                "ranks": list(self._ranks(group)),
            }
            for (lane, group), name in self._names.items()
        ]

    def _ranks(self, group: str) -> tuple[int, ...]:
        parts = self._trace.groups.get(group, ())
        return next((part for part in parts if self._rank in part), ())


def _shown(ranks: tuple[int, ...]) -> str:
    first = ranks if len(ranks) <= _MOST_RANKS else ranks[: _MOST_RANKS - 1]
    return f"[{', '.join(map(str, first))}{'' if first is ranks else f', ..., {ranks[-1]}'}]"


def kernel_name(span: Span, spec: Spec) -> str:
    """Of the kernel that runs a collective, with its parameters."""
    version = _version(spec)
    parameters = next(text for since, text in _PARAMETERS if version >= since)
    function = _FUNCTIONS[span.kind]
    old, new = _TYPES[_scalar_type(span, spec)]
    if version >= (2, 19):
        if function == "SendRecv":
            return f"ncclDevKernel_SendRecv{parameters}"
        reduction = f"_Sum_{new}" if function in _REDUCING else ""
        algorithm = "TREE" if algorithm_and_protocol(span)[0] == "TREE" else "RING"
        return f"ncclDevKernel_{function}{reduction}_{algorithm}_LL{parameters}"
    if function == "SendRecv":
        return f"ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t{parameters}"
    kind = old if function in _REDUCING else "int8_t"
    return f"ncclKernel_{function}_{algorithm_and_protocol(span)[0]}_LL_Sum_{kind}{parameters}"


def algorithm_and_protocol(span: Span) -> tuple[str, str]:
    """What NCCL chose; a ring with LL for a group of one, which chooses nothing."""
    algorithm, _, protocol = (span.note or "RING_LL").rpartition("_")
    return algorithm, protocol


def title(span: Span, spec: Spec) -> str:
    """Of the annotation around the call on the host."""
    return _C10D[span.kind, _form(span.kind, spec)][1]


def arguments(span: Span, spec: Spec, groups: ProcessGroups) -> dict[str, Any]:
    """What PyTorch records of a collective, and algorithm, protocol and bytes beside it."""
    group = groups.arguments(span)
    elements = span.nbytes // max(1, span.element_bytes)
    share = elements // max(1, group["Group size"])
    algorithm, protocol = algorithm_and_protocol(span)
    return {
        "Collective name": _C10D[span.kind, _form(span.kind, spec)][0],
        "In msg nelems": share if span.kind == "all_gather" else elements,
        "Out msg nelems": share if span.kind == "reduce_scatter" else elements,
        "dtype": _scalar_type(span, spec),
        "In split size": "[]",
        "Out split size": "[]",
        **group,
        "Algorithm": algorithm,
        "Protocol": protocol,
        "bytes": span.nbytes,
    }


def _form(kind: str, spec: Spec) -> str:
    """Through lists of tensors, straight from and into one, or grouped."""
    if kind not in {"all_gather", "reduce_scatter"}:
        return ""
    if not spec.runtime.has_stages:
        return "base"
    switches = spec.runtime.optimisations
    if kind == "all_gather":
        return switches.all_gather_form if spec.zero.stage == 3 else switches.parameter_gather_form
    # The reference engine reduces by stage 3's buckets in all stages that cut gradients.
    is_bucketed = spec.zero.stage == 3 or spec.runtime.framework == "reference"
    return switches.reduce_scatter_form if is_bucketed else "base"


def _scalar_type(span: Span, spec: Spec) -> str:
    if span.element_bytes == 1:
        return "Byte"
    if span.element_bytes == 4:
        return "Float"
    return "BFloat16" if spec.train.precision == "bf16" else "Half"


def _version(spec: Spec) -> tuple[int, ...]:
    stack = spec.runtime.stack
    text = stack.nccl_version if isinstance(stack, StackSpec) else "head"
    return (99,) if text == "head" else tuple(int(part) for part in text.split("."))
