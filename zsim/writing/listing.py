"""Stages of the pipeline and the catalogue as plain lines and tables."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zsim.ops import Key, Program
from zsim.reading.catalogue import Entry
from zsim.spec import Spec
from zsim.trace import Trace


def program_lines(programs: Iterable[Program], phase: str | None, layer: int | None) -> Iterator[str]:
    """A line for each role, then one for each of its ops."""
    for program in programs:
        yield f"# role {program.role}: {len(program.ranks)} ranks, {len(program.ops):,} ops"
        yield from (str(op) for op in program.ops if _wanted(op.key, phase, layer))


def trace_lines(trace: Trace, phase: str | None, layer: int | None) -> Iterator[str]:
    """A line for each span, seconds in front."""
    for span in trace.spans:
        if _wanted(span.key, phase, layer):
            times = f"{span.start_s:13.9f} {span.end_s:13.9f}"
            yield f"{times}  {span.rank:<4} {span.lane:<12} {span.kind:<15} {span.key}  bytes={span.nbytes}"


def spec_lines(spec: Spec) -> Iterator[str]:
    """Dotted path = value, the constants' origins left to their own list."""
    for field in fields(spec):
        if field.name != "constants":
            yield from _value_lines(field.name, getattr(spec, field.name))


def _value_lines(path: str, value: Any) -> Iterator[str]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _value_lines(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield f"{path} = {value!r}"


def _wanted(key: Key, phase: str | None, layer: int | None) -> bool:
    return phase in {None, key.phase} and layer in {None, key.layer}


def names_table(kind: str, names: Mapping[str, str]) -> RenderableType:
    """Names of one kind with a line on each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in names.items():
        table.add_row(f"  {name}", line)
    return Group(Text(kind, style="bold"), table)


def entries_text(entries: Iterable[Entry]) -> RenderableType:
    """Numbers and choices of one data file: name, value, range, origin; what it is and the source below."""
    blocks: list[RenderableType] = []
    for entry in entries:
        head = Text.assemble((entry.path, "bold"), f" = {entry.value}")
        if entry.range:
            head.append(f" ({entry.range})")
        if entry.origin:
            head.append(f", {entry.origin}")
        blocks.append(head)
        blocks += [Padding.indent(Text(line, style="dim"), 4) for line in (entry.meaning, entry.source) if line]
    return Group(*blocks)
