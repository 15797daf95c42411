"""An operator of a layer as memory sees it, before it is known what comes in front of the layer and what is trained.

`wiring` joins the operators of a model by name and finds which gradients there are.
"""

from dataclasses import dataclass, replace
from typing import Final

from zsim.model.modules import Tensor

PREVIOUS: Final = ""
"""What the operator in front in the same module puts out; for the first one, what the module is called with."""
INPUT: Final = "input"
"""What the module is called with."""
STREAM: Final = "stream"
"""The residual stream of the block."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, or several whose temporaries are small.

    Its node makes a gradient of the size of each tensor that it reads and that has one, unless it hands on its own.
    """

    writes: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()
    """Views of what it reads first; the first of these, or else of what it writes, is what it puts out."""
    reads: tuple[str, ...] = (PREVIOUS,)
    binds: tuple[str, ...] = ()
    """Names under which what it reads is kept, in the order of `reads`; "" for none."""
    keeps: tuple[str, ...] = ()
    """Names of what its node keeps, where the layer's gradients say so too."""
    named: str = ""
    """A name by which others read what it puts out."""
    hands_on: bool = False
    scratch_bytes: tuple[int, ...] = ()
    has_weights: bool = False
    flattens: bool = False
    """Whether it sees its input as rows of tokens, so that the gradient of that is a view of what its node makes."""
    continues_stream: bool = False
    """Whether what it puts out is the residual stream from now on."""
    core: bool = False
    until: str = ""
    within: str = ""
    needs: tuple[str, ...] = ()
    """What a local name holds until it has run, though it does not read it."""


Operators = tuple[Operator, ...]


def held(operators: Operators, until: str) -> Operators:
    """The last one's result is held by a local name until a module is through; without any, what is handed through."""
    if not operators:
        return (Operator(until=until),) if until else ()
    return (*operators[:-1], replace(operators[-1], until=until))
