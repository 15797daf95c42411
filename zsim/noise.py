"""Draws of noise: how much slower or faster each rank's host is in each step."""

from math import exp, log1p, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

from zsim.spec import NoiseSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WARM_UP_STEPS = 2
"""Steps -2 and -1 may run before step 0, to fill the allocator's cache."""


def host_scale(noise: NoiseSpec, num_ranks: int) -> "NDArray[np.float64] | None":
    """Factors on the host seconds of each rank in each step; None without jitter.

    They are log-normal with mean 1 and standard deviation `host_jitter`: positive, and skewed to the slow side as the
    delays of a thread are. Each step has a stream of its own and each rank its place in it, so a draw depends neither
    on how many steps nor on how many ranks there are.

    Returns:
        Shape [ranks, steps + 2]; the last two columns are those of the warm-up steps -2 and -1, so that a step is its
        own index.

    """
    if not noise.host_jitter:
        return None
    import numpy as np  # noqa: PLC0415  numpy is only needed with noise

    variance = log1p(noise.host_jitter**2)
    steps = (*range(noise.steps), *range(-WARM_UP_STEPS, 0))
    draws = [np.random.default_rng([noise.seed, step + WARM_UP_STEPS]).standard_normal(num_ranks) for step in steps]
    scale: NDArray[np.float64] = np.exp(sqrt(variance) * np.column_stack(draws) - variance / 2)
    return scale


def slowest_of(num_ranks: int, host_jitter: float, share: float) -> float:
    """The factor of which the largest of so many draws stays below with probability `share`, between 0 and 1.

    The largest of N is below x with probability F(x)^N.
    """
    variance = log1p(host_jitter**2)
    return exp(sqrt(variance) * NormalDist().inv_cdf(share ** (1 / num_ranks)) - variance / 2)
