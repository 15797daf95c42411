"""Draws of noise: how much slower or faster each rank's host is in each step."""

from math import exp, log1p, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

from zsim.noise_spec import NoiseSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WARM_UP_STEPS = 2
"""Steps -2 and -1 may run before step 0, to fill the allocator's cache."""
_STRAY = 1
"""Tells its streams of draws from those of hosts."""


def host_scale(noise: NoiseSpec, num_ranks: int) -> "NDArray[np.float64] | None":
    """Factors on the host seconds of each rank in each step; None without jitter.

    They are log-normal with mean 1 and standard deviation `host_jitter`: positive, and skewed to the slow side as the
    delays of a thread are. Each step has a stream of its own and each rank its place in it, so a draw depends neither
    on how many steps nor on how many ranks there are.

    Returns:
        Shape [ranks, steps + 2]; the last two columns are those of the warm-up steps -2 and -1, so that a step is its
        own index.

    """
    if not noise.host_jitter or noise.equal_ranks:
        return None
    import numpy as np  # noqa: PLC0415  numpy is only needed with noise

    variance = log1p(noise.host_jitter**2)
    streams = (np.random.default_rng([noise.seed, step]) for step in _steps(noise))
    draws = np.column_stack([stream.standard_normal(num_ranks) for stream in streams])
    scale: NDArray[np.float64] = np.exp(sqrt(variance) * draws - variance / 2)
    return scale


def stray_scale(noise: NoiseSpec, num_ranks: int) -> "NDArray[np.float64] | None":
    """Factors on the size of what each rank holds beside its program in each step; None without it.

    They are exponential, with mean and standard deviation 1. Shape and independence as for `host_scale`.
    """
    if not noise.stray_bytes or noise.equal_ranks:
        return None
    import numpy as np  # noqa: PLC0415  numpy is only needed with noise

    streams = (np.random.default_rng([noise.seed, step, _STRAY]) for step in _steps(noise))
    return np.column_stack([stream.standard_exponential(num_ranks) for stream in streams])


def by_rank(draws: "NDArray[np.float64] | None") -> dict[int, list[float]] | None:
    """Plain numbers, quicker where single ones are looked at."""
    return None if draws is None else dict(enumerate(draws.tolist()))


def sizes_differ(noise: NoiseSpec) -> bool:
    """Whether a step may take more memory than the one before."""
    return noise.shortest_seq_len > 0 or (noise.stray_bytes > 0 and not noise.equal_ranks)


def _steps(noise: NoiseSpec) -> tuple[int, ...]:
    """Numbers from 0 of the steps that count, then of those that warm up, which come first in time."""
    return (*range(WARM_UP_STEPS, WARM_UP_STEPS + noise.steps), *range(WARM_UP_STEPS))


def slowest_of(num_ranks: int, host_jitter: float, share: float) -> float:
    """The factor of which the largest of so many draws stays below with probability `share`, between 0 and 1.

    The largest of N is below x with probability F(x)^N.
    """
    variance = log1p(host_jitter**2)
    return exp(sqrt(variance) * NormalDist().inv_cdf(share ** (1 / num_ranks)) - variance / 2)
