"""One config.json, key by key: typed, with the line of each key, and with account of what was read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from zsim.reading.documents import Document, InputError
from zsim.reading.shapes import MOST
from zsim.units import shown

_LARGEST: Final = 10**9


@dataclass(slots=True)
class Reader:
    """Reads keys of one mapping; `at` is where it stands in the document."""

    document: Document
    data: dict[str, Any]
    at: tuple[str, ...] = ()
    read: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    """Field of ours -> file, line and key."""
    notes: list[str] = field(default_factory=list)
    """What is to be said of the file."""

    def where(self, key: str) -> str:
        """File, line and key."""
        return self.document.where(*self.at, key)

    def note(self, text: str) -> None:
        """Something to be said of the file."""
        self.notes.append(text)

    def section(self, key: str) -> "Reader":
        """The mapping below a key; empty where it is absent or null."""
        self.read.add(key)
        value = {} if self.data.get(key) is None else self.data[key]
        if not isinstance(value, dict):
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: a mapping")
        return Reader(self.document, value, (*self.at, key), set(), self.places, self.notes)

    def count(
        self,
        keys: str | Iterable[str],
        default: int | None = None,
        *,
        of: str = "",
        least: int = 1,
        most: int | None = None,
    ) -> int:
        """A whole number under the first of these names that has a value.

        Args:
            keys: a name, or several that mean the same.
            default: what the configuration class has where the key is absent or null; None where it must be given.
            of: our field, for messages and for its largest value.
            least: smallest value allowed.
            most: largest one, where it is not that of the field.

        """
        names = (keys,) if isinstance(keys, str) else tuple(keys)
        self.read |= set(names)
        given = [name for name in names if self.data.get(name) is not None]
        name = given[0] if given else names[0]
        for other in given[1:]:
            if self.data[other] != self.data[name]:
                said = f"given {shown(self.data[other])}, but {name} is {shown(self.data[name])}"
                raise InputError(f"{self.where(other)}: {said}; allowed: the same in both")
        if of:
            self.places[of] = self.where(name)
        value = self.data.get(name)
        if value is None:
            if default is None:
                raise InputError(f"{self.where(name)} is missing; allowed: a whole number from {least}")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        limit = MOST.get(of, _LARGEST) if most is None else most
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            allowed = f"a whole number from {least} to {limit:,}"
            raise InputError(f"{self.where(name)}: given {shown(value)}; allowed: {allowed}")
        return value

    def flag(self, key: str, default: bool, *, of: str = "") -> bool:
        """True or false."""
        self.read.add(key)
        if of:
            self.places[of] = self.where(key)
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: true or false")
        return value

    def probability(self, key: str, default: float) -> float:
        """Of dropout."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: a number from 0 to 1")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A word."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: text")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty where it is absent or null."""
        self.read.add(key)
        value = [] if self.data.get(key) is None else self.data[key]
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: a list of whole numbers")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of words; empty where it is absent or null."""
        self.read.add(key)
        value = [] if self.data.get(key) is None else self.data[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: a list of words")
        return tuple(value)

    def must_be(self, key: str, allowed: Any, why: str) -> None:
        """Refuses every other value; an absent key has the allowed one."""
        self.read.add(key)
        value = self.data.get(key)
        if value is not None and value != allowed:
            raise InputError(f"{self.where(key)}: given {shown(value)}; allowed: {shown(allowed)}, {why}")
