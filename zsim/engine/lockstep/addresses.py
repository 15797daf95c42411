"""Tables and state by their address, for compiled functions that hand them on.

A named tuple is passed by value, and of an array that means seven words or more: with each call some 400 words, which
took three quarters of a run. A function that gets the address instead reads the fields it uses, in the same notation.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr, signature
from numba.extending import intrinsic, models, register_model

_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])
_signature: Final[Callable[..., Any]] = signature
_borrowed: Final[Callable[..., Any]] = impl_ret_borrowed
_on_stack: Final[Callable[..., Any]] = cgutils.alloca_once_value
_element: Final[Callable[..., Any]] = cgutils.gep_inbounds


class Address(types.Type):
    """Of a named tuple, whose fields are read as those of the tuple itself."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(name=f"Address({of})")


@register_model(Address)
class _Pointer(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Address) -> None:
        pointer = manager.lookup(kind.of).get_value_type().as_pointer()
        super().__init__(manager, kind, pointer)  # type: ignore[no-untyped-call]


@infer_getattr
class _Fields(AttributeTemplate):
    key = Address

    def generic_resolve(self, kind: Address, name: str) -> Any:  # type: ignore[override]  # declared as never done
        """The type of a field; None if there is none of that name."""
        return kind.of.types[kind.of.fields.index(name)] if name in kind.of.fields else None


@lower_getattr_generic(Address)  # type: ignore[no-untyped-call, untyped-decorator]
def _read(context: Any, builder: Any, kind: Address, pointer: Any, name: str) -> Any:
    """The tuple keeps its own reference to an array."""
    index = kind.of.fields.index(name)
    return _borrowed(context, builder, kind.of.types[index], builder.load(_element(builder, pointer, 0, index)))


@intrinsic
def _address(_typing: Any, value: Any) -> Any:
    def generate(_context: Any, builder: Any, _call: Any, arguments: Any) -> Any:
        return _on_stack(builder, arguments[0])

    return _signature(Address(value), value), generate


address_of: Final = cast("Callable[[_Tuple], _Tuple]", _address)
"""For the function that was given a named tuple: what it hands on, as long as it runs itself."""
