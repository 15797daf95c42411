"""How functions of the second engine are compiled, and by what the result is known when it is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event
from numpy.typing import NDArray

from zsim import allocator, ranks
from zsim.engine.lockstep.state import State, Tables

Function = TypeVar("Function", bound=Callable[..., object])

_OPTIONS: Final = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


class Rounds(Protocol):
    """What Python calls; see `rounds`."""

    def __call__(
        self,
        tables: Tables,
        state: State,
        bounds: NDArray[np.int64],
        shared: NDArray[np.int64],
        num_rounds: int,
        /,
    ) -> None:
        """Leaves in `shared` what came of it."""


def compiled(function: Function) -> Function:
    """For other compiled functions: without the code that takes arguments from Python, half of the time it takes.

    And without counting references to arrays, which took four fifths of a run; so it can make none.
    """
    options: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True, "_nrt": False}
    return cast("Function", njit(**options)(function))


def allocating(function: Function) -> Function:
    """As `compiled`, and it may make arrays."""
    options: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True}
    return cast("Function", njit(**options)(function))


def entry(function: Rounds) -> Rounds:
    """For Python, whose lock it gives up meanwhile; machine code is kept beside its source or in the home.

    Where there is no such place it is made anew in each process, and `watched` says so.
    """
    options: dict[str, Any] = dict(_OPTIONS)
    try:
        return cast("Rounds", njit(cache=True, **options)(function))
    except RuntimeError:  # "no locator available"
        return cast("Rounds", njit(**options)(function))


@contextmanager
def watched(tell: Callable[[], None]) -> Iterator[None]:
    """Calls back when machine code is made, rather than found where it was kept."""

    class Listener(event.Listener):
        def on_start(self, event: event.Event) -> None:  # noqa: ARG002
            tell()

        def on_end(self, event: event.Event) -> None: ...

    with event.install_listener("numba:compile", Listener()):
        yield


def _digest() -> int:
    folders = (Path(__file__).parent, Path(allocator.__file__).parent)
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))] + [Path(ranks.__file__)]
    content = b"".join(path.read_bytes() for path in paths)
    return int.from_bytes(sha256(content).digest()[:7], "big")


SOURCES: Final = _digest()
"""Of all modules here, of the allocator and of the rule who is last: numba looks at the file of the entry alone."""
