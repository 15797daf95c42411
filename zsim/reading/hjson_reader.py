"""JSON as DeepSpeed reads it, which is Hjson (https://hjson.github.io/syntax.html), with the line of every key.

Comments (`#`, `//`, `/* */`) anywhere, trailing or missing commas, keys and text without quotes. Hjson reads text
without quotes to the end of the line, commas and brackets included; where it would swallow those, and where it would
begin a text of several lines, this reader refuses: nobody means that in a configuration.
"""

import re
from bisect import bisect_right
from typing import Any, Final

from zsim.reading.scalars import number, whole_characters
from zsim.units import InputError, shown

Keys = tuple[str, ...]

_NEXT: Final = re.compile(r"(?:[ \t\n\r]|#[^\n\r]*|//[^\n\r]*|/\*.*?\*/)*", re.DOTALL)
"""Blanks and comments."""
_BARE_KEY: Final = re.compile(r"([^ \t\n\r:{}\[\],]+)[ \t\n\r]*(?=:)")
_BARE_VALUE: Final = re.compile(r"(?:[^\n\r,\]}#/]|/(?![/*]))*")
_LINE: Final = re.compile(r"[^\n\r]*")
_QUOTED: Final = {
    quote: re.compile(rf"{quote}((?:[^{quote}\\\x00-\x1f]|\\[^\x00-\x1f])*){quote}") for quote in ('"', "'")
}
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES: Final = {mark: mark for mark in "\"'\\/"} | {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NUMERAL: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {"null": None, "true": True, "false": False}
_SWALLOWED: Final = re.compile(r"[,:{}\[\]\"'#]|//|/\*")
"""What a line of unquoted text holds only by mistake."""


def build(text: str, name: str, max_depth: int) -> tuple[Any, dict[Keys, int]]:
    """The value of a text and the line of each of its keys; `[]` stands for an item of a list.

    Raises:
        InputError: not well-formed, a key given twice, or nested too deeply; with file and line.

    """
    reader = _Reader(text, name, max_depth)
    return reader.root(), reader.lines


class _Reader:
    """A position in a text; each method leaves it behind what it has read."""

    def __init__(self, text: str, name: str, max_depth: int) -> None:
        self.text, self.name, self.max_depth = text, name, max_depth
        self.at = 0
        self.lines: dict[Keys, int] = {}
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def root(self) -> Any:
        """Everything; the braces around a whole file may be missing."""
        first = self._next()
        if not first:
            return None
        if first in "{[":
            value = self._value((), 0)
        elif self._begins_a_mapping():
            value = self._mapping((), "", 1)
        else:
            value = self._value((), 0)
        if self._next():
            raise self._error("more text behind the end")
        return value

    def _begins_a_mapping(self) -> bool:
        begin = self.at
        if self.text[begin] in _QUOTED:
            self._quoted()
            is_key = self._next() == ":"
        else:
            is_key = _BARE_KEY.match(self.text, begin) is not None
        self.at = begin
        return is_key

    def _next(self) -> str:
        """Skips blanks and comments; the character that follows, or nothing at the end."""
        match = _NEXT.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.text.startswith("/*", self.at):
            raise self._error("a comment without its end")
        return self.text[self.at : self.at + 1]

    def _value(self, keys: Keys, depth: int) -> Any:
        first = self._next()
        if first in ("{", "["):
            if depth >= self.max_depth:
                raise InputError(f"{self._place()}: nested deeper than {self.max_depth} levels")
            self.at += 1
            return self._mapping(keys, "}", depth + 1) if first == "{" else self._list(keys, depth + 1)
        return self._quoted() if first in _QUOTED else self._bare(keys)

    def _mapping(self, keys: Keys, end: str, depth: int) -> dict[str, Any]:
        content: dict[str, Any] = {}
        while self._next() != end:
            place, line = self._place(), self._line()
            key = self._key()
            path = (*keys, key)
            if key in content:
                raise InputError(f"{place}: {'.'.join(path)} is given twice; allowed: once")
            self.lines[path] = line
            if self._next() != ":":
                raise self._error(f"no colon behind {shown(key)}")
            self.at += 1
            content[key] = self._value(path, depth)
            if self._next() == ",":
                self.at += 1
        self.at += len(end)
        return content

    def _list(self, keys: Keys, depth: int) -> list[Any]:
        content: list[Any] = []
        while (first := self._next()) != "]":
            if not first:
                raise self._error("a list without its end")
            content.append(self._value((*keys, "[]"), depth))
            if self._next() == ",":
                self.at += 1
        self.at += 1
        return content

    def _key(self) -> str:
        if self._next() in _QUOTED:
            return self._quoted()
        match = _BARE_KEY.match(self.text, self.at)
        if match is None:
            raise self._error("no key" if self.text[self.at :] else "a mapping without its end")
        self.at = match.end()
        return whole_characters(match[1], self._place())

    def _quoted(self) -> str:
        place, quote = self._place(), self.text[self.at]
        if self.text.startswith("'''", self.at):
            raise self._error("a text of several lines")
        match = _QUOTED[quote].match(self.text, self.at)
        if match is None:
            raise self._error("a text without its end, or with a line break in it")
        try:
            text = _ESCAPE.sub(_character, match[1])
        except KeyError as error:
            raise self._error(f"the unknown escape \\{error.args[0]}") from None
        self.at = match.end()
        return whole_characters(text, place)

    def _bare(self, keys: Keys) -> Any:
        """A word, a number, or a line of text without quotes."""
        match = _BARE_VALUE.match(self.text, self.at)
        assert match is not None
        word = match[0].strip()
        if word in _WORDS or _NUMERAL.fullmatch(word):
            value = _WORDS[word] if word in _WORDS else number(word, self._place())
            self.at = match.end()
            return value
        line = _LINE.match(self.text, self.at)
        assert line is not None
        text = line[0].strip()
        key = ".".join(keys)
        if not word:
            raise self._error(f"no value for {key}")
        if _SWALLOWED.search(text):
            place = f"{self._place()}: {key}" if key else self._place()
            raise InputError(
                f"{place}: the unquoted text {shown(word)}, perhaps a placeholder of a template;"
                f" allowed: a number, true, false, null, or text in quotes"
            )
        self.at = line.end()
        return whole_characters(text, self._place())

    def _line(self) -> int:
        """Counted from one."""
        return bisect_right(self._ends, self.at - 1) + 1

    def _place(self) -> str:
        return f"{self.name}:{self._line()}"

    def _error(self, problem: str) -> InputError:
        found = self.text[self.at : self.at + 20].splitlines()
        return InputError(f"{self._place()}: not well-formed: {problem}; found {shown(found[0] if found else '')}")


def _character(escape: re.Match[str]) -> str:
    mark = escape[1]
    return chr(int(mark[1:], 16)) if len(mark) > 1 else _ESCAPES[mark]
