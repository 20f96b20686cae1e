"""Find optimizer states that stage 3 offloaded to disk: raw swap files beside the rank files.

The optimizer states then hold tensors of size 0. ``offloaded_tensors/rankRR`` holds a file for the
fp32 weights of each swapped sub-group, ``BEGIN_END.tensor.swp``, and one for each slot,
``SLOT-BEGIN_END.tensor.swp``: float32 elements, then padding to a multiple of the I/O alignment.
BEGIN and END are the ``ds_id`` of the sub-group's first and last parameter, ids in the order in
which the parameters were made. No file states which sub-group that is. Within one param group, the
files and the sub-groups are matched in order; between several groups, they are matched by size.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``save_checkpoint``), ``runtime/zero/stage3.py``
(``fp32_partitioned_groups_flat[i].ds_id``), ``runtime/swap_tensor/optimizer_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.containers.torch_objects import StoredBuffer, Tensor
from reshard.core import dtypes
from reshard.core.location import Location
from reshard.core.manifest import MASTER, SourceFile
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed.stage3 import count_piece_elements
from reshard.formats.deepspeed.states import OptimizerStates, Shapes
from reshard.system.files import get_size

_WEIGHTS = re.compile(r"(\d+)_(\d+)\.tensor\.swp")
_ALIGNMENT = 1024  # bytes; every file is padded to a multiple of it times the aio parallelism
_MAX_PADDING = 64 * _ALIGNMENT


def fill(
    location: Location, shapes: Shapes, ranks: Sequence[OptimizerStates]
) -> tuple[list[OptimizerStates], dict[str, SourceFile]]:
    """Return the states with the tensors of swap files for the empty ones, and these files."""
    filled: list[OptimizerStates] = []
    paths: list[str] = []
    for rank in ranks:
        groups = rank.root.get("fp32_flat_groups") or []
        offloaded = [
            index
            for index, group in enumerate(groups)
            if isinstance(group, Tensor) and group.numel == 0 and index < len(shapes)
        ]
        found = [*_list_tensors(location, offloaded, shapes, rank, len(ranks))] if offloaded else []
        filled.append(_replace_tensors(rank, found) if found else rank)
        paths += [tensor.storage.file for _, _, tensor in found]
    return filled, {path: SourceFile(path, get_size(path)) for path in sorted(paths)}


def _replace_tensors(
    rank: OptimizerStates, found: Iterable[tuple[int, str, Tensor]]
) -> OptimizerStates:
    masters = [*rank.require_list("fp32_flat_groups")]
    states = {**rank.optimizer.get("state", {})}
    for index, kind, tensor in found:
        if kind == MASTER:
            masters[index] = tensor
        else:
            states[index] = {**states[index], kind: tensor}
    optimizer = {**rank.optimizer, "state": states}
    root = {**rank.root, "fp32_flat_groups": masters, "optimizer_state_dict": optimizer}
    return replace(rank, root=root)


def _find_folder(location: Location, rank: int) -> Path:
    name = f"rank{rank:02d}"
    offloaded = location.folders.get("offloaded_tensors")
    folder = offloaded.folders.get(name) if offloaded else None
    return folder.path if folder else location.path / "offloaded_tensors" / name


def _list_tensors(
    location: Location, offloaded: list[int], shapes: Shapes, rank: OptimizerStates, ranks: int
) -> Iterator[tuple[int, str, Tensor]]:
    folder = _find_folder(location, rank.rank)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [match for name in names if (match := _WEIGHTS.fullmatch(name))]
    ids = sorted((int(match[1]), int(match[2])) for match in matches)
    if len(ids) != len(offloaded):
        raise IncompleteError(
            folder,
            f"{len(offloaded)} sub-groups of rank {rank.rank} were offloaded to disk, but the"
            f" checkpoint contains {len(ids)} of their swap files",
            "DeepSpeed before 0.13 left them in nvme_path: look there, or save again without"
            " offload",
        )
    if _count_groups(offloaded, rank) > 1:
        ids = _sort_by_size(folder, ids)
        offloaded = sorted(offloaded, key=lambda index: count_piece_elements(shapes[index], ranks))
    for index, (begin, end) in zip(offloaded, ids, strict=True):
        numel = count_piece_elements(shapes[index], ranks)
        slots = [
            name
            for name, value in rank.get_group_state(index).items()
            if isinstance(value, Tensor) and value.shape == (0,)  # a 0-d step is not swapped
        ]
        for kind in (MASTER, *slots):
            prefix = "" if kind == MASTER else f"{kind}-"
            path = folder / f"{prefix}{begin}_{end}.tensor.swp"
            _check_size(path, numel)
            nbytes = numel * dtypes.FLOAT32.itemsize
            storage = StoredBuffer(str(path), "", dtypes.FLOAT32, nbytes, 0)
            yield index, kind, Tensor(storage, 0, (numel,), (1,), dtypes.FLOAT32)


def _sort_by_size(folder: Path, ids: list[tuple[int, int]]) -> list[tuple[int, int]]:
    # Ids rise along one param group, but not from one group to the next. Padding does not change
    # the order of sizes, so different sizes show which file belongs to which sub-group.
    sizes = {pair: get_size(folder / f"{pair[0]}_{pair[1]}.tensor.swp") for pair in ids}
    if len(set(sizes.values())) < len(ids):
        raise UnsupportedError(
            folder,
            "sub-groups of several param groups were offloaded to disk, and the swap files cannot"
            " be told apart by size",
            "save once without offload_optimizer to nvme",
        )
    return sorted(ids, key=sizes.__getitem__)


def _check_size(path: Path, numel: int) -> None:
    size, needed = get_size(path), numel * dtypes.FLOAT32.itemsize
    if size % _ALIGNMENT or not needed <= size < needed + _MAX_PADDING:
        raise CorruptError(
            path,
            f"has {size} bytes; its sub-group takes {needed} plus padding to a multiple of"
            f" {_ALIGNMENT}",
            "the file is truncated, or belongs to another run",
        )


def _count_groups(offloaded: list[int], rank: OptimizerStates) -> int:
    owner = {
        index: number
        for number, group in enumerate(rank.optimizer.get("param_groups", []))
        for index in group.get("params", [])
    }
    return len({owner.get(index) for index in offloaded})
