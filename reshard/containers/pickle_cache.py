"""Parse a pickle that many files have in common (ranks, parameters of one shape) once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.containers import numpy_arrays
from reshard.containers.pickles.unpickle import loads
from reshard.containers.pickles.values import Builder, DictObject
from reshard.containers.torch_objects import TORCH_BUILDERS, Storages, StoredBuffer, Tensor
from reshard.core import stamps
from reshard.core.stamps import KEY, Stamp

_CONTAINERS = frozenset({dict, DictObject, list, tuple})
_DEEPEST = 16  # of containers in a pickle that is kept
_KEY = b"X%c\0\0\0%b" % (len(KEY), KEY.encode())
_LONGEST = 1024  # bytes of a stamp in a pickle
_MEMO = rb"(?:q.|r.{4})"  # BINPUT, LONG_BINPUT
# The end of a pickle of protocol 2 whose last value is a stamp (`Stamp.as_dict`). The rank, the
# length of the file's name and that name are groups of their own, and so is what is between them.
_STAMPED = re.compile(
    rb"(%b.{,99}?X\x07\0\0\0save_id.{,299}?X\x04\0\0\0rank%b)(K.|M..|J.{4})"
    rb"(X.{,99}?X\x04\0\0\0file%bX)(.{4})([ -~]*)(%bu[usb]*\.)" % (_KEY, _MEMO, _MEMO, _MEMO),
    re.DOTALL,
)

Holders = dict[int, list[Any]]  # the id of a container -> the keys or positions of those in it


class PickleContent(NamedTuple):
    """The content of a pickle, not to be changed.

    Args:
        value: its root, without the stamp.
        globals: every global that it names.
        storages: its storages, without positions.
        is_known: whether an earlier file has an equal pickle, except for the stamp.
    """

    value: Any
    globals: set[str]
    storages: tuple[StoredBuffer, ...]
    stamp: Stamp | None
    is_known: bool = False


class _Kept(NamedTuple):
    """A pickle that was parsed.

    Args:
        before: its bytes; or those before its stamp, if only that differs between ranks.
        rest: the bytes from the stamp on, without the rank and the name of the file.
        holders: the containers in which tensors are; empty if no tensor has elements.
    """

    before: bytes
    rest: bytes
    parsed: PickleContent
    holders: Holders


class PickleCache:
    """Parses equal pickles once, also if each has the stamp of its own rank.

    The positions of elements differ between files. So a pickle whose tensors have elements is kept
    only if all of its tensors are in dicts, lists and tuples, in which they are easily replaced.
    """

    _MOST = 16  # pickles: enough for the devices of a node, or the shapes of a model

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def parse(
        self, data: bytes, path: str, builders: Mapping[str, Builder], start: int
    ) -> PickleContent:
        """Return the content of a pickle.

        Args:
            start: byte of the file at which the pickle begins.

        Raises:
            CorruptError, UnsafeError: as in `loads` and `stamps.take`.
        """
        end, rest, own = _split_stamp(data)
        for kept in self._kept:
            if len(kept.before) == end and kept.rest == rest and data.startswith(kept.before):
                stamp = kept.parsed.stamp
                if own and stamp:
                    rank, file = own
                    if rank >= stamp.world_size:
                        break  # `stamps.take` refuses it
                    stamp = Stamp(stamp.save_id, rank, stamp.world_size, stamp.step, file)
                return _renew(kept, path, stamp)
        storages = Storages(path)
        done = loads(data, where=path, builders={**TORCH_BUILDERS, **builders}, persistent=storages)
        stored = tuple(storages.by_key.values())
        # The elements of arrays are in the pickle, at positions in this file, so it is not kept.
        has_arrays = numpy_arrays.has_arrays(done, stored)
        value = numpy_arrays.convert(done.value, path, start) if has_arrays else done.value
        value, stamp = stamps.take(value, done.stamp, path)
        parsed = PickleContent(value, done.globals, stored, stamp)
        found = stamp and (stamp.rank, stamp.file)
        if len(self._kept) < self._MOST and not has_arrays and own in (None, found):
            holders: Holders = {}
            # A pickle of placeholders can have many of them.
            is_bare = not any(each.nbytes for each in stored) and not _is_simple(value)
            tensors = frozenset() if is_bare else _find_tensors(value, holders, {})
            if is_bare or len(tensors) == sum(each.views for each in stored):
                self._kept.append(_Kept(data[:end], rest, parsed, holders))
        return parsed


def _split_stamp(data: bytes) -> tuple[int, bytes, tuple[int, str] | None]:
    """Find the stamp at the end of a pickle.

    Returns:
        Where it begins, or the length of the pickle if it does not end with a stamp; the bytes from
        there on, without the rank and the name of the file; the rank and the name.
    """
    start = data.rfind(_KEY, max(len(data) - _LONGEST, 0))
    match = _STAMPED.fullmatch(data, start) if start >= 0 else None
    if match is None or len(match[5]) != int.from_bytes(match[4], "little"):
        return len(data), b"", None
    rank = int.from_bytes(match[2][1:], "little")
    return start, match[1] + match[3] + match[6], (rank, match[5].decode())


def _renew(kept: _Kept, path: str, stamp: Stamp | None) -> PickleContent:
    """Return the content of a known pickle with the storages and the stamp of another file."""
    parsed = kept.parsed
    own = {
        id(each): StoredBuffer(path, each.key, each.dtype, each.nbytes, views=each.views)
        for each in parsed.storages
    }
    value = parsed.value
    if kept.holders or type(value) is Tensor:
        value = _replace_storages(value, own, kept.holders, {})
    return PickleContent(value, parsed.globals, tuple(own.values()), stamp, is_known=True)


def _is_simple(value: Any) -> bool:
    """Return whether a value is a tensor, or a dict of tensors and plain values."""
    values = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(each, (Tensor, str, int, float, type(None))) for each in values)


def _find_tensors(
    value: Any, holders: Holders, seen: dict[int, frozenset[int]], depth: int = 0
) -> frozenset[int]:
    """Return the ids of the tensors that are in a value, or in dicts, lists and tuples in it.

    Args:
        value: the value.
        holders: receives the id of each container that holds tensors.
        seen: what was found in the values before.
        depth: how many values hold this one.
    """
    if id(value) in seen:
        return seen[id(value)]
    if type(value) is Tensor:
        return frozenset((id(value),))
    if type(value) not in _CONTAINERS or depth == _DEEPEST:
        return frozenset()
    # A value that holds itself gives an id too many, so the pickle is not kept.
    seen[id(value)] = frozenset((id(value),))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inside = {key: _find_tensors(item, holders, seen, depth + 1) for key, item in items}
    seen[id(value)] = found = frozenset[int]().union(*inside.values())
    if found:
        holders[id(value)] = [key for key, tensors in inside.items() if tensors]
    return found


def _replace_storages(
    value: Any, own: Mapping[int, StoredBuffer], holders: Holders, made: dict[int, Any]
) -> Any:
    """Return a copy of a value that is or holds a tensor, in which tensors use other storages.

    Args:
        value: the value.
        own: the id of each storage -> the other storage.
        holders: what `_find_tensors` found.
        made: the copies before: a value that is in two places has one copy.
    """
    if id(value) in made:
        return made[id(value)]
    copy: Any
    if type(value) is Tensor:
        storage = own[id(value.storage)]
        copy = Tensor(storage, value.offset, value.shape, value.strides, value.dtype)
    else:
        copy = type(value)(value) if isinstance(value, dict) else list(value)
        if isinstance(value, DictObject):
            copy.call = value.call
        for key in holders[id(value)]:
            copy[key] = _replace_storages(value[key], own, holders, made)
        copy = tuple(copy) if type(value) is tuple else copy
    made[id(value)] = copy
    return copy
