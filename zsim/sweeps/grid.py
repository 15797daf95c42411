"""The grid of a sweep: axes, the experiment of each row, and what tells one sweep from another."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Final

from zsim.reading import data, hardware, twins
from zsim.reading.config import Experiment
from zsim.reading.documents import Document, InputError, parse_value
from zsim.reading.resolution import variant
from zsim.reading.runtime import open_runtime
from zsim.units import shown

MAX_ROWS: Final = 100_000
"""Rows of a grid: at a tenth of a second each these take three hours."""
_ASIDE: Final = frozenset({"question", "sweep", "measured", "assumed"})
"""What an experiment file says beside what is simulated."""

Assignments = dict[str, Any]
"""Dotted key -> value, in the order of the axes."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The cartesian product of the axes; the last axis varies fastest."""

    experiment: Experiment
    axes: dict[str, list[Any]]

    @property
    def num_rows(self) -> int:
        """Points of the grid."""
        return math.prod(map(len, self.axes.values()))

    def rows(self) -> Iterator[Assignments]:
        """Each point, in order."""
        return points(self.axes)

    def experiment_of(self, assignments: Assignments) -> Experiment:
        """The experiment of one row.

        Raises:
            InputError: its values do not go together.

        """
        return variant(self.experiment, assignments)


def grid(experiment: Experiment, axes: Mapping[str, Sequence[Any]] | None = None) -> Grid:
    """The experiment's `sweep`, with further axes that replace those of the same name.

    Raises:
        InputError: a ValueError: no axis, a value that is malformed, a key that is set as well, or too many rows.

    """
    found = {**experiment.settings.sweep, **{name: list(values) for name, values in (axes or {}).items()}}
    if not found:
        raise InputError(
            f"{experiment.where('sweep')} is missing; allowed: a mapping of dotted keys to lists of values, or --axis"
        )
    for name, values in found.items():
        _check_axis(experiment, name, values, given_beside=name in (axes or {}))
    made = Grid(experiment, found)
    if made.num_rows > MAX_ROWS:
        lengths = " x ".join(str(len(values)) for values in found.values())
        raise InputError(
            f"{experiment.where('sweep')}: {lengths} = {made.num_rows:,} rows; allowed: at most {MAX_ROWS:,}"
        )
    return made


def _check_axis(experiment: Experiment, name: str, values: Sequence[Any], *, given_beside: bool) -> None:
    where = f"--axis {name}" if given_beside else experiment.where("sweep", name)
    keys = twins.plain_keys(tuple(name.split(".")))
    for path in experiment.places.overridden:
        if path[: len(keys)] == keys[: len(path)]:
            raise InputError(f"--set {'.'.join(path)}: {name} is an axis of the sweep; allowed: --axis {name}=VALUES")
    texts = [canonical(value) for value in values]
    if not texts or len(set(texts)) < len(texts):
        twice = next((text for text in texts if texts.count(text) > 1), "")
        raise InputError(f"{where}: " + (f"{shown(twice)} is given twice; allowed: once" if texts else "no values"))
    if given_beside:
        for value in values:
            try:
                variant(experiment, {name: value})
            except InputError as error:
                raise InputError(f"{where} = {shown(value)}: {error}") from None


def parse_axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    """`train.micro_batch=1,2,4` of the command line -> {"train.micro_batch": [1, 2, 4]}.

    Raises:
        InputError: not of this form, or an axis given twice.

    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not all(name.split(".")) or not values:
            raise InputError(f"--axis: given {shown(text)}; allowed: a.b=value,value,...")
        if name in axes:
            raise InputError(f"--axis {name}: given twice; allowed: once")
        inside = values if values.startswith("[") and values.endswith("]") else f"[{values}]"
        axes[name] = parse_value(inside, f"--axis {name}")
        if not isinstance(axes[name], list):
            raise InputError(f"--axis {name}: given {shown(values)}; allowed: a list of values")
    return axes


def points(axes: Mapping[str, Sequence[Any]]) -> Iterator[Assignments]:
    """The cartesian product of axes, in order."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def canonical(value: Any) -> str:
    """Equal values give equal text, 5e8 and 500000000 too."""
    return json.dumps(_whole(value), sort_keys=True, separators=(",", ":"), default=str)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def identity(experiment: Experiment) -> dict[str, Any]:
    """What every row of a sweep has in common: other settings or another zsim make another sweep.

    Returns:
        dotted key -> value of the experiment, in JSON; and "zsim" -> `fingerprint()`.

    """
    found: dict[str, Any] = {"zsim": fingerprint()}
    _flatten(experiment.settings.model_dump(mode="json", exclude=set(_ASIDE)), "", found)
    return found


def file_digests(asked: Grid) -> dict[str, str]:
    """Every file of the user's own that a row may read: its path from the experiment's folder -> digest."""
    rows = [asked.experiment]
    for name, values in asked.axes.items():
        rows += [variant(asked.experiment, {name: value}) for value in values]
    found: dict[str, str] = {}
    for row in rows:
        for path in row.files[1:]:
            if path.is_file():
                found[os.path.relpath(path, row.base)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for owner, document in _behind(row):
            # Its own name depends on the working folder.
            found[f"{owner} -> {Path(document.name).name}"] = hashlib.sha256(
                canonical(document.data).encode()
            ).hexdigest()[:16]
    return found


def _behind(row: Experiment) -> Iterator[tuple[str, Document]]:
    """What the user's own topology and runtime name in turn, with their names.

    Nothing where they are wrong, for then nothing runs.
    """
    settings = row.settings
    with suppress(InputError):
        if data.is_path(settings.cluster.topology):
            yield settings.cluster.topology, hardware.open_topology(settings.cluster.topology, row.base, "").device
    with suppress(InputError):
        if data.is_path(settings.runtime):
            yield settings.runtime, open_runtime(settings.runtime, row.base, "").software_document


def key(common: Mapping[str, Any], assignments: Assignments) -> str:
    """The name of a row: a digest of its values and of what all rows have in common."""
    text = canonical([common, sorted(assignments.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Version of zsim and a digest of its code and data files: rows of two programs are not one table."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    sources = [package.rglob("*.py")]
    sources += [data.folder(name).rglob("*.yaml") for name in ("topologies", "runtimes", "models")]
    for files in sources:
        for path in sorted(files):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{version('zsim')} ({digest.hexdigest()[:12]})"


def _flatten(value: Any, prefix: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(inner, f"{prefix}.{name}" if prefix else str(name), found)
    else:
        found[prefix] = value
