"""The best row of a table and why: which seconds it has less of than the runner-up."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, Literal

from zsim.display import duration
from zsim.figures.breakdown import LABELS
from zsim.sweeps import Row

Aim = Literal["fastest", "cheapest", "fewest GPU hours"]

_SHOWN_SHARE: Final = 0.1
"""Causes below this part of the largest one are left to the rest."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best row for an aim, held against the next one."""

    aim: Aim
    row: Row
    runner_up: Row | None
    """None where no other row fits."""
    lead: float
    """By what fraction the runner-up takes more: time, money or GPU hours for the same tokens."""
    longer_s: float
    """What the runner-up takes longer for the tokens of one step of the best row; of a cheapest row in time of as many
    GPUs as that has."""
    causes_s: dict[str, float]
    """The same by cause, as in `breakdown_s`; adds up to `longer_s`."""

    @property
    def reason(self) -> str:
        """The seconds that make the difference, the largest first."""
        ranked = sorted(self.causes_s.items(), key=lambda item: -abs(item[1]))
        largest = abs(ranked[0][1]) if ranked else 0.0
        named = [item for item in ranked if abs(item[1]) >= _SHOWN_SHARE * largest > 0]
        words = [f"{_signed(seconds)} {LABELS.get(cause, cause)}" for cause, seconds in named]
        rest_s = self.longer_s - sum(seconds for _, seconds in named)
        if abs(rest_s) > _SHOWN_SHARE * abs(self.longer_s):
            words.append(f"{_signed(rest_s)} others")
        return f"{_signed(self.longer_s)} a step: {', '.join(words)}" if words else "the same step"


def choose(rows: Sequence[Row], aim: Aim, alike: AbstractSet[str] = frozenset()) -> Choice | None:
    """The best of the rows that fit; None if none does, or if one of them has no price and the aim is money.

    Args:
        rows: of one table.
        aim: what the best has least of.
        alike: keys that do not make another row of it: the runner-up differs in some other key, if any row does.

    """
    measures = [(_MEASURES[aim](row.figures), row) for row in rows if row.usable]
    ranked = sorted(((value, row) for value, row in measures if value is not None), key=lambda item: item[0])
    if not ranked or len(ranked) < len(measures):
        return None
    (least, best), *others = ranked
    if not others:
        return Choice(aim, best, None, 0.0, 0.0, {})
    unlike = (item for item in others if _essence(item[1], alike) != _essence(best, alike))
    more, runner_up = next(unlike, others[0])
    causes_s = _causes_s(best, runner_up, per_gpu=aim != "fastest")
    return Choice(aim, best, runner_up, more / least - 1 if least else 0.0, sum(causes_s.values()), causes_s)


def choices(rows: Sequence[Row], alike: AbstractSet[str] = frozenset()) -> list[Choice]:
    """Fastest and cheapest, the latter in GPU hours where there is no price; `alike` as for `choose`."""
    economical = choose(rows, "cheapest", alike) or choose(rows, "fewest GPU hours", alike)
    found = [choose(rows, "fastest", alike), economical]
    return [choice for choice in found if choice is not None]


def _essence(row: Row, alike: AbstractSet[str]) -> dict[str, Any]:
    return {name: value for name, value in row.assignments.items() if name not in alike}


_MEASURES: Final[dict[Aim, Callable[[dict[str, Any]], float | None]]] = {
    "fastest": lambda figures: 1 / figures["tokens_per_s"],
    "cheapest": lambda figures: figures["cost"],
    "fewest GPU hours": lambda figures: 1 / figures["tokens_per_s_per_gpu"],
}
"""What a token, or all of them, takes by the figures of a row."""


def _causes_s(best: Row, other: Row, *, per_gpu: bool) -> dict[str, float]:
    """By cause, what `other` takes longer than `best` for the tokens of one step of `best`."""
    assert best.outcome.metrics is not None
    assert other.outcome.metrics is not None
    mine, theirs = best.figures, other.figures
    tokens = mine["tokens_per_s"] * mine["step_time_s"]
    scale = tokens / (theirs["tokens_per_s"] * theirs["step_time_s"])
    if per_gpu:
        scale *= theirs["num_gpus"] / mine["num_gpus"]
    before, after = best.outcome.metrics["breakdown_s"], other.outcome.metrics["breakdown_s"]
    return {name: scale * after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{duration(abs(seconds))}"
