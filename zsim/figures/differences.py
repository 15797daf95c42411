"""What two experiments differ in, and on which causes of a step each difference acts directly.

"Directly" is a table, not a proof: it names the inputs that the code behind a cause reads. That a cause changed may
also follow from another cause, and only throwing single switches tells which of several inputs did it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from zsim.figures import causes
from zsim.spec import Spec

_SILENT: Final = frozenset({"constants", "warnings", "measured", "name", "question", "noise"})
"""Fields of the spec that change no second."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One input that is not the same."""

    path: str
    """Within `Spec`."""
    before: Any
    after: Any

    def __str__(self) -> str:
        name = self.path.removeprefix("runtime.optimisations.")
        return f"{name} {_shown(self.before)} -> {_shown(self.after)}"


def differences(before: Spec, after: Spec) -> tuple[Difference, ...]:
    """All inputs in which two specs differ, in the order of their fields."""
    return tuple(_differing(before, after, ""))


def _differing(before: Any, after: Any, prefix: str) -> Iterator[Difference]:
    for field in fields(before):
        if not prefix and field.name in _SILENT:
            continue
        one, other = getattr(before, field.name), getattr(after, field.name)
        if is_dataclass(one) and type(one) is type(other):
            yield from _differing(one, other, f"{prefix}{field.name}.")
        elif one != other:
            yield Difference(f"{prefix}{field.name}", one, other)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


_BATCH: Final = ("train.micro_batch", "train.seq_len", "train.gradient_accumulation")
_SCALE: Final = ("cluster.num_nodes", "cluster.gpus_per_node")
_FABRIC: Final = (
    "cluster.topology",
    *_SCALE,
    "cluster.network.inter_bus*",
    "cluster.network.intra_bus*",
    "cluster.network.*",
)
_MODEL: Final = ("model.*", "train.precision", "train.*")


def _switches(*names: str) -> tuple[str, ...]:
    return tuple(f"runtime.optimisations.{name}" for name in names)


def _host(*names: str) -> tuple[str, ...]:
    return tuple(f"runtime.host.{name}" for name in names)


_SYNCS: Final = _switches("all_gather_sync", "reduce_sync", "bucket_sync")
_FORMS: Final = _switches("coalesced_collectives", "all_gather_form", "reduce_scatter_form", "parameter_gather_form")
_COLLECTIVE: Final = ("runtime.framework", "zero.stage", "zero.overlap_comm", "megatron.*")
_GATHER: Final = _switches(
    "all_gather_sync", "broken_trace", "coalesced_collectives", "all_gather_form", "parameter_gather_form",
    "limiter_depth", "separate_communicators", "cached_decisions",
)  # fmt: skip
_REDUCE: Final = _switches(
    "reduce_sync", "bucket_sync", "multi_rank_all_reduce", "separate_communicators", "coalesced_collectives",
    "reduce_scatter_form", "limiter_depth", "all_gather_sync",
)  # fmt: skip

_ACTING: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("compute", "GEMMs"): (
        *_BATCH, "model.*", "train.*", "cluster.device.name", "cluster.device.*", "runtime.stack.*", *_SCALE,
    ),
    ("compute", "memory-bound kernels"): (
        *_switches("debug_norms"), *_BATCH, "model.attention", "model.fused_kernels", "model.compile", "model.*",
        "train.*", "cluster.device.memory*", "runtime.stack.memory_efficiency", "runtime.stack.kernel_floor_s",
        *_SCALE,
    ),
    ("compute", "slowed by collectives and copies"): (
        *_COLLECTIVE, "runtime.stack.compute_share", *_GATHER, *_REDUCE, *_FABRIC,
    ),
    ("optimizer", ""): (
        *_switches("fused_gradient_norm", "debug_strings"), "zero.stage", "megatron.*", *_SCALE, "zero.sub_group_size",
        *_MODEL,
        "cluster.device.*",
    ),
    ("exposed_all_gather", ""): (*_COLLECTIVE, *_GATHER, "zero.*", *_FABRIC, *_BATCH, *_MODEL),
    ("exposed_reduce", ""): (*_COLLECTIVE, *_REDUCE, "zero.*", *_FABRIC, *_BATCH, *_MODEL),
    ("exposed_other_communication", ""): (*_COLLECTIVE, *_REDUCE, "zero.*", *_FABRIC, *_MODEL),
    ("copies", ""): (*_SYNCS, *_FORMS, *_switches("preallocated_buffers"), "zero.*", *_MODEL, "cluster.device.memory*"),
    ("allocator", ""): (
        *_switches("defragmentation", "preallocated_buffers", "limiter_depth"), *_FORMS, "fsdp.limit_all_gathers",
        *_BATCH, "zero.*", "cluster.device.memory_bytes", *_MODEL, *_host("device_malloc_s", "device_free_s"),
    ),
    ("sync", ""): (
        *_SYNCS, *_switches("debug_norms", "fused_gradient_norm", "limiter_depth"), "runtime.framework", "zero.stage",
        *_host("sync_return_s", "item_s"),
    ),
    ("host", causes.LAUNCHES): (
        *_switches("debug_norms", "fused_gradient_norm"), *_FORMS, "model.fused_kernels", "model.attention",
        "model.compile", *_host("op_forward_s", "op_backward_s", "launch_s", "compiled_launch_s"), "zero.stage",
        "model.num_layers",
    ),
    ("host", causes.HOOKS): (
        *_switches("counting_hooks"), "zero.stage", "model.compile",
        *_host("visit*", "module_call_s", "compiled_call_s", "gradient_hook_s", "counted_parameter_s"),
        "model.num_layers",
    ),
    ("host", causes.BOOKKEEPING): (
        *_switches("cached_decisions", "broken_trace"), "zero.stage", *_host("decision*", "parameter_s", "scan_s"),
        "model.num_layers",
    ),
    ("host", causes.DEBUG): (*_switches("debug_norms", "debug_strings"), *_host("string_s", "norm_string_s")),
    ("host", causes.LISTS): (*_FORMS, *_SCALE, *_host("narrow_s", "view_s", "grouped_tensor_s")),
    ("host", causes.EVENTS): (*_SYNCS, *_host("event_s", "wait_stream_s")),
    ("host", causes.ALLOCATOR): (
        *_switches("preallocated_buffers", "defragmentation"), *_FORMS, *_host("allocation_s"),
    ),
    ("host", causes.OPTIMIZER): (
        *_switches("fused_gradient_norm"), "zero.sub_group_size", *_host("optimizer*", "partition*", "item_s"),
    ),
    ("host", causes.PYTHON): (*_host("*"),),
    ("host", causes.NOTHING): (*_SYNCS, *_host("launch_latency_s", "sync_return_s")),
}  # fmt: skip
"""Cause and kind of its work -> patterns of inputs, those that say most first."""


def acting_on(cause: str, work: str, given: Iterable[Difference]) -> tuple[Difference, ...]:
    """The differences that act on a cause directly, those that say most first."""
    patterns = _ACTING.get((cause, work)) or _ACTING[cause, ""]
    if cause == "host":
        patterns += ("runtime.framework", "zero.stage", "cluster.host_slowdown", *_BATCH)
    found = {d.path: d for pattern in patterns for d in given if fnmatchcase(d.path, pattern)}
    return tuple(found.values())
