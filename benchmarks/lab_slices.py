"""Short calibrations between the visits of a lab benchmark, by all ranks at once: what a core and TCP reach meanwhile.

The device's slice runs the model's own operators as `zsim calibrate device` does; the network's runs each collective
alone, and is to be had over loopback and over links of 1 Gbit/s only.
"""

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from reference.calibration.clock import CoreClock
from reference.calibration.operators import Passes
from reference.collective_bench import CARRIERS, OPERATIONS
from reference.collective_rank import collective
from reference.communication import Communicator, communicators
from zsim.calibration.tcp_samples import Operation
from zsim.calibration.work import work_of
from zsim.spec import Spec

ROUNDS: Final = 3
SIZE_BYTES: Final = 16 * 2**20
NUM_LATENCIES: Final = 20
ADAM_BYTES: Final = 28
"""An element: gradient, parameter and two moments read, all but the gradient written."""
Samples = dict[str, list[float]]
"""Name -> values of all rounds; rates in FLOP/s and bytes/s."""


class Device:
    """Of this rank's core, by the calibration's own clock: it stands still while other processes have the core."""

    def __init__(self, spec: Spec) -> None:
        self._passes = Passes(spec, torch.float32, torch.device("cpu"))
        self._work = work_of(spec)
        self._source = torch.randn(2**22)
        self._target = torch.empty_like(self._source)
        self._weights = nn.Parameter(torch.randn(8_000_000))
        self._weights.grad = torch.randn_like(self._weights)
        self._optimizer = torch.optim.AdamW([self._weights], fused=True)
        self.samples()

    def samples(self) -> Samples:
        """Rates of the model's operators, of an update and of copies."""
        found: Samples = {}
        for _ in range(ROUNDS):
            seconds = self._passes.seconds()
            for kind, amount, name in (
                ("product", self._work.gemm_flop, "fp32_gemm_flop_per_s"),
                ("kernel", self._work.kernel_bytes, "fp32_kernel_bytes_per_s"),
            ):
                taken_s = sum(each for (_, of), each in seconds.items() if of == kind)
                found.setdefault(name, []).append(amount / taken_s)
        moved_bytes = 2 * self._source.nbytes
        found["copy_bytes_per_s"] = _rates(lambda: self._target.copy_(self._source), moved_bytes)
        found["fp32_update_bytes_per_s"] = _rates(self._optimizer.step, ADAM_BYTES * self._weights.numel())
        return found


def _rates(action: Callable[[], object], amount: float) -> list[float]:
    timer = CoreClock()
    for _ in range(ROUNDS):
        timer.start()
        action()
        timer.stop()
    return [amount / taken_s for taken_s in timer.samples()]


class Network:
    """Both implementations of the collectives among all ranks."""

    def __init__(self, timeout_s: float) -> None:
        self._among = {
            name: communicators([f"slice.{name}"], ring=name == "ring", timeout_s=timeout_s)[f"slice.{name}"]
            for name in CARRIERS
        }

    def samples(self) -> Samples:
        """Seconds and CPU seconds for each byte that a ring sends, by carrier and operation; seconds of a message."""
        found: Samples = {}
        for carrier, communicator in self._among.items():
            for operation in OPERATIONS:
                for _ in range(ROUNDS - 1):
                    seconds, cpu_s, sent = _timed(communicator, operation)
                    found.setdefault(f"{carrier}_{operation}.s_per_byte", []).append(seconds / sent)
                    found.setdefault(f"{carrier}_{operation}.cpu_s_per_byte", []).append(cpu_s / sent)
        return found | {"message_s": _messages_s(self._among["ring"])}

    def close(self) -> None:
        """Their connections."""
        for communicator in self._among.values():
            communicator.close()


def _timed(communicator: Communicator, operation: Operation) -> tuple[float, float, int]:
    """Seconds, CPU seconds of this rank, and bytes that a ring sends."""
    call, ring_bytes = collective(communicator, operation, SIZE_BYTES)
    dist.barrier()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    call()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return seconds, cpu_s, ring_bytes


def _messages_s(communicator: Communicator) -> list[float]:
    """Of one number all-reduced, 2(n - 1) messages one after the other."""
    number, found = torch.zeros(1), []
    for _ in range(NUM_LATENCIES):
        start_s = time.perf_counter()
        communicator.all_reduce(number)
        found.append((time.perf_counter() - start_s) / (2 * (communicator.size - 1)))
    return found


def of_all_ranks(samples: Samples) -> Samples:
    """Those of every rank, on every rank."""
    each: list[Samples] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, samples)
    return {name: [value for rank in each for value in rank[name]] for name in samples}
