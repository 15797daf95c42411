"""How much of a step's computation are GEMMs, how much memory-bound kernels: their time alone on the device."""

from dataclasses import dataclass
from typing import Final

from zsim.costs import pricer, products_and_all_s
from zsim.figures.causes import PHASES
from zsim.ops import Compute
from zsim.pipeline import Result, programs
from zsim.strategies import groups

GEMMS: Final = "GEMMs"
MEMORY_BOUND: Final = "memory-bound kernels"
SLOWED: Final = "slowed by collectives and copies"
"""What computation takes beyond its time alone."""


@dataclass(slots=True)
class ComputeWork:
    """Of one pass in one step."""

    gemm_s: float = 0.0
    memory_s: float = 0.0
    flop: float = 0.0
    """That the GEMMs execute."""
    num_kernels: int = 0
    """Beside the GEMMs."""
    nbytes: float = 0.0
    """Read and written by them."""


def compute_work(result: Result) -> dict[str, ComputeWork]:
    """By pass, mean over the steps, of the first rank; seconds as the engine was given them."""
    spec = result.spec
    first = min(span.rank for span in result.trace.spans)
    price = pricer(spec, groups(spec))
    works = {phase: ComputeWork() for phase in PHASES}
    ops = next(program.ops for program in programs(spec) if first in program.ranks)
    # Steps are alike in their computation.
    for op in ops:
        if not isinstance(op, Compute) or op.key.step:
            continue
        alone_s = price(op).alone_s
        gemms_s, all_s = products_and_all_s(op, spec)
        work = works[op.key.phase]
        gemm_share = gemms_s / all_s if all_s else 0.0
        work.gemm_s += alone_s * gemm_share
        work.memory_s += alone_s * (1 - gemm_share)
        work.flop += sum(gemm.executed_flop for gemm in op.gemms)
        work.num_kernels += op.num_kernels - len(op.gemms)
        work.nbytes += op.nbytes
    return works
