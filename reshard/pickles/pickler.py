"""Write values as Python's C pickler does in protocol 2, byte for byte, without its code.

The values are those that `unpickle.loads` yields: plain ones of Python, a `Global` for a class or
function, a `Call` for an object. Any other value is a leaf, which a subclass writes.

As in Python, a value that occurs twice *as the same object* is written once and then fetched from
the memo; equal strings that are two objects are written twice.

Source: CPython 3.11 ``Modules/_pickle.c`` (``batch_list``, ``batch_dict``, ``save_reduce``),
``Lib/pickletools.py``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from reshard.errors import UnsupportedError
from reshard.pickles import trust
from reshard.pickles.values import Call, Global, Located

_BATCH = 1000
_MAX_DEPTH = 100  # checkpoints nest some ten deep; each level is up to five frames of Python
_LONG_MEMO = struct.Struct("<cI").pack
_ONE_BYTE = {length: bytes((0x84 + length,)) for length in (1, 2, 3)}  # TUPLE1, TUPLE2, TUPLE3
_PYTHON2 = {  # protocol 2 writes Python 2's names (CPython ``Lib/_compat_pickle.py``)
    "builtins.str": "__builtin__.unicode",
    "builtins.int": "__builtin__.long",
    "builtins.range": "__builtin__.xrange",
    "builtins.chr": "__builtin__.unichr",
}
_PYTHON2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
# Made by a call without arguments. All else without arguments is an object of which only the
# state is known, which Python makes by ``cls.__new__(cls)``.
_CALLED = frozenset(
    f"collections.{name}" for name in ("OrderedDict", "Counter", "deque", "defaultdict")
)


class Pickler:
    """One pickle being written; `value` writes, `finished` ends it.

    Args:
        where: the file, for messages.
    """

    def __init__(self, where: object) -> None:
        self.where = where
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[int, int] = {}  # id -> index
        self._names: dict[str, int] = {}  # global -> index
        self._kept: list[Any] = []  # what we made ourselves: an id must not be given out again
        self._count = 0
        self._depth = 0

    def finished(self) -> bytes:
        """The whole pickle."""
        return bytes(self.out) + b"."

    def finished_with(self, last: dict[str, Any], *, as_state: bool = False) -> tuple[int, bytes]:
        """How much of `out` begins the whole pickle with more items in its dict, and the rest.

        Nothing is kept of the items.

        Args:
            as_state: give the dict these attributes instead.
        """
        out, count, memo = self.out, self._count, self._memo
        self._memo = {}  # texts that the dict happens to share with `last` are written again
        self.out = bytearray()
        moved = not as_state and out.endswith(b"u")  # the end of the dict's last batch of items
        if as_state:
            self._dict(last)
            self.out += b"b"
        elif moved:
            for key, value in last.items():
                self.text(key)
                self.value(value)
            self.out += b"u"
        else:
            self._items(last.items())
        rest = self.finished()
        self.out, self._count, self._memo = out, count, memo
        return len(out) - moved, rest

    def leaf(self, value: Any) -> None:
        """Write a value that is not Python's own.

        Raises:
            UnsupportedError: it cannot be written.
        """
        raise UnsupportedError(
            self.where, f"a {type(value).__name__} cannot be written into a pickle"
        )

    def value(self, value: Any) -> None:
        """Write any value.

        Raises:
            UnsupportedError: it holds a value that is none of ours, or nests too deeply.
        """
        kind = type(value)
        plain = _PLAIN.get(kind)
        if plain is not None:
            plain(self, value)
            return
        index = self._memo.get(id(value))
        if index is not None:
            self._fetch(index)
            return
        if self._depth == _MAX_DEPTH:
            raise UnsupportedError(self.where, f"holds values nested more than {_MAX_DEPTH} deep")
        self._depth += 1
        _NESTING.get(kind, type(self).leaf)(self, value)
        self._depth -= 1

    def keep(self, value: Any = None) -> None:
        """Memoize the value just written: under its identity, or for nobody to fetch."""
        index = self._count
        self._count = index + 1
        if value is not None:
            self._memo[id(value)] = index
        self.out += b"q%c" % index if index < 256 else _LONG_MEMO(b"r", index)

    def named(self, name: str) -> None:
        """Write a class or function by its dotted name.

        Raises:
            UnsupportedError: it is no name that a pickle can have.
        """
        index = self._names.get(name)
        if index is not None:
            self._fetch(index)
            return
        if name in trust.NESTED_CLASSES:
            owner, _, attribute = name.rpartition(".")
            self.called("builtins.getattr", (Global(owner), self._made(attribute)))
        else:
            self._named_plainly(name)
        self._names[name] = self._count
        self.keep()

    def _named_plainly(self, name: str) -> None:
        module, dot, attribute = _PYTHON2.get(name, name).rpartition(".")
        if not dot or not name.isascii() or "\n" in name:
            raise UnsupportedError(self.where, f"{name!r} cannot be named in a pickle")
        module = _PYTHON2_MODULES.get(module, module)
        self.out += f"c{module}\n{attribute}\n".encode()

    def called(self, name: str, args: tuple[Any, ...]) -> None:
        """Write ``name(*args)``, a call that nothing else shares; it is not memoized yet."""
        self.named(name)
        self.row(args)
        self.out += b"R"

    def row(self, values: tuple[Any, ...]) -> None:
        """Write a tuple that nothing else shares."""
        size = len(values)
        if not size:
            self.out += b")"
            return
        if size > 3:
            self.out += b"("
        for value in values:
            if type(value) is int:
                self.integer(value)
            else:
                self.value(value)
        self.out += _ONE_BYTE.get(size, b"t")
        self.keep()

    def text(self, value: str) -> None:
        """Write a string."""
        index = self._memo.get(id(value))
        if index is not None:
            self._fetch(index)
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X"
        self.out += len(data).to_bytes(4, "little")
        self.out += data
        self.keep(value)

    def call(self, call: Call) -> None:
        """Write an object: how it is made, then its elements, items and state."""
        self.named(call.name)
        self.value(call.args)
        self.out += b"R" if call.args or call.name in _CALLED else b"\x81"  # REDUCE, NEWOBJ
        self.keep(call)
        self._elements(call.elements)
        self._items(call.items.items())
        if call.state is not None:
            self.value(call.state)
            self.out += b"b"

    def integer(self, value: int) -> None:
        """Write a whole number of any size."""
        if 0 <= value < 1 << 8:
            self.out += b"K%c" % value
        elif 0 <= value < 1 << 16:
            self.out += struct.pack("<cH", b"M", value)
        elif -1 << 31 <= value < 1 << 31:
            self.out += struct.pack("<ci", b"J", value)
        else:
            bits = (value if value >= 0 else ~value).bit_length()
            data = value.to_bytes(bits // 8 + 1, "little", signed=True)
            short = len(data) < 256
            self.out += b"\x8a" if short else b"\x8b"
            self.out += len(data).to_bytes(1 if short else 4, "little")
            self.out += data

    def _made(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _fetch(self, index: int) -> None:
        self.out += b"h%c" % index if index < 256 else _LONG_MEMO(b"j", index)

    def _tuple(self, values: tuple[Any, ...]) -> None:
        if not values:
            self.out += b")"
            return
        size = len(values)
        if size > 3:
            self.out += b"("
        for value in values:
            self.value(value)
        index = self._memo.get(id(values))
        if index is not None:  # it holds itself, and has been written meanwhile
            self.out += b"0" * size if size <= 3 else b"1"
            self._fetch(index)
            return
        self.out += _ONE_BYTE.get(size, b"t")
        self.keep(values)

    def _list(self, values: list[Any]) -> None:
        self.out += b"]"
        self.keep(values)
        self._elements(values, exact=True)

    def _dict(self, items: dict[Any, Any]) -> None:
        self.out += b"}"
        self.keep(items)
        self._items(items.items(), exact=True)
        if items and len(items) % _BATCH == 0:
            self.out += b"(u"  # the C pickler begins another batch before it finds none left

    def _ordered(self, items: OrderedDict[Any, Any]) -> None:
        self.called("collections.OrderedDict", ())
        self.keep(items)
        self._items(items.items())

    def _elements(self, values: Collection[Any], *, exact: bool = False) -> None:
        for batch, close in self._batches(values, b"a", b"e", exact=exact):
            for value in batch:
                self.value(value)
            self.out += close

    def _items(self, pairs: Collection[tuple[Any, Any]], *, exact: bool = False) -> None:
        for batch, close in self._batches(pairs, b"s", b"u", exact=exact):
            for key, value in batch:
                self.value(key)
                self.value(value)
            self.out += close

    def _batches(
        self, values: Collection[Any], one: bytes, many: bytes, *, exact: bool
    ) -> Iterable[tuple[Iterable[Any], bytes]]:
        """Batches to be written, each with the opcode that takes it into the container.

        A last batch of one is written without MARK, unless the container is Python's own
        (``exact``) and has other batches.
        """
        rest = iter(values)
        for start in range(0, len(values), _BATCH):
            single = len(values) - start == 1 and not (exact and start)
            if not single:
                self.out += b"("
            yield islice(rest, _BATCH), one if single else many

    def _set(self, values: set[Any] | frozenset[Any]) -> None:
        """In sorted order: Python's own depends on the process where it holds strings."""
        try:
            ordered = sorted(values)
        except TypeError:
            ordered = sorted(values, key=lambda value: (type(value).__name__, repr(value)))
        self.called(f"builtins.{type(values).__name__}", (self._made(ordered),))
        self.keep(values)

    def _bytes(self, data: bytes) -> None:
        """Protocol 2 has no bytes: they are text that is encoded."""
        if data:
            self.called("_codecs.encode", (self._made(data.decode("latin-1")), "latin1"))
        else:
            self.called("builtins.bytes", ())
        self.keep(data)

    def _complex(self, value: complex) -> None:
        self.called("builtins.complex", (value.real, value.imag))
        self.keep(value)

    def _float(self, value: float) -> None:
        self.out += struct.pack(">cd", b"G", value)

    def _none(self, _value: None) -> None:
        self.out += b"N"

    def _bool(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def _global(self, value: Global) -> None:
        self.named(value.name)


_Writer = Callable[[Pickler, Any], None]
_PLAIN: dict[type, _Writer] = {
    str: Pickler.text,
    int: Pickler.integer,
    float: Pickler._float,  # noqa: SLF001 - one table of the class's own methods
    bool: Pickler._bool,  # noqa: SLF001
    type(None): Pickler._none,  # noqa: SLF001
    Global: Pickler._global,  # noqa: SLF001
}
_NESTING: dict[type, _Writer] = {
    tuple: Pickler._tuple,  # noqa: SLF001
    list: Pickler._list,  # noqa: SLF001
    dict: Pickler._dict,  # noqa: SLF001
    OrderedDict: Pickler._ordered,  # noqa: SLF001
    set: Pickler._set,  # noqa: SLF001
    frozenset: Pickler._set,  # noqa: SLF001
    bytes: Pickler._bytes,  # noqa: SLF001
    Located: Pickler._bytes,  # noqa: SLF001
    complex: Pickler._complex,  # noqa: SLF001
    Call: lambda pickler, value: pickler.call(value),
}
