"""Lay out FSDP's files of one training state: one file for each rank, or whole files.

    lay_out_fsdp2        DTensors: ``model.state_dict()`` and an optimizer's, of each rank; FSDP 1's
                         SHARDED_STATE_DICT with a device mesh is the same, the optimizer by fqn
    lay_out_fsdp1_full   FULL_STATE_DICT of FSDP 1: whole tensors, the optimizer by fqn

`flat_files` lays out FSDP 1's flat parameters.

Sources: torch 2.13 ``distributed/fsdp/_state_dict_utils.py``, ``_optim_utils.py``; Accelerate 1.15
``utils/fsdp_utils.py`` and ``utils/constants.py``; verl 0.9
``utils/checkpoint/fsdp_checkpoint_manager.py``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.core.chunks import find_boxes
from reshard.core.manifest import Keyed, Skeleton
from reshard.core.stamps import Stamp
from reshard.errors import IncompleteError, UsageError
from reshard.formats.request import Request
from reshard.formats.trainers.accelerate import lay_out_accelerate_extras
from reshard.layouts import mesh
from reshard.layouts.mesh import MeshGrid, MeshPlacements, find_sharded_dims
from reshard.layouts.partition import Cut
from reshard.layouts.tensor_parallel import TensorPlan, find_cuts
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.state_dict.sections import TRAIN_STATE
from reshard.state_dict.slots import RankFileLayouts, WholeSlots
from reshard.state_dict.torch_state_dict import Value
from reshard.training.state import Weight, WritableState, refuse_non_elementwise_slots

_SAY_MODEL = "pass the model: --model config.json|DIR|module:factory"


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names of each rank's files, with ``{rank}`` and ``{world}``.

    Args:
        optimizer: equal to ``model`` if both are in one file, under two keys.
        extra_state: a file of each rank for the scheduler; empty for none.
        train_state: a file of rank 0 for everything else; empty for none.
        about: a file that states the number of ranks; empty for none.
        accelerate: whether Accelerate reads them, which needs further files.
        keyed: how the optimizer names its parameters.
        meshes: the axis names of each mesh that the reader accepts, the usual one first; empty if
            it accepts any.
    """

    model: str
    optimizer: str
    keyed: Keyed = "index"
    extra_state: str = ""
    train_state: str = ""
    about: str = ""
    meshes: tuple[tuple[str, ...], ...] = ()
    accelerate: bool = False

    def format_pair(self, rank: int, ranks: int) -> tuple[str, str]:
        """Return the names of a rank's two files."""
        model, optimizer = (
            name.format(rank=rank, world=ranks) for name in (self.model, self.optimizer)
        )
        return model, optimizer


PAIR = FileNames("model_rank{rank}.pt", "optim_rank{rank}.pt", train_state=f"{TRAIN_STATE}.pt")
VERL = FileNames(
    "model_world_size_{world}_rank_{rank}.pt",
    "optim_world_size_{world}_rank_{rank}.pt",
    extra_state="extra_state_world_size_{world}_rank_{rank}.pt",
    about="fsdp_config.json",
    meshes=(("fsdp",), ("ddp", "fsdp")),  # create_device_mesh
)
ACCELERATE = FileNames(  # save_fsdp_model and save_fsdp_optimizer with use_dcp=False
    "pytorch_model_fsdp_0_rank{rank}.bin",
    "optimizer_0_rank{rank}.bin",
    keyed="fqn",
    accelerate=True,
)
LOCAL = FileNames(  # the same functions under LOCAL_STATE_DICT
    "pytorch_model_fsdp_rank{rank}.bin",
    "optimizer_0_rank{rank}.bin",
    accelerate=True,
)
TRAINER_RANKS = replace(ACCELERATE, accelerate=False)  # our trainer needs no further files
TRAINER_LOCAL = replace(LOCAL, accelerate=False)
_KEYS = ("model", "optimizer")
# Formats whose parameters may be sharded by FSDP.
_SHARDED = ("dcp", "fsdp", "torchtitan", "verl", "accelerate", "hf-trainer")


def lay_out_fsdp2(
    state: WritableState,
    request: Request,
    grid: MeshGrid,
    *,
    naming: FileNames = PAIR,
    whole_weights: bool = False,
) -> Skeleton:
    """Lay out one file of DTensors for each rank, as ``fully_shard`` builds them.

    Args:
        grid: the device mesh of the new run, with its axis names and device type.
        whole_weights: whether each rank has whole weights but shards of the optimizer's state, as
            under FSDP 1's NO_SHARD with ``use_orig_params=False``.
    """
    model, weights_only = request.model, request.weights_only
    values = torch_state_dict.build_weights(
        state, dtype=request.dtype, divided=build_is_divided(state, model)
    )
    uncut = frozenset(value.owner for value in values.values() if not value.divided)
    shapes = {weight.fqn: weight.shape for weight in state.weights}
    dims = find_sharded_dims(state.manifest.placements, shapes, grid.size("shard"))
    placements = MeshPlacements(grid, find_tensor_cuts(grid, request.tensor, values), uncut, dims)
    moments = None if weights_only else torch_state_dict.build_optimizer(state, naming.keyed, model)
    if moments is not None:
        _refuse_factored(state)

    weights: OrderedDict[str, Any] = OrderedDict(values)
    if whole_weights:
        whole = WholeSlots()
        weights = OrderedDict((name, whole(value)) for name, value in values.items())
    pairs = [naming.format_pair(rank, grid.world) for rank in range(grid.world)]

    def stamp(name: str, rank: int) -> Stamp | None:
        return state.stamp(name, rank, grid.world)

    parts = [
        RankFileLayouts(root, placements, names, stamp).lay_out()
        for root, names in zip(
            assign_files(pairs[0], weights, moments).values(),
            zip(*pairs, strict=True),
            strict=False,
        )
    ]
    for rank in range(grid.world):
        parts += lay_out_extras(state, request, naming, rank, version=2)
    if naming.accelerate and not weights_only:
        parts += lay_out_accelerate_extras(state, grid.world)
    return skeletons.join(parts)


def find_tensor_cuts(
    grid: MeshGrid, plan: TensorPlan | None, weights: Mapping[str, Value]
) -> dict[str, Cut | None]:
    """Return how the tensor-parallel axis, if any, cuts each parameter that it touches.

    Args:
        weights: as from `torch_state_dict.build_weights`; all names of a tensor have one value.

    Raises:
        UsageError: there is no plan.
    """
    if "tensor" not in grid.roles:
        return {}
    if plan is None:
        raise UsageError(
            f"a mesh of {grid}",
            "no file states how tensor parallelism cuts the parameters",
            "pass --tp-plan FILE, or the model: --model config.json|DIR|module:factory",
        )
    names: dict[str, list[str]] = {}
    for name, value in weights.items():
        if value.divided:
            names.setdefault(value.owner, []).append(name)
    return find_cuts(plan, [(owned, weights[owned[0]].shape) for owned in names.values()])


def assign_files(names: Sequence[str], weights: Any, moments: Any) -> dict[str, Any]:
    """Return the content of each file."""
    model, optimizer = names
    weights, moments = Canonicalizer().convert((weights, moments))
    if model == optimizer:
        both = zip(_KEYS, (weights, moments), strict=True)
        return {model: {key: value for key, value in both if value is not None}}
    return {model: weights} if moments is None else {model: weights, optimizer: moments}


def lay_out_extras(
    state: WritableState, request: Request, naming: FileNames, rank: int, *, version: int
) -> Iterator[Skeleton]:
    """Yield the files beside weights and optimizer."""
    world, weights_only = request.world_size, request.weights_only
    extra = {} if weights_only else torch_state_dict.collect_extra_state(state.manifest.train)
    if naming.train_state and extra and rank == 0:
        stamp = state.stamp(naming.train_state, rank, world)
        yield torch_writer.lay_out_object(naming.train_state, extra, stamp=stamp)
    if naming.extra_state and not weights_only:
        name = naming.extra_state.format(rank=rank, world=world)
        scheduler = {"lr_scheduler": extra.get("scheduler")}
        yield torch_writer.lay_out_object(name, scheduler, stamp=state.stamp(name, rank, world))
    if naming.about and rank == 0:
        text = json.dumps({"FSDP_version": version, "world_size": world}, indent=4)
        yield skeletons.lay_out_bytes(naming.about, text.encode())


def _refuse_factored(state: WritableState) -> None:
    whole = {slot for m in state.members for slot, entry in m.slots.items() if not entry.shape}
    refuse_non_elementwise_slots(
        state,
        "how FSDP would store such a state in rank files is not known",
        "write DCP instead, or pass --weights-only",
        placed=whole,
    )


def build_is_divided(state: WritableState, model: ModelShapes | None) -> Callable[[Weight], bool]:
    """Return a function that tells parameters, which are cut, from what each rank has whole.

    Buffers are whole, and so are the parameters that the source's run left to no FSDP unit
    (``ignored_params``, ``ignored_modules``).
    """
    owned = {member.fqn for member in state.members}
    owned |= state.manifest.frozen
    # DeepSpeed's files list their buffers.
    marks_buffers = any(weight.is_buffer for weight in state.weights)
    marks_buffers = marks_buffers and state.manifest.all_buffers_marked
    marks_buffers = marks_buffers or state.manifest.origin.format.startswith("deepspeed")
    # Computed once, and only for the few sources that leave the question open.
    by_fsdp = cache(lambda: _is_sharded_by_fsdp(state))
    ranks = _count_ranks_of_stage(state)

    def divided(weight: Weight) -> bool:
        if not weight.shape or weight.is_buffer:
            return False
        # As a parameter of an FSDP unit, several ranks would have blocks of it.
        is_dtensor = weight.fqn in state.manifest.placements
        if not is_dtensor and _is_stored_whole(weight, ranks) and by_fsdp():
            return False
        if model is not None:
            return _is_parameter(model, weight.fqn)
        # FSDP shards parameters alone, so a weight that is stored in several blocks is a parameter.
        if marks_buffers or weight.fqn in owned or len(find_boxes(weight.value.chunks)) > 1:
            return True
        if not weight.dtype.can_train:
            return False
        if state.groups:
            raise IncompleteError(
                state.manifest.origin.path,
                f"no file states whether {weight.fqn!r} is a parameter or a buffer: no optimizer"
                " has state for it, and ranks store parameters in shards but buffers whole",
                _SAY_MODEL,
            )
        return True

    return divided


def _count_ranks_of_stage(state: WritableState) -> int:
    origin = state.manifest.origin
    return origin.world // origin.mesh.get("pp", 1)


def _is_stored_whole(weight: Weight, ranks: int) -> bool:
    """Return whether rank files have a copy on each of the ranks, or DCP has one block.

    One block in one rank file may be the part of a flat parameter that this rank has, and the only
    row of a parameter is one block in DCP, too, if FSDP shards it.
    """
    chunks = [chunk for chunk in weight.value.chunks if chunk.box.volume]
    one_box = len({chunk.box for chunk in chunks}) == 1
    is_copied = 1 < len(chunks) >= ranks  # under HYBRID_SHARD, some ranks have copies of a block
    is_one_row = weight.shape[:1] == (1,)
    return one_box and (is_copied or (chunks[0].file.endswith(".distcp") and not is_one_row))


def _is_sharded_by_fsdp(state: WritableState) -> bool:
    """Return whether the source's ranks stored weights in flat parameters, or in shards of rows.

    A tensor-parallel run cuts some weights along dim 1, and leaves some parameters whole, unless
    FSDP shards what is left: then no trained weight is whole.
    """
    if state.manifest.origin.format not in _SHARDED:
        return False
    placements = state.manifest.placements.values()
    if placements:
        return any(mesh.ROLES.get(axis) != "tensor" for each in placements for axis, _ in each)
    if torch_state_dict.has_flat_storage(state.manifest):
        ranks = _count_ranks_of_stage(state)  # under NO_SHARD, each has every weight
        return not all(_is_stored_whole(weight, ranks) for weight in state.weights)
    cut = [
        (weight, boxes)
        for weight in state.weights
        if len(boxes := find_boxes(weight.value.chunks)) > 1
    ]
    by_rows = all(box.shape[1:] == weight.shape[1:] for weight, boxes in cut for box in boxes)
    names = {weight.fqn for weight, _ in cut}
    trained = (member.weight for member in state.members)
    every = all(weight.fqn in names for weight in trained if weight.shape and weight.shape[0] > 1)
    return bool(cut) and (by_rows or (every and bool(state.groups)))


def _is_parameter(model: ModelShapes, fqn: str) -> bool:
    first = model.tied.get(fqn, fqn)
    if first not in model.parameters and first not in model.buffers:
        raise UsageError(model.source, f"has no {fqn!r}, but the checkpoint has it")
    return first in model.parameters


def lay_out_fsdp1_full(
    state: WritableState,
    request: Request,
    *,
    names: tuple[str, str] = ("pytorch_model_fsdp.bin", "optimizer.bin"),
    rank: int = 0,
    accelerate: bool = False,
) -> Skeleton:
    """Lay out FSDP 1's FULL_STATE_DICT, named as by Accelerate: whole tensors, all by fqn.

    Args:
        rank: the rank that the files' stamps name as the one that saved them.
        accelerate: whether to add the files that Accelerate needs beside them.
    """
    weights_only, ranks = request.weights_only, request.world_size
    weights = OrderedDict(torch_state_dict.build_weights(state, dtype=request.dtype))
    moments = None if weights_only else torch_state_dict.build_optimizer(state, "fqn")
    files = assign_files(names, weights, moments)
    laid_out = [
        torch_writer.lay_out_object(
            name, root, slot_of=WholeSlots(), stamp=state.stamp(name, rank, ranks)
        )
        for name, root in files.items()
    ]
    if accelerate and not weights_only:
        laid_out += lay_out_accelerate_extras(state, ranks)
    return skeletons.join(laid_out)
