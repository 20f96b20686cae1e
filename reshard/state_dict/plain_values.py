"""Convert the values of a pickle into plain ones that print and serialize as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.containers.pickles import trust
from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_objects import Tensor
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import LocalTensors

_MAX_DEPTH = 100
_LONG = 64  # characters; a longer text counts as several parts if it is repeated
_COUNTED = ("bytes", "str", "list", "tuple", "dict", "set", "frozenset")
_KEYS = (str, int, float, bytes, tuple, frozenset, type(None), Global)  # texts identify them
_MAX_PARTS = 50_000  # parts of one value; a pickle can refer to one part from many places


class SetItems(list[Any]):
    """The elements of a set, sorted, which JSON shows as a list."""

    def __init__(self, items: Iterable[Any], kind: type[set[Any] | frozenset[Any]] = set) -> None:
        super().__init__(sorted(items, key=lambda item: (type(item).__name__, repr(item))))
        self.kind = kind


def restore_sets(value: Any) -> Any:
    """Return a plain value with the sets that `to_plain` made lists of."""
    if isinstance(value, SetItems):
        return value.kind(map(restore_sets, value))
    if isinstance(value, dict):
        return {key: restore_sets(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(restore_sets, value))
    return value


def to_plain(value: Any) -> Any:
    """Return a value that serializes as JSON; anything else becomes a description of itself."""
    return _ValueConverter().convert(value)


def is_plain(value: Any) -> bool:
    """Return whether a value and its parts are plain, not descriptions that `to_plain` made."""
    if isinstance(value, dict):
        return not is_description(value) and all(map(is_plain, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(is_plain, value))


def is_description(value: dict[Any, Any]) -> bool:
    """Return whether a dict is what `to_plain` makes of a tensor, an object or bytes."""
    return value.keys() == {"tensor", "shape"} or "class" in value or _is_count(value)


def _is_count(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and all(k in _COUNTED and type(n) is int for k, n in value.items())


class _ValueConverter:
    """Converts one value; beyond a number of parts, the rest is only counted."""

    def __init__(self) -> None:
        self._parts = 0
        self._inside: set[int] = set()  # ids of open containers, which may contain themselves
        self._long: set[int] = set()  # ids of long texts that were already converted once

    def convert(self, value: Any) -> Any:
        self._parts += 1
        if isinstance(value, str) and len(value) > _LONG:
            return self._convert_text(value)
        if not isinstance(value, (Call, dict, list, tuple, set, frozenset)):
            return _convert_scalar(value)
        if self._parts > _MAX_PARTS or len(self._inside) > _MAX_DEPTH or id(value) in self._inside:
            return _summarize(value)
        self._inside.add(id(value))
        try:
            return self._convert_container(value)
        finally:
            self._inside.discard(id(value))

    def _convert_text(self, value: str) -> Any:
        if id(value) in self._long:
            self._parts += len(value) // _LONG
            return _summarize(value) if self._parts > _MAX_PARTS else value
        self._long.add(id(value))
        return value

    def _convert_container(self, value: Any) -> Any:
        if isinstance(value, Call):
            return self._convert_call(value)
        if isinstance(value, dict):
            shown = {_convert_key(key): self.convert(item) for key, item in value.items()}
            by_object = not all(isinstance(key, _KEYS) for key in value)
            return {"class": "dict", "items": shown} if by_object else shown
        items = [self.convert(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return SetItems(items, type(value))
        return tuple(items) if isinstance(value, tuple) else items

    def _convert_call(self, value: Call) -> dict[str, Any]:
        shown: dict[str, Any] = {"class": value.name}
        for key, part in (
            ("args", value.args),
            ("state", value.state),
            ("items", value.items),
            ("elements", value.elements),
        ):
            if part:
                shown[key] = self.convert(part)
        return shown


def _convert_key(key: Any) -> Any:
    """Return a dict's key; JSON shows numbers as texts, but ``MultiStepLR`` looks them up."""
    return key if type(key) is int else str(key)


def _convert_scalar(value: Any) -> Any:
    if isinstance(value, Global):  # an unexpected one is not written again, not even as a text
        return value.name if trust.is_expected(value.name) else {"class": value.name}
    if isinstance(value, (Tensor, GlobalTensor)):
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, LocalTensors):
        first = next(iter(value.pieces.values()))
        return {"tensor": str(first.dtype), "shape": list(first.box.shape)}
    return {"bytes": len(value)} if isinstance(value, bytes) else value


def _summarize(value: Any) -> dict[str, Any]:
    if isinstance(value, Call):
        return {"class": value.name}
    return {type(value).__name__: len(value)}
