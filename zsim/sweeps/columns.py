"""Columns of a grid: an axis whose values are whole sections becomes one column for each key in which they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from zsim.sweeps.grid import canonical

_NOT_GIVEN: Final = object()


def columns(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """Dotted keys that tell the rows apart, in the order of the axes.

    An axis of sections gives the keys in which these differ (all, if it has one value only) and which no other axis
    sets; any other axis gives itself, also one that has paths beside sections.
    """
    found: dict[str, None] = {}
    for name, values in axes.items():
        if _is_of_sections(values):
            sections = [leaves({name: value}) for value in values]
            names = dict.fromkeys(key for section in sections for key in section)
            found |= dict.fromkeys(
                key
                for key in names
                if not _is_set_beside(key, name, axes) and (len(values) == 1 or _differs(key, sections))
            )
        else:
            found[name] = None
    return list(found)


def cells(axes: Mapping[str, Sequence[Any]], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Of each of `columns` the value in a row; None where its section does not give the key."""
    whole = {name: value for name, value in assignments.items() if not _is_of_sections(axes.get(name, [value]))}
    known = {**leaves(assignments), **whole}
    return {name: known.get(name) for name in columns(axes)}


def leaves(assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Assignments with each section as its keys, without those that another assignment replaces."""
    return {
        key: value
        for name, given in assignments.items()
        for key, value in _leaves(name, given)
        if key == name or not _is_set_beside(key, name, assignments)
    }


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Of each dotted key its last parts, as few as tell it from the others."""
    found = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found[name] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name)
    return found


def _is_of_sections(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) and value for value in values)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def _is_set_beside(key: str, name: str, others: Mapping[str, Any]) -> bool:
    """Whether a deeper key than `name` sets `key` or a section that holds it."""
    return any(f"{key}.".startswith(f"{other}.") for other in others if other.startswith(f"{name}."))


def _differs(key: str, sections: Sequence[Mapping[str, Any]]) -> bool:
    values = [section.get(key, _NOT_GIVEN) for section in sections]
    if _NOT_GIVEN in values:
        return True
    return len({canonical(value) for value in values}) > 1
