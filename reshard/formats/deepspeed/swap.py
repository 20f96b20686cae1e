"""Optimizer states that stage 3 offloaded to disk: raw swap files beside the rank files.

The optimizer states then hold tensors of size 0. ``offloaded_tensors/rankRR`` holds a file for the
fp32 weights of each swapped sub-group, ``BEGIN_END.tensor.swp``, and one a slot,
``SLOT-BEGIN_END.tensor.swp``: float32 elements, then padding to a multiple of the I/O alignment.
BEGIN and END are the ``ds_id`` of the sub-group's first and last parameter, ids in the order in
which the parameters were made. No file says which sub-group that is: within one param group files
and sub-groups are matched in order, between several by size, and every size must agree.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``save_checkpoint``), ``runtime/zero/stage3.py``
(``fp32_partitioned_groups_flat[i].ds_id``), ``runtime/swap_tensor/optimizer_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard import dtypes
from reshard.containers.torch_objects import Tensor
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.files import size_of
from reshard.formats.deepspeed.partitioned import Swapped, piece_numel, sub_group_state
from reshard.formats.deepspeed.states import OptimizerStates, Piece, Shapes
from reshard.location import Location
from reshard.manifest import MASTER

_WEIGHTS = re.compile(r"(\d+)_(\d+)\.tensor\.swp")
_ALIGNMENT = 1024  # bytes; a multiple of it (the aio parallelism times) pads every file
_MAX_PADDING = 64 * _ALIGNMENT


def find(location: Location, shapes: Shapes, ranks: Sequence[OptimizerStates]) -> Swapped:
    """Every piece that lies in a swap file.

    Raises:
        IncompleteError: a sub-group was offloaded, and its files are not in the checkpoint.
        CorruptError: a file of another size than its sub-group.
        UnsupportedError: sizes do not tell two sub-groups apart.
    """
    found: dict[tuple[int, int, str], Piece] = {}
    for rank in ranks:
        groups = rank.root.get("fp32_flat_groups") or []
        wanted = [
            index
            for index, group in enumerate(groups)
            if isinstance(group, Tensor) and group.numel == 0 and index < len(shapes)
        ]
        if wanted:
            folder = _folder(location, rank.rank)
            _refuse_ambiguous(folder, wanted, shapes, rank)
            for index, kind, piece in _of_rank(folder, wanted, shapes, rank, len(ranks)):
                found[rank.rank, index, kind] = piece
    return found


def _folder(location: Location, rank: int) -> Path:
    """Where a rank's swap files lie, or should."""
    name = f"rank{rank:02d}"
    offloaded = location.folders.get("offloaded_tensors")
    found = offloaded.folders.get(name) if offloaded else None
    return found.path if found else location.path / "offloaded_tensors" / name


def _of_rank(
    folder: Path, wanted: list[int], shapes: Shapes, rank: OptimizerStates, ranks: int
) -> Iterator[tuple[int, str, Piece]]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [match for name in names if (match := _WEIGHTS.fullmatch(name))]
    ids = sorted((int(match[1]), int(match[2])) for match in matches)
    if len(ids) != len(wanted):
        raise IncompleteError(
            folder,
            f"{len(wanted)} sub-groups of rank {rank.rank} were offloaded to disk, but"
            f" {len(ids)} of their swap files are here",
            "DeepSpeed before 0.13 left them in nvme_path: look there, or save again without"
            " offload",
        )
    if _group_count(wanted, rank) > 1:
        wanted = sorted(wanted, key=lambda index: piece_numel(shapes[index], ranks))
        ids.sort(key=lambda pair: size_of(folder / f"{pair[0]}_{pair[1]}.tensor.swp"))
    for index, (begin, end) in zip(wanted, ids, strict=True):
        numel = piece_numel(shapes[index], ranks)
        slots = [
            name
            for name, value in sub_group_state(rank, index).items()
            if isinstance(value, Tensor) and value.shape == (0,)
        ]
        for kind in (MASTER, *slots):
            prefix = "" if kind == MASTER else f"{kind}-"
            path = folder / f"{prefix}{begin}_{end}.tensor.swp"
            _check_size(path, numel)
            yield index, kind, Piece(str(path), 0, numel, dtypes.FLOAT32)


def _check_size(path: Path, numel: int) -> None:
    held, needed = size_of(path), numel * dtypes.FLOAT32.itemsize
    if held % _ALIGNMENT or not needed <= held < needed + _MAX_PADDING:
        raise CorruptError(
            path,
            f"has {held} bytes; its sub-group takes {needed} and padding to a multiple of"
            f" {_ALIGNMENT}",
            "the file is truncated, or of another run",
        )


def _group_count(wanted: list[int], rank: OptimizerStates) -> int:
    """To how many param groups the sub-groups belong."""
    optimizer = rank.root.get("optimizer_state_dict") or {}
    owner = {
        index: number
        for number, group in enumerate(optimizer.get("param_groups", []))
        for index in group.get("params", [])
    }
    return len({owner.get(index) for index in wanted})


def _refuse_ambiguous(
    folder: Path, wanted: list[int], shapes: Shapes, rank: OptimizerStates
) -> None:
    """Ids rise along one param group; between groups only a size tells sub-groups apart."""
    sizes = {piece_numel(shapes[index], 1) * 4 // _MAX_PADDING for index in wanted}
    if _group_count(wanted, rank) > 1 and len(sizes) < len(wanted):
        raise UnsupportedError(
            folder,
            "sub-groups of several param groups were offloaded to disk, and their sizes do not"
            " tell the swap files apart",
            "save once without offload_optimizer to nvme",
        )
