"""Pickles of plain data, read without Python's unpickler: a pickle is a program, and this machine lacks its dangers.

It knows the opcodes for None, booleans, numbers, text, bytes, lists, tuples and dicts, and those that remember and
recall them. An opcode that looks a name up, calls something or builds an object is refused by name, not run. What is
read is bounded: opcodes (each makes at most some 64 bytes), digits, and the keys of dicts, which could be made to
collide. Opcodes are those of pickletools.py of Python's standard library, protocols 0 to 5.
"""

import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, Final

from zsim.units import InputError

MAX_OPCODES: Final = 40_000_000
"""Some million events with their stacks; at most 3 GB of objects."""
_MAX_DIGITS: Final = 64
_MAX_LINE: Final = 4096
_MAX_KEY: Final = 2**32
_MARK: Final = object()
_HINT: Final = "allowed: the dicts, lists, text and numbers of torch.cuda.memory._dump_snapshot()"

_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


def loads(content: bytes, name: str) -> object:
    """What a pickle of plain data holds.

    Args:
        content: the whole pickle.
        name: of the file, for messages.

    Raises:
        InputError: it is none, is cut off, holds more than plain data, or more than a machine should take.

    """
    machine = _Machine(content)
    try:
        return machine.run()
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, ValueError, OverflowError):
        at = machine.opcode_at
        raise InputError(f"{name}: no pickle, or a damaged one: byte {at:,} of {len(content):,}; {_HINT}") from None


class _Machine:
    """A stack, a memo and a place in the bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0
        self.opcode_at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> object:
        """Runs to the end."""
        content, handlers = self.content, _HANDLERS
        for _ in range(MAX_OPCODES):
            self.opcode_at = self.at
            if self.at >= len(content):
                raise InputError(f"the pickle is cut off after {len(content):,} bytes; allowed: a whole one")
            code = content[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            handler = handlers.get(code)
            if handler is None:
                raise self._refused(code)
            handler(self)
        raise InputError(f"the pickle has more than {MAX_OPCODES:,} opcodes; allowed: fewer (max_entries=100000)")

    def _refused(self, code: int) -> InputError:
        if code not in _NAMES:
            return InputError(f"no pickle: byte {self.opcode_at:,} is {code:#04x}; {_HINT}")
        return InputError(f"opcode {_NAMES[code]} at byte {self.opcode_at:,} is none of plain data; {_HINT}")

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        end = self.at + nbytes
        if end > len(self.content):
            raise InputError(f"the pickle is cut off after {len(self.content):,} bytes; allowed: a whole one")
        taken = self.content[self.at : end]
        self.at = end
        return taken

    def line(self) -> bytes:
        """Up to the end of the line, without it."""
        end = self.content.index(b"\n", self.at, self.at + _MAX_LINE)
        taken = self.content[self.at : end]
        self.at = end + 1
        return taken

    def unsigned(self, nbytes: int) -> int:
        """A number of so many bytes, little end first."""
        return int.from_bytes(self.take(nbytes), "little")

    def since_mark(self) -> list[Any]:
        """What lies above the last mark, taken off."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _push(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _whole(machine: _Machine, text: bytes) -> int:
    if len(text) > _MAX_DIGITS:
        raise InputError(
            f"a number of {len(text)} digits at byte {machine.opcode_at:,}; allowed: at most {_MAX_DIGITS}"
        )
    return int(text)


def _int_line(machine: _Machine) -> None:
    text = machine.line()
    machine.stack.append({b"00": False, b"01": True}[text] if text in {b"00", b"01"} else _whole(machine, text))


def _long_line(machine: _Machine) -> None:
    machine.stack.append(_whole(machine, machine.line().removesuffix(b"L")))


def _float_line(machine: _Machine) -> None:
    machine.stack.append(float(machine.line()))


def _binary_float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _signed_4(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _unsigned(nbytes: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.unsigned(nbytes))


def _long(length_bytes: int) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        length = machine.unsigned(length_bytes)
        if length > _MAX_DIGITS:
            where = f"at byte {machine.opcode_at:,}"
            raise InputError(f"a number of {length:,} bytes {where}; allowed: at most {_MAX_DIGITS}")
        machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))

    return push


def _text(length_bytes: int) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        machine.stack.append(machine.take(machine.unsigned(length_bytes)).decode("utf-8", "surrogatepass"))

    return push


def _bytes(length_bytes: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.unsigned(length_bytes)))


def _text_line(machine: _Machine) -> None:
    machine.stack.append(machine.line().decode("raw-unicode-escape"))


def _mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError
        items = tuple(machine.stack[-count:])
        machine.stack[-count:] = [items]

    return make


def _tuple(machine: _Machine) -> None:
    machine.stack.append(tuple(machine.since_mark()))


def _list(machine: _Machine) -> None:
    machine.stack.append(machine.since_mark())


def _dict(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack.append({})
    _set_all(machine, items)


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _top(machine, list).append(item)


def _appends(machine: _Machine) -> None:
    items = machine.since_mark()
    _top(machine, list).extend(items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_all(machine, [key, value])


def _set_items(machine: _Machine) -> None:
    _set_all(machine, machine.since_mark())


def _set_all(machine: _Machine, items: list[Any]) -> None:
    target = _top(machine, dict)
    if len(items) % 2:
        raise ValueError
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not (type(key) is str or (type(key) is int and 0 <= key < _MAX_KEY)):
            where = f"at byte {machine.opcode_at:,}"
            raise InputError(f"a {type(key).__name__} as a key {where}; allowed: text, or a number below {_MAX_KEY:,}")
        target[key] = value


def _top(machine: _Machine, kind: type) -> Any:
    if type(machine.stack[-1]) is not kind:
        raise TypeError
    return machine.stack[-1]


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(length_bytes: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.memo[machine.unsigned(length_bytes)] = machine.stack[-1]

    return put


def _get(length_bytes: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.memo[machine.unsigned(length_bytes)])


def _put_line(machine: _Machine) -> None:
    machine.memo[_whole(machine, machine.line())] = machine.stack[-1]


def _get_line(machine: _Machine) -> None:
    machine.stack.append(machine.memo[_whole(machine, machine.line())])


def _protocol(machine: _Machine) -> None:
    version = machine.unsigned(1)
    if version > pickle.HIGHEST_PROTOCOL:
        raise InputError(f"pickle protocol {version}; allowed: 0 to {pickle.HIGHEST_PROTOCOL}")


def _frame(machine: _Machine) -> None:
    """Of how many bytes the next part has."""
    machine.take(8)


_STOP: Final = ord(".")

_HANDLERS: Final[dict[int, Callable[[_Machine], None]]] = {
    code[0]: handler
    for code, handler in (
        (pickle.PROTO, _protocol),
        (pickle.FRAME, _frame),
        (pickle.MARK, _mark),
        (pickle.NONE, _push(None)),
        (pickle.NEWTRUE, _push(True)),
        (pickle.NEWFALSE, _push(False)),
        (pickle.INT, _int_line),
        (pickle.LONG, _long_line),
        (pickle.FLOAT, _float_line),
        (pickle.BININT, _signed_4),
        (pickle.BININT1, _unsigned(1)),
        (pickle.BININT2, _unsigned(2)),
        (pickle.LONG1, _long(1)),
        (pickle.LONG4, _long(4)),
        (pickle.BINFLOAT, _binary_float),
        (pickle.UNICODE, _text_line),
        (pickle.SHORT_BINUNICODE, _text(1)),
        (pickle.BINUNICODE, _text(4)),
        (pickle.BINUNICODE8, _text(8)),
        (pickle.SHORT_BINBYTES, _bytes(1)),
        (pickle.BINBYTES, _bytes(4)),
        (pickle.BINBYTES8, _bytes(8)),
        (pickle.EMPTY_LIST, lambda machine: machine.stack.append([])),
        (pickle.EMPTY_TUPLE, _push(())),
        (pickle.EMPTY_DICT, lambda machine: machine.stack.append({})),
        (pickle.LIST, _list),
        (pickle.TUPLE, _tuple),
        (pickle.TUPLE1, _tuple_of(1)),
        (pickle.TUPLE2, _tuple_of(2)),
        (pickle.TUPLE3, _tuple_of(3)),
        (pickle.DICT, _dict),
        (pickle.APPEND, _append),
        (pickle.APPENDS, _appends),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, _set_items),
        (pickle.MEMOIZE, _memoize),
        (pickle.PUT, _put_line),
        (pickle.BINPUT, _put(1)),
        (pickle.LONG_BINPUT, _put(4)),
        (pickle.GET, _get_line),
        (pickle.BINGET, _get(1)),
        (pickle.LONG_BINGET, _get(4)),
    )
}
