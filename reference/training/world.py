"""The ranks of a run: who this process is among them, and on which device it computes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from reference.device.heap import keep_freed_memory
from zsim.errors import RunFailedError
from zsim.spec import ClusterSpec, Spec
from zsim.units import InputError

TORCHRUN = "torchrun --nproc-per-node RANKS -m reference.train EXPERIMENT, or zsim measure EXPERIMENT"


def device(spec: Spec) -> torch.device:
    """Of this rank: its GPU where the experiment has GPUs and this machine one for each rank, else the CPU."""
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if isinstance(spec.cluster, ClusterSpec) and torch.cuda.device_count() >= wanted:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def check_environment() -> None:
    """Whether the environment says which rank this process is.

    Raises:
        InputError: it does not.

    """
    if missing := {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(os.environ):
        raise InputError(f"{', '.join(sorted(missing))} not set: not started as a rank; allowed: {TORCHRUN}")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise InputError(f"{name}: given {os.environ[name]!r}; allowed: a whole number, as torchrun sets it")
    if not int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
        raise InputError(f"RANK: given {os.environ['RANK']}; allowed: less than WORLD_SIZE {os.environ['WORLD_SIZE']}")


def meet(backend: str, timeout_s: float) -> None:
    """Makes the process group of the ranks that the environment names.

    Raises:
        RunFailedError: they did not meet.

    """
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        meeting, said = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", str(error).split("\n")[0]
        raise RunFailedError(f"the ranks did not meet at MASTER_ADDR:MASTER_PORT {meeting}: {said}") from error


@contextmanager
def joined(spec: Spec, *, timeout_s: float) -> Iterator[None]:
    """Within, this process is one of the ranks of an experiment: gloo among CPUs, NCCL among GPUs.

    Raises:
        InputError: it was started by nothing that says who it is, or with another number of ranks.
        RunFailedError: the ranks did not meet.

    """
    check_environment()
    started, wanted = int(os.environ["WORLD_SIZE"]), spec.cluster.num_ranks
    if started != wanted:
        raise InputError(
            f"{spec.name}: its cluster has {wanted} ranks, {started} were started; allowed: as many, "
            f"by --set cluster.nodes=... or torchrun's --nproc-per-node"
        )
    where = device(spec)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        # Ranks share the cores of a machine, one for each.
        torch.set_num_threads(1)
        keep_freed_memory()
    meet("nccl" if where.type == "cuda" else "gloo", timeout_s)
    try:
        yield
    finally:
        dist.destroy_process_group()
