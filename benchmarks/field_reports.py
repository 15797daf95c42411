"""What users reported, as experiments: `python -m benchmarks.field_reports`.

A report is a file of `experiments/field_reports/` with variants of it, as overrides, and what its author measured of
each. Reports rarely state everything, so what is compared is mostly what two variants of one set-up tell: their order,
the ratio of their figures, or their difference. `reports.yaml` lists them; nothing in it reaches a prediction.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import zsim
from benchmarks import EXPERIMENTS, Bar, bars_table, table
from zsim.figures.metrics import Metrics
from zsim.reading.constants import with_node_bandwidth
from zsim.reading.documents import read
from zsim.studies.bandwidth import exposed_share
from zsim.units import parse

FOLDER: Final = EXPERIMENTS / "field_reports"
FEWEST_RIGHT: Final = 15
"""Reports of which everything has to come out as reported."""
RATIO_BAR: Final = 0.25
"""Of a figure, of the ratio of two and of a change, unless the report asks for less by `within`."""
DIFFERENCE_BAR_MIB: Final = 3.0
NODE_BANDWIDTH: Final = "node_bandwidth"
"""Among the overrides of a variant: nominal, of all NICs of a node together."""
UNITS: Final = {"mib": 2**20, "gib": 2**30, "gb": 1e9}


def _without_context(total: str) -> Callable[[Metrics], float]:
    """What PyTorch counts: nothing that CUDA and NCCL take for themselves."""
    return lambda metrics: getattr(metrics.memory, total) - metrics.memory.categories["context"]


def _states(metrics: Metrics) -> float:
    held = metrics.memory.categories
    return sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))


def _gradient_traffic(metrics: Metrics) -> float:
    return sum(total.bytes_per_gpu for total in metrics.collectives if total.phase == "backward")


FIGURES: Final[dict[str, Callable[[Metrics], float]]] = {
    "allocated": _without_context("peak_allocated"),
    "reserved": _without_context("peak_reserved"),
    "states": _states,
    "gradient_traffic": _gradient_traffic,
    "exposed_share": exposed_share,
}
"""Beside those of `zsim run --json`."""


def figure(name: str, metrics: Metrics) -> float:
    """One of `FIGURES` or of the JSON document, by its dotted name; `..._mib`, `_gib` and `_gb` divide bytes."""
    stem, _, unit = name.rpartition("_")
    if unit in UNITS:
        return figure(stem, metrics) / UNITS[unit]
    if name in FIGURES:
        return FIGURES[name](metrics)
    value: Any = metrics.to_json()
    for key in name.split("."):
        value = value[key]
    return float(value)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One figure of a report, measured of one of its variants or of several."""

    figure: str
    by: str
    """`order`: the variants sort alike. Against the first variant: `ratio`, `change`, and in MiB `difference`. By
    itself: `value`, and `range` where the report bounds the figure."""
    reported: dict[str, Any]
    """By variant: a number; with `range` the lowest and the highest."""
    within: float = RATIO_BAR

    def verdicts(self, report: str, predicted: dict[str, float]) -> Iterator[Bar]:
        """One for each variant that is compared; one for the whole where the order is judged."""
        what = f"{report}: {self.figure}"
        if self.by == "order":
            wanted, got = (sorted(found, key=found.__getitem__) for found in (self.reported, predicted))
            yield Bar(f"{what}, least first", ", ".join(got), ", ".join(wanted), got == wanted)
        elif self.by == "range":
            for name, (low, high) in self.reported.items():
                met = low <= predicted[name] <= high
                yield Bar(f"{what}, {name}", digits(predicted[name]), f"{digits(low)} to {digits(high)}", met)
        else:
            limit = DIFFERENCE_BAR_MIB if self.by == "difference" else self.within
            shown = f"{limit:g} MiB" if self.by == "difference" else f"{limit * 100:g} %"
            for name, value, wanted_value in self._pairs(predicted):
                off = self._off(value, wanted_value)
                figure_, allowed = f"{digits(value)}, {self._shown(off)}", f"{digits(wanted_value)} ± {shown}"
                yield Bar(f"{what}, {name}", figure_, allowed, abs(off) <= limit)

    def outcome(self, predicted: dict[str, float]) -> str:
        """How it is compared, and by how much the worst of it is off."""
        if self.by in {"order", "range"}:
            return self.by
        worst = max((self._off(value, wanted) for _, value, wanted in self._pairs(predicted)), key=abs)
        return f"{self.by} {self._shown(worst)}"

    def _pairs(self, predicted: dict[str, float]) -> Iterator[tuple[str, float, float]]:
        """What is compared: its name, predicted and reported."""
        first, *others = self.reported
        for name in self.reported if self.by == "value" else others:
            both = [(found[name], found[first]) for found in (predicted, self.reported)]
            match self.by:
                case "value":
                    yield name, predicted[name], self.reported[name]
                case "ratio":
                    yield f"{name} over {first}", *(figure_ / base for figure_, base in both)
                case _:
                    yield f"{name} less {first}", *(figure_ - base for figure_, base in both)

    def _off(self, value: float, wanted: float) -> float:
        # Sources print whole MiB, so that a fraction of one says nothing.
        return round(value) - wanted if self.by == "difference" else value / wanted - 1

    def _shown(self, off: float) -> str:
        return f"{off:+.0f} MiB" if self.by == "difference" else f"{off:+.0%}"


@dataclass(frozen=True, slots=True)
class Report:
    """What one source reports, the experiment that asks the same, and how they are compared."""

    name: str
    experiment: str
    source: str
    variants: dict[str, dict[str, Any]]
    """Overrides by variant."""
    judged: tuple[Judgement, ...]

    def predicted(self, judgement: Judgement) -> dict[str, float]:
        """The figure of the variants that it was measured of."""
        found = {name: _metrics(self.experiment, json.dumps(self.variants[name])) for name in judgement.reported}
        return {name: figure(judgement.figure, metrics) for name, metrics in found.items()}

    def bars(self) -> list[Bar]:
        """Every verdict."""
        return [bar for judged in self.judged for bar in judged.verdicts(self.name, self.predicted(judged))]

    @property
    def met(self) -> bool:
        """Whether everything comes out as reported."""
        return all(bar.met for bar in self.bars())


@cache
def reports() -> tuple[Report, ...]:
    """All of `reports.yaml`, in its order; their sources stand in the experiments."""
    return tuple(
        Report(
            name,
            fields["experiment"],
            fields.get("source") or read(FOLDER / fields["experiment"]).data["measured"]["source"],
            {variant: overrides or {} for variant, overrides in fields["variants"].items()},
            tuple(Judgement(**judged) for judged in fields["judged"]),
        )
        for name, fields in read(FOLDER / "reports.yaml").data.items()
    )


@cache
def _metrics(experiment: str, overrides: str) -> Metrics:
    given = json.loads(overrides)
    bandwidth = given.pop(NODE_BANDWIDTH, None)
    assignments = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    spec = zsim.resolve(zsim.load(FOLDER / experiment, assignments))
    if bandwidth is not None:
        spec = with_node_bandwidth(spec, parse(bandwidth, "bytes_per_s", NODE_BANDWIDTH))
    return zsim.simulate(spec).metrics


def bars() -> list[Bar]:
    """How many reports come out as reported, and differences of memory one by one."""
    right = sum(report.met for report in reports())
    what = "field reports of which everything comes out as reported"
    differences = [
        bar
        for report in reports()
        for judged in report.judged
        if judged.by == "difference"
        for bar in judged.verdicts(report.name, report.predicted(judged))
    ]
    return [Bar(what, f"{right} of {len(reports())}", f"≥ {FEWEST_RIGHT}", right >= FEWEST_RIGHT), *differences]


def reports_table() -> str:
    """Reported and predicted figures of every variant, with the verdict."""
    rows: list[tuple[object, ...]] = []
    for report in reports():
        for i, judged in enumerate(report.judged):
            predicted = report.predicted(judged)
            met = all(bar.met for bar in judged.verdicts(report.name, predicted))
            name = f"[{report.name}]({report.source})" if i == 0 else ""
            cells = _listed(judged.reported), _listed(predicted), judged.outcome(predicted)
            rows.append((name, f"`{judged.figure}`", *cells, "as reported" if met else "**missed**"))
    return table(["report", "figure:", "reported:", "predicted:", "compared:", "verdict:"], rows)


def _listed(figures: dict[str, Any]) -> str:
    shown = {
        name: " to ".join(map(digits, value)) if isinstance(value, list | tuple) else digits(value)
        for name, value in figures.items()
    }
    return "<br>".join(f"{name}: {value}" for name, value in shown.items())


def assumptions_table() -> str:
    """What each report leaves open."""
    rows = []
    for path in dict.fromkeys(report.experiment for report in reports()):
        assumed = read(FOLDER / path).data.get("assumed", ())
        file = f"[{Path(path).stem}](../experiments/field_reports/{path})".replace("field_reports/../", "")
        rows.append((file, ", ".join(f"`{key}`" for key in assumed) or "nothing"))
    return table(["experiment", "assumed:"], rows)


def summary() -> str:
    """One sentence: how many come out."""
    verdicts = [bar.met for report in reports() for bar in report.bars()]
    right = sum(report.met for report in reports())
    return (
        f"Of {len(reports())} reports {right} come out as reported in everything that is judged; of {len(verdicts)}"
        f" single verdicts {sum(verdicts)}."
    )


def digits(value: float) -> str:
    """Three digits, or all before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report() -> str:
    """Figures, then verdicts."""
    verdicts = [bar for found in reports() for bar in found.bars()]
    return "\n\n".join((summary(), reports_table(), bars_table(verdicts)))


if __name__ == "__main__":
    print(report())
