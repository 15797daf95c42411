"""experiments/published/errors.yaml: how wrong predictions of a class of runs were, on sources that no fit had seen.

Written by `zsim calibrate published --write`.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from zsim.reading import data
from zsim.reading.documents import read

NAME: Final = "errors.yaml"
ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """Runs that are wrong in the same way."""

    name: str
    num_rows: int
    num_sources: int
    low: float
    """What a predicted step time has to be multiplied by to reach the measured one: the 10th percentile, at most 1."""
    high: float
    """The 90th, at least 1."""


def path() -> Path:
    """Of the file that ships with zsim."""
    return data.folder("experiments") / "published" / NAME


def names(framework: str, generation: str) -> tuple[str, ...]:
    """The classes that a run belongs to, the narrowest first."""
    return f"{framework} {generation}", framework, ALL


@lru_cache(maxsize=1)
def read_classes() -> dict[str, ErrorClass]:
    """Every class, by name; none where nothing was fitted yet."""
    if not path().is_file():
        return {}
    entries = read(path(), f"experiments/published/{NAME}").data["classes"]
    return {
        name: ErrorClass(name, entry["rows"], entry["sources"], *map(float, entry["range"]))
        for name, entry in entries.items()
    }


def class_of(framework: str, generation: str) -> ErrorClass | None:
    """The narrowest class with rows enough."""
    classes = read_classes()
    return next((classes[name] for name in names(framework, generation) if name in classes), None)
