"""Logs of collectives with the traits of real ones: prefixes, INFO lines, missing parts; times from a given formula."""

from collections.abc import Callable
from typing import Any

GIB = 2**30
SIZES = tuple(2**power for power in range(3, 33))
COLUMNS = f"#       size         count      type   redop    root{2 * '     time   algbw   busbw #wrong'}"
INFO = "node3:812:840 [0] NCCL INFO Channel 00/08 :    0   1   2   3"


def factor(collective: str, ranks: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests define it."""
    scale = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}.get(collective)
    return 1.0 if scale is None else scale * (ranks - 1) / ranks


def time_of(latency_s: float, busbw: float) -> Callable[[str, int, int], float]:
    """Seconds of a collective by its size."""
    return lambda collective, ranks, size: latency_s + size * factor(collective, ranks) / busbw


def microseconds(seconds: float) -> str:
    """As nccl-tests print: fewer decimals for more digits."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 10_000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def row(collective: str, ranks: int, size: int, seconds: float, **options: Any) -> str:
    """One line of nccl-tests: out of place, and in place with a hundredth more time."""
    kind, width = options.get("type", "float"), options.get("width", 4)
    gathers = collective in {"all_gather", "reduce_scatter"}
    redop = "none" if collective in {"all_gather", "broadcast"} else "sum"
    root = "0" if collective in {"broadcast", "reduce"} else "-1"
    words = [str(size), str(size // width // (ranks if gathers else 1)), kind, *options.get("operation", (redop, root))]
    for each in (seconds, seconds * 1.01):
        shown = microseconds(each)
        algbw = size / float(shown) / 1e3
        busbw = algbw * factor(collective, ranks)
        words += [shown, f"{algbw:.2f}", f"{busbw:.2f}", options.get("wrong", "0")]
    return " ".join(f"{word:>12}" for word in words)


def table(collective: str, ranks: int, seconds: Callable[[str, int, int], float], **options: Any) -> list[str]:
    """A header and its rows."""
    sizes = options.get("sizes", SIZES)
    return [COLUMNS, *(row(collective, ranks, size, seconds(collective, ranks, size), **options) for size in sizes)]
