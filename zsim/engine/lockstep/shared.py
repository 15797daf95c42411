# ruff: noqa: ARG001  numba looks at the names of all arguments
"""What threads of the second engine share while they run without Python: integers that change as a whole.

A round is over in some hundred microseconds, so threads meet by looking at a number, not by being woken.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.typing.templates import signature
from numba.extending import intrinsic

_ORDER: Final = "seq_cst"
_signature: Final[Callable[..., Any]] = signature
_external: Final[Callable[..., Any]] = cgutils.get_or_insert_function


def _of_code(generator: Callable[..., Any]) -> Callable[..., Any]:
    """For compiled functions: called with values, though it is written with what generates code for them."""
    made: Callable[..., Any] = intrinsic(generator)
    return made


@_of_code
def add(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Adds to an element of an int64 array; returns what it was before."""

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, call, arguments)
        return builder.atomic_rmw("add", pointer, arguments[2], _ORDER)

    return _signature(types.int64, array, types.intp, types.int64), generate


@_of_code
def exchange(_typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Changes an element of an int64 array if it is what is expected; returns whether it was."""

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, call, arguments)
        pair = builder.cmpxchg(pointer, arguments[2], arguments[3], _ORDER, _ORDER)
        return builder.extract_value(pair, 1)

    return _signature(types.boolean, array, types.intp, types.int64, types.int64), generate


@_of_code
def read(_typing: Any, array: Any, index: Any) -> Any:
    """An element of an int64 array as it is now, whoever wrote it."""

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, call, arguments), _ORDER, 8)

    return _signature(types.int64, array, types.intp), generate


@_of_code
def write(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Changes an element of an int64 array; all that was written before is seen by who reads it."""

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _pointer(context, builder, call, arguments), _ORDER, 8)
        return context.get_dummy_value()

    return _signature(types.void, array, types.intp, types.int64), generate


@_of_code
def give_way(_typing: Any) -> Any:
    """Lets another thread have the core, if one waits for it (sched_yield of POSIX)."""

    def generate(_context: Any, builder: Any, _call: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(_external(builder.module, kind, "sched_yield"), [])

    return _signature(types.int32), generate


def _pointer(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
    array = context.make_array(call.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])
