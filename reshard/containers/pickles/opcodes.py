"""The opcodes that `Machine.run` does not handle itself, each registered by its code.

Source: Python ``Lib/pickletools.py``, protocols 0 to 5.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

from reshard.containers.pickles.machine import (
    Handler,
    Machine,
    build_dict,
    get_items,
    peek,
    require_value,
)
from reshard.containers.pickles.values import Call, Located, require_hashable

HANDLERS: dict[int, Handler] = {}
_MAX_INTEGER = 1024  # bytes; Python turns no integer of more than 4300 digits into text


def _register(*codes: int) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for code in codes:
            HANDLERS[code] = handler
        return handler

    return register


def _register_constant(code: int, value: Any) -> None:
    HANDLERS[code] = lambda machine: machine.stack.append(value)


def _register_counted(code: int, layout: str, convert: Callable[[bytes], Any]) -> None:
    def handler(machine: Machine) -> None:
        machine.stack.append(convert(machine.take(machine.take_number(layout))))

    HANDLERS[code] = handler


def _register_fresh(code: int, make: Callable[[], Any]) -> None:
    HANDLERS[code] = lambda machine: machine.stack.append(make())


for _code, _literal in ((0x4E, None), (0x88, True), (0x89, False)):
    _register_constant(_code, _literal)
for _code, _factory in ((0x5D, list), (0x8F, set)):
    _register_fresh(_code, _factory)
HANDLERS[0x47] = lambda machine: machine.stack.append(machine.take_number(">d"))  # BINFLOAT


def _decode_long(data: bytes) -> int:
    if len(data) > _MAX_INTEGER:
        raise ValueError(f"an integer of {len(data)} bytes; reshard reads up to {_MAX_INTEGER}")
    return int.from_bytes(data, "little", signed=True)


def _decode_unicode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _decode_latin(data: bytes) -> str:
    # A string of Python 2 has no known encoding; Latin-1 keeps each of its bytes as one letter.
    return data.decode("latin-1")


for _code, _layout, _convert in (
    (0x8C, "<B", _decode_unicode),  # SHORT_BINUNICODE
    (0x8D, "<Q", _decode_unicode),  # BINUNICODE8
    (0x55, "<B", _decode_latin),  # SHORT_BINSTRING
    (0x54, "<i", _decode_latin),  # BINSTRING
    (0x8A, "<B", _decode_long),  # LONG1
    (0x8B, "<i", _decode_long),  # LONG4
):
    _register_counted(_code, _layout, _convert)


def _register_raw(code: int, layout: str) -> None:
    def handler(machine: Machine) -> None:
        data = machine.take(machine.take_number(layout))
        machine.stack.append(Located.of(data, machine.position - len(data)))

    HANDLERS[code] = handler


for _code, _layout in (
    (0x43, "<B"),  # SHORT_BINBYTES
    (0x42, "<I"),  # BINBYTES
    (0x8E, "<Q"),  # BINBYTES8
    (0x96, "<Q"),  # BYTEARRAY8
):
    _register_raw(_code, _layout)


@_register(0x80)  # PROTO
def _proto(machine: Machine) -> None:
    if machine.take(1)[0] > 5:
        raise ValueError("a pickle protocol newer than 5")


@_register(0x95)  # FRAME: the whole stream is in memory, so only its declared size is checked
def _frame(machine: Machine) -> None:
    if machine.take_number("<Q") > len(machine.data) - machine.position:
        raise ValueError("a frame reaches past the end")


@_register(0x87)  # TUPLE3
def _tuple3(machine: Machine) -> None:
    machine.stack[-3:] = [tuple(map(require_value, peek(machine.stack, 3)))]


@_register(0x74)  # TUPLE
def _tuple(machine: Machine) -> None:
    machine.stack.append(tuple(machine.pop_to_mark()))


@_register(0x6C)  # LIST
def _list(machine: Machine) -> None:
    machine.stack.append(machine.pop_to_mark())


@_register(0x64)  # DICT
def _dict(machine: Machine) -> None:
    machine.stack.append(build_dict(machine.pop_to_mark()))


@_register(0x91)  # FROZENSET
def _frozenset(machine: Machine) -> None:
    machine.stack.append(frozenset(map(require_hashable, machine.pop_to_mark())))


@_register(0x61)  # APPEND
def _append(machine: Machine) -> None:
    value = require_value(machine.stack.pop())
    _extend(machine.stack[-1], [value])


@_register(0x65, 0x90)  # APPENDS, ADDITEMS
def _appends(machine: Machine) -> None:
    values = machine.pop_to_mark()
    _extend(machine.stack[-1], values)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, set):
        target.update(map(require_hashable, values))
    elif isinstance(target, Call):
        if target.elements is None:
            target.elements = []
        target.elements += values
    else:
        raise TypeError(f"items are added to a {type(target).__name__}")


@_register(0x62)  # BUILD
def _build(machine: Machine) -> None:
    machine.build()


@_register(0x73)  # SETITEM
def _setitem(machine: Machine) -> None:
    value, key = require_value(machine.stack.pop()), require_hashable(machine.stack.pop())
    get_items(machine.stack[-1])[key] = value


@_register(0x63)  # GLOBAL
def _global(machine: Machine) -> None:
    module = machine.take_line()
    machine.stack.append(machine.make_global(f"{module}.{machine.take_line()}"))


@_register(0x93)  # STACK_GLOBAL
def _stack_global(machine: Machine) -> None:
    module, name = peek(machine.stack, 2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a global whose name is not text")
    machine.stack[-2:] = [machine.make_global(f"{module}.{name}")]


# ``function(*args)`` and ``cls.__new__(cls, *args)`` have the same description, a `Call`.
@_register(0x52, 0x81)  # REDUCE, NEWOBJ
def _reduce(machine: Machine) -> None:
    target, args = peek(machine.stack, 2)
    machine.stack[-2:] = [machine.call(target, args)]


@_register(0x92)  # NEWOBJ_EX
def _newobj_ex(machine: Machine) -> None:
    target, args, keywords = peek(machine.stack, 3)
    value = machine.call(target, args)
    if keywords and isinstance(value, Call):
        get_items(value).update(keywords)
    machine.stack[-3:] = [value]


@_register(0x69)  # INST
def _inst(machine: Machine) -> None:
    module = machine.take_line()
    target = machine.make_global(f"{module}.{machine.take_line()}")
    machine.stack.append(machine.call(target, tuple(machine.pop_to_mark())))


@_register(0x6F)  # OBJ
def _obj(machine: Machine) -> None:
    target, *args = machine.pop_to_mark()
    machine.stack.append(machine.call(target, tuple(args)))


@_register(0x51)  # BINPERSID
def _binpersid(machine: Machine) -> None:
    machine.stack[-1] = _load_persistent(machine, require_value(machine.stack[-1]))


@_register(0x50)  # PERSID
def _persid(machine: Machine) -> None:
    machine.stack.append(_load_persistent(machine, machine.take_line()))


def _load_persistent(machine: Machine, pid: Any) -> Any:
    if machine.persistent is None:
        raise ValueError("a persistent id in a file that cannot have one")
    return machine.persistent(pid)


@_register(0x30)  # POP
def _pop(machine: Machine) -> None:
    machine.stack.pop()


@_register(0x31)  # POP_MARK
def _pop_mark(machine: Machine) -> None:
    machine.pop_to_mark()


@_register(0x32)  # DUP
def _dup(machine: Machine) -> None:
    machine.stack.append(machine.stack[-1])
    machine.check_reference(machine.stack[-1])


@_register(0x67)  # GET
def _get(machine: Machine) -> None:
    machine.fetch(int(machine.take_line()))


@_register(0x70)  # PUT
def _put(machine: Machine) -> None:
    machine.put(int(machine.take_line()))


@_register(0x49)  # INT
def _int(machine: Machine) -> None:
    text = machine.take_line()
    # Protocols 0 and 1 write False and True as integers with a leading zero.
    machine.stack.append(text == "01" if text in ("00", "01") else int(text))


@_register(0x4C)  # LONG
def _text_long(machine: Machine) -> None:
    machine.stack.append(int(machine.take_line().rstrip("L")))


@_register(0x46)  # FLOAT
def _float(machine: Machine) -> None:
    machine.stack.append(float(machine.take_line()))


@_register(0x56)  # UNICODE
def _text_unicode(machine: Machine) -> None:
    machine.stack.append(machine.take_raw_line().decode("raw-unicode-escape"))


@_register(0x53)  # STRING
def _text_string(machine: Machine) -> None:
    # The line is the text that Python 2's ``repr`` gives for a string of bytes.
    line = machine.take_raw_line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    machine.stack.append(_decode_latin(codecs.escape_decode(line[1:-1])[0]))
