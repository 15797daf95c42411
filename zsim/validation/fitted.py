"""The constants that are fitted to published rows: which, what they mean, and what was known before the fit.

experiments/published/fitted.yaml lists all of them. Each is one number of a data file, shared by every run on the same
software, GPU generation or fabric; none belongs to a row or to a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Final

from zsim import units
from zsim.reading.constants import with_constant
from zsim.reading.documents import Document, InputError, nearest, read
from zsim.spec import Spec
from zsim.validation.inference import folder

FILE: Final = "fitted.yaml"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a data file has a number."""

    file: str
    """From the project's root."""
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant."""

    name: str
    path: str
    """Within a spec, e.g. "runtime.stack.gemm_efficiency"."""
    where: tuple[tuple[str, frozenset[str]], ...]
    """What a spec has to be, one of several each, for the constant to be this one: names of `_FACTS`."""
    places: tuple[Place, ...]
    meaning: str
    prior: float
    """SI units: what was known before the fit."""
    low: float
    high: float
    """What is possible: the fit stays within."""
    source: str
    """Of the prior and its range."""

    @property
    def scale(self) -> float:
        """How far, as a natural logarithm, the truth may well be from the prior: half of the range."""
        return log(self.high / self.low) / 2

    def is_of(self, spec: Spec) -> bool:
        """Whether it is among the constants of this experiment."""
        known = any(constant.path == self.path for constant in spec.constants)
        return known and all(_FACTS[name](spec) in wanted for name, wanted in self.where)


_FACTS: Final[dict[str, Callable[[Spec], str]]] = {
    "software": lambda spec: spec.runtime.software,
    "runtime": lambda spec: spec.runtime.name,
    "topology": lambda spec: spec.cluster.topology,
    "device": lambda spec: spec.cluster.device.name,
    "generation": lambda spec: getattr(spec.cluster.device, "generation", "cpu"),
}


def read_fitted(path: Path | None = None) -> tuple[Fitted, ...]:
    """The list, by default the one that ships with zsim.

    Raises:
        InputError: a ValueError: an entry lacks something.

    """
    document = read(path or folder() / FILE, None if path else f"experiments/published/{FILE}")
    return tuple(_fitted(document, name, entry) for name, entry in document.data["constants"].items())


def _fitted(document: Document, name: str, entry: dict[str, Any]) -> Fitted:
    where = document.where("constants", name)
    for fact in entry["where"]:
        if fact not in _FACTS:
            raise InputError(f"{where}: where: {fact}: unknown; {nearest(fact, _FACTS)}")
    prior, dimension = entry["prior"], units.dimension_of(entry["path"])
    low, high = (units.parse(bound, dimension, where) for bound in prior["range"])
    value = units.parse(prior["value"], dimension, where)
    if not 0 < low <= value <= high:
        raise InputError(f"{where}: prior: its range has to be above 0 and enclose its value")
    return Fitted(
        name=name,
        path=entry["path"],
        where=tuple((fact, frozenset(wanted)) for fact, wanted in entry["where"].items()),
        places=tuple(Place(place["file"], tuple(place["keys"])) for place in entry["places"]),
        meaning=entry["meaning"],
        prior=value,
        low=low,
        high=high,
        source=prior["source"],
    )


def with_values(spec: Spec, values: Mapping[Fitted, float]) -> Spec:
    """The spec with other values of those constants that are its own."""
    for constant, value in values.items():
        if constant.is_of(spec):
            spec = with_constant(spec, constant.path, value)
    return spec


def present(constant: Fitted, specs: list[Spec]) -> float | None:
    """Its value in the data files as they are; None if no spec has it."""
    own = next((spec for spec in specs if constant.is_of(spec)), None)
    return None if own is None else next(each.value for each in own.constants if each.path == constant.path)
