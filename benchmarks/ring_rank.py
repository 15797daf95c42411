"""A rank of `benchmarks.ring`: `-m benchmarks.ring_rank OUTPUT` under torchrun, in a lab of two nodes.

Every repetition runs all carriers one after the other, so that a slow spell of the machine falls on all of them.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ring import SIZES_MIB, Measurement
from reference.collective_bench import OPERATIONS
from reference.collective_rank import collective
from reference.communication import Communicator, communicators
from reference.launching import iproute
from zsim.calibration.tcp_samples import Operation

MIB = 2**20
REPETITIONS = {1: 7, 16: 3, 64: 3}
TIMEOUT_S = 60.0
MATRIX = 256


def carriers() -> dict[str, Communicator]:
    """A ring over connections of its own, one over gloo's messages, and gloo's own collectives."""
    return {
        "ring": communicators(["ring"], ring=True, timeout_s=TIMEOUT_S)["ring"],
        "ring over isend": communicators(["isend"], ring=True, timeout_s=TIMEOUT_S, messages="gloo")["isend"],
        "gloo": communicators(["gloo"], ring=False, timeout_s=TIMEOUT_S)["gloo"],
    }


def measure(operation: Operation, mib: int, among: dict[str, Communicator], *, busy: bool) -> list[Measurement]:
    """Medians over the repetitions, by carrier."""
    found: dict[str, list[Measurement]] = {name: [] for name in among}
    for _ in range(REPETITIONS[mib] + 1):
        for name, communicator in among.items():
            call, ring_bytes = collective(communicator, operation, mib * MIB)
            communicator.barrier()
            before, cpu, start = _sent_bytes(), time.process_time(), time.perf_counter()
            products = _beside_products(call) if busy else _alone(call)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            communicator.barrier()
            sent = _sent_bytes() - before
            found[name].append(
                Measurement(name, operation, mib, busy, seconds, ring_bytes, sent, cpu, products / seconds)
            )
    # The first fills buffers and opens TCP's window.
    medians = [_median(measurements[1:]) for measurements in found.values()]
    for one in medians:
        print(one, flush=True)
    return medians


def _alone(call: Callable[[], None]) -> int:
    call()
    return 0


def _beside_products(call: Callable[[], None]) -> int:
    """Calls in another thread, as a lane of the engine does, and multiplies until it is done; number of products."""
    matrix = torch.ones(MATRIX, MATRIX)
    thread = threading.Thread(target=call)
    thread.start()
    products = 0
    while thread.is_alive():
        torch.mm(matrix, matrix)
        products += 1
    thread.join()
    return products


def _sent_bytes() -> int:
    queue = iproute.token_buckets()[iproute.INTERFACE]
    return iproute.payload_bytes(queue["bytes"], queue["packets"])


def _median(of: list[Measurement]) -> Measurement:
    one = of[0]
    return Measurement(
        one.carrier,
        one.operation,
        one.mib,
        one.busy,
        statistics.median(each.seconds for each in of),
        one.ring_bytes,
        statistics.median(each.sent_bytes for each in of),
        statistics.median(each.cpu_s for each in of),
        statistics.median(each.products_per_s for each in of),
    )


def main() -> None:
    """Rank 0 writes a JSON list of measurements to the file named on the command line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    among = carriers()
    found = [one for mib in SIZES_MIB for operation in OPERATIONS for one in measure(operation, mib, among, busy=False)]
    found += [one for operation in OPERATIONS for one in measure(operation, SIZES_MIB[-1], among, busy=True)]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
