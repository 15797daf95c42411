"""Which module a launch belongs to, forward by what encloses it, backward by the node that its forward had made."""

import re
from collections.abc import Sequence
from typing import Final

from zsim.imports.kineto.records import HostEvent, Profile

_INDEXED: Final = re.compile(r"(.+)_(\d+)")
"""Class of a module, and its number among its kind, in order of first call."""
Path = tuple[str, ...]
"""Modules as the trace names them ("LlamaMLP_3"), from the outermost in."""


class ModulePaths:
    """Modules of a profile; nothing of them is known unless `with_stack` was set."""

    def __init__(self, profile: Profile) -> None:
        self._by_sequence: dict[int, Path] = {}
        if not profile.has_stacks:
            return
        for index, event in enumerate(profile.host):
            is_graded = event.kind == "operator" and event.sequence >= 0 and event.forward_thread == 0
            # Of operators within each other the innermost has made the node; it comes last.
            if is_graded and (path := _enclosing(profile.enclosing(index))):
                self._by_sequence[event.sequence] = path

    def of(self, chain: Sequence[HostEvent]) -> Path:
        """Of what encloses a launch, from the innermost out; () where no module is known."""
        for event in chain:
            if event.kind == "operator" and event.forward_thread > 0 and event.sequence in self._by_sequence:
                return self._by_sequence[event.sequence]
        return _enclosing(chain)


def _enclosing(chain: Sequence[HostEvent]) -> Path:
    return tuple(event.name for event in reversed(chain) if event.kind == "module")


def plain(name: str) -> str:
    """The class of a module, without its number."""
    found = _INDEXED.fullmatch(name)
    return found[1] if found else name


def block_class(profile: Profile, num_blocks: int | None) -> str:
    """Class of the model's blocks; "" where no modules were recorded.

    The outermost class of which just `num_blocks` have run; where their number is not known the outermost of which
    several have run, and which have modules of their own.
    """
    numbers: dict[str, set[str]] = {}
    depths: dict[str, int] = {}
    has_parts: set[str] = set()
    for index, event in enumerate(profile.host):
        if event.kind != "module":
            continue
        path = _enclosing(profile.enclosing(index))
        numbers.setdefault(plain(event.name), set()).add(event.name)
        depths.setdefault(plain(event.name), len(path))
        has_parts.update(plain(name) for name in path[:-1])
    fitting = [
        name
        for name, found in numbers.items()
        if (len(found) == num_blocks if num_blocks is not None else len(found) > 1 and name in has_parts)
    ]
    return min(fitting, key=lambda name: depths[name], default="")


def layer(path: Path, block: str) -> int:
    """Number of the block in a path; -1 outside of blocks."""
    for name in path:
        if block and (found := _INDEXED.fullmatch(name)) and found[1] == block:
            return int(found[2])
    return -1
