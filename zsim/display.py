"""Quantities as people read them."""


def duration(seconds: float) -> str:
    """Three or more significant digits in a unit that people read."""
    if seconds == 0:
        return "0 s"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (1e4, 1.0, "s")):
        if seconds < limit:
            value = seconds * scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{seconds:,.0f} s"


def duration_in(unit: str, seconds: float) -> str:
    """As `duration` has it in this unit, without the unit: the ends of an interval."""
    value = seconds * {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def size(nbytes: float) -> str:
    """Bytes in binary units."""
    for limit, unit in ((2**10, "B"), (2**20, "KiB"), (2**30, "MiB")):
        if nbytes < limit:
            return f"{nbytes / (limit / 2**10):.{0 if unit == 'B' else 1}f} {unit}"
    return f"{gibibytes(nbytes):,.2f} GiB"


def gibibytes(nbytes: float) -> float:
    """GiB."""
    return nbytes / 2**30


def tflops(value: float) -> str:
    """TFLOPS; a CPU does hundredths of one."""
    return f"{value:.1f}" if value >= 1 else f"{value:.3g}"


def count(number: float) -> str:
    """Parameters and the like: four digits in thousands, millions, billions."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            value = number / limit
            return f"{value:,.{2 if value < 100 else 1}f}{unit}"
    return f"{number:,.0f}"
