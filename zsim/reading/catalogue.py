"""What ships with zsim, and every number of it with meaning, unit, origin and source, as the data files state them."""

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from zsim import cpu_spec, software, spec
from zsim.reading import data
from zsim.reading.documents import Document, InputError, nearest, read
from zsim.reading.hardware import open_topology
from zsim.reading.presets import presets
from zsim.reading.runtime import kinds_of_device, open_runtime

KINDS: Final = ("topologies", "runtimes", "models", "experiments")
SINGULAR: Final = {"topology": "topologies", "runtime": "runtimes", "model": "models", "experiment": "experiments"}
"""Either form names a kind."""

_RECORDS: Final = (
    *("ClusterSpec", "DeviceSpec", "NetworkSpec", "HostCosts", "StackSpec", "Optimisations"),
    *("CpuClusterSpec", "CpuSpec", "TcpSpec", "TransportSpec"),
)
"""Records of the spec that topologies and runtimes fill."""


class Entry(NamedTuple):
    """A number or a choice of a data file."""

    path: str
    value: str
    range: str
    origin: str
    source: str
    meaning: str


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
    """Everything that is stated of one name, or of a user's own file by its path."""
    known = _meanings() if kind in {"topologies", "runtimes"} else {}
    return [entry for document in _documents(kind, name) for entry in _walk(document, (), known)]


def _documents(kind: str, name: str) -> list[dict[str, Any]]:
    here = Path()
    match kind:
        case "topologies":
            topology = open_topology(name, here, kind)
            inline = topology.device is topology.document
            return [topology.document.data, *([] if inline else [topology.device.data])]
        case "runtimes":
            first, *others = [open_runtime(name, here, kind, on) for on in kinds_of_device(name, here, kind)]
            return [first.document.data, *(runtime.software_document.data for runtime in (first, *others))]
        case "models":
            known = presets()
        case "experiments":
            if data.is_path(name):
                return [read(here / name).data]
            known = {stem: read(data.folder("experiments") / f"{stem}.yaml").data for stem in data.names("experiments")}
        case _:
            raise InputError(f"{kind}: unknown kind; {nearest(kind, KINDS)}")
    if name not in known:
        hint = ", or the path of a .yaml file" if kind == "experiments" else ""
        raise InputError(f"{kind}: unknown {name!a}; {nearest(name, known)}{hint}")
    return [known[name]]


def _walk(node: Any, keys: tuple[str, ...], known: dict[str, str]) -> Iterator[Entry]:
    """`known` says what a field is; nothing of words of the file itself, such as its description."""
    path, meaning = ".".join(keys), next((known[key] for key in reversed(keys) if key in known), "")
    if not isinstance(node, dict):
        yield Entry(path, _shown(node), "", "", "", meaning)
    elif "origin" in node and "value" in node:
        bounds = " to ".join(map(str, node.get("range") or ()))
        yield Entry(path, str(node["value"]), bounds, str(node["origin"]), str(node.get("source", "")), meaning)
    else:
        for key, child in node.items():
            yield from _walk(child, (*keys, str(key)), known)


@lru_cache(maxsize=1)
def _meanings() -> dict[str, str]:
    """Field of a record -> the docstring below it: what the spec says of a number is said once."""
    found: dict[str, str] = {}
    for node in ast.parse("".join(map(inspect.getsource, (spec, software, cpu_spec)))).body:
        if isinstance(node, ast.ClassDef) and node.name in _RECORDS:
            for field, after in zip(node.body, node.body[1:], strict=False):
                match field, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_line(document: Document) -> str:
    return str(document.data.get("description") or document.data.get("question") or "")


def _shape(fields: dict[str, Any]) -> str:
    return f"{fields['family']}, {fields['layers']} x {fields['hidden']}, {fields['heads']} heads"
