"""Compare the files of two checkpoints that no reader used, as far as their contents show."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from reshard.checks.pairs import TensorPair
from reshard.checks.train import StateDifference
from reshard.containers import torch_reader
from reshard.containers.json_files import read_json
from reshard.containers.torch_detect import SUFFIXES, is_torch_file
from reshard.containers.torch_objects import Tensor
from reshard.core.location import Location
from reshard.core.manifest import Entry, Manifest
from reshard.errors import ReshardError
from reshard.formats.dcp import reader
from reshard.formats.dcp.directory import METADATA
from reshard.formats.unread import group
from reshard.state_dict import tree
from reshard.state_dict.plain_values import to_plain
from reshard.system.files import SourceFiles, get_size
from reshard.system.paths import as_path
from reshard.training.copied_files import TENSOR

_BLOCK = 1 << 22
_DEPTH = 32
_STATE = (*SUFFIXES, ".distcp", ".safetensors", ".npy", ".npz")  # files that can hold a state
# Files from which no framework resumes: copies of the weights beside a training state, files that
# an engine writes twice, and those of other ranks, which `verify` names as stale.
_NOT_RESUMED = re.compile(
    r"(?:(?:pytorch_|adapter_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)|sharded/.*|huggingface/.*"
    r"|[^/]*(?:model|optim)_states\.pt|[^/]*\.distcp)"
)


def find_differences(a: Manifest, b: Manifest) -> Iterator[StateDifference]:
    """Yield the files that differ, and those with states that one side alone has."""
    one, two = dict(a.unread_files), dict(b.unread_files)
    for folder in _list_shared_folders(a, b):
        # The files of DCP differ although the states are equal: it divides them over other ranks.
        left, right = (to_plain(_read_folder(files, folder)) for files in (one, two))
        yield from _compare(f"{folder}/", left, right)
        one, two = (
            {name: path for name, path in files.items() if name.rpartition("/")[0] != folder}
            for files in (one, two)
        )
    for name in one.keys() & two.keys():
        if not _are_equal(one[name], two[name]):
            yield from _compare(name, _read(one[name]), _read(two[name]))
    for files, others, is_first in ((one, two, True), (two, one, False)):
        only = (name for name in files if name not in others)
        for name in group(filter(_has_state, only)):
            yield StateDifference(name, *(("stored", None) if is_first else (None, "stored")))


def pair_tensors(a: Manifest, b: Manifest) -> Iterator[TensorPair]:
    """Yield the tensors in the DCP folders of both sides, paired by name."""
    for folder in _list_shared_folders(a, b):
        one, two = (
            dict(_list_tensors(_read_folder(manifest.unread_files, folder), folder))
            for manifest in (a, b)
        )
        for name in one.keys() & two.keys():
            yield TensorPair(TENSOR, name, one[name], two[name])


def _list_tensors(node: Any, name: str) -> Iterator[tuple[str, Entry]]:
    if isinstance(node, (dict, list, tuple)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _list_tensors(value, f"{name}/{key}")
    elif (tensor := tree.as_global(node)) is not None:
        yield name, Entry(name, TENSOR, tensor.dtype, tensor.shape, tuple(tensor.chunks))


def describe_others(a: Manifest, b: Manifest) -> Iterator[str]:
    """Yield a note for each side that alone has unread files without states."""
    for side, files, others in (
        ("A", a.unread_files, b.unread_files),
        ("B", b.unread_files, a.unread_files),
    ):
        only = [name for name in files if name not in others and not _has_state(name)]
        if only:
            yield f"only {side} has these files, which were not read: {', '.join(group(only))}"


def _has_state(name: str) -> bool:
    return name.endswith(_STATE) and _NOT_RESUMED.fullmatch(name) is None


def _list_shared_folders(a: Manifest, b: Manifest) -> list[str]:
    one, two = (
        {
            folder
            for folder, _, name in (n.rpartition("/") for n in manifest.unread_files)
            if name == METADATA
        }
        for manifest in (a, b)
    )
    return sorted(one & two)


def _read_folder(files: Mapping[str, str], folder: str) -> Any:
    path = as_path(files[f"{folder}/{METADATA}"]).parent
    return reader.read(Location([path], inner=True)).root


def _compare(name: str, a: Any, b: Any) -> Iterator[StateDifference]:
    if a != b:
        yield StateDifference(name, a, b)


def _read(path: str) -> Any:
    with suppress(ReshardError):  # a file that is not read may have any content
        if path.endswith(".json"):
            return read_json(as_path(path))
        if is_torch_file(as_path(path)):
            file = torch_reader.read(as_path(path))
            sums = {
                key: (record.nbytes, record.crc32 or _hash(path, record.byte_offset, record.nbytes))
                for key, record in file.records.items()
            }
            places = [  # two tensors can be other parts of one buffer, which torch writes whole
                (*sums[tensor.storage.key], tensor.offset, tensor.chunk.is_dense or tensor.strides)
                for _, node in tree.walk((file.root,), _DEPTH)
                for _, tensor in tree.list_items(node)
                if isinstance(tensor, Tensor) and tensor.storage.key in sums
            ]
            values = to_plain(tree.convert_file(file))
            return {"values": values, "checksums of tensors": [*sums.values(), *places]}
    return f"{get_size(path)} bytes, SHA-256 {_hash(path, 0, get_size(path))}"


def _hash(path: str, start: int, size: int) -> str:
    digest = hashlib.sha256()
    with SourceFiles() as pool:
        for at in range(0, size, _BLOCK):
            digest.update(pool.read(path, start + at, min(_BLOCK, size - at)))
    return digest.hexdigest()


def _are_equal(a: str, b: str) -> bool:
    size = get_size(a)
    if size != get_size(b):
        return False
    with SourceFiles() as pool:
        starts = range(0, size, _BLOCK)
        spans = ((start, min(_BLOCK, size - start)) for start in starts)
        return all(pool.read(a, *span) == pool.read(b, *span) for span in spans)
