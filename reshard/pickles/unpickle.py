"""A pickle reader that cannot run code: it interprets opcodes and calls nothing from the file.

What a pickle would construct by calling a global becomes a `Call`: the dotted name, the
arguments, the state. Callers turn the calls that they know into values of their own through
``builders``; names outside the allow-list are collected (or refused). Nothing is imported.

Opcodes: Python ``Lib/pickletools.py``, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import CorruptError, ReshardError, UnsafeError
from reshard.pickles import trust

Builder = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names, as ``module.name``. Never imported."""

    name: str


@dataclass(slots=True, eq=False)
class Call:
    """An object that a pickle would make by calling ``name(*args)``, kept as a description."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def get(self, attribute: str, default: Any = None) -> Any:
        """An attribute of the object's state, as ``getattr`` would find it.

        The state is a dict, or a pair (dict or None, dict of ``__slots__``).
        """
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        for part in parts:
            if isinstance(part, dict) and attribute in part:
                return part[attribute]
        return default


@dataclass(slots=True)
class Unpickled:
    """The result: the value, where its pickle ended, and every global it named."""

    value: Any
    end: int
    globals: set[str]


class _Mark:
    """The stack's MARK; one instance, compared by identity."""


_MARK = _Mark()
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_MAX_COPIED = 1 << 20
_MAX_KEY_PARTS = 64
_MAX_KEY_NUMBER = 1 << 64  # beyond it many integers can be made to have one hash


def _raw(data: Any = b"") -> bytes:
    if not isinstance(data, (bytes, list, tuple)):
        raise TypeError("bytearray of something that is not bytes")
    return bytes(data)


def _mapping(items: Any = (), /) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {_key(key): value for key, value in pairs}


# Every container of Python's own is made by us; all else is a Call.
_BUILTIN_BUILDERS: dict[str, Builder] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda *_factory: {},
    "collections.Counter": _mapping,
    "collections.deque": lambda *items: list(*items[:1]),
    "builtins.set": lambda *items: set(map(_key, *items)) if items else set(),
    "builtins.frozenset": lambda *items: frozenset(map(_key, *items)) if items else frozenset(),
    "builtins.list": list,
    "builtins.dict": _mapping,
    "builtins.tuple": tuple,
    "builtins.bytes": _raw,
    "builtins.bytearray": lambda *data: bytes(data[0], "latin-1") if len(data) > 1 else _raw(*data),
    "builtins.complex": complex,
    "_codecs.encode": lambda text, _encoding="latin-1": text.encode("latin-1"),
}


def _python2(name: str) -> str:
    return "builtins." + name[12:] if name.startswith("__builtin__.") else name


def loads(
    data: bytes,
    *,
    where: object,
    start: int = 0,
    builders: Mapping[str, Builder] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Unpickled:
    """Interpret one pickle that begins at ``data[start]``.

    Args:
        where: the file, for messages.
        builders: dotted name -> our function that makes the value from the call's arguments.
        persistent: makes the value of a persistent id (torch: a storage).

    Raises:
        CorruptError: the stream is not a well-formed pickle.
        UnsafeError: it names a function that only an attack has a use for.
    """
    machine = _Machine(data, start, where, {**_BUILTIN_BUILDERS, **(builders or {})}, persistent)
    try:
        value = machine.run()
    except ReshardError:
        raise
    except (
        RecursionError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        struct.error,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise CorruptError(
            where,
            f"the pickle is damaged at byte {machine.position} of {len(data)}"
            f" ({type(error).__name__}: {error})",
            "the file is truncated or was altered: fetch it again",
        ) from error
    return Unpickled(value, machine.position, machine.globals)


class _Machine:
    """The stack machine; `run` holds the opcodes that make up 95% of a checkpoint's pickle."""

    def __init__(
        self,
        data: bytes,
        start: int,
        where: object,
        builders: Mapping[str, Builder],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.where = where
        self.position = start
        self.builders = builders
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: set[str] = set()
        self.copied = 0  # elements of containers that calls have copied

    def run(self) -> Any:  # noqa: C901, PLR0912 - inlined for speed
        """Interpret until STOP and return the top of the stack."""
        data, stack, memo = self.data, self.stack, self.memo
        handlers = _HANDLERS
        at = self.position
        while True:
            op = data[at]
            at += 1
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
                at += 4
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x85:  # TUPLE1
                stack[-1] = (_value(stack[-1]),)
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x58:  # BINUNICODE
                size = int.from_bytes(data[at : at + 4], "little")
                at += 4 + size
                stack.append(_text(data, at - size, at))
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [tuple(map(_value, _top(stack, 2)))]
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x2E:  # STOP
                self.position = at
                return _value(stack.pop())
            else:
                self.position = at
                handlers[op](self)
                at = self.position

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes of the stream."""
        stop = self.position + size
        if size < 0 or stop > len(self.data):
            raise ValueError(f"{size} bytes are announced, {len(self.data) - self.position} remain")
        piece = self.data[self.position : stop]
        self.position = stop
        return piece

    def number(self, layout: str) -> Any:
        """The next fixed-width number, ``layout`` as in `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def raw_line(self) -> bytes:
        """The rest of the text line (protocol 0 arguments)."""
        stop = self.data.index(b"\n", self.position)
        raw = self.data[self.position : stop]
        self.position = stop + 1
        return raw

    def line(self) -> str:
        """The same as text."""
        return self.raw_line().decode("utf-8")

    def popped(self) -> list[Any]:
        """Everything above the last MARK, which goes too."""
        stack = self.stack
        index = len(stack) - 1
        while stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no MARK on the stack")
        above = stack[index + 1 :]
        del stack[index:]
        return above

    def named(self, name: str) -> Global:
        """A global that the stream names."""
        name = _python2(name)
        if name == "builtins.getattr":  # how a nested class is named; `call` decides
            return Global(name)
        if trust.runs_code(name):
            raise UnsafeError(
                self.where,
                f"its pickle asks for {name!r}, which would run code",
                "do not use this file; reshard has executed nothing of it",
            )
        self.globals.add(name)
        return Global(name)

    def nested(self, owner: Any = None, attribute: Any = None, *rest: Any) -> Global:
        """The class that ``getattr(owner, attribute)`` names, if it is one that torch writes so."""
        name = f"{owner.name}.{attribute}" if isinstance(owner, Global) else ""
        if name not in trust.NESTED_CLASSES or rest:
            raise UnsafeError(
                self.where,
                f"its pickle asks for an attribute ({attribute!r:.60}) of an object",
                "do not use this file; reshard has executed nothing of it",
            )
        return self.named(name)

    def call(self, target: Any, args: Any) -> Any:
        """What ``target(*args)`` stands for: our own builder's value, or a `Call`."""
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise TypeError("a call of something that is not a named global")
        if target.name == "builtins.getattr":
            return self.nested(*args)
        builder = self.builders.get(target.name)
        if builder is None:
            return Call(target.name, args)
        for arg in args:
            if isinstance(arg, _SIZED):
                self.copied += len(arg)
        if self.copied > _MAX_COPIED + 8 * len(self.data):
            raise ValueError("it copies the same value over and over")
        return builder(*args)


def _key(value: Any) -> Any:
    """A dict key or set element that can be hashed in little time.

    Python hashes a tuple anew at each use, and deep; a frozenset keeps its hash.
    """
    if value is None or isinstance(value, str):
        return value
    waiting = [value]
    for _ in range(_MAX_KEY_PARTS):
        if not waiting:
            return value
        part = waiting.pop()
        if isinstance(part, tuple):
            waiting += part
        elif isinstance(part, int) and not -_MAX_KEY_NUMBER < part < _MAX_KEY_NUMBER:
            raise ValueError("a huge number as a key")
        elif not isinstance(part, (str, bytes, int, float, frozenset, type(None), Global, Call)):
            raise TypeError(f"a {type(part).__name__} as a key")
    raise ValueError("a key of too many parts")


def _text(data: bytes, start: int, stop: int) -> str:
    if stop > len(data):
        raise ValueError(f"a string of {stop - start} bytes is announced, {len(data) - start} left")
    return data[start:stop].decode("utf-8", "surrogatepass")


def _value(item: Any) -> Any:
    if item is _MARK:
        raise ValueError("a MARK stands where a value must be")
    return item


def _top(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise ValueError("the stack is too short")
    return stack[-count:]


_HANDLERS: dict[int, Callable[[_Machine], None]] = {}


def _opcode(*codes: int) -> Callable[[Callable[[_Machine], None]], Callable[[_Machine], None]]:
    def register(handler: Callable[[_Machine], None]) -> Callable[[_Machine], None]:
        for code in codes:
            _HANDLERS[code] = handler
        return handler

    return register


def _constant(code: int, value: Any) -> None:
    _HANDLERS[code] = lambda machine: machine.stack.append(value)


def _counted(code: int, layout: str, convert: Callable[[bytes], Any]) -> None:
    """An opcode that pushes a value made from a length-prefixed run of bytes."""

    def handler(machine: _Machine) -> None:
        machine.stack.append(convert(machine.take(machine.number(layout))))

    _HANDLERS[code] = handler


def _fixed(code: int, layout: str) -> None:
    _HANDLERS[code] = lambda machine: machine.stack.append(machine.number(layout))


def _fresh(code: int, make: Callable[[], Any]) -> None:
    _HANDLERS[code] = lambda machine: machine.stack.append(make())


for _code, _literal in ((0x4E, None), (0x88, True), (0x89, False)):
    _constant(_code, _literal)
for _code, _factory in ((0x5D, list), (0x8F, set)):
    _fresh(_code, _factory)
for _code, _layout in ((0x4A, "<i"), (0x47, ">d")):
    _fixed(_code, _layout)


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _unicode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


for _code, _layout, _convert in (
    (0x8C, "<B", _unicode),  # SHORT_BINUNICODE
    (0x8D, "<Q", _unicode),  # BINUNICODE8
    (0x43, "<B", bytes),  # SHORT_BINBYTES
    (0x42, "<I", bytes),  # BINBYTES
    (0x8E, "<Q", bytes),  # BINBYTES8
    (0x96, "<Q", bytes),  # BYTEARRAY8
    (0x55, "<B", _latin),  # SHORT_BINSTRING
    (0x54, "<i", _latin),  # BINSTRING
    (0x8A, "<B", _long),  # LONG1
    (0x8B, "<i", _long),  # LONG4
):
    _counted(_code, _layout, _convert)


@_opcode(0x80)  # PROTO
def _proto(machine: _Machine) -> None:
    if machine.take(1)[0] > 5:
        raise ValueError("a pickle protocol newer than 5")


@_opcode(0x95)  # FRAME: the whole stream is in memory, so only its announced size is checked
def _frame(machine: _Machine) -> None:
    if machine.number("<Q") > len(machine.data) - machine.position:
        raise ValueError("a frame reaches past the end")


@_opcode(0x87)  # TUPLE3
def _tuple3(machine: _Machine) -> None:
    machine.stack[-3:] = [tuple(map(_value, _top(machine.stack, 3)))]


@_opcode(0x74)  # TUPLE
def _tuple(machine: _Machine) -> None:
    machine.stack.append(tuple(machine.popped()))


@_opcode(0x6C)  # LIST
def _list(machine: _Machine) -> None:
    machine.stack.append(machine.popped())


@_opcode(0x64)  # DICT
def _dict(machine: _Machine) -> None:
    machine.stack.append(_pairs(machine.popped()))


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(map(_key, flat[::2]), flat[1::2], strict=True))


@_opcode(0x91)  # FROZENSET
def _frozenset(machine: _Machine) -> None:
    machine.stack.append(frozenset(map(_key, machine.popped())))


@_opcode(0x61)  # APPEND
def _append(machine: _Machine) -> None:
    value = _value(machine.stack.pop())
    _extend(machine.stack[-1], [value])


@_opcode(0x65, 0x90)  # APPENDS, ADDITEMS
def _appends(machine: _Machine) -> None:
    values = machine.popped()
    _extend(machine.stack[-1], values)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, set):
        target.update(map(_key, values))
    elif isinstance(target, Call):
        target.elements.extend(values)
    else:
        raise TypeError(f"items are added to a {type(target).__name__}")


@_opcode(0x73)  # SETITEM
def _setitem(machine: _Machine) -> None:
    value, key = _value(machine.stack.pop()), _key(machine.stack.pop())
    _dict_of(machine.stack[-1])[key] = value


@_opcode(0x75)  # SETITEMS
def _setitems(machine: _Machine) -> None:
    flat = machine.popped()
    _update(machine.stack[-1], flat)


def _update(target: Any, flat: list[Any]) -> None:
    _dict_of(target).update(_pairs(flat))


def _dict_of(target: Any) -> dict[Any, Any]:
    items = target.items if isinstance(target, Call) else target
    if not isinstance(items, dict):
        raise TypeError(f"keys are set in a {type(target).__name__}")
    return items


@_opcode(0x63)  # GLOBAL
def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(machine.named(f"{module}.{machine.line()}"))


@_opcode(0x93)  # STACK_GLOBAL
def _stack_global(machine: _Machine) -> None:
    module, name = _top(machine.stack, 2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a global whose name is not text")
    machine.stack[-2:] = [machine.named(f"{module}.{name}")]


@_opcode(0x52, 0x81)  # REDUCE, NEWOBJ
def _reduce(machine: _Machine) -> None:
    target, args = _top(machine.stack, 2)
    machine.stack[-2:] = [machine.call(target, args)]


@_opcode(0x92)  # NEWOBJ_EX
def _newobj_ex(machine: _Machine) -> None:
    target, args, keywords = _top(machine.stack, 3)
    made = machine.call(target, args)
    if keywords and isinstance(made, Call):
        made.items.update(keywords)
    machine.stack[-3:] = [made]


@_opcode(0x69)  # INST
def _inst(machine: _Machine) -> None:
    module = machine.line()
    target = machine.named(f"{module}.{machine.line()}")
    machine.stack.append(machine.call(target, tuple(machine.popped())))


@_opcode(0x6F)  # OBJ
def _obj(machine: _Machine) -> None:
    target, *args = machine.popped()
    machine.stack.append(machine.call(target, tuple(args)))


@_opcode(0x62)  # BUILD: attributes of containers (OrderedDict._metadata) carry no tensors; dropped
def _build(machine: _Machine) -> None:
    state = _value(machine.stack.pop())
    target = machine.stack[-1]
    if isinstance(target, Call):
        target.state = state


@_opcode(0x51)  # BINPERSID
def _binpersid(machine: _Machine) -> None:
    machine.stack[-1] = _persistent(machine, _value(machine.stack[-1]))


@_opcode(0x50)  # PERSID
def _persid(machine: _Machine) -> None:
    machine.stack.append(_persistent(machine, machine.line()))


def _persistent(machine: _Machine, pid: Any) -> Any:
    if machine.persistent is None:
        raise ValueError("a persistent id, where none can be")
    return machine.persistent(pid)


@_opcode(0x30)  # POP
def _pop(machine: _Machine) -> None:
    machine.stack.pop()


@_opcode(0x31)  # POP_MARK
def _pop_mark(machine: _Machine) -> None:
    machine.popped()


@_opcode(0x32)  # DUP
def _dup(machine: _Machine) -> None:
    machine.stack.append(machine.stack[-1])


@_opcode(0x67)  # GET
def _get(machine: _Machine) -> None:
    machine.stack.append(machine.memo[int(machine.line())])


@_opcode(0x70)  # PUT
def _put(machine: _Machine) -> None:
    machine.memo[int(machine.line())] = machine.stack[-1]


@_opcode(0x49)  # INT
def _int(machine: _Machine) -> None:
    text = machine.line()
    machine.stack.append({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text))


@_opcode(0x4C)  # LONG
def _text_long(machine: _Machine) -> None:
    machine.stack.append(int(machine.line().rstrip("L")))


@_opcode(0x46)  # FLOAT
def _float(machine: _Machine) -> None:
    machine.stack.append(float(machine.line()))


@_opcode(0x56)  # UNICODE
def _text_unicode(machine: _Machine) -> None:
    machine.stack.append(machine.raw_line().decode("raw-unicode-escape"))


@_opcode(0x53)  # STRING
def _text_string(machine: _Machine) -> None:
    machine.stack.append(machine.line().strip("'\""))
