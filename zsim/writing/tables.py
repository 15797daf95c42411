"""The frame that all tables on a terminal share: a rule below the headings and no edges."""

from typing import Final

from rich import box
from rich.table import Table

Padding = tuple[int, int] | tuple[int, int, int, int]
BETWEEN: Final[Padding] = (0, 1)
BEHIND: Final[Padding] = (0, 1, 0, 0)
"""A space right of each cell alone: for tables of many columns."""


def plain_table(padding: Padding = BETWEEN, *, expand: bool = False) -> Table:
    """Without columns yet; `expand` fills the width of the terminal."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False, expand=expand)


def figures_table(*headings: str) -> Table:
    """One column of words, then columns of numbers; what is too long is folded."""
    table = plain_table(BEHIND)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table
