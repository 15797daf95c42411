"""A rank of `collective_bench`: `-m reference.collective_rank RESULT TINY SIZES REPETITIONS` under torchrun."""

import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from reference.collective_bench import CARRIERS, OPERATIONS, TIMEOUT_S, Sizes, write
from reference.communication import Communicator, communicators
from reference.launching import heartbeat, iproute
from zsim.calibration.tcp_samples import Carrier, Operation, Sample


def main() -> None:
    """Measures; rank 0 writes the list of samples."""
    result, tiny, large, repetitions = sys.argv[1:]
    sizes = Sizes(int(tiny), tuple(map(int, large.split(","))), int(repetitions))
    torch.set_num_threads(1)
    with heartbeat.told():
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        samples = measured(sizes)
        if dist.get_rank() == 0:
            write(Path(result), samples)
        dist.destroy_process_group()


def measured(sizes: Sizes) -> list[Sample]:
    """All repetitions but the first of each size, which fills buffers and opens TCP's window."""
    among = {name: communicators([name], ring=name == "ring", timeout_s=TIMEOUT_S)[name] for name in CARRIERS}
    samples: list[Sample] = []
    num_rounds = sizes.repetitions * len(sizes.large_bytes)
    for index, nbytes in enumerate(sizes.large_bytes):
        for repetition in range(sizes.repetitions + 1):
            heartbeat.beat(index * sizes.repetitions + repetition, num_rounds + 1, f"{nbytes >> 20} MiB")
            found = [_sample(among[carrier], carrier, each, nbytes) for each in OPERATIONS for carrier in CARRIERS]
            samples += found if repetition else []
    for repetition in range(sizes.tiny_repetitions + 1):
        found = [_sample(among[carrier], carrier, "all_reduce", 4 * dist.get_world_size()) for carrier in CARRIERS]
        samples += found if repetition else []
    for communicator in among.values():
        communicator.close()
    return samples


def _sample(communicator: Communicator, carrier: Carrier, operation: Operation, nbytes: int) -> Sample:
    call, ring_bytes = collective(communicator, operation, nbytes)
    communicator.barrier()
    before, cpu, start = _sent_bytes(), time.process_time(), time.perf_counter()
    call()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    communicator.barrier()
    sent = None if before is None else (_sent_bytes() or 0) - before
    return Sample(carrier, operation, nbytes, communicator.size, seconds, ring_bytes, sent, cpu)


def collective(communicator: Communicator, operation: Operation, nbytes: int) -> tuple[Callable[[], None], int]:
    """A call on a tensor of so many bytes, and the bytes that a ring sends."""
    size = communicator.size
    full = torch.zeros(nbytes // 4 // size * size)
    shard = full.chunk(size)[communicator.rank]
    once = full.nbytes * (size - 1) // size
    if operation == "all_gather":
        return lambda: communicator.all_gather(full, shard), once
    if operation == "reduce_scatter":
        return lambda: communicator.reduce_scatter(shard, full), once
    return lambda: communicator.all_reduce(full), 2 * once


def _sent_bytes() -> int | None:
    """Of this node's token bucket; None where there is none."""
    if shutil.which("tc") is None:
        return None
    queue = iproute.token_buckets().get(iproute.INTERFACE)
    return None if queue is None else iproute.payload_bytes(queue["bytes"], queue["packets"])


if __name__ == "__main__":
    main()
