"""What users reported, as experiments: `python -m benchmarks.field_reports`.

A report is a file of `experiments/field_reports/` with variants of it, as overrides, and what its author measured of
each. Reports rarely state everything, so what is compared is what two variants of one set-up tell: their order, the
ratio of their figures, or the difference of their memory. `reports.yaml` lists them; nothing of it is predicted from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import zsim
from benchmarks import EXPERIMENTS, Bar, bars_table, table
from zsim.documents import read
from zsim.metrics import Metrics

FOLDER: Final = EXPERIMENTS / "field_reports"
RATIO_BAR: Final = 0.25
"""Of a ratio of two variants."""
DIFFERENCE_BAR_MIB: Final = 3.0
MEBIBYTE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Judgement:
    """One figure of a report, measured for at least two of its variants."""

    report: str
    source: str
    experiment: str
    figure: str
    by: str
    """"ratio", "order" or "difference"."""
    variants: dict[str, tuple[str, ...]]
    """Overrides by variant, the one that others are compared with first."""
    reported: dict[str, float]

    def predicted(self) -> dict[str, float]:
        """The same figure of the same variants."""
        return {name: figure(self.figure, _metrics(self.experiment, self.variants[name])) for name in self.reported}

    def verdicts(self) -> Iterator[Bar]:
        """One for each variant but the first; one for the whole where the order is judged."""
        predicted = self.predicted()
        what = f"{self.report}: {self.figure}"
        (first, base), *others = self.reported.items()
        if self.by == "order":
            wanted, got = (sorted(figures, key=figures.__getitem__) for figures in (self.reported, predicted))
            yield Bar(f"{what}, least first", ", ".join(got), ", ".join(wanted), got == wanted)
            return
        for name, value in others:
            if self.by == "ratio":
                ratio, wanted_ratio = predicted[name] / predicted[first], value / base
                error = ratio / wanted_ratio - 1
                allowed = f"{wanted_ratio:.2f} ± {RATIO_BAR:.0%}"
                yield Bar(f"{what}, {name} / {first}", f"{ratio:.2f} ({error:+.0%})", allowed, abs(error) <= RATIO_BAR)
            else:
                change, wanted_change = predicted[name] - predicted[first], value - base
                met = abs(change - wanted_change) <= DIFFERENCE_BAR_MIB
                allowed = f"{wanted_change:+,.0f} ± {DIFFERENCE_BAR_MIB:.0f}"
                yield Bar(f"{what}, {name} less {first}", f"{change:+,.1f}", allowed, met)


def figure(name: str, metrics: Metrics) -> float:
    """A figure of `zsim run --json` by its dotted name; `..._mib` is the bytes of that name in MiB."""
    value: Any = metrics.to_json()
    for key in name.removesuffix("_mib").split("."):
        value = value[key]
    return value / MEBIBYTE if name.endswith("_mib") else float(value)


@cache
def judgements() -> tuple[Judgement, ...]:
    """All of `reports.yaml`, in its order."""
    found = []
    for report, fields in read(FOLDER / "reports.yaml").data.items():
        variants = {name: tuple(overrides or ()) for name, overrides in fields["variants"].items()}
        for judged in fields["judged"]:
            reported = {name: float(value) for name, value in judged["reported"].items()}
            where = report, fields["source"], fields["experiment"]
            found.append(Judgement(*where, judged["figure"], judged["by"], variants, reported))
    return tuple(found)


@cache
def _metrics(experiment: str, overrides: tuple[str, ...]) -> Metrics:
    return zsim.simulate(zsim.load(FOLDER / experiment, overrides)).metrics


def bars() -> list[Bar]:
    """Every verdict."""
    return [bar for judgement in judgements() for bar in judgement.verdicts()]


def reports_table() -> str:
    """Reported and predicted figures of every variant, with the verdict."""
    rows = []
    for judgement in judgements():
        predicted = judgement.predicted()
        met = all(bar.met for bar in judgement.verdicts())
        for i, (name, value) in enumerate(judgement.reported.items()):
            head = (f"[{judgement.report}]({judgement.source})", judgement.figure) if i == 0 else ("", "")
            verdict = f"{judgement.by}: {'as reported' if met else 'not as reported'}" if i == 0 else ""
            rows.append((*head, name, _digits(value), _digits(predicted[name]), verdict))
    return table(["report", "figure", "variant", "reported", "predicted", "verdict"], rows)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report() -> str:
    """Figures, then verdicts."""
    return "\n\n".join((reports_table(), bars_table(bars())))


if __name__ == "__main__":
    print(report())
