"""A row of a table as options of the command line that give the same run."""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from zsim.reading.config import Experiment
from zsim.reading.documents import InputError, parse_value
from zsim.sweeps.columns import leaves
from zsim.sweeps.grid import canonical


def settings_of(experiment: Experiment, assignments: Mapping[str, Any]) -> list[str]:
    """Options `--set key=value`, quoted for a shell, that make the experiment the row.

    Args:
        experiment: what the row is a variant of.
        assignments: those of the row; a section is given key by key, as a whole where the experiment has keys in it
            that the row does not.

    """
    whole = {
        name: value
        for name, value in assignments.items()
        if isinstance(value, Mapping) and not _written(experiment, name) <= leaves({name: value}).keys()
    }
    inside = tuple(f"{name}." for name in whole)
    found = whole | {key: value for key, value in leaves(assignments).items() if not key.startswith(inside)}
    # Keys that another axis sets within a section that is given as a whole.
    found |= {
        name: value for name, value in assignments.items() if name not in whole and not isinstance(value, Mapping)
    }
    return [f"--set {quote(f'{name}={_text(value)}')}" for name, value in found.items()]


def _written(experiment: Experiment, name: str) -> set[str]:
    value: Any = experiment.raw
    for key in name.split("."):
        value = value.get(key, {}) if isinstance(value, Mapping) else {}
    return set(leaves({name: value})) if isinstance(value, Mapping) and value else set()


def _text(value: Any) -> str:
    """A string as it is where it reads back as one."""
    if isinstance(value, str):
        try:
            if parse_value(value, "--set") == value:
                return value
        except InputError:
            pass
    return canonical(value)
