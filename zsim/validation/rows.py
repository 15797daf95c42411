"""Measured results as people publish them: CSV in, rows out, with one line for each that is no result.

Columns: docs/validation.md. A file of another layout is read by a table of `inference.yaml` that gives its columns the
names of these and fills in what holds for all of its rows.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zsim.reading.documents import Document, InputError, nearest
from zsim.units import shown

MAX_BYTES: Final = 32 * 1024 * 1024
NEEDED: Final = ("system", "model", "hardware", "gpus", "seq_len", "metric", "value")
"""Columns without which nothing can be predicted, or compared."""
NUMBERS: Final = (
    *("params_b", "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "gpus", "gpus_per_node"),
    *("tp", "pp", "dp", "micro_batch", "global_batch", "grad_accum", "internode_gbps_per_node"),
    *("value", "alt_value", "peak_mem_gb"),
)
WHOLE: Final = frozenset(NUMBERS) - {"params_b", "internode_gbps_per_node", "value", "alt_value", "peak_mem_gb"}
COLUMNS: Final = (
    *("id", "source", "verified", "system", "model", "params_b", "layers", "hidden", "heads", "ffn", "vocab"),
    *("seq_len", "hardware", "gpus", "gpus_per_node", "interconnect", "internode_gbps_per_node", "precision"),
    *("zero_stage", "tp", "pp", "virtual_pp", "dp", "micro_batch", "global_batch", "grad_accum"),
    *("activation_checkpointing", "offload", "metric", "value", "flops_convention", "notes", "alt_metric"),
    *("alt_value", "peak_mem_gb", "source_ref", "topology", "runtime", "model_preset", "set"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured result."""

    place: str
    """File and line, for messages."""
    file: Path
    cells: Mapping[str, str] = field(repr=False)
    problem: str = ""
    """Why it is no result; empty where it is one."""

    @property
    def id(self) -> str:
        """What its author calls it, or its place."""
        return self.cells.get("id", "") or self.place

    def text(self, column: str) -> str:
        """A cell, empty where the file has none."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """A cell that is a number; None where it is empty."""
        text = self.text(column)
        return float(text) if text else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of other files: how to know one, and what they mean."""

    name: str
    columns: frozenset[str]
    rename: Mapping[str, str]
    constant: Mapping[str, str]
    refuse: str
    """Which command reads such files, where this one does not."""


def read_layouts(document: Document) -> tuple[Layout, ...]:
    """The section `layouts` of a document."""
    found: dict[str, dict[str, Any]] = document.data["layouts"]
    return tuple(
        Layout(
            name,
            frozenset(given["columns"]),
            given.get("rename", {}),
            {column: str(value) for column, value in given.get("constant", {}).items()},
            given.get("refuse", ""),
        )
        for name, given in found.items()
    )


def read_rows(path: Path, layouts: tuple[Layout, ...]) -> list[Row]:
    """Every row of a file, those with a fault too: it stands in `problem`.

    Raises:
        InputError: a ValueError: no CSV file, no rows, or columns that are missing.

    """
    reader = csv.reader(io.StringIO(_content(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: no CSV: {error}") from None
    layout = _layout(path, header, layouts)
    names = header if layout is None else [layout.rename.get(name, name) for name in header]
    constant = {} if layout is None else layout.constant
    rows = [_row(path, line, names, cells, constant) for line, cells in lines]
    if not rows:
        raise InputError(f"{path}: no rows; allowed: one result a line below the names of the columns")
    return rows


def _content(path: Path) -> str:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise InputError(f"{path} {kind}; allowed: a CSV file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES:,} bytes; allowed: a CSV file of results")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8); allowed: CSV") from None
    if not text.strip():
        raise InputError(f"{path}: empty; allowed: a CSV file with {', '.join(NEEDED)} and more columns")
    if "\0" in text:
        raise InputError(f"{path}: not a text file; allowed: CSV")
    return text


def _layout(path: Path, header: list[str], layouts: tuple[Layout, ...]) -> Layout | None:
    """The layout of another kind of file; None for results as they are documented."""
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InputError(f"{path}:1: the column {shown(twice[0])} is there twice; allowed: once")
    missing = [name for name in NEEDED if name not in header]
    if not missing:
        return None
    for layout in layouts:
        if layout.columns <= set(header):
            if layout.refuse:
                raise InputError(f"{path}: {layout.refuse}")
            return layout
    others = [name for name in header if name not in COLUMNS]
    hints = f"; {shown(others[0])}: {nearest(others[0], missing)}" if others and len(missing) < len(NEEDED) else ""
    raise InputError(f"{path}:1: missing columns {', '.join(missing)}{hints}; allowed: see docs/validation.md")


def _row(path: Path, line: int, names: list[str], cells: list[str], constant: Mapping[str, str]) -> Row:
    place = f"{path.name}:{line}"
    if len(cells) != len(names):
        problem = f"{place}: {len(cells)} cells; allowed: {len(names)}, as many as columns"
        return Row(place, path, dict(zip(names, cells, strict=False)), problem)
    found = {**constant, **{name: cell.strip() for name, cell in zip(names, cells, strict=True)}}
    found = {name: _plain(name, cell) for name, cell in found.items()}
    return Row(place, path, found, next(_problems(place, found), ""))


def _plain(name: str, cell: str) -> str:
    """A whole number as one: 16.0 of a spreadsheet is 16."""
    try:
        return str(int(float(cell))) if name in WHOLE and float(cell).is_integer() else cell
    except (ValueError, OverflowError):
        return cell


def _problems(place: str, cells: Mapping[str, str]) -> Iterator[str]:
    for name in NEEDED:
        if not cells[name] and name != "seq_len":
            yield f"{place}: {name} is empty"
    for name in NUMBERS:
        text = cells.get(name, "")
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            yield f"{place}: {name}: given {shown(text)}; allowed: a number"
            continue
        if name == "value" and value == 0 and cells["metric"] == "oom":
            continue
        if not math.isfinite(value) or value <= 0:
            yield f"{place}: {name}: given {shown(text)}; allowed: a number above 0"
        elif name in WHOLE and not value.is_integer():
            yield f"{place}: {name}: given {shown(text)}; allowed: a whole number"
