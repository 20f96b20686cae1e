"""Write pickles in protocol 2, byte for byte like CPython's C pickler, without its code.

The values are those that `unpickle.loads` returns: plain Python values, a `Global` for a class or
function, a `Call` for an object. A subclass writes every other value (`Pickler.write_leaf`).

As in Python, a value that occurs twice *as the same object* is written once and then fetched from
the memo; equal strings that are two objects are written twice. All values must stay alive until the
pickle is complete, except `UnsharedObject` and `UnsharedItems`.

Source: CPython 3.11 ``Modules/_pickle.c`` (``batch_list``, ``batch_dict``, ``save_reduce``),
``Lib/pickletools.py``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

from reshard.containers.pickles import trust
from reshard.containers.pickles.values import (
    PYTHON2_NAMES,
    Call,
    DictObject,
    Global,
    ListObject,
    Located,
    UnsharedItems,
    UnsharedObject,
)
from reshard.errors import UnsupportedError

# CPython's `BATCHSIZE`: items that one opcode adds to a container.
_BATCH = 1000
_MAX_DEPTH = 100  # checkpoints are about ten levels deep; a level takes up to five Python frames
_LONG_MEMO = struct.Struct("<cI").pack
_ONE_BYTE = {length: bytes((0x84 + length,)) for length in (1, 2, 3)}  # TUPLE1, TUPLE2, TUPLE3
_PYTHON2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
# Classes that pickles call without arguments. Python builds other objects without arguments by
# ``cls.__new__(cls)``.
_CALLED = frozenset(
    f"collections.{name}" for name in ("OrderedDict", "Counter", "deque", "defaultdict")
)


class _Counted(Protocol):
    """Values whose number is known before they are made."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class VaryingPart(NamedTuple):
    """The part of a pickle that writes a varying object, and what was memoized before it.

    Args:
        start, stop: its bytes in the pickle.
        before, after: the number of memoized values before it and after it.
    """

    call: Call
    start: int
    stop: int
    before: int
    after: int
    memo: dict[int, int]
    names: dict[str, int]


class Pickler:
    """The state of one pickle while it is written; `write` adds a value, `finish` ends the pickle.

    Args:
        where: the file, for messages.
        varying: objects whose state is changed later, to write their parts again (`write_again`).

    Attributes:
        parts: those of the varying objects; one that is inside of another is a part of that.
    """

    def __init__(self, where: object, varying: Iterable[Call] = ()) -> None:
        self.where = where
        self.parts: list[VaryingPart] = []
        self._varying = {id(call) for call in varying}
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[int, int] = {}  # id -> index
        self._names: dict[str, int] = {}  # global -> index
        # References to temporary values, so that Python does not reuse their ids.
        self._alive: list[Any] = []
        self._count = 0
        self._depth = 0

    def finish(self) -> bytes:
        """Return the whole pickle."""
        return b"".join((self.out, b"."))

    def finish_with(self, last: dict[str, Any], *, as_state: bool) -> tuple[int, bytes]:
        """Return the pickle with more items in its dict, without keeping them in this writer.

        Args:
            as_state: set the items as attributes of the dict instead.

        Returns:
            The number of bytes of `out` that begin the pickle, and the bytes that follow them.
        """
        out, count, memo = self.out, self._count, self._memo
        self._memo = {}  # texts that the dict happens to share with `last` are written again
        self.out = bytearray()
        moved = not as_state and out.endswith(b"u")  # the end of the dict's last batch of items
        if as_state:
            self._write_dict(last)
            self.out += b"b"
        elif moved:
            for key, value in last.items():
                self.write_text(key)
                self.write(value)
            self.out += b"u"
        else:
            self._write_items(last.items())
        rest = self.finish()
        self.out, self._count, self._memo = out, count, memo
        return len(out) - moved, rest

    def write_again(self, part: VaryingPart) -> bytes:
        """Return the bytes of a varying object after a change of its state.

        What follows in the pickle refers to memoized values by their number, so the new state must
        memoize the same number of values.
        """
        self._varying = set()  # the parts are known
        kept = self.out, self._count, self._memo, self._names
        self.out, self._count = bytearray(), part.before
        self._memo, self._names = part.memo.copy(), part.names.copy()
        self._write_object(part.call)
        data, count = bytes(self.out), self._count
        self.out, self._count, self._memo, self._names = kept
        if count != part.after:
            raise AssertionError(f"{part.call.name} memoizes another number of values")
        return data

    def write_leaf(self, value: Any) -> None:
        """Write a value of a type that Python itself does not define.

        Raises:
            UnsupportedError: it cannot be written.
        """
        raise UnsupportedError(
            self.where, f"a {type(value).__name__} cannot be written into a pickle"
        )

    def write(self, value: Any) -> None:
        """Write any value.

        Raises:
            UnsupportedError: it contains a value of an unsupported type, or is nested too deeply.
        """
        kind = type(value)
        plain = Pickler._write_float if isinstance(value, float) else _PLAIN.get(kind)
        if plain is not None:
            plain(self, value)
            return
        index = self._memo.get(id(value))
        if index is not None:
            self._write_fetch(index)
            return
        if self._depth == _MAX_DEPTH:
            raise UnsupportedError(
                self.where, f"contains values nested more than {_MAX_DEPTH} levels deep"
            )
        self._depth += 1
        _NESTING.get(kind, type(self).write_leaf)(self, value)
        self._depth -= 1

    def memoize(self, value: Any = None) -> None:
        """Memoize the value just written, under its identity if ``value`` is given."""
        index = self._count
        self._count = index + 1
        if value is not None:
            self._memo[id(value)] = index
        self.out += b"q%c" % index if index < 256 else _LONG_MEMO(b"r", index)

    def write_global(self, name: str) -> None:
        """Write a class or function by its dotted name.

        Raises:
            UnsupportedError: a pickle cannot contain this name.
        """
        index = self._names.get(name)
        if index is not None:
            self._write_fetch(index)
            return
        if name in trust.NESTED_CLASSES:
            owner, _, attribute = name.rpartition(".")
            self.write_call("builtins.getattr", (Global(owner), self._keep_alive(attribute)))
        else:
            self._write_plain_global(name)
        self._names[name] = self._count
        self.memoize()

    def _write_plain_global(self, name: str) -> None:
        module, dot, attribute = PYTHON2_NAMES.get(name, name).rpartition(".")
        if not dot or not name.isascii() or "\n" in name:
            raise UnsupportedError(self.where, f"{name!r} cannot be named in a pickle")
        module = _PYTHON2_MODULES.get(module, module)
        self.out += f"c{module}\n{attribute}\n".encode()

    def write_call(self, name: str, args: tuple[Any, ...]) -> None:
        """Write the call ``name(*args)`` of an unshared object, without memoizing the result."""
        self.write_global(name)
        self.write_tuple(args)
        self.out += b"R"

    def write_tuple(self, values: tuple[Any, ...]) -> None:
        """Write a tuple that is not shared."""
        size = len(values)
        if not size:
            self.out += b")"
            return
        if size > 3:
            self.out += b"("
        for value in values:
            if type(value) is int:
                self.write_integer(value)
            else:
                self.write(value)
        self.out += _ONE_BYTE.get(size, b"t")
        self.memoize()

    def write_text(self, value: str) -> None:
        """Write a string."""
        index = self._memo.get(id(value))
        if index is not None:
            self._write_fetch(index)
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X"
        self.out += len(data).to_bytes(4, "little")
        self.out += data
        self.memoize(value)

    def write_object(self, call: Call) -> None:
        """Write an object: its constructor call, then its elements, items and state."""
        if id(call) not in self._varying:
            self._write_object(call)
            return
        varying, self._varying = self._varying, set()
        start, before = len(self.out), self._count
        memo, names = self._memo.copy(), self._names.copy()
        self._write_object(call)
        part = VaryingPart(call, start, len(self.out), before, self._count, memo, names)
        self.parts.append(part)
        self._varying = varying

    def _write_object(self, call: Call) -> None:
        self.write_global(call.name)
        self.write(call.args)
        self.out += b"R" if call.args or call.name in _CALLED else b"\x81"  # REDUCE, NEWOBJ
        self.memoize(call)
        self._write_elements(call.elements or ())
        self._write_items((call.items or {}).items())
        if call.state is not None:
            self.write(call.state)
            self.out += b"b"

    def write_integer(self, value: int) -> None:
        """Write an integer of any size."""
        if 0 <= value < 1 << 8:
            self.out += b"K%c" % value
        elif 0 <= value < 1 << 16:
            self.out += struct.pack("<cH", b"M", value)
        elif -1 << 31 <= value < 1 << 31:
            self.out += struct.pack("<ci", b"J", value)
        else:
            # The sign takes a bit of its own, so eight bits of a value need a second byte.
            bits = (value if value >= 0 else ~value).bit_length()
            data = value.to_bytes(bits // 8 + 1, "little", signed=True)
            short = len(data) < 256
            self.out += b"\x8a" if short else b"\x8b"
            self.out += len(data).to_bytes(1 if short else 4, "little")
            self.out += data

    def _keep_alive(self, value: Any) -> Any:
        self._alive.append(value)
        return value

    def _write_fetch(self, index: int) -> None:
        self.out += b"h%c" % index if index < 256 else _LONG_MEMO(b"j", index)

    def _write_shared_tuple(self, values: tuple[Any, ...]) -> None:
        if not values:
            self.out += b")"
            return
        size = len(values)
        if size > 3:
            self.out += b"("
        for value in values:
            self.write(value)
        index = self._memo.get(id(values))
        if index is not None:  # the tuple contains itself, and was written meanwhile
            self.out += b"0" * size if size <= 3 else b"1"
            self._write_fetch(index)
            return
        self.out += _ONE_BYTE.get(size, b"t")
        self.memoize(values)

    def _write_list(self, values: list[Any]) -> None:
        self.out += b"]"
        self.memoize(values)
        self._write_elements(values, exact=True)

    def _write_dict(self, items: dict[Any, Any]) -> None:
        self.out += b"}"
        self.memoize(items)
        self._write_exact_items(items.items())

    def _write_exact_items(self, pairs: _Counted) -> None:
        self._write_items(pairs, exact=True)
        if len(pairs) and len(pairs) % _BATCH == 0:
            self.out += b"(u"  # the C pickler starts another batch, which turns out empty

    def _write_unshared_items(self, items: UnsharedItems) -> None:
        is_list = items.kind is list
        self.out += b"]" if is_list else b"}"
        self.memoize()
        if is_list:
            self._write_elements(items, exact=True)
        else:
            self._write_exact_items(items)

    def _write_unshared_object(self, value: UnsharedObject) -> None:
        self.write_global(value.name)
        self.out += b")\x81"  # EMPTY_TUPLE, NEWOBJ
        self.memoize()
        if value.state is None:
            return
        out, memo, count = self.out, self._memo, len(value.state)
        out += b"}"
        self.memoize()
        out += b"(" if count > 1 else b""
        for pair in value.state.items():
            for part in pair:
                # Most are texts and objects that were written before, or integers.
                index = memo.get(id(part))
                if index is not None and index >= 256:
                    out += _LONG_MEMO(b"j", index)
                elif type(part) is int:
                    self.write_integer(part)
                else:
                    self.write(part)
        out += b"ub" if count > 1 else b"sb" if count else b"b"

    def _write_ordered_dict(self, items: OrderedDict[Any, Any]) -> None:
        self.write_call("collections.OrderedDict", ())
        self.memoize(items)
        self._write_items(items.items())

    def _write_elements(self, values: _Counted, *, exact: bool = False) -> None:
        for batch, close in self._split_batches(values, b"a", b"e", exact=exact):
            for value in batch:
                self.write(value)
            self.out += close

    def _write_items(self, pairs: _Counted, *, exact: bool = False) -> None:
        for batch, close in self._split_batches(pairs, b"s", b"u", exact=exact):
            for key, value in batch:
                self.write(key)
                self.write(value)
            self.out += close

    def _split_batches(
        self, values: _Counted, one: bytes, many: bytes, *, exact: bool
    ) -> Iterable[tuple[Iterable[Any], bytes]]:
        # A last batch of one is written without MARK, unless the container is a built-in one
        # (``exact``) and has other batches.
        rest = iter(values)
        for start in range(0, len(values), _BATCH):
            single = len(values) - start == 1 and not (exact and start)
            if not single:
                self.out += b"("
            yield islice(rest, _BATCH), one if single else many

    def _write_set(self, values: set[Any] | frozenset[Any]) -> None:
        """Write a set in sorted order: Python's own order of strings differs between processes."""
        try:
            ordered = sorted(values)
        except TypeError:
            ordered = sorted(values, key=lambda value: (type(value).__name__, repr(value)))
        self.write_call(f"builtins.{type(values).__name__}", (self._keep_alive(ordered),))
        self.memoize(values)

    def _write_bytes(self, data: bytes) -> None:
        """Write bytes as encoded text, because protocol 2 has no bytes."""
        if data:
            self.write_call("_codecs.encode", (self._keep_alive(data.decode("latin-1")), "latin1"))
        else:
            self.write_call("builtins.bytes", ())
        self.memoize(data)

    def _write_complex(self, value: complex) -> None:
        self.write_call("builtins.complex", (value.real, value.imag))
        self.memoize(value)

    def _write_float(self, value: float) -> None:
        self.out += struct.pack(">cd", b"G", value)

    def _write_none(self, _value: None) -> None:
        self.out += b"N"

    def _write_bool(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def _write_global_value(self, value: Global) -> None:
        self.write_global(value.name)


_Writer = Callable[[Pickler, Any], None]
_PLAIN: dict[type, _Writer] = {
    str: Pickler.write_text,
    int: Pickler.write_integer,
    bool: Pickler._write_bool,  # noqa: SLF001 - one table of the class's own methods
    type(None): Pickler._write_none,  # noqa: SLF001
    Global: Pickler._write_global_value,  # noqa: SLF001
}
_NESTING: dict[type, _Writer] = {
    tuple: Pickler._write_shared_tuple,  # noqa: SLF001
    list: Pickler._write_list,  # noqa: SLF001
    dict: Pickler._write_dict,  # noqa: SLF001
    OrderedDict: Pickler._write_ordered_dict,  # noqa: SLF001
    DictObject: Pickler._write_dict,  # noqa: SLF001
    ListObject: Pickler._write_list,  # noqa: SLF001
    set: Pickler._write_set,  # noqa: SLF001
    frozenset: Pickler._write_set,  # noqa: SLF001
    bytes: Pickler._write_bytes,  # noqa: SLF001
    Located: Pickler._write_bytes,  # noqa: SLF001
    complex: Pickler._write_complex,  # noqa: SLF001
    Call: lambda pickler, value: pickler.write_object(value),
    UnsharedObject: Pickler._write_unshared_object,  # noqa: SLF001
    UnsharedItems: Pickler._write_unshared_items,  # noqa: SLF001
}
