"""Collectives by the names and arguments that PyTorch, NCCL, RCCL and gloo give them."""

import re
from collections.abc import Mapping
from typing import Any, Final

from zsim.imports.kineto.records import CollectiveCall, Kind

_KERNELS: Final = re.compile(r"^(?:void )?\w*(?:nccl|rccl)", re.IGNORECASE)
"""ncclKernel_..., ncclDevKernel_..., rcclGenericKernel, mscclKernel_...; not a library's name within a template."""
_CALLS: Final = re.compile(r"^(?:nccl|gloo|c10d|mpi|ucc|xccl):+(?P<name>\w+)$")
"""Annotations of the process groups and operators of c10d."""
RECORD: Final = "record_param_comms"
"""Operator that carries a collective's arguments."""

_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "other"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("sendrecv", "send_recv"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)
"""Part of a name without underscores -> kind; the first that is found."""

_ELEMENT_BYTES: Final = {
    "bool": 1,
    "byte": 1,
    "char": 1,
    "float8e4m3fn": 1,
    "float8e4m3fnuz": 1,
    "float8e5m2": 1,
    "float8e5m2fnuz": 1,
    "short": 2,
    "half": 2,
    "bfloat16": 2,
    "int": 4,
    "float": 4,
    "long": 8,
    "double": 8,
    "longint": 8,
    "unsignedchar": 1,
    "signedchar": 1,
}
"""ScalarType of PyTorch, as collectives name it ("BFloat16") and as operators do ("c10::BFloat16")."""


def element_bytes(dtype: str) -> int:
    """Of one element; 0 where the type is not known."""
    return _ELEMENT_BYTES.get(re.sub(r"c10::|[_\s]", "", dtype).lower(), 0)


def is_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL's or RCCL's."""
    return _KERNELS.match(name) is not None


def is_call(name: str) -> bool:
    """Whether an annotation or operator of the host is a collective's."""
    return name == RECORD or _CALLS.match(name) is not None


def kind(name: str) -> Kind:
    """By name of a kernel, an annotation, or the argument "Collective name"."""
    plain = name.lower().replace("_", "")
    return next((found for part, found in _KINDS if part in plain), "other")


def of_arguments(name: str, arguments: Mapping[str, Any]) -> CollectiveCall:
    """By an event's name and its arguments, of which there may be none."""
    given = arguments.get("Collective name")
    return CollectiveCall(
        kind(given if isinstance(given, str) and given else name),
        _count(arguments, "In msg nelems", "In msg size"),
        _count(arguments, "Out msg nelems", "Out msg size"),
        element_bytes(str(arguments.get("dtype", ""))),
        _count(arguments, "Group size"),
        str(arguments.get("Process Group Name", ""))[:100],
    )


def _count(arguments: Mapping[str, Any], *names: str) -> int:
    """The first that is there; PyTorch 2.1 calls numbers of elements sizes."""
    for name in names:
        value = arguments.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
            return value
    return 0
