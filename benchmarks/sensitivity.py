"""What the step hangs on: `python -m benchmarks.sensitivity`.

±20 % of every constant, as `zsim run --sensitivity` does, for the 10B case before and after; the ten strongest, and
what the ends of their own stated ranges would do.
"""

from functools import cache

from benchmarks import EXPERIMENTS, predict, table
from zsim.pipeline import load, resolve, sensitivity, simulate
from zsim.reading.constants import with_constant
from zsim.spec import Constant

CASES = ("roberta_10b_p4d_before", "roberta_10b_p4d_after")
FRACTION = 0.2
NUM_SHOWN = 10


@cache
def strongest(case: str) -> tuple[tuple[Constant, float, float], ...]:
    """(constant, change of the step when lower, when higher), as fractions of the step."""
    step_s = predict(case).step_time_s
    rows = [
        (constant, low_s / step_s - 1, high_s / step_s - 1)
        for constant, low_s, high_s in sensitivity(resolve(load(EXPERIMENTS / f"{case}.yaml")), FRACTION)
    ]
    return tuple(sorted(rows, key=lambda row: -max(abs(row[1]), abs(row[2])))[:NUM_SHOWN])


def at_ends(case: str, constant: Constant) -> tuple[float, float]:
    """Change of the step with the constant at the lower and the upper end of its range."""
    spec = resolve(load(EXPERIMENTS / f"{case}.yaml"))
    step_s = predict(case).step_time_s
    low, high = (
        simulate(with_constant(spec, constant.path, value)).step_time_s / step_s - 1
        for value in (constant.low, constant.high)
    )
    return low, high


def case_table(case: str) -> str:
    """The ten strongest of one case."""
    rows = []
    for constant, lower, higher in strongest(case):
        has_range = constant.low < constant.high
        ends = " to ".join(f"{change:+.1%}" for change in at_ends(case, constant)) if has_range else ""
        value = f"{constant.value:.4g} {constant.unit if constant.unit != '1' else ''}".rstrip()
        span = f"{constant.low:.4g} to {constant.high:.4g}" if has_range else ""
        cells = (value, constant.origin, span, f"{lower:+.1%}", f"{higher:+.1%}", ends)
        rows.append((f"`{constant.path}`", *cells))
    headings = ["value", "origin:", "range", "−20 %", "+20 %", "from end to end of the range"]
    return table([case, *headings], rows)


def report() -> str:
    """Change of the step time; positive is slower."""
    return "\n\n".join((TEXT, *(case_table(case) for case in CASES)))


TEXT = """\
Change of the step time; positive is slower. The last column takes the constant from the lower to the upper end of its
own range. 1.2 times `tile_halving_efficiency` is above 1, which no tile reaches."""


if __name__ == "__main__":
    print(report())
