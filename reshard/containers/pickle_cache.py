"""Parse a pickle that many files have in common (ranks, parameters of one shape) once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.containers import numpy_arrays
from reshard.containers.pickles.unpickle import loads
from reshard.containers.pickles.values import Builder, Call, DictObject, rebuild_dict
from reshard.containers.torch_objects import TORCH_BUILDERS, Storages, StoredBuffer, Tensor
from reshard.core import stamps
from reshard.core.stamps import KEY, Stamp

_DEEPEST = 16  # of containers and objects in a pickle that is kept
_FIELDS = ("args", "state", "items", "elements")  # of a `Call`, in which tensors can be
_KEY = b"X%c\0\0\0%b" % (len(KEY), KEY.encode())
_LONGEST = 1024  # bytes of a stamp in a pickle
_MEMO = rb"(?:q.|r.{4})"  # BINPUT, LONG_BINPUT
_NUMBER = rb"(?:K.|M..|J.{4})"  # BININT1, BININT2, BININT
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
# The end of a pickle of protocol 2 whose last value is a stamp (`Stamp.as_dict`). The groups are
# the rank, the length of the file's name, and that name.
_STAMP = re.compile(
    rb"%b.{,99}?X\x07\0\0\0save_id.{,299}?X\x04\0\0\0rank%b(%b)"
    rb"X.{,99}?X\x04\0\0\0file%bX(.{4})([ -~]*)%bu[usb]*\." % (_KEY, _MEMO, _NUMBER, _MEMO, _MEMO),
    re.DOTALL,
)
# What the mesh of a rank's DTensors states about the rank (torch 2.13
# ``distributed/device_mesh.py``). The groups are the names of its process groups, the rank, and the
# coordinates.
_GROUPS, _RANK, _COORDINATE = "_dim_group_names", "_rank", "_coordinate_on_dim"
_NAME = rb"X.\0{3}[0-9a-f]+%b" % _MEMO
_NAMES = re.compile(rb"X(.)\0{3}([0-9a-f]+)", re.DOTALL)
_MESH = re.compile(
    rb"X\x10\0\0\0_dim_group_names%b\]%b((?:%ba|\((?:%b){2,3}e))"
    rb"X\x05\0\0\0_rank%b(%b)X\x12\0\0\0_coordinate_on_dim%b(%b{1,3})(?=[\x85-\x87])"
    % (_MEMO, _MEMO, _NAME, _NAME, _MEMO, _NUMBER, _MEMO, _NUMBER),
    re.DOTALL,
)

Holders = dict[int, list[Any]]
"""The id of a container or object -> the keys, positions or fields of what holds tensors in it."""

Span = tuple[int, int]
_HOLDS_ITSELF = 0  # in place of an id


class PickleContent(NamedTuple):
    """The content of a pickle, not to be changed.

    Args:
        value: its root, without the stamp.
        storages: its storages, without positions.
        is_known: whether an earlier file has an equal pickle, except for what states its rank.
    """

    value: Any
    globals: set[str]
    storages: tuple[StoredBuffer, ...]
    stamp: Stamp | None
    is_known: bool = False


class _Kept(NamedTuple):
    """A pickle that was parsed.

    Args:
        parts: its bytes without what each rank states about itself.
        mesh_at: where the place of the rank in a mesh begins; -1 if there is none.
        mesh: the dict that has this place in the content.
        holders: the containers in which tensors are; empty if no tensor has elements.
    """

    parts: Sequence[bytes]
    mesh_at: int
    mesh: dict[str, Any] | None
    content: PickleContent
    holders: Holders

    def equals(self, data: bytes, holes: Sequence[Span]) -> bool:
        if len(self.parts) != len(holes) + 1:
            return False
        at = 0
        for part, (start, stop) in zip(self.parts, [*holes, (len(data),) * 2], strict=True):
            if start - at != len(part) or not data.startswith(part, at):
                return False
            at = stop
        return True


class PickleCache:
    """Parses equal pickles once, also if each has the stamp and the place in a mesh of its rank.

    The positions of elements differ between files. So a pickle whose tensors have elements is kept
    only if all of its tensors are in containers and objects, in which they are easily replaced.
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
        holes, own = _find_stamp(data)
        for kept in self._kept:
            place = _find_place(data, kept.mesh_at) if kept.mesh else None
            spans = [*place.regs[1:], *holes] if place else holes
            if kept.equals(data, spans):
                stamp = kept.content.stamp
                if own and stamp:
                    rank, file = own
                    if not 0 <= rank < stamp.world_size:
                        break  # `stamps.take` refuses it
                    stamp = Stamp(stamp.save_id, rank, stamp.world_size, stamp.step, file)
                return _renew(kept, path, stamp, _read_place(place) if place else {})
        storages = Storages(path)
        done = loads(data, where=path, builders={**TORCH_BUILDERS, **builders}, persistent=storages)
        stored = tuple(storages.by_key.values())
        # The elements of arrays are in the pickle, at positions in this file, so it is not kept.
        has_arrays = numpy_arrays.has_arrays(done, stored)
        value = numpy_arrays.convert(done.value, path, start) if has_arrays else done.value
        value, stamp = stamps.take(value, done.stamp, path)
        content = PickleContent(value, done.globals, stored, stamp)
        found = stamp and (stamp.rank, stamp.file)
        if len(self._kept) < self._MOST and not has_arrays and own in (None, found):
            self._keep(data, holes, content)
        return content

    def _keep(self, data: bytes, holes: list[Span], content: PickleContent) -> None:
        value, stored, finder = content.value, content.storages, _TensorFinder()
        # A pickle of placeholders can have many of them.
        if any(storage.nbytes for storage in stored) or _is_simple(value):
            tensors = finder.find(value) - finder.meshes.keys()
            if _HOLDS_ITSELF in tensors or len(tensors) != sum(storage.views for storage in stored):
                return
        meshes = list(finder.meshes.values())
        place = _find_place(data) if len(meshes) == 1 else None
        mesh = None
        if place and _read_place(place).items() <= meshes[0].items():
            mesh, holes = meshes[0], [*place.regs[1:], *holes]
        starts, stops = [0, *(stop for _, stop in holes)], [*(at for at, _ in holes), len(data)]
        parts = [data[at:stop] for at, stop in zip(starts, stops, strict=True)]
        at = place.start() if place and mesh else -1
        self._kept.append(_Kept(parts, at, mesh, content, finder.holders))


def _find_stamp(data: bytes) -> tuple[list[Span], tuple[int, str] | None]:
    """Return where a stamp states the rank and the file's name, and both; nothing without one."""
    start = data.rfind(_KEY, max(len(data) - _LONGEST, 0))
    match = _STAMP.fullmatch(data, start) if start >= 0 else None
    if match is None or len(match[3]) != int.from_bytes(match[2], "little"):
        return [], None
    return [match.span(1), (match.start(2), match.end(3))], (_read(match[1]), match[3].decode())


def _find_place(data: bytes, at: int | None = None) -> re.Match[bytes] | None:
    """Return what a mesh states about the rank, at an offset or anywhere."""
    match = _MESH.search(data) if at is None else _MESH.match(data, at)
    if match and all(size[0] == len(name) for size, name in _NAMES.findall(match[1])):
        return match
    return None


def _read_place(match: re.Match[bytes]) -> dict[str, Any]:
    return {
        _GROUPS: [name.decode() for _, name in _NAMES.findall(match[1])],
        _RANK: _read(match[2]),
        _COORDINATE: tuple(map(_read, _NUMBERS.findall(match[3]))),
    }


def _read(number: bytes) -> int:
    return int.from_bytes(number[1:], "little", signed=number.startswith(b"J"))


def _renew(kept: _Kept, path: str, stamp: Stamp | None, place: Mapping[str, Any]) -> PickleContent:
    content = kept.content
    own = {
        id(old): StoredBuffer(
            path, old.key, old.dtype, old.nbytes, views=old.views, viewed=old.viewed
        )
        for old in content.storages
    }
    value = content.value
    if kept.holders or type(value) is Tensor:
        made: dict[int, Any] = {}
        value = _replace_storages(value, own, kept.holders, made)
        if kept.mesh:
            made[id(kept.mesh)].update(place)
    return PickleContent(value, content.globals, tuple(own.values()), stamp, is_known=True)


def _is_simple(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(part, (Tensor, str, int, float, type(None))) for part in values)


class _TensorFinder:
    """Finds the tensors in a value, and the dicts that state the place of a rank in a mesh.

    Attributes:
        holders: the containers and objects that hold tensors or such dicts.
        meshes: those dicts, by their ids with a minus.
    """

    def __init__(self) -> None:
        self.holders: Holders = {}
        self.meshes: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, frozenset[int]] = {}

    def find(self, value: Any, depth: int = 0) -> frozenset[int]:
        """Return the ids of the tensors in a value, and those of the dicts of meshes with a minus.

        `_HOLDS_ITSELF` is among them if one of the values holds itself.
        """
        if id(value) in self._seen:
            return self._seen[id(value)]
        if type(value) is Tensor:
            return frozenset((id(value),))
        if type(value) in (dict, DictObject):
            items = value.items()
        elif type(value) in (list, tuple):
            items = enumerate(value)
        elif type(value) is Call:
            items = [(name, getattr(value, name)) for name in _FIELDS]
        else:
            return frozenset()
        if depth == _DEEPEST:
            return frozenset()
        self._seen[id(value)] = frozenset((_HOLDS_ITSELF,))
        inside = {key: self.find(item, depth + 1) for key, item in items}
        found = frozenset[int]().union(*inside.values())
        if type(value) is dict and _RANK in value and _COORDINATE in value:
            self.meshes[-id(value)] = value
            found |= {-id(value)}
        self._seen[id(value)] = found
        if found:
            self.holders[id(value)] = [key for key, tensors in inside.items() if tensors]
        return found


def _replace_storages(
    value: Any, own: Mapping[int, StoredBuffer], holders: Holders, made: dict[int, Any]
) -> Any:
    """Return a copy of a value that is or holds a tensor, in which tensors use other storages.

    Args:
        own: the id of each storage -> the other storage.
        holders: what `_TensorFinder` found.
        made: the copies before: a value that is in two places has one copy.
    """
    if id(value) in made:
        return made[id(value)]
    copy: Any
    if type(value) is Tensor:
        storage = own[id(value.storage)]
        copy = Tensor(storage, value.offset, value.shape, value.strides, value.dtype)
    elif type(value) is Call:
        copy = Call(value.name, value.args, value.state, value.items, value.elements)
        for name in holders[id(value)]:
            part = _replace_storages(getattr(value, name), own, holders, made)
            setattr(copy, name, part)
    else:
        copy = rebuild_dict(value, dict(value)) if isinstance(value, dict) else list(value)
        for key in holders[id(value)]:
            copy[key] = _replace_storages(value[key], own, holders, made)
        copy = tuple(copy) if type(value) is tuple else copy
    made[id(value)] = copy
    return copy
