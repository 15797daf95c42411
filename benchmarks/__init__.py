"""Every figure on accuracy and speed that the documents print: `python -m benchmarks` runs them all.

Each module answers one question. Its `report()` is Markdown, its `bars()` are what has to hold; `python -m
benchmarks.headline` prints one report.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zsim
from zsim.figures.metrics import Metrics

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
PUBLISHED = EXPERIMENTS / "published"


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that has to hold, and whether it does."""

    what: str
    figure: str
    allowed: str
    met: bool

    @property
    def verdict(self) -> str:
        """One word for tables."""
        return "met" if self.met else "**missed**"


@cache
def predict(experiment: str, *overrides: str) -> Metrics:
    """The metrics of an experiment that ships with zsim; `overrides` as for `--set`."""
    return zsim.simulate(zsim.load(EXPERIMENTS / f"{experiment}.yaml", list(overrides))).metrics


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, headings that end in a colon too, all others are numbers."""
    texts = [heading.endswith(":") or not column for column, heading in enumerate(headings)]
    lines = [
        [heading.removesuffix(":") for heading in headings],
        ["---" if text else "--:" for text in texts],
        *([str(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bars_table(bars: Iterable[Bar]) -> str:
    """What has to hold, one a line."""
    return table(
        ["bar", "figure:", "allowed:", "verdict:"], [(bar.what, bar.figure, bar.allowed, bar.verdict) for bar in bars]
    )
