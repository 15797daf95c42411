"""A trace as PyTorch's profiler (Kineto) writes it: for ui.perfetto.dev, and for HolisticTraceAnalysis (HTA).

Format: "Trace Event Format" (Google, 2016) with the categories and arguments of Kineto's output_json.cpp. A process is
a rank; its threads are the host and the streams. Times are microseconds, on the host with nanoseconds behind the point.
"""

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from zsim.software import StackSpec
from zsim.spec import DeviceSpec
from zsim.trace import Trace
from zsim.writing.chrome_trace.events import Event, events
from zsim.writing.chrome_trace.nccl import ProcessGroups

_COMPUTE_CAPABILITY: Final = {"volta": 7, "ampere": 8, "ada": 8, "hopper": 9, "blackwell": 10}
_COMPRESSION: Final = 4
"""Of 9; three quarters of the gain at a third of the time."""
_BATCH: Final = 2048
"""Events between two writes."""


def write(trace: Trace, path: Path, rank: int | None = None) -> None:
    """Writes a trace, event by event: a step may have a million of them.

    Args:
        trace: what ran.
        path: JSON; compressed if it ends in .gz.
        rank: the only rank to write, as HTA wants a file for each; None writes all that were executed.

    Raises:
        ValueError: the rank was not executed.

    """
    executed = sorted({span.rank for span in trace.spans})
    if rank is not None and rank not in executed:
        raise ValueError(f"rank {rank}: was not executed, allowed are {', '.join(map(str, executed))}")
    ranks = executed if rank is None else [rank]
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    with _opened(path) as file:
        file.write(f"{_head(trace, ranks[0] if ranks else 0)}\n")
        batch: list[str] = []
        separator = ""
        for event in events(trace, ranks):
            batch.append(encode(event))
            if len(batch) == _BATCH:
                file.write(separator + ",\n".join(batch))
                separator = ",\n"
                batch.clear()
        file.write(separator * bool(batch) + ",\n".join(batch) + "\n]}\n")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The file as text; compressed ones have the same bytes whenever and under whatever name they are written."""
    if path.suffix != ".gz":
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as compressed,
        io.TextIOWrapper(compressed, encoding="utf-8") as file,
    ):
        yield file


def _head(trace: Trace, rank: int) -> str:
    """Everything before the events, on one line: HTA searches it for `"rank": 0`, blank included."""
    spec = trace.spec
    groups = ProcessGroups(trace, rank).configuration()
    stack = spec.runtime.stack
    distributed = {
        "backend": "nccl" if isinstance(stack, StackSpec) else "gloo",
        "rank": rank,
        "world_size": trace.num_ranks,
        "pg_count": len(groups),
        "pg_config": groups,
        **({"nccl_version": stack.nccl_version} if isinstance(stack, StackSpec) else {}),
    }
    head: Event = {
        "schemaVersion": 1,
        "deviceProperties": [_device(trace, index) for index in range(spec.cluster.gpus_per_node)],
        "distributedInfo": distributed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "otherData": {
            "schema": trace.schema,
            "origin": trace.origin,
            "experiment": spec.name,
            "versions": trace.versions,
        },
        "traceEvents": [],
    }
    return json.dumps(head, allow_nan=False).removesuffix("]}")


def _device(trace: Trace, index: int) -> dict[str, Any]:
    device = trace.spec.cluster.device
    properties = {"id": index, "name": device.name, "totalGlobalMem": int(device.memory_bytes)}
    if isinstance(device, DeviceSpec):
        properties |= {"computeMajor": _COMPUTE_CAPABILITY[device.generation], "numSms": device.num_sms}
    return properties
