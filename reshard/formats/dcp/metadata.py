"""Read ``.metadata``, a bare pickle of what was saved and where, without torch.

With ``use_collectives=False`` every rank writes a ``__<rank>.metadata`` of its own chunks; their
union is the checkpoint.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.containers.pickles.unpickle import loads
from reshard.containers.pickles.values import Call
from reshard.core import dtypes
from reshard.core.box import Box, Index, as_index
from reshard.core.dtypes import DType
from reshard.errors import CorruptError, IncompleteError, UnsafeError, UnsupportedError, shown
from reshard.system.files import read_small_file, refuse_lfs_pointer

_CLASSES = ("Metadata", "MCoreMetadata")  # the second of Megatron-core 0.14 and 0.15
_BUILDERS = {"torch.Size": lambda dims=(): tuple(dims)}
_MAX_BYTES = 1 << 31
_MAX_PATH = 64  # parts


@dataclass(frozen=True, slots=True)
class Block:
    """One stored item: a block of a tensor, or (``box`` None) a pickled object."""

    key: str
    box: Box | None
    file: str  # relative to the directory
    byte_offset: int
    nbytes: int


@dataclass(slots=True)
class StoredTensor:
    """One tensor as the metadata announce it."""

    dtype: DType
    shape: Index
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class Metadata:
    """The content of one or several metadata files."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Block | None] = field(default_factory=dict)  # None: location not yet known
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # key -> path in the state dict
    shapes: dict[str, Index] = field(default_factory=dict)  # of tensors stored in another shape
    globals: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)  # all that are named, those of unused copies too
    version: str = ""
    directory: str = ""  # the one that the program saved to; empty if no file states it


def read(files: Sequence[Path]) -> Metadata:
    """Return the union of the metadata files of one checkpoint.

    Raises:
        CorruptError: a file is not DCP metadata, or two contradict each other.
        IncompleteError: a chunk is announced and stored nowhere.
        UnsafeError: the metadata name a file outside the directory.
        UnsupportedError: a dtype is unknown, or there is a stream extension.
    """
    found = Metadata()
    for path in files:
        _add_file(found, path)
    lost = [key for key, block in found.objects.items() if block is None]
    if lost:
        raise IncompleteError(
            files[0],
            f"lists {lost[0]!r}, but does not state where it is stored",
            "the save was interrupted, or a rank's part is missing: fetch the checkpoint again",
        )
    return found


def _add_file(found: Metadata, path: Path) -> None:
    content = read_small_file(path, _MAX_BYTES)
    refuse_lfs_pointer(path, content)
    done = loads(content, where=path, builders=_BUILDERS)
    root = done.value
    if not isinstance(root, Call) or root.name.rsplit(".", 1)[-1] not in _CLASSES:
        raise CorruptError(path, "is a pickle, but not DCP metadata", "fetch it again")
    if root.get("bytecheckpoint_version") is not None:
        raise UnsupportedError(
            path,
            "is metadata of ByteCheckpoint, whose files have other contents than those of DCP",
            "merge the checkpoint with ByteCheckpoint's scripts/merge_bcp.py",
        )
    found.globals |= done.globals
    version = root.get("version")
    found.version = version if version and isinstance(version, str) else found.version
    found.directory = _parse_directory(root.get("storage_meta")) or found.directory
    try:
        stored = _parse_storage(path, root.get("storage_data") or {})
        found.files |= {name for name, *_ in stored.values()}
        for key, about in root.get("state_dict_metadata").items():
            _add_item(found, path, key, about, stored)
        paths = {key: _parse_path(key, at) for key, at in (root.get("planner_data") or {}).items()}
        found.paths.update(paths)
        found.shapes.update(_read_shapes(root.get("mcore_data") or {}))
        _refuse_unannounced({key for key, _ in stored} | paths.keys(), root)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CorruptError(
            path,
            f"is DCP metadata that reshard cannot read ({type(error).__name__}: {error})",
            "the file was altered, or written by a newer torch than reshard supports",
        ) from error


def _parse_directory(about: Any) -> str:
    saved = about.get("checkpoint_id") if isinstance(about, Call) else None
    if isinstance(saved, Call) and all(type(part) is str for part in saved.args):
        return str(PurePosixPath(*saved.args))
    return saved if isinstance(saved, str) else ""


def _read_shapes(about: Mapping[str, Any]) -> dict[str, Index]:
    shapes = {
        key: properties.get("nd_reformulated_orig_global_shape")
        for key, properties in about.items()
    }
    return {key: as_index(shape) for key, shape in shapes.items() if shape is not None}


def _refuse_unannounced(keys: set[str], root: Call) -> None:
    unknown = keys - root.get("state_dict_metadata").keys()
    if unknown:
        raise ValueError(f"it places {min(unknown)!r}, but does not list it")


def _parse_path(key: str, parts: Iterable[Any]) -> tuple[Any, ...]:
    """Return a key's path in the state dict, which joins to the key (``flatten_state_dict``)."""
    path = tuple(parts)
    sane = 0 < len(path) <= _MAX_PATH and all(type(part) in (str, int) for part in path)
    if not sane or ".".join(map(str, path)) != key:
        raise ValueError(
            f"{key!s:.60} has the path {shown(path)} in the state dict, which does not join to"
            " that key"
        )
    return path


def _parse_storage(
    path: Path, data: Mapping[Call, Call]
) -> dict[tuple[str, Index | None], tuple[str, int, int]]:
    stored = {}
    checked: set[str] = set()  # millions of blocks are in a few thousand files
    for index, info in data.items():
        transforms = info.get("transform_descriptors")
        if transforms:
            raise UnsupportedError(
                path,
                f"stores {index.get('fqn')!r} through {shown(transforms)}",
                "save it without stream extensions",
            )
        name, numbers = info.get("relative_path"), (info.get("offset"), info.get("length"))
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"impossible position {shown(numbers)} in {shown(name)}")
        if name not in checked:
            _check_inside(path, name)
            checked.add(name)
        origin = index.get("offset")
        at = None if origin is None else as_index(origin)
        key = index.get("fqn")
        if not isinstance(key, str):
            raise TypeError(f"{shown(key)} is not a valid key")
        stored[key, at] = (name, *numbers)
    return stored


def _check_inside(path: Path, name: str) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not name:
        raise UnsafeError(
            path,
            f"names the file {name!r}, which is outside the directory",
            "the metadata was tampered with: do not use this checkpoint",
        )


def _add_item(
    found: Metadata,
    path: Path,
    key: str,
    about: Call,
    stored: Mapping[tuple[str, Index | None], tuple[str, int, int]],
) -> None:
    kind = about.name.rsplit(".", 1)[-1]
    if kind == "BytesStorageMetadata":
        location = stored.get((key, None))
        # All ranks' files list an object, and one of them may state its location.
        found.objects[key] = found.objects.get(key) or (location and Block(key, None, *location))
        return
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{key!r} is a {about.name}, which reshard does not read")
    shape = as_index(about.get("size"))
    dtype = _parse_dtype(path, key, about.get("properties"))
    tensor = found.tensors.setdefault(key, StoredTensor(dtype, shape))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise CorruptError(
            path,
            f"{key!r} is {dtype} {shape}, but {tensor.dtype} {tensor.shape} in another rank's"
            " metadata",
            "metadata of different runs is mixed: fetch the checkpoint again as a whole",
        )
    for chunk in about.get("chunks"):
        box = Box(
            as_index(chunk.get("offsets"), len(shape)), as_index(chunk.get("sizes"), len(shape))
        )
        location = stored.get((key, box.origin))
        if location is None:
            if box.volume == 0:
                continue
            raise IncompleteError(
                path,
                f"lists {key!r} {box.origin}+{box.shape}, but does not state where it is stored",
                "the save was interrupted, or a rank's part is missing: fetch the checkpoint again",
            )
        tensor.blocks.append(Block(key, box, *location))


def _parse_dtype(path: Path, key: str, properties: Call) -> DType:
    state = properties.state
    # ``TensorProperties.__getstate__`` returns a tuple that begins with the dtype (torch 2.13).
    named = state[0] if isinstance(state, tuple) else properties.get("dtype")
    dtype = dtypes.BY_NAME.get(named.name.removeprefix("torch."))
    if dtype is None:
        raise UnsupportedError(
            path, f"{key!r} has dtype {named.name}, which reshard does not support"
        )
    return dtype
