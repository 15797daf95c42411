"""Whether an experiment fits in this machine's memory, told before anything starts."""

from pathlib import Path

import zsim
from zsim.cpu_spec import CpuClusterSpec
from zsim.display import size
from zsim.program_memory import peak_of
from zsim.spec import Spec
from zsim.units import InputError

CONTEXT = "context"
PROCESS_BYTES = 224_160 * 1024
"""Resident after `import torch, torch.distributed`: torch 2.13 for CPUs, Python 3.11; for devices that state none."""


def available_bytes() -> int:
    """MemAvailable: what can be had without swapping (Linux, proc(5)).

    Raises:
        InputError: this machine does not say.

    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise InputError(f"/proc/meminfo: {error.strerror}; measured runs need Linux") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def needed_bytes(spec: Spec) -> int:
    """Of all ranks together on one machine: the peak of each rank's tensors, by zsim's program, and its process."""
    capacity = int(spec.cluster.device.memory_bytes)
    total = 0
    for program in zsim.programs(spec):
        categories = peak_of(program.ops, capacity, None).categories
        tensors = sum(nbytes for category, nbytes in categories.items() if category != CONTEXT)
        total += len(program.ranks) * (tensors + _process_bytes(spec))
    return total


def _process_bytes(spec: Spec) -> int:
    cluster = spec.cluster
    return int(cluster.device.context_bytes) if isinstance(cluster, CpuClusterSpec) else PROCESS_BYTES


def check_fits(spec: Spec) -> None:
    """Refuses what would make this machine swap or kill.

    Raises:
        InputError: the ranks need more than there is; says how much.

    """
    needed, available = needed_bytes(spec), available_bytes()
    if needed > available:
        ranks = spec.cluster.num_ranks
        raise InputError(
            f"{spec.name} does not fit in this machine's memory: {ranks} ranks need {size(needed)}, "
            f"{size(available)} are available; fewer nodes, a smaller model or a smaller micro-batch may"
        )
