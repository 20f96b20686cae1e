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
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.containers.torch_objects import Tensor
from reshard.core import dtypes
from reshard.core.location import Location
from reshard.core.manifest import MASTER
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed.stage3 import Swapped, count_piece_elements
from reshard.formats.deepspeed.states import FlatPiece, OptimizerStates, Shapes
from reshard.system.files import get_size

_WEIGHTS = re.compile(r"(\d+)_(\d+)\.tensor\.swp")
_ALIGNMENT = 1024  # bytes; every file is padded to a multiple of it times the aio parallelism
_MAX_PADDING = 64 * _ALIGNMENT


def find_swap_files(
    location: Location, shapes: Shapes, ranks: Sequence[OptimizerStates]
) -> Swapped:
    """Return every piece of the optimizer's tensors that is in a swap file."""
    pieces: dict[tuple[int, int, str], FlatPiece] = {}
    for rank in ranks:
        groups = rank.root.get("fp32_flat_groups") or []
        offloaded = [
            index
            for index, group in enumerate(groups)
            if isinstance(group, Tensor) and group.numel == 0 and index < len(shapes)
        ]
        if offloaded:
            folder = _find_folder(location, rank.rank)
            for index, kind, piece in _list_pieces(folder, offloaded, shapes, rank, len(ranks)):
                pieces[rank.rank, index, kind] = piece
    return pieces


def _find_folder(location: Location, rank: int) -> Path:
    """Return the directory of a rank's swap files, which may be missing."""
    name = f"rank{rank:02d}"
    offloaded = location.folders.get("offloaded_tensors")
    folder = offloaded.folders.get(name) if offloaded else None
    return folder.path if folder else location.path / "offloaded_tensors" / name


def _list_pieces(
    folder: Path, offloaded: list[int], shapes: Shapes, rank: OptimizerStates, ranks: int
) -> Iterator[tuple[int, str, FlatPiece]]:
    """Yield (sub-group, kind, piece) for each swap file of a rank."""
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
            yield index, kind, FlatPiece(str(path), 0, numel, dtypes.FLOAT32)


def _sort_by_size(folder: Path, ids: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ids in the order of the sizes of their files.

    Ids rise along one param group, but not from one group to the next. Padding does not change the
    order of sizes, so different sizes show which file belongs to which sub-group.
    """
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
    """Return the number of param groups to which the sub-groups belong."""
    owner = {
        index: number
        for number, group in enumerate(rank.optimizer.get("param_groups", []))
        for index in group.get("params", [])
    }
    return len({owner.get(index) for index in offloaded})
