"""Quantities with a unit, as people write them, to SI floats: "400 Gbit/s", "80 GiB", "5 us", "312 TFLOP/s".

Parsed once, at the door; behind it everything is bytes, seconds, FLOP and their ratios.
"""

import math
import re
from decimal import Decimal
from typing import Final, Literal

Dimension = Literal["bytes", "bytes_per_s", "s", "flop_per_s", "1"]

_DECIMAL: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES: Final = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}

FACTORS: Final[dict[Dimension, dict[str, float]]] = {
    "bytes": _BYTES,
    "bytes_per_s": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
    "flop_per_s": {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
    "1": {"": 1.0},
}
"""Unit -> SI factor, by dimension. Both Unicode spellings of micro are read. "1" is a plain number."""

_EXAMPLES: Final[dict[Dimension, str]] = {
    "bytes": '"80 GiB", "1.2 GB" or "64 MiB"',
    "bytes_per_s": '"1555 GB/s", "1.5 TB/s" or "400 Gbit/s"',
    "s": '"5 us", "1.5 ms" or "2 s"',
    "flop_per_s": '"312 TFLOP/s" or "1 PFLOP/s"',
    "1": "a plain number such as 8 or 0.85",
}

_LIMITS: Final[dict[Dimension, tuple[float, float]]] = {
    "bytes": (0.0, 1e18),
    "bytes_per_s": (1e3, 1e18),
    "s": (0.0, 1e5),
    "flop_per_s": (1e6, 1e21),
    "1": (0.0, 1e24),
}
"""Lowest and highest value in SI units: far beyond any machine, near enough that no product of them overflows."""

_QUANTITY: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([A-Za-zµμ/]*)", re.ASCII)
_LONGEST: Final = 64
"""Characters of a quantity; a numeral with thousands of digits is no quantity."""
_LONGEST_MESSAGE: Final = 1_000
"""Characters; what the user wrote may be as long as a file, what is said of it may not."""


class InputError(ValueError):
    """What the user wrote is wrong: one line with where, what was given, what is allowed."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # No control characters: a key of a file may hold what a terminal obeys.
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        half = _LONGEST_MESSAGE // 2
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else f"{line[:half]} ... {line[-half:]}")


def dimension_of(field: str) -> Dimension:
    """The dimension that the suffix of a field of `spec` promises."""
    suffixes: tuple[Dimension, ...] = ("bytes_per_s", "flop_per_s", "bytes", "s")
    return next((suffix for suffix in suffixes if field.endswith("_" + suffix)), "1")


def parse(given: object, dimension: Dimension, where: str) -> float:
    """The quantity in SI units.

    Raises:
        InputError: no number, no unit or one of another dimension, or beyond what any machine has.

    """
    value = _number(given, dimension, where)
    lowest, highest = _LIMITS[dimension]
    if not lowest <= value <= highest:
        raise InputError(f"{where}: {shown(given)} is out of range; allowed: {between(lowest, highest, dimension)}")
    return value


def between(lowest: float, highest: float, dimension: Dimension) -> str:
    """Two bounds in SI units as a message names them."""
    unit = {"bytes": " B", "bytes_per_s": " B/s", "s": " s", "flop_per_s": " FLOP/s", "1": ""}[dimension]
    return f"{lowest:g} to {highest:g}{unit}"


def _number(given: object, dimension: Dimension, where: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise InputError(f"{where}: {shown(given)} is no quantity; allowed: {_EXAMPLES[dimension]}")
    if not isinstance(given, str):
        if dimension != "1":
            raise InputError(f"{where}: {shown(given)} lacks a unit; allowed: {_EXAMPLES[dimension]}")
        # An integer beyond the range of floats would raise OverflowError.
        return float(given) if abs(given) < 1e300 else math.inf
    match = _QUANTITY.fullmatch(given.strip()) if len(given) <= _LONGEST else None
    if match is None:
        raise InputError(f"{where}: {shown(given)} is no quantity; allowed: {_EXAMPLES[dimension]}")
    factor = FACTORS[dimension].get(match[2])
    if factor is None:
        problem = f"has the unit {match[2]!r}" if match[2] else "lacks a unit"
        raise InputError(f"{where}: {shown(given)} {problem}; allowed: {_EXAMPLES[dimension]}")
    # In decimals, so that 40 us is 4e-05 and not its neighbour.
    return float(Decimal(match[1]) * Decimal(repr(factor)))


def shown(given: object) -> str:
    """What the user gave, on one line and short enough for a message."""
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 10**_LONGEST:
        return "a number of more than 64 digits"
    text = ascii(given) if not isinstance(given, str) else repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
