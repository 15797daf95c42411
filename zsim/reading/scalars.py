"""Plain words of YAML and JSON -> None, booleans, numbers and text, within limits and without surprises."""

import math
import re
from typing import Any, Final

from zsim.units import InputError

_WORDS: Final = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "None": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMERAL: Final = 64


def plain(text: str, place: str) -> Any:
    """An unquoted scalar of YAML: `5e8` and `1_000` are numbers, Python's `True` and `None` are read."""
    if text in _WORDS:
        return _WORDS[text]
    if not _INTEGER.fullmatch(text) and not _FLOAT.fullmatch(text):
        return whole_characters(text, place)
    if text[0] == "0" and text.isdigit() and text != "0":
        return text  # 007 is octal to some readers and decimal to others
    return number(text, place)


def number(text: str, place: str) -> int | float:
    """A numeral that is short enough to be meant and finite."""
    if len(text) > _LONGEST_NUMERAL:
        raise InputError(f"{place}: a number of {len(text)} digits; allowed: at most {_LONGEST_NUMERAL}")
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise InputError(f"{place}: {text} is beyond any finite number")
    return value


def whole_characters(text: str, place: str) -> str:
    """Text in which the halves of a character beyond the basic plane, as JSON escapes it, are one again."""
    if any("\ud800" <= character <= "\udbff" for character in text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{place}: half a surrogate pair in {text[:40]!a}; allowed: text that can be written")
    return text
