"""Describe what a pickle would import and call, and build its plain containers.

Builders construct Python's own containers; every other object becomes a `Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

Builder = Callable[..., Any]

_MAX_KEY_PARTS = 64
_MAX_KEY_NUMBER = 1 << 64  # larger integers can be chosen to collide


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names, as ``module.name``. Never imported."""

    name: str


class Located(bytes):
    """Bytes of a pickle, with their offset in the stream.

    Attributes:
        at: offset of the first byte.
        text_nbytes: length of the UTF-8 text that encodes the bytes there; None for raw bytes.
    """

    at: int
    text_nbytes: int | None

    @classmethod
    def of(cls, data: bytes, at: int, text_nbytes: int | None = None) -> Located:
        """Return the same bytes with their offset."""
        located = cls(data)
        located.at, located.text_nbytes = at, text_nbytes
        return located


@dataclass(slots=True, eq=False)
class Call:
    """An object that a pickle would create by calling ``name(*args)``, as a description.

    Few objects have items or elements, and some pickles have millions of objects, so they have no
    containers for them at first.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] | None = None
    elements: list[Any] | None = None

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute of the object's state, as ``getattr`` would find it.

        The state is a dict, or a pair (dict or None, dict of ``__slots__``).
        """
        state = self.state
        if type(state) is dict:
            return state.get(attribute, default)
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict) and attribute in part:
                return part[attribute]
        return default


class UnsharedObject(NamedTuple):
    """An object without arguments that occurs once in a pickle, so the pickler does not keep it.

    Args:
        name: its class.
        state: its attributes; None for a class without any.
    """

    name: str
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class UnsharedItems:
    """The elements of a list, or the pairs of a dict, which occurs once in a pickle.

    They can be made while they are written: a checkpoint may have millions.

    Args:
        kind: list or dict.
        count: their number.
        items: an iterable of them.
    """

    kind: type[list[Any] | dict[Any, Any]]
    count: int
    items: Iterable[Any]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


_BY_IDENTITY: Any = object.__hash__
_KEYS = (str, bytes, int, float, frozenset, type(None), Global, Call)


def require_hashable(value: Any) -> Any:
    """Return a dict key or set element, unchanged, if it can be hashed in little time.

    Python hashes a tuple again at each use, recursively; a frozenset stores its hash. A tensor is a
    key by its identity: GrokAdamW 0.1.2 keeps its state so.

    Raises:
        TypeError, ValueError: the value cannot be a key, or is too expensive to hash.
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
        elif not isinstance(part, _KEYS) and type(part).__hash__ is not _BY_IDENTITY:
            raise TypeError(f"a {type(part).__name__} as a key")
    raise ValueError("a key of too many parts")


def _make_bytes(data: Any = b"") -> bytes:
    if not isinstance(data, (bytes, list, tuple)):
        raise TypeError("bytearray of something that is not bytes")
    return bytes(data)


def _make_dict(items: Any = (), /) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {require_hashable(key): value for key, value in pairs}


class DictObject(dict[Any, Any]):
    """A dict of a class of ``collections``, read as a plain dict.

    Attributes:
        call: the class, and what its constructor gets beside the items.
    """

    __slots__ = ("call",)
    call: Call

    @classmethod
    def of(cls, name: str, items: Any = (), *args: Any) -> DictObject:
        """Return a dict of items that knows its class."""
        value = cls(_make_dict(items))
        value.call = Call(name, args)
        return value


class ListObject(list[Any]):
    """A deque, read as a plain list.

    Attributes:
        call: the class, and what its constructor gets beside the elements.
    """

    __slots__ = ("call",)
    call: Call

    @classmethod
    def of(cls, name: str, elements: Any = (), *args: Any) -> ListObject:
        """Return a list of elements that knows its class."""
        value = cls(elements)
        value.call = Call(name, ((), *args) if args else ())
        return value


def rebuild_dict(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return items as a dict of the class of another one."""
    if not isinstance(original, DictObject):
        return items
    value = DictObject(items)
    value.call = original.call
    return value


def rebuild_sequence(original: Sequence[Any], elements: Iterable[Any]) -> Sequence[Any]:
    """Return elements as a list, tuple or deque, whichever another one is."""
    if isinstance(original, tuple):
        return tuple(elements)
    if not isinstance(original, ListObject):
        return list(elements)
    value = ListObject(elements)
    value.call = original.call
    return value


PYTHON2_NAMES = {  # protocol 2 uses the names of Python 2 (CPython ``Lib/_compat_pickle.py``)
    "builtins.str": "__builtin__.unicode",
    "builtins.int": "__builtin__.long",
    "builtins.range": "__builtin__.xrange",
    "builtins.chr": "__builtin__.unichr",
}
_DEFAULTDICT = "collections.defaultdict"
ENCODE = "_codecs.encode"  # protocol 2 writes bytes as a call of it

BUILDERS: dict[str, Builder] = {
    "collections.OrderedDict": partial(DictObject.of, "collections.OrderedDict"),
    # The factory would be code of the file. Python writes the items as opcodes of their own.
    _DEFAULTDICT: lambda factory=None, items=(): DictObject.of(_DEFAULTDICT, items, factory),
    "collections.Counter": partial(DictObject.of, "collections.Counter"),
    "collections.deque": partial(ListObject.of, "collections.deque"),
    "builtins.set": lambda *items: set(map(require_hashable, *items)) if items else set(),
    "builtins.frozenset": lambda *items: (
        frozenset(map(require_hashable, *items)) if items else frozenset()
    ),
    "builtins.list": list,
    "builtins.dict": _make_dict,
    "builtins.tuple": tuple,
    "builtins.bytes": _make_bytes,
    "builtins.bytearray": lambda *data: (
        bytes(data[0], "latin-1") if len(data) > 1 else _make_bytes(*data)
    ),
    "builtins.complex": complex,
    ENCODE: lambda text, _encoding="latin-1": text.encode("latin-1"),
}
