"""What ships with zsim, and every number of it with unit, origin and source, as the data files state them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from zsim import data
from zsim.documents import Document, InputError, nearest, read
from zsim.hardware import open_topology
from zsim.presets import presets
from zsim.runtime import open_runtime

KINDS: Final = ("topologies", "runtimes", "models", "experiments")


class Entry(NamedTuple):
    """A number or a choice of a data file."""

    path: str
    value: str
    range: str
    origin: str
    source: str


def names(kind: str) -> dict[str, str]:
    """Name -> one line on it."""
    match kind:
        case "models":
            return {name: _shape(fields) for name, fields in sorted(presets().items())}
        case "topologies" | "runtimes" | "experiments":
            documents = {name: read(data.folder(kind) / f"{name}.yaml") for name in data.names(kind)}
            return {name: _one_line(document) for name, document in documents.items()}
        case _:
            raise InputError(f"{kind}: unknown kind; {nearest(kind, KINDS)}")


def entries(kind: str, name: str) -> list[Entry]:
    """Everything that is stated of one name."""
    return [entry for document in _documents(kind, name) for entry in _walk(document, ())]


def _documents(kind: str, name: str) -> list[dict[str, Any]]:
    here = Path()
    match kind:
        case "topologies":
            topology = open_topology(name, here, kind)
            inline = topology.device is topology.document
            return [topology.document.data, *([] if inline else [topology.device.data])]
        case "runtimes":
            runtime = open_runtime(name, here, kind)
            return [runtime.document.data, runtime.software_document.data]
        case "models":
            known = presets()
        case "experiments":
            known = {stem: read(data.folder("experiments") / f"{stem}.yaml").data for stem in data.names("experiments")}
        case _:
            raise InputError(f"{kind}: unknown kind; {nearest(kind, KINDS)}")
    if name not in known:
        raise InputError(f"{kind}: unknown {name!a}; {nearest(name, known)}")
    return [known[name]]


def _walk(node: Any, keys: tuple[str, ...]) -> Iterator[Entry]:
    path = ".".join(keys)
    if not isinstance(node, dict):
        yield Entry(path, _shown(node), "", "", "")
    elif "origin" in node and "value" in node:
        bounds = " to ".join(map(str, node.get("range") or ()))
        yield Entry(path, str(node["value"]), bounds, str(node["origin"]), str(node.get("source", "")))
    else:
        for key, child in node.items():
            yield from _walk(child, (*keys, str(key)))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_line(document: Document) -> str:
    return str(document.data.get("description") or document.data.get("question") or "")


def _shape(fields: dict[str, Any]) -> str:
    return f"{fields['family']}, {fields['layers']} x {fields['hidden']}, {fields['heads']} heads"
