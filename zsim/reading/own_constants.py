"""`constants` of an experiment: numbers in place of those of its topology, device, runtime and software.

A file, several, or the mapping itself, laid out as the spec is, so that a number stands under the path by which
`zsim show --stage constants` lists it:

    runtime:
      stack:
        gemm_efficiency: {value: 0.71, origin: measured, source: "...", range: [0.68, 0.73]}

What is measured on one's own machine, as `zsim calibrate` writes it, needs no copy of a whole runtime then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Final, get_type_hints

from zsim.imports.user_files import locate
from zsim.reading.config import Experiment
from zsim.reading.constants import Reader, replaced
from zsim.reading.documents import Document, InputError, Keys, nearest, read
from zsim.reading.hardware import check_achieved
from zsim.spec import ClusterSpec, Constant, Spec
from zsim.units import shown

SECTION: Final = "constants"
_NUMBER: Final = frozenset({"value", "by_software", "by_generation"})
"""A mapping with one of these is a number, any other a section."""


def with_own_constants(spec: Spec, experiment: Experiment, software: str, generation: str) -> Spec:
    """The spec with the experiment's own numbers.

    Args:
        spec: as topology and runtime make it.
        experiment: with its `constants`.
        software: generation of software, which chooses among `by_software`.
        generation: of the GPU, or "cpu", which chooses among `by_generation`.

    Raises:
        InputError: a ValueError: a number that this experiment has not, or one that is given twice or wrong.

    """
    places: dict[str, str] = {}
    for document, base in _documents(experiment):
        reader = Reader(document, software, generation)
        for keys, node in _numbers(document, base):
            path, where = ".".join(keys[len(base) :]), document.where(*keys)
            if path in places:
                raise InputError(f"{where}: given twice, also at {places[path]}; allowed: once")
            places[path] = where
            spec = _with(spec, reader, path, keys, node)
    if places and isinstance(spec.cluster, ClusterSpec):
        check_achieved(spec.cluster, lambda name: places.get(f"cluster.network.{name}", experiment.where(SECTION)))
    return spec


def _documents(experiment: Experiment) -> Iterator[tuple[Document, Keys]]:
    """Each document with numbers, and under which keys they stand in it."""
    given = experiment.settings.constants
    typed = experiment.is_typed(SECTION)
    if isinstance(given, dict):
        whole = experiment.places.document
        name = "--set" if typed else whole.name
        yield Document(name, {SECTION: given}, {} if typed else whole.lines), (SECTION,)
        return
    for name in given:
        where = experiment.where(SECTION)
        try:
            path, shown_name = locate(name, experiment.base, is_typed=typed)
            yield read(path, shown_name), ()
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _numbers(document: Document, base: Keys) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Each number with its place, in the order of the document."""
    root: Any = document.data
    for key in base:
        root = root[key]
    waiting: list[tuple[Keys, Any]] = [(base, root)]
    while waiting:
        keys, node = waiting.pop()
        if not isinstance(node, dict):
            raise InputError(f"{document.where(*keys)}: given {shown(node)}; allowed: a number with value and origin")
        if _NUMBER & node.keys():
            yield keys, node
        else:
            waiting += reversed([((*keys, str(key)), item) for key, item in node.items()])


def _with(spec: Spec, reader: Reader, path: str, keys: Keys, node: Mapping[str, Any]) -> Spec:
    known = {constant.path: constant for constant in spec.constants}
    if path not in known:
        raise InputError(f"{reader.document.where(*keys)}: no number of this experiment; {nearest(path, known)}")
    constant = reader.number(node, keys, path, integral=_is_whole(spec, path))
    changed: Spec = replaced(spec, path.split("."), constant.value)
    return replace(changed, constants=tuple(_or(constant, other) for other in spec.constants))


def _or(constant: Constant, other: Constant) -> Constant:
    return constant if other.path == constant.path else other


def _is_whole(spec: Spec, path: str) -> bool:
    """Whether the field is a whole number."""
    *sections, name = path.split(".")
    record: Any = spec
    for section in sections:
        record = getattr(record, section)
    assert is_dataclass(record)
    return get_type_hints(type(record))[name] is int
