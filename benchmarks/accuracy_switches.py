"""Gains of single optimisations, predicted against measured: `python -m benchmarks.accuracy_switches`.

The measured side is what `benchmarks.lab_switches` has left in `out/`; `--constants` are those of a calibration. A gain
is told from noise where it is larger than the quartiles of both runs and the drift of compute alone between them.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zsim
from benchmarks import ROOT, table
from benchmarks.accuracy_report import GAIN_OF_STEP, GAIN_SHARE
from benchmarks.lab_runs import EXPERIMENT, MODELS, Measured, Results, Visit, seconds
from benchmarks.lab_switches import OFF, ON, RATES, visits


@dataclass(frozen=True, slots=True)
class Gain:
    """What throwing one switch wins, seconds of a step; negative is lost."""

    switch: str
    others: str
    """Whether all others were on or off."""
    measured_s: float
    predicted_s: float
    noise_s: float
    step_s: float
    """Of the slower of both runs, measured."""

    @property
    def is_clear(self) -> bool:
        """Whether it exceeds the noise."""
        return abs(self.measured_s) > self.noise_s

    @property
    def has_right_sign(self) -> bool:
        """Of the prediction."""
        return self.measured_s * self.predicted_s > 0

    @property
    def has_right_size(self) -> bool:
        """Within a quarter of the gain or 3 % of the step."""
        allowed_s = max(GAIN_SHARE * abs(self.measured_s), GAIN_OF_STEP * self.step_s)
        return abs(self.measured_s - self.predicted_s) <= allowed_s


def gains(results: Results, wanted: dict[str, Visit], constants: Sequence[str] = ()) -> Iterator[Gain]:
    """Both ends, and every switch alone from either end, as far as they have been measured."""
    rows = {name: found for name, visit in wanted.items() if (found := results.of(visit))}
    predicted = {name: _predicted_s(wanted[name], constants) for name in rows}

    def gain(switch: str, others: str, without: str, with_it: str) -> Gain:
        steps_s = [seconds(rows[name]) for name in (without, with_it)]
        return Gain(
            switch,
            others,
            steps_s[0] - steps_s[1],
            predicted[without] - predicted[with_it],
            _noise_s(rows[without], rows[with_it]),
            max(steps_s),
        )

    if ON in rows and OFF in rows:
        yield gain("all", "", OFF, ON)
    for name in rows:
        if name.startswith("on, but ") and ON in rows:
            yield gain(name.removeprefix("on, but "), "on", name, ON)
        elif name.startswith("off, but ") and OFF in rows:
            yield gain(name.removeprefix("off, but "), "off", OFF, name)


def _predicted_s(visit: Visit, constants: Sequence[str]) -> float:
    return zsim.simulate(zsim.load(EXPERIMENT, [*visit.overrides, *constants])).step_time_s


def _noise_s(one: Sequence[Measured], other: Sequence[Measured]) -> float:
    """Quartiles of the steps of both, and what compute alone has drifted from one to the other."""
    drift_s = abs(_alone_s(one) - _alone_s(other))
    return drift_s + sum(_interquartile_s(rows) for rows in (one, other)) / 2


def _alone_s(rows: Sequence[Measured]) -> float:
    return statistics.median(each for row in rows for each in row.alone_s)


def _interquartile_s(rows: Sequence[Measured]) -> float:
    steps_s = [step for row in rows for step in row.steps_s]
    if len(steps_s) < 2:
        return 0.0
    low_s, _, high_s = statistics.quantiles(steps_s, n=4, method="inclusive")
    return high_s - low_s


def report(found: Sequence[Gain]) -> str:
    """How many signs and sizes are right, and every gain."""
    clear = [gain for gain in found if gain.is_clear]
    signs, sizes = (sum(test(gain) for gain in clear) for test in (_sign, _size))
    lines = [
        (
            gain.switch,
            gain.others,
            f"{gain.measured_s:+.2f}",
            f"{gain.noise_s:.2f}",
            f"{gain.predicted_s:+.2f}",
            _verdict(gain),
        )
        for gain in found
    ]
    headings = ("switch", "others:", "measured gain, s", "noise, s", "predicted gain, s", "verdict:")
    summary = (
        f"{len(clear)} of {len(found)} gains exceed the noise: {signs} have the right sign, {sizes} the right size "
        f"(within {GAIN_SHARE:.0%} of the gain or {GAIN_OF_STEP:.0%} of the step)."
    )
    return f"{summary}\n\n{table(headings, lines)}"


def _sign(gain: Gain) -> bool:
    return gain.has_right_sign


def _size(gain: Gain) -> bool:
    return gain.has_right_size


def _verdict(gain: Gain) -> str:
    if not gain.is_clear:
        return "below the noise"
    return "right" if gain.has_right_sign and gain.has_right_size else "size" if gain.has_right_sign else "**sign**"


def main() -> None:
    """Prints the report of each model and rate that has been measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "lab_switches.jsonl", help="lines of JSON")
    parser.add_argument("--constants", type=Path, help="of a calibration")
    given = parser.parse_args()
    results = Results(given.results, minutes=0, steps=0)
    constants = [f"constants={given.constants}"] if given.constants else []
    for model in MODELS.values():
        for rate in RATES:
            if found := list(gains(results, visits(model, rate), constants)):
                print(f"## {model.name}, {rate}\n\n{report(found)}\n")


if __name__ == "__main__":
    main()
