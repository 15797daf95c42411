"""A row of measured results -> the experiment that was run, by the table in experiments/published/inference.yaml.

What a source does not print is decided there, with a reason; here are only the mechanics: cells become settings,
sections of rules make more of them in the order of the file, and what a row's own columns `topology`, `runtime`,
`model_preset` and `set` say is decided already.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zsim.reading import data, hardware
from zsim.reading.constants import with_node_bandwidth
from zsim.reading.documents import Document, read
from zsim.reading.resolution import of_document, resolve
from zsim.spec import Spec
from zsim.validation.rows import Layout, Row, read_layouts
from zsim.validation.rules import Rule, first, read_rules

_OVERRIDES: Final = {"topology": "cluster.topology", "runtime": "runtime", "model_preset": "model.preset"}
"""Columns that decide what is inferred otherwise."""
_NODE_GBPS: Final = "cluster.node_gbps"
_TOTAL: Final = "train.global_batch"
"""Keys that rules may set and no experiment has."""
_USUAL_GPUS: Final = 8
"""GPUs of a node where they are not printed."""
_GBPS: Final = 1e9 / 8
_GIVEN: Final = ("topology", "runtime", "model_preset")


class NotExpressibleError(Exception):
    """A row that no experiment stands for; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Section:
    """Rules of which the first that holds decides one question."""

    name: str
    decides: str
    """The dotted key whose value, given by the row itself, leaves nothing to infer; empty where there is none."""
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """inference.yaml."""

    columns: Mapping[str, str]
    """Column -> dotted key."""
    sections: tuple[Section, ...]
    sources: tuple[Rule, ...]
    """The key under which a row is grouped."""
    conventions: tuple[Rule, ...]
    """How a row counts FLOP."""
    layouts: tuple[Layout, ...]


def folder() -> Path:
    """Where the published rows and their tables are."""
    return data.folder("experiments") / "published"


def read_table(path: Path | None = None) -> Table:
    """The table, by default the one that ships with zsim."""
    document = read(path or folder() / "inference.yaml", None if path else "experiments/published/inference.yaml")
    return Table(
        columns=document.data["columns"],
        sections=tuple(_sections(document)),
        sources=read_rules(document, document.data["sources"], "sources"),
        conventions=read_rules(document, document.data["conventions"], "conventions"),
        layouts=read_layouts(document),
    )


def _sections(document: Document) -> Iterator[Section]:
    for name, given in document.data["sections"].items():
        rules = read_rules(document, given["rules"], "sections", name, "rules")
        yield Section(name, given.get("decides", ""), rules)


def source_of(row: Row, table: Table) -> str:
    """Of which source a row is: by the table, else as its column says, else the name of its file."""
    rule = first(table.sources, row.cells)
    if rule is not None:
        return str(rule.made(row.cells)["source"])
    return row.text("source") or row.file.stem


def spec_of(row: Row, table: Table) -> Spec:
    """The resolved experiment of a row.

    Raises:
        NotExpressibleError: something that zsim has no counterpart for, or that is not printed.
        InputError: a ValueError: the settings do not go together; the message names the row.

    """
    overrides = [text.strip() for text in row.text("set").split(";") if text.strip()]
    raw: dict[str, Any] = {"question": f"What was measured as {row.id}?"}
    settings = _settings(row, table, overrides)
    node_gbps = settings.pop(_NODE_GBPS, None)
    for key, value in settings.items():
        _put(raw, key.split("."), value)
    spec = resolve(of_document(Document(row.place, raw, {}), row.file.parent / row.id, overrides))
    return spec if node_gbps is None else with_node_bandwidth(spec, float(node_gbps) * _GBPS)


def _settings(row: Row, table: Table, overrides: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {_OVERRIDES[name]: row.text(name) for name in _GIVEN if row.text(name)}
    decided = {*settings, *(text.partition("=")[0].strip() for text in overrides)}
    for column, key in table.columns.items():
        if row.text(column) and not (key.startswith("model.") and "model.preset" in decided):
            settings[key] = int(row.text(column))
    cells: ChainMap[str, str] = ChainMap({}, {**row.cells, "num_nodes": str(_num_nodes(row))})
    for section in table.sections:
        cells.maps[0] = {key: str(value) for key, value in settings.items()} | _places(row, settings)
        if section.decides in decided:
            continue
        rule = first(section.rules, cells)
        if rule is None:
            continue
        if rule.skip:
            raise NotExpressibleError(rule.reason(cells))
        settings.update({key: value for key, value in rule.made(cells).items() if key not in decided})
    inferred_total = str(settings.pop(_TOTAL, ""))
    return settings | _nodes(row, settings) | _batch(row, settings, row.text("global_batch") or inferred_total)


def _put(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
    raw[keys[-1]] = value


def _places(row: Row, settings: Mapping[str, Any]) -> dict[str, str]:
    """Cells for the rules: how many nodes there are, once the machine is known."""
    if "cluster.topology" not in settings:
        return {}
    return {key.rpartition(".")[2]: str(value) for key, value in _nodes(row, settings).items()}


def _num_nodes(row: Row) -> int:
    """As printed, before the machine is known."""
    return -(-int(row.text("gpus")) // int(row.text("gpus_per_node") or _USUAL_GPUS))


def _nodes(row: Row, settings: Mapping[str, Any]) -> dict[str, int]:
    """Whole nodes, or a part of one."""
    gpus = int(row.text("gpus"))
    topology = hardware.open_topology(settings["cluster.topology"], row.file.parent, f"{row.place}: topology")
    per_node = min(gpus, int(row.text("gpus_per_node") or topology.gpus_per_node or gpus))
    if gpus % per_node:
        raise NotExpressibleError(f"{gpus} GPUs in nodes of {per_node}; allowed: as many in each node")
    return {"cluster.nodes": gpus // per_node, "cluster.gpus_per_node": per_node}


def _batch(row: Row, settings: Mapping[str, Any], total: str) -> dict[str, int]:
    """Micro-batch and accumulation: as printed, or the one that the global batch leaves."""
    micro, accumulation = row.text("micro_batch"), row.text("grad_accum")
    micro = micro or str(settings.get("train.micro_batch", ""))
    accumulation = accumulation or str(settings.get("train.gradient_accumulation", ""))
    gpus = int(row.text("gpus"))
    if not micro and not (total and accumulation):
        raise NotExpressibleError("the micro-batch is not printed")
    if not accumulation and not total:
        raise NotExpressibleError("neither accumulation nor the global batch is printed")
    if not micro:
        micro = _share(int(total), gpus * int(accumulation))
    if not accumulation:
        accumulation = _share(int(total), gpus * int(micro))
    return {"train.micro_batch": int(micro), "train.gradient_accumulation": int(accumulation)}


def _share(total: int, parts: int) -> str:
    if total % parts:
        raise NotExpressibleError(f"a global batch of {total} is no multiple of {parts}")
    return str(total // parts)
