"""What reading any part of a DeepSpeed configuration needs: kinds of values, unknown keys, and notes for the user."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from zsim.imports.deepspeed_keys import GRAMMARS, Grammar
from zsim.reading.documents import InputError, nearest
from zsim.units import shown

Where = Callable[..., str]
Auto = Literal["auto"]
AUTO: Final = "auto"
"""Hugging Face's placeholder: to be filled from what the run knows."""
LARGEST_SIZE: Final = 10**15
"""Elements; above any model, below what overflows 64 bits in bytes."""
_PRINTED_DIGITS: Final = 7
"""Digits of a size in DeepSpeed's log (`f"{value:e}"`, runtime/config_utils.py)."""
_ROUND: Final = 2**16
"""Sizes that are a multiple of it were chosen as a power of two, or as one times a small number."""
_SEARCH_SPACE: Final = "a list is a search space of the autotuner"


def is_comment(name: str) -> bool:
    """JSON has no comments of its own; people write them as keys."""
    return name.startswith(("_", "#", "//")) or name.lower() in {"comment", "comments"}


@dataclass(frozen=True, slots=True)
class Stranger:
    """A key that DeepSpeed ignores because it does not know it."""

    note: str
    meant: str
    """The known key that it resembles; empty if there is none."""


@dataclass(slots=True)
class Reader:
    """The version that reads, the place of each key, and what there is to tell."""

    where: Where
    """Place of a key, for messages."""
    runtime: str = "DeepSpeed"
    grammar: Grammar = GRAMMARS["2026"]
    is_ours: Callable[..., bool] = lambda *_: True
    """Whether a key was written for zsim (an experiment, --set) and not for DeepSpeed: there a slip is an error."""
    notes: list[str] = field(default_factory=list)
    strangers: list[Stranger] = field(default_factory=list)

    def name(self, keys: tuple[str, ...]) -> str:
        """A key as a line of the report names it: with file and line where it stands in a DeepSpeed file."""
        return f"deepspeed.{'.'.join(keys)}" if self.is_ours(*keys) else self.where(*keys)

    def note(self, keys: tuple[str, ...], text: str) -> None:
        """A line for the warnings of the run."""
        self.notes.append(f"{self.name(keys)} {text}")

    def without_effect(self, keys: tuple[str, ...], reason: str) -> None:
        """Said of what the file gives and this run does not use."""
        self.note(keys, f"has no effect: {reason}")

    def unknown(self, keys: tuple[str, ...], value: object, known: Iterable[str], *, strict: bool) -> None:
        """A key that no version knows: refused where zsim or this version does, else ignored as DeepSpeed ignores it.

        Args:
            keys: its path.
            value: what it is given as.
            known: names that it may have been meant for.
            strict: whether this version refuses unknown keys in this section.

        """
        name, place, known = keys[-1], self.where(*keys), frozenset(known)
        if is_comment(name) and not strict:
            return
        blanks = name != name.strip() and name.strip() in known
        hint = f"without the blanks it is {name.strip()!r}" if blanks else nearest(name, known)
        if self.is_ours(*keys):
            raise InputError(f"{place}: unknown key; {hint}")
        if strict:
            raise InputError(f"{place}: unknown key, which {self.runtime} refuses; {hint}")
        close = [name.strip()] if blanks else difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.6)
        text = f"{place}: given {amount(value)}, but {self.runtime} ignores this unknown key"
        text += f"; {hint}" if close else ""
        self.strangers.append(Stranger(text, close[0] if close else ""))


def amount(value: object) -> str:
    """A number with its thousands apart, and anything else as the user gave it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(value)
    return f"{int(value):,}" if isinstance(value, int) or value.is_integer() else shown(value)


def among(value: object, allowed: Iterable[object]) -> bool:
    """Equality that keeps true apart from 1 and false from 0."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


def mapping(value: object, where: str) -> dict[str, object]:
    """A section; an absent one is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{where}: given {shown(value)}; allowed: a mapping")
    return value


def refuse_unless(value: object, effect: str, off: tuple[object, ...], where: str) -> None:
    """What would switch on something that is not modelled."""
    if not among(value, off):
        allowed = ", ".join("null" if item is None else str(item).lower() for item in off)
        raise InputError(
            f"{where}: given {shown(value)}; {effect}: not modelled yet; allowed: {allowed} or no such key"
        )


def switch(value: object, where: str) -> bool | Auto:
    """True, false or "auto"."""
    if value == AUTO:
        return AUTO
    if isinstance(value, bool):
        return value
    hint = f"{_SEARCH_SPACE}; " if isinstance(value, list) else f"given {shown(value)}; "
    raise InputError(f'{where}: {hint}allowed: true, false or "auto"')


def whole(value: object, where: str, least: int, most: int) -> int:
    """A whole number, also written 5e8; a fraction is refused as DeepSpeed refuses it."""
    if isinstance(value, list):
        raise InputError(f"{where}: {_SEARCH_SPACE}; allowed: one whole number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: given {shown(value)}; allowed: a whole number from {least:,} to {most:,}")
    if (isinstance(value, float) and not value.is_integer()) or not least <= value <= most:
        raise InputError(f"{where}: given {shown(value)}; allowed: a whole number from {least:,} to {most:,}")
    return int(value)


def size(value: object, where: str, least: int, most: int = LARGEST_SIZE) -> int | Auto:
    """A number of elements or "auto"; what people write for it and DeepSpeed rejects is named."""
    if value == AUTO:
        return AUTO
    if isinstance(value, float) and not value.is_integer() and least < value < LARGEST_SIZE:
        raise InputError(
            f'{where}: given {value!r}; DeepSpeed rejects a fraction of an element; allowed: {int(value)} or "auto"'
        )
    if value == 0 and least > 0 and not isinstance(value, bool):
        raise InputError(f'{where}: given 0, which stood for "auto" in 2021; allowed: "auto" or a number from 1')
    return whole(value, where, least, most)


def lost_digits(value: object) -> str:
    """What to say of a size with as many digits as DeepSpeed's log prints, so that the rest may be lost; or nothing."""
    if not isinstance(value, float) or value < 10**_PRINTED_DIGITS:
        return ""
    mantissa, _, exponent = f"{value:.{_PRINTED_DIGITS - 1}e}".partition("e")
    if float(f"{mantissa}e{exponent}") != value or mantissa.endswith("0"):
        return ""
    margin = 10 ** (int(exponent) - _PRINTED_DIGITS + 1) // 2
    factors = (2**bits for bits in range(60, _ROUND.bit_length() - 2, -1))
    rounded = (round(value / factor) * factor for factor in factors)
    near = next((whole_size for whole_size in rounded if whole_size and abs(whole_size - value) <= margin), None)
    guess = f"; {near:,} is within them" if near else ""
    return (
        f"= {int(value):,} has the {_PRINTED_DIGITS} digits that DeepSpeed's log prints, so up to {margin:,} are"
        f" lost{guess}; taken as written"
    )
