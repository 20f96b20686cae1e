"""Find a Megatron checkpoint, and the rank of each of its folders.

    <save>/latest_checkpointed_iteration.txt    "3" or "release"
    <save>/iter_0000003/ or release/
        mp_rank_TT[_PPP][_EEE]/                 torch: model_optim_rng.pt, distrib_optim.pt
        .metadata  *.distcp  metadata.json      torch_dist: DCP; common.pt before core 0.19
        .metadata  *.distcp                     fsdp_dtensor: DCP
    <verl>/global_step_3/actor/                 three directories of torch_dist, see `list_parts`

Source: Megatron-LM core_v0.16.1 ``megatron/training/checkpointing.py`` (get_checkpoint_name,
_get_checkpoint_format), ``core/dist_checkpointing/core.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.location import Location
from reshard.errors import FETCH_MISSING, IncompleteError, StaleError, UnsupportedError, UsageError
from reshard.system.files import MAX_POINTER, SourceFiles, read_small_file
from reshard.units import abridge

if TYPE_CHECKING:
    from reshard.formats.megatron.arguments import Arguments

NAME = "megatron"
TRACKER = "latest_checkpointed_iteration.txt"
MODEL = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"
COMMON = "common.pt"
METADATA = ".metadata"  # DCP's
BACKEND = "metadata.json"
DIST_FOLDER = "dist_ckpt"  # verl's
VERL_PARTS = ("model", "optimizer", "extra")  # folders of verl, each with a DIST_FOLDER
# Folders of mcore_adapter (ROLL 8eb27cc ``mcore_adapter/checkpointing.py``), both of torch_dist.
# Without the first one, the weights are in ``mp_rank_*``.
_ADAPTER_MODEL, _ADAPTER_OPTIMIZER = "dist_model", "dist_optimizer"

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODELS = (MODEL, "model_rng.pt")  # the second until 2023, beside one optimizer file a rank
_ITERATION = re.compile(r"iter_(\d{7,18})")
_LOCAL = re.compile(r"iter_\d{7,18}_\d+_local[\w.]*\.pt")
FSDP_DTENSOR = "fsdp_dtensor"  # a form, see above
_LISTED = 4
_FSDP, _HEAD = b"model.module.", 1 << 16  # begin of a parameter's key, among the first bytes
# Keys of the format in the pickle of .metadata, for a directory that has another name.
_OWN_KEYS = (b"\x8c\x04args\x94", b"\x8c\x12checkpoint_version\x94")
_BLOCK, _MAX_SEARCHED = 1 << 20, 1 << 26


class GridPosition(NamedTuple):
    """The position of one rank's folder in the grid."""

    pp: int
    ep: int
    tp: int

    def name_folder(self, *, pp: int, ep: int) -> str:
        """Return the folder's name in a run with these numbers of stages and of expert ranks."""
        name = f"mp_rank_{self.tp:02d}"
        name += f"_{self.pp:03d}" if pp > 1 else ""
        return name + (f"_{self.ep:03d}" if ep > 1 else "")


def detect(location: Location) -> bool:
    """Return whether a Megatron checkpoint, or a rank's part of one, is directly at a location."""
    if location.chosen:
        folder = location.folder
        is_whole = is_dist(folder) or is_fsdp(folder)
        is_part = _is_rank_folder(folder) or (_is_part(location.chosen) and is_whole)
        return is_part or is_local(location)
    is_recognized = is_dist(location) or is_zarr(location) or is_fsdp(location)
    is_recognized = is_recognized or is_local(location) or _is_rank_folder(location)
    return is_recognized or bool(list_rank_folders(location)) or bool(list_parts(location))


def is_run(location: Location) -> bool:
    """Return whether a location is a run directory of Megatron, which may hold other files."""
    return TRACKER in location.files and any(map(detect, location.folders.values()))


def is_dist(location: Location) -> bool:
    """Return whether a directory has the torch_dist format."""
    # Any DCP directory has .metadata; only Megatron's has one of the others beside it.
    return METADATA in location.files and (BACKEND in location.files or COMMON in location.files)


def is_fsdp(location: Location) -> bool:
    """Return whether a directory has the format of Megatron FSDP, which is plain DCP."""
    files = location.files
    if METADATA not in files or is_dist(location):
        return False
    # Only the names of its parameters and values tell it from DCP of other programs.
    path = files[METADATA]
    size = path.stat().st_size
    with SourceFiles() as pool:
        if _FSDP not in pool.read(str(path), 0, min(size, _HEAD)):
            return False
        is_named = parse_iteration(location.name) is not None
        return is_named or _contains(pool, str(path), size, _OWN_KEYS)


def _contains(pool: SourceFiles, path: str, size: int, words: Sequence[bytes]) -> bool:
    overlap = max(map(len, words)) - 1
    missing = set(words)
    for start in range(0, min(size, _MAX_SEARCHED), _BLOCK):
        block = pool.read(path, start, min(_BLOCK + overlap, size - start))
        missing = {word for word in missing if word not in block}
        if not missing:
            return True
    return False


def list_parts(location: Location) -> dict[str, Location]:
    """Return the torch_dist directories in which verl saves one checkpoint, by part.

    The result is empty if there is no part with weights or an optimizer. mcore_adapter has such a
    directory for the weights.

    Source: verl 0.9.1 ``utils/checkpoint/megatron_checkpoint_manager.py`` (``save_checkpoint``).
    """
    folders = {
        part: location.folders[part].folders.get(DIST_FOLDER)
        for part in VERL_PARTS
        if part in location.folders
    }
    parts = {part: folder for part, folder in folders.items() if folder and is_dist(folder)}
    model = location.folders.get(_ADAPTER_MODEL)
    if model is not None and is_dist(model):
        return {"model": model}
    return {} if parts.keys() <= {"extra"} else parts


def find_unread_optimizer(location: Location) -> Location | None:
    """Return the directory in which mcore_adapter saved the optimizer apart from the weights."""
    above = location.get_parent() if location.name == _ADAPTER_MODEL else location
    return above.folders.get(_ADAPTER_OPTIMIZER)


def parse_iteration(path: str) -> int | None:
    """Return the iteration that the name of a checkpoint's directory states; None without one."""
    match = _ITERATION.fullmatch(path.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def is_zarr(location: Location) -> bool:
    """Return whether a directory has the format before torch_dist, a zarr array for each tensor.

    Source: Megatron-LM core_v0.9.0 ``core/dist_checkpointing/strategies/zarr.py``.
    """
    files = location.files
    if METADATA in files or COMMON not in files or BACKEND not in files:
        return False
    # Only the content tells it from torch_dist without .metadata, which is an interrupted save.
    return b'"zarr"' in read_small_file(files[BACKEND], MAX_POINTER)


def is_local(location: Location) -> bool:
    """Return whether a location has one rank's file of a checkpoint that ranks keep for themselves.

    Source: Megatron-LM core_v0.19.2 with nvidia-resiliency-ext 0.4.1 ``checkpointing/local/
    ckpt_managers/local_manager.py``: ``--non-persistent-ckpt-type local``.
    """
    names = [location.chosen] if location.chosen else location.files
    return any(_LOCAL.fullmatch(name) for name in names)


def _is_part(name: str) -> bool:
    return name in (METADATA, BACKEND, COMMON) or name.endswith(".distcp")


def list_rank_folders(location: Location) -> dict[str, Location]:
    """Return the ranks' folders of the torch format by name."""
    return {name: folder for name, folder in location.folders.items() if _is_rank(name, folder)}


def _is_rank(name: str, folder: Location) -> bool:
    # A folder that lacks its model is recognized, so that reading can report what is missing.
    expected = (*_MODELS, OPTIMIZER)
    return _RANK.fullmatch(name) is not None and any(file in folder.files for file in expected)


def _is_rank_folder(location: Location) -> bool:
    return _is_rank(location.name, location)


def find_checkpoint(location: Location) -> Location:
    """Return the directory of a checkpoint from it, one of its files or its only rank's folder.

    Raises:
        UsageError: the location is one rank's folder of several, or a file in it.
    """
    folder = location.folder
    if not _is_rank_folder(folder):
        return folder
    above = folder.get_parent()
    count = len(list_rank_folders(above))
    if count > 1:
        raise UsageError(
            location,
            f"belongs to one of {count} model-parallel ranks",
            f"pass the directory above: {above}",
        )
    return above


def find_model_file(folder: Location) -> Path:
    """Return the file of a rank's weights.

    Raises:
        IncompleteError: the file is missing.
    """
    path = folder.find_first(_MODELS)
    if path is None:
        raise IncompleteError(folder, f"{MODEL} is missing", "copy it here from the rank's disk")
    return path


def find_ranks(location: Location, args: Arguments) -> dict[GridPosition, Location]:
    """Return the folder of every rank that saves, in the order of the grid.

    One rank of each tensor-, pipeline- and expert-parallel position saves (save_checkpoint). The
    second number of ``mp_rank_00_001`` is a stage or an expert rank: only the arguments tell which.

    Raises:
        IncompleteError: a folder is missing, or Megatron itself did not save every tensor rank.
        StaleError: there are folders of another grid.
        UnsupportedError: Megatron itself did not save every part of the experts.
    """
    if not covers_experts(args):
        raise UnsupportedError(
            location,
            f"lacks a part of the experts: {args.etp} ranks share each expert (expert tensor"
            f" parallel size), and {args.tp} each layer, so that Megatron saves several ranks to"
            " one file, over each other",
            "save with --ckpt-format torch_dist",
        )
    folders = list_rank_folders(location)
    known = _name_positions(args, lcm(args.tp, args.etp * args.ep))
    expected = _name_positions(args, _count_savers(args))
    unsaved = expected.keys() - _name_positions(args, args.etp * args.ep).keys()
    lost = [name for name in expected if name in unsaved and not _has_model(folders.get(name))]
    if lost:
        raise IncompleteError(
            location,
            f"lacks the weights of {abridge(lost, _LISTED)}: of the {args.tp} ranks that share each"
            f" layer, Megatron-core before 0.18 saves only {args.etp * args.ep}, which have all"
            " experts (expert tensor x expert parallel size)",
            "save with --ckpt-format torch_dist, as no file has these weights; if a later version"
            " saved them, copy the folders here",
        )
    grid = ", ".join(
        f"{axis} {size}" for axis, size in (("tp", args.tp), ("pp", args.pp), ("ep", args.ep))
    )
    missing = [name for name in expected if name not in folders]
    if missing:
        raise IncompleteError(
            location,
            f"was saved with {grid}: expected {len(expected)} folders mp_rank_*;"
            f" {abridge(missing, _LISTED)} {'is' if len(missing) == 1 else 'are'} missing",
            FETCH_MISSING,
        )
    extra = [name for name in folders if name not in known]
    if extra:
        raise StaleError(
            location,
            f"was saved with {grid}, but also contains {abridge(extra, _LISTED)}, left over from"
            " another run",
            "if the other folders are the run that you want, move these away",
        )
    return {
        rank: folders[name]
        for name, rank in sorted(known.items(), key=lambda item: item[1])
        if name in folders
    }


def fits_folders(location: Location, args: Arguments) -> bool:
    """Return whether a checkpoint has the folders of all ranks that save, and no others."""
    folders = list_rank_folders(location).keys()
    known = _name_positions(args, lcm(args.tp, args.etp * args.ep)).keys()
    return _name_positions(args, _count_savers(args)).keys() <= folders <= known


def _has_model(folder: Location | None) -> bool:
    return folder is not None and folder.find_first(_MODELS) is not None


def _name_positions(args: Arguments, ranks: int) -> dict[str, GridPosition]:
    return {
        GridPosition(pp, ep, tp).name_folder(pp=args.pp, ep=args.ep): GridPosition(pp, ep, tp)
        for pp in range(args.pp)
        for tp, ep in _list_positions(args, ranks)
    }


def covers_experts(args: Arguments) -> bool:
    """Return whether the ranks of `list_saving_ranks` have every part of the experts.

    Where more ranks share an expert than share a layer, several of them are one (tensor, expert)
    rank. In the torch format they write one file, over each other.
    """
    parts = {(args.get_expert_tensor_rank(tp, ep), ep) for tp, ep in list_saving_ranks(args)}
    return not args.experts or len(parts) == args.etp * args.ep


def list_saving_ranks(args: Arguments) -> list[tuple[int, int]]:
    """Return the (tensor, expert) ranks of a pipeline stage whose parts make a whole model."""
    return _list_positions(args, _count_savers(args))


def _count_savers(args: Arguments) -> int:
    # Megatron-LM before core_v0.18.0 saves only the ranks with the first copy of experts
    # (save_checkpoint), and needs the folders of all ranks to load.
    return max(args.tp, args.etp * args.ep)


def _list_positions(args: Arguments, ranks: int) -> list[tuple[int, int]]:
    # Dense layers are assigned to ranks as tp-cp-dp, experts as etp-ep-edp
    # (``core/parallel_state.py``).
    found = {(r % args.tp, r // args.etp % args.ep) for r in range(ranks)}
    return sorted(found, key=lambda position: (position[1], position[0]))
