"""One round of all measurements of a GPU and of the host thread that drives it."""

import time
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.distributed as dist

from reference.calibration.host import Flush, OperatorCosts
from reference.calibration.operators import PHASES, Kind, Passes
from zsim.calibration.work import efficiencies
from zsim.spec import Spec

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SEGMENT_BYTES: Final = 64 * 2**20
"""Taken from the device and given back: a segment of its own for the caching allocator."""
_SMALL: Final = 1024


class GpuFigures:
    """Products, memory-bound kernels and attention by events; operators, streams, memory and a collective by the host.

    Left out: the hooks of DeepSpeed and FSDP, which have costs of their own, and the sustained rate of a GPU that is
    hot: a calibration is shorter than it takes to become so.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        dtype = _DTYPES[spec.train.precision]
        self._passes = Passes(spec, dtype, device)
        self._operators = OperatorCosts(dtype, device)
        self._flush = Flush()
        self._side = torch.cuda.Stream(device)
        self._small = torch.ones(_SMALL, device=device)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)

    def round(self) -> dict[str, float]:
        """See `Figures`."""
        seconds = self._passes.seconds()

        def taken_s(kind: Kind) -> float:
            return sum(seconds.get((phase, kind), 0.0) for phase in PHASES)

        found = efficiencies(
            self._spec, gemm_s=taken_s("product"), attention_s=taken_s("attention"), kernel_s=taken_s("kernel")
        )
        found["runtime.stack.kernel_floor_s"] = max(0.0, self._passes.tiny_s() - self._passes.floor_s())
        found["cluster.device.memory_bytes"] = float(torch.cuda.get_device_properties(self._device).total_memory)
        host = {**self._operators.seconds(), **dict(self._calls()), **dict(self._segments())}
        return found | {f"runtime.host.{name}_s": taken for name, taken in host.items()}

    def close(self) -> None:
        """See `Figures`."""

    def _calls(self) -> Iterator[tuple[str, float]]:
        """Single calls, each on an idle device."""
        event, small, current = torch.cuda.Event(), self._small, torch.cuda.current_stream(self._device)
        calls: dict[str, Callable[[], object]] = {
            "event": lambda: event.record(current),
            "wait_stream": lambda: self._side.wait_stream(current),
            "allocation": lambda: torch.empty(_SMALL, device=self._device),
            "narrow": lambda: small.narrow(0, 1, 2),
            "view": lambda: small.view(-1),
            "item": small[0].item,
            "collective": lambda: dist.all_reduce(small, async_op=True),
        }
        for name, call in calls.items():
            yield name, self._alone_s(call)

    def _segments(self) -> Iterator[tuple[str, float]]:
        """One cudaMalloc and one cudaFree, by a caching allocator that has nothing left."""
        torch.cuda.empty_cache()
        held: list[torch.Tensor] = []

        def take() -> None:
            held.append(torch.empty(_SEGMENT_BYTES, dtype=torch.uint8, device=self._device))

        yield "device_malloc", self._alone_s(take)
        held.clear()
        yield "device_free", self._alone_s(torch.cuda.empty_cache)

    def _alone_s(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        self._flush()
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s
