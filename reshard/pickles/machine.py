"""The stack machine of a pickle, which calls nothing: values, memo, marks, and the names it meets.

`run` holds the opcodes that make up 95% of a checkpoint's pickle; the others are `opcodes`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from reshard.errors import UnsafeError, shown
from reshard.pickles import sharing, trust
from reshard.pickles.values import ENCODE, Builder, Call, Global, Located

_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_MAX_COPIED = 1 << 20
_BETWEEN = 64  # most bytes of opcodes between a text and the call that encodes it


class _Mark:
    """The stack's MARK; one instance, compared by identity."""


_MARK = _Mark()


def _python2(name: str) -> str:
    return "builtins." + name[12:] if name.startswith("__builtin__.") else name


class Machine:
    """One pickle while it is interpreted.

    Args:
        data: the pickle begins at ``data[start]``.
        where: the file, for messages.
        builders, persistent: as in `unpickle.loads`.
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
        self.memo: dict[int, Any] = {}
        self.globals: set[str] = set()
        self.stamp: Any = None  # the attribute `stamps.KEY` of a container
        self.copied = 0  # elements of containers that calls have copied
        self._letters: dict[bytes, int] = {}  # text of one letter -> a place of it
        self.shared = 0  # times that a container was put in one more place

    def run(self, handlers: Mapping[int, Handler]) -> Any:  # noqa: C901, PLR0912 - inlined for speed
        """Interpret until STOP and return the top of the stack; ``handlers`` by opcode."""
        data, stack, memo = self.data, self.stack, self.memo
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
                if type(stack[-1]) in sharing.HOLDERS:
                    self.share(stack[-1])
            elif op == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
                at += 4
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
                if type(stack[-1]) in sharing.HOLDERS:
                    self.share(stack[-1])
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x85:  # TUPLE1
                stack[-1] = (checked(stack[-1]),)
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
                stack[-2:] = [tuple(map(checked, top(stack, 2)))]
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x2E:  # STOP
                self.position = at
                return checked(stack.pop())
            else:
                self.position = at
                handlers[op](self)
                at = self.position

    def share(self, value: Any) -> None:
        """Note that a value gets one more place."""
        self.shared += sharing.is_worth_a_look(value)

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
        """A global that the stream names.

        Raises:
            UnsafeError: only an attack has a use for it.
        """
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
        """The class that ``getattr(owner, attribute)`` names, if it is one that torch writes so.

        Raises:
            UnsafeError: it is another, or something else.
        """
        is_named = isinstance(owner, Global) and isinstance(attribute, str)
        name = f"{owner.name}.{attribute}" if is_named else ""
        if name not in trust.NESTED_CLASSES or rest:
            raise UnsafeError(
                self.where,
                f"its pickle asks for an attribute ({shown(attribute)}) of an object",
                "do not use this file; reshard has executed nothing of it",
            )
        return self.named(name)

    def call(self, target: Any, args: Any) -> Any:
        """What ``target(*args)`` stands for: our own builder's value, or a `Call`.

        Raises:
            UnsafeError: as `nested`.
        """
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
        made = builder(*args)
        return self.located(made) if target.name == ENCODE else made

    def located(self, data: bytes) -> bytes:
        """Return bytes that a text stands for with the place of that text, if it is the last one.

        The same text anywhere stands for the same bytes, so its place is found by its content.
        """
        text = data.decode("latin-1").encode()
        at = self.data.rfind(text, max(self.position - len(text) - _BETWEEN, 0), self.position)
        if at < 0 and len(data) == 1:  # CPython has one object of each such text: one is stored
            at = self._letters.setdefault(text, self.data.find(text, 0, self.position))
        return Located.of(data, at, len(text)) if text and at >= 0 else data


def _text(data: bytes, start: int, stop: int) -> str:
    if stop > len(data):
        raise ValueError(f"a string of {stop - start} bytes is announced, {len(data) - start} left")
    return data[start:stop].decode("utf-8", "surrogatepass")


def checked(item: Any) -> Any:
    """A value of the stack, which is no MARK.

    Raises:
        ValueError: it is one.
    """
    if item is _MARK:
        raise ValueError("a MARK stands where a value must be")
    return item


def top(stack: list[Any], count: int) -> list[Any]:
    """The last values of the stack.

    Raises:
        ValueError: it has fewer.
    """
    if len(stack) < count:
        raise ValueError("the stack is too short")
    return stack[-count:]


Handler = Callable[[Machine], None]
