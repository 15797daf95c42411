"""Seconds of kernels on a device: GEMMs by shape, everything else by the bytes it moves.

Leaves out: attention kernels that do not fill the device, and their lower rate with narrow heads;
split-K and stream-K schedules, L2 reuse between kernels, power and clock drift within a run.
"""

from functools import lru_cache
from math import ceil, inf
from statistics import NormalDist

from zsim.ops import Attention, Gemm, Product
from zsim.software import StackSpec
from zsim.spec import DeviceSpec

_ALIGNMENT_BYTES = 16
"""What tensor cores load at a time (NVIDIA, Matrix Multiplication Background User's Guide, section 4)."""

_NUM_TILES = 4
"""The best tile and three halves of it, down to an eighth of its area."""


@lru_cache(maxsize=4096)
def gemm_s(gemm: Gemm, device: DeviceSpec, stack: StackSpec, element_bytes: int) -> float:
    """One GEMM: full waves of tiles over the SMs, or its bytes if those take longer.

    Every tile streams K plus a prologue that fills and drains it; a wave lasts as long as one tile, however many SMs
    are idle in it (NVIDIA, Matrix Multiplication Background User's Guide, sections 2 and 3). Of the generation's best
    tile and its halves the library takes the quickest: smaller ones fill more SMs at a lower rate.
    """
    sm_flop_per_s = stack.gemm_efficiency * _held_flop_per_s(device, stack, element_bytes) / device.num_sms
    if any(size * element_bytes % _ALIGNMENT_BYTES for size in (gemm.m, gemm.n, gemm.k)):
        sm_flop_per_s /= stack.misaligned_slowdown
    best_s = inf
    tile_m, tile_n = device.tile_m, device.tile_n
    for _ in range(_NUM_TILES):
        tiles = gemm.batch * ceil(gemm.m / tile_m) * ceil(gemm.n / tile_n)
        tile_s = 2 * tile_m * tile_n * (gemm.k + stack.gemm_prologue) / sm_flop_per_s
        best_s = min(best_s, ceil(tiles / device.num_sms) * tile_s)
        sm_flop_per_s *= stack.tile_halving_efficiency
        tile_m, tile_n = (tile_m // 2, tile_n) if tile_m > tile_n else (tile_m, tile_n // 2)
    nbytes = element_bytes * gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    return max(best_s, memory_s(nbytes, device, stack), stack.kernel_floor_s)


def attention_s(attention: Attention, device: DeviceSpec, stack: StackSpec, element_bytes: int) -> float:
    """Attention as one kernel: the FLOP that it executes, or its operands if those take longer.

    Scores never reach memory (Dao 2023, FlashAttention 2, section 3).
    """
    flop_per_s = stack.attention_efficiency * _held_flop_per_s(device, stack, element_bytes)
    compute_s = attention.executed_flop / flop_per_s
    return max(compute_s, memory_s(attention.nbytes, device, stack), stack.kernel_floor_s)


def product_s(product: Product, device: DeviceSpec, stack: StackSpec, element_bytes: int) -> float:
    """One kernel of tensor cores."""
    if isinstance(product, Attention):
        return attention_s(product, device, stack, element_bytes)
    return gemm_s(product, device, stack, element_bytes)


def _held_flop_per_s(device: DeviceSpec, stack: StackSpec, element_bytes: int) -> float:
    """Peak of the data sheet at the clock that this chip holds."""
    peak_flop_per_s = device.peak_flop_per_s
    if element_bytes == 4:
        peak_flop_per_s = device.tf32_flop_per_s if stack.tf32 else device.fp32_flop_per_s
    return device.clock_share * peak_flop_per_s


def memory_s(nbytes: float, device: DeviceSpec, stack: StackSpec) -> float:
    """Memory-bound kernels that read and write `nbytes` together."""
    return nbytes / (stack.memory_efficiency * device.memory_bytes_per_s)


@lru_cache(maxsize=4096)
def kernels_s(
    gemms: tuple[Product, ...],
    nbytes: int,
    num_kernels: int,
    *,
    device: DeviceSpec,
    stack: StackSpec,
    element_bytes: int,
) -> float:
    """A sequence of kernels on one lane.

    No GEMM is shorter than the kernel floor; the others together take their bytes or a floor each, whichever is more,
    so small kernels next to large ones hide behind them.
    """
    gemm_total_s = sum(product_s(gemm, device, stack, element_bytes) for gemm in gemms)
    num_others = max(0, num_kernels - len(gemms))
    return gemm_total_s + max(memory_s(nbytes, device, stack), num_others * stack.kernel_floor_s)


def copies_s(nbytes: int, num_kernels: int, *, device: DeviceSpec, stack: StackSpec) -> float:
    """Copies in a row on one lane: the first is a kernel like others, small ones follow each other more closely."""
    floor_s = stack.kernel_floor_s + (num_kernels - 1) * stack.copy_floor_s
    return max(memory_s(nbytes, device, stack), floor_s)


def slowest_chip_factor(chip_spread: float, num_chips: int) -> float:
    """Expected slowness of the slowest of `num_chips`: every collective waits for it.

    1 + σ·E[max], the expected maximum of normal samples by Blom's approximation (1958): Φ⁻¹((N − ⅜)/(N + ¼)).
    Memory-bound kernels are slowed alike, for lack of a spread of their own.
    """
    if num_chips == 1:
        return 1.0
    return 1.0 + chip_spread * NormalDist().inv_cdf((num_chips - 0.375) / (num_chips + 0.25))
