"""The `noise` section: what varies between ranks, steps and batches."""

from collections.abc import Iterator

from zsim import units
from zsim.cpu_spec import CpuClusterSpec
from zsim.noise_spec import NoiseSpec
from zsim.ranks import HISTORIES_OF_DRAWS
from zsim.reading.config import Experiment
from zsim.spec import ClusterSpec, TrainSpec
from zsim.units import InputError


def shared_draws(noise: NoiseSpec, num_ranks: int) -> Iterator[str]:
    """What the engine of many ranks leaves out of the draws of memory."""
    if noise.stray_bytes and num_ranks > HISTORIES_OF_DRAWS:
        shares = f"{num_ranks:,} ranks share {HISTORIES_OF_DRAWS:,} histories of allocators and their draws"
        yield f"noise.stray_memory: {shares}, so what flushes cost is a lower bound"


def resolve_noise(experiment: Experiment, cluster: ClusterSpec | CpuClusterSpec, train: TrainSpec) -> NoiseSpec:
    """The section as it takes effect on this cluster.

    Raises:
        InputError: stray memory beyond the device, a shortest batch that is no batch, unequal batches on CPUs.

    """
    noise, stray_bytes = experiment.settings.noise, 0
    if noise.stray_memory is not None:
        where = experiment.where("noise", "stray_memory")
        stray_bytes = round(units.parse(noise.stray_memory, "bytes", where))
        if stray_bytes > cluster.device.memory_bytes:
            most = f"at most the {cluster.device.memory_bytes / 2**30:.4g} GiB of {cluster.device.name}"
            raise InputError(f"{where}: given {noise.stray_memory}; allowed: {most}")
    is_cached = isinstance(cluster, ClusterSpec)
    if shortest := noise.shortest_seq_len:
        where = experiment.where("noise", "shortest_seq_len")
        if shortest > train.seq_len:
            raise InputError(f"{where}: given {shortest}; allowed: at most the {train.seq_len} of train.seq_len")
        if not is_cached:
            raise InputError(f"{where}: given {shortest}; allowed: on GPUs; where zsim also trains, lengths are equal")
    return NoiseSpec(
        noise.seed,
        noise.steps,
        noise.host_jitter,
        stray_bytes if is_cached else 0,
        shortest_seq_len=shortest or 0,
    )
