"""The stack machine of a pickle: stack, memo, marks and names. It calls nothing from the file.

`Machine.run` handles the opcodes that make up 95% of a checkpoint's pickle; `opcodes` has the rest.
Two sequences of opcodes, of which DCP's metadata has millions, are handled as one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from reshard.containers.pickles import sharing, trust
from reshard.containers.pickles.values import (
    ENCODE,
    PYTHON2_NAMES,
    Builder,
    Call,
    Global,
    Located,
    require_hashable,
)
from reshard.core import stamps
from reshard.errors import UnsafeError, UnsupportedError, shown

_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_MAX_COPIED = 1 << 20
_BETWEEN = 64  # maximum bytes of opcodes between a text and the call that encodes it


class _Mark:
    """The stack's MARK; there is one instance, compared by identity."""


_MARK = _Mark()
_NO_VALUE = "a MARK in place of a value"
_NO_NUMBER = "a number that the memo does not have"


class _Unused:
    """A number of the memo that the pickle has not used; there is one instance."""


_UNUSED = _Unused()
# The types of values in the memo that `Machine.check_reference` must see.
_CHECKED = sharing.HOLDERS | {_Unused}

# What follows TUPLE1 or TUPLE2 in a call of one tuple, such as ``torch.Size``:
# MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE.
_CALL_WITH_TUPLE = b"\x94\x85\x94R\x94"
# What follows EMPTY_TUPLE in an object with attributes: NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK.
_NEW_OBJECT = b"\x81\x94}\x94("

_PYTHON3_NAMES = {old: name for name, old in PYTHON2_NAMES.items()}


def _modernize_name(name: str) -> str:
    """Return the name in Python 3 of a builtin that protocol 2 calls as Python 2 does."""
    if not name.startswith("__builtin__."):
        return name
    return _PYTHON3_NAMES.get(name) or "builtins." + name[12:]


class Machine:
    """The state of the interpreter of one pickle.

    Args:
        data: bytes in which the pickle begins at ``data[start]``.
        where: the file, for messages.
        builders, persistent: see `unpickle.loads`.
    """

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
        self.memo: list[Any] = []
        self.globals: set[str] = set()
        self.stamp: Any = None  # the attribute `stamps.KEY` of a container
        self.copied = 0  # number of container elements that calls have copied
        self._letters: dict[bytes, int] = {}  # text of one letter -> an offset of it
        self.shared = 0  # number of repeated references to containers

    def run(self, handlers: Mapping[int, Handler]) -> Any:  # noqa: C901, PLR0912, PLR0915 - for speed
        """Interpret until STOP and return the top of the stack; ``handlers`` maps opcodes."""
        data, stack, memo, checked = self.data, self.stack, self.memo, _CHECKED
        at = self.position
        while True:
            # Past the end of the data this raises IndexError, which `loads` reports as damage.
            op = data[at]
            at += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x68:  # BINGET
                value = memo[data[at]]
                at += 1
                stack.append(value)
                if type(value) in checked:
                    self.check_reference(value)
            elif op == 0x71:  # BINPUT
                self.put(data[at])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                value = memo[int.from_bytes(data[at : at + 4], "little")]
                at += 4
                stack.append(value)
                if type(value) in checked:
                    self.check_reference(value)
            elif op == 0x72:  # LONG_BINPUT
                self.put(int.from_bytes(data[at : at + 4], "little"))
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif op == 0x85:  # TUPLE1
                stack[-1] = (require_value(stack[-1]),)
                if data.startswith(_CALL_WITH_TUPLE, at):
                    at += len(_CALL_WITH_TUPLE)
                    self.position = at
                    self.call_with_tuple()
            elif op == 0x86:  # TUPLE2
                pair = stack[-2], stack.pop()
                if _MARK is pair[0] or _MARK is pair[1]:
                    raise ValueError(_NO_VALUE)
                stack[-1] = pair
                if data.startswith(_CALL_WITH_TUPLE, at):
                    at += len(_CALL_WITH_TUPLE)
                    self.position = at
                    self.call_with_tuple()
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
                if data.startswith(_NEW_OBJECT, at):
                    at += len(_NEW_OBJECT)
                    self.position = at
                    self.begin_object()
            elif op == 0x75:  # SETITEMS
                self.set_items()
                if data[at] == 0x62:  # BUILD
                    at += 1
                    self.build()
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op == 0x58:  # BINUNICODE
                size = int.from_bytes(data[at : at + 4], "little")
                at += 4 + size
                stack.append(_decode_text(data, at - size, at))
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x2E:  # STOP
                self.position = at
                return require_value(stack.pop())
            else:
                self.position = at
                handlers[op](self)
                at = self.position

    def put(self, number: int) -> None:
        """Store the top of the stack in the memo."""
        memo = self.memo
        if number == len(memo):
            memo.append(self.stack[-1])
            return
        if not 0 <= number < len(self.data):  # a pickler counts what it stores
            raise ValueError(_NO_NUMBER)
        memo += [_UNUSED] * (number + 1 - len(memo))
        memo[number] = self.stack[-1]

    def fetch(self, number: int) -> None:
        """Push a value of the memo."""
        if number < 0:
            raise ValueError(_NO_NUMBER)
        value = self.memo[number]
        self.check_reference(value)
        self.stack.append(value)

    def check_reference(self, value: Any) -> None:
        """Count one more reference to a value.

        Raises:
            ValueError: the memo does not have it.
        """
        if value is _UNUSED:
            raise ValueError(_NO_NUMBER)
        self.shared += sharing.may_grow(value)

    def begin_object(self) -> None:
        """Do NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE and MARK."""
        stack = self.stack
        value: Any = self.call(stack[-2], stack[-1])
        state: dict[Any, Any] = {}
        self.memo += (value, state)
        stack[-2:] = (value, state, _MARK)

    def call_with_tuple(self) -> None:
        """Do MEMOIZE, TUPLE1, MEMOIZE, REDUCE and MEMOIZE."""
        stack = self.stack
        args = (stack.pop(),)
        result = self.call(stack[-1], args)
        self.memo += (*args, args, result)
        stack[-1] = result

    def set_items(self) -> None:
        """Add the keys and values above the last MARK to the dict, or to the object, below it."""
        flat = self.pop_to_mark()
        get_items(self.stack[-1]).update(build_dict(flat))

    def build(self) -> None:
        """Set the state of an object.

        Attributes of containers (``OrderedDict._metadata``) have no tensors, so they are dropped.
        """
        state = require_value(self.stack.pop())
        target = self.stack[-1]
        if isinstance(state, dict) and stamps.KEY in state:
            self.stamp = state[stamps.KEY]
        if isinstance(target, Call):
            target.state = state

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the stream."""
        stop = self.position + size
        if size < 0 or stop > len(self.data):
            raise ValueError(f"{size} bytes are declared, {len(self.data) - self.position} remain")
        piece = self.data[self.position : stop]
        self.position = stop
        return piece

    def take_number(self, layout: str) -> Any:
        """Return the next fixed-width number; ``layout`` is a format of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def take_raw_line(self) -> bytes:
        """Return the rest of the text line (protocol 0 arguments)."""
        stop = self.data.index(b"\n", self.position)
        raw = self.data[self.position : stop]
        self.position = stop + 1
        return raw

    def take_line(self) -> str:
        """Return the rest of the text line, decoded."""
        return self.take_raw_line().decode("utf-8")

    def pop_to_mark(self) -> list[Any]:
        """Remove the last MARK and everything above it; return the values above it."""
        stack = self.stack
        index = len(stack) - 1
        while stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no MARK on the stack")
        above = stack[index + 1 :]
        del stack[index:]
        return above

    def make_global(self, name: str) -> Global:
        """Return a global that the stream names.

        Raises:
            UnsafeError: the name is of use only to an attack.
            UnsupportedError: it builds a quantised tensor.
        """
        name = _modernize_name(name)
        if name == "builtins.getattr":  # names a nested class; `call` checks which one
            return Global(name)
        if trust.runs_code(name):
            raise UnsafeError(
                self.where,
                f"its pickle asks for {name!r}, which would run code",
                "do not use this file; reshard has executed nothing of it",
            )
        self._refuse_quantised(name)
        self.globals.add(name)
        return Global(name)

    def _refuse_quantised(self, name: str) -> None:
        kind = trust.find_quantised_class(name)
        if kind:
            raise UnsupportedError(
                self.where,
                f"has weights of Transformer Engine's class {kind}, whose codes reshard does not"
                " read",
                "save them in 16 bits, as Megatron does with --ckpt-format torch_dist",
            )

    def make_nested_class(self, owner: Any = None, attribute: Any = None, *rest: Any) -> Global:
        """Return the nested class ``getattr(owner, attribute)``, if it is one that torch saves so.

        Raises:
            UnsafeError: the attribute is anything else.
            UnsupportedError: it builds a quantised tensor.
        """
        is_named = isinstance(owner, Global) and isinstance(attribute, str)
        name = f"{owner.name}.{attribute}" if is_named else ""
        self._refuse_quantised(name)
        if name not in trust.NESTED_CLASSES or rest:
            raise UnsafeError(
                self.where,
                f"its pickle asks for an attribute ({shown(attribute)}) of an object, which would"
                " run code",
                "do not use this file; reshard has executed nothing of it",
            )
        return self.make_global(name)

    def call(self, target: Any, args: Any) -> Any:
        """Return the value of ``target(*args)``: our own builder's result, or a `Call`.

        Raises:
            UnsafeError: see `make_nested_class`.
        """
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise TypeError("a call of something that is not a named global")
        builder = self.builders.get(target.name)
        if builder is None:
            if target.name == "builtins.getattr":
                return self.make_nested_class(*args)
            return Call(target.name, args)
        for arg in args:
            if isinstance(arg, _SIZED):
                self.copied += len(arg)
        # A small pickle can pass one large value to thousands of calls, each of which copies it.
        if self.copied > _MAX_COPIED + 8 * len(self.data):
            raise ValueError("it copies the same value too many times")
        value = builder(*args)
        return self.locate(value) if target.name == ENCODE else value

    def locate(self, data: bytes) -> bytes:
        """Attach the offset of a text to the bytes that it encodes, if the text is the last one.

        Equal texts encode equal bytes, so the offset is found by the content of the text.
        """
        text = data.decode("latin-1").encode()
        at = self.data.rfind(text, max(self.position - len(text) - _BETWEEN, 0), self.position)
        if at < 0 and len(data) == 1:  # CPython interns such texts: the stream stores each once
            at = self._letters.setdefault(text, self.data.find(text, 0, self.position))
        return Located.of(data, at, len(text)) if text and at >= 0 else data


def _decode_text(data: bytes, start: int, stop: int) -> str:
    if stop > len(data):
        raise ValueError(f"a string of {stop - start} bytes is declared, {len(data) - start} left")
    # Python pickles half of a surrogate pair as well, which UTF-8 proper does not have.
    return data[start:stop].decode("utf-8", "surrogatepass")


def require_value(item: Any) -> Any:
    """Return a value of the stack, unchanged.

    Raises:
        ValueError: the item is a MARK.
    """
    if item is _MARK:
        raise ValueError(_NO_VALUE)
    return item


def peek(stack: list[Any], count: int) -> list[Any]:
    """Return the last ``count`` values of the stack.

    Raises:
        ValueError: the stack has fewer.
    """
    if len(stack) < count:
        raise ValueError("the stack is too short")
    return stack[-count:]


def build_dict(flat: list[Any]) -> dict[Any, Any]:
    """Return the dict of keys and values that alternate."""
    keys = flat[::2]
    for key in keys:
        if type(key) is not str:
            require_hashable(key)
    return dict(zip(keys, flat[1::2], strict=True))


def get_items(target: Any) -> dict[Any, Any]:
    """Return the items of a dict or of an object that is one.

    Raises:
        TypeError: the target has no items.
    """
    if isinstance(target, Call):
        if target.items is None:
            target.items = {}
        return target.items
    if not isinstance(target, dict):
        raise TypeError(f"keys are set in a {type(target).__name__}")
    return target


Handler = Callable[[Machine], None]
