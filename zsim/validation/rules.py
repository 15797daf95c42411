"""Rules of a data file: when a row's cells look like this, these settings follow, or the row is left out, because ...

A rule is a mapping of
- `when`: column -> a regular expression that its cell contains (letter case aside), or [lowest, highest] for a number;
  all of them have to hold, none where `when` is absent; names with a dot are settings made so far;
- `set`: dotted key of an experiment -> value, in which `{column}` stands for a cell; or `skip`: why the row is left
  out, in which it does too;
- `because`: why that follows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

from zsim.reading.documents import Document, InputError, nearest, parse_value
from zsim.units import shown

Cells = Mapping[str, str]
"""Column -> text; an empty cell is an empty text."""

_KEYS: Final = ("when", "set", "skip", "because")


@dataclass(frozen=True, slots=True)
class Within:
    """A number between two bounds, both included."""

    low: float
    high: float

    def search(self, text: str) -> bool:
        """Whether a cell holds such a number."""
        try:
            return self.low <= float(text) <= self.high
        except ValueError:
            return False


Condition = re.Pattern[str] | Within


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; of `settings` and `skip` one says something."""

    when: Mapping[str, Condition]
    settings: Mapping[str, Any]
    skip: str
    because: str

    def holds(self, cells: Cells) -> bool:
        """Whether every condition does; a column that is not there is an empty cell."""
        return all(bool(condition.search(cells.get(name, ""))) for name, condition in self.when.items())

    def made(self, cells: Cells) -> dict[str, Any]:
        """Its settings with the cells put in."""
        return {key: filled(value, cells) for key, value in self.settings.items()}

    def reason(self, cells: Cells) -> str:
        """Why a row is left out, with the cells put in."""
        return " ".join(_formatted(self.skip, cells).split())


def first(rules: tuple[Rule, ...], cells: Cells) -> Rule | None:
    """The first rule that holds."""
    return next((rule for rule in rules if rule.holds(cells)), None)


def read_rules(document: Document, given: Any, *keys: str) -> tuple[Rule, ...]:
    """A list of rules of a document.

    Raises:
        InputError: a ValueError: it is none; the message says which rule and what is allowed.

    """
    where = document.where(*keys)
    if not isinstance(given, list):
        raise InputError(f"{where}: given {shown(given)}; allowed: a list of rules")
    return tuple(_rule(rule, f"{where}: rule {number}") for number, rule in enumerate(given, start=1))


def filled(value: Any, cells: Cells) -> Any:
    """A value of a rule: a text with cells in it is read as it would be in an experiment."""
    if isinstance(value, list):
        return [filled(item, cells) for item in value]
    if not isinstance(value, str) or "{" not in value:
        return value
    text = _formatted(value, cells)
    return parse_value(text, value)


def _formatted(text: str, cells: Cells) -> str:
    return text.format_map(_Blank(cells))


class _Blank(dict[str, str]):
    """Cells of which those that are not there are empty."""

    def __missing__(self, _key: str) -> str:
        return ""


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, dict):
        raise InputError(f"{where}: given {shown(given)}; allowed: a mapping of {', '.join(_KEYS)}")
    for name in given:
        if name not in _KEYS:
            raise InputError(f"{where}: {name}: unknown key; {nearest(name, _KEYS)}")
    if ("set" in given) == ("skip" in given):
        raise InputError(f"{where}: allowed: one of set and skip")
    because = given.get("because", given.get("skip", ""))
    if not because:
        raise InputError(f"{where}: because is missing")
    when = _section(given, "when", where)
    settings = _section(given, "set", where)
    for text in _texts([given.get("skip", ""), *settings.values()]):
        _check_template(text, where)
    conditions = {name: _condition(value, f"{where}: when.{name}") for name, value in when.items()}
    return Rule(conditions, settings, given.get("skip", ""), because)


def _section(given: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    section = given.get(name, {})
    if not isinstance(section, dict):
        raise InputError(f"{where}: {name}: given {shown(section)}; allowed: a mapping")
    return section


def _condition(given: Any, where: str) -> Condition:
    if isinstance(given, list) and len(given) == 2 and all(isinstance(bound, int | float) for bound in given):
        return Within(*given)
    if not isinstance(given, str):
        raise InputError(f"{where}: given {shown(given)}; allowed: a regular expression or [lowest, highest]")
    try:
        return re.compile(given, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"{where}: {shown(given)} is no regular expression: {error}") from None


def _texts(values: list[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, list):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _check_template(text: str, where: str) -> None:
    try:
        names: Callable[[str], Any] = Formatter().parse
        for _ in names(text):
            pass
    except ValueError as error:
        raise InputError(f"{where}: {shown(text)}: {error}") from None
