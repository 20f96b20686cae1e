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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.core.manifest import Keyed, Skeleton
from reshard.core.stamps import Stamp
from reshard.errors import UsageError
from reshard.formats.parameter_kinds import build_is_divided
from reshard.formats.request import Request
from reshard.formats.trainers.accelerate import lay_out_accelerate_extras
from reshard.layouts.mesh import MeshGrid, MeshPlacements, find_sharded_dims
from reshard.layouts.partition import Cut
from reshard.layouts.tensor_parallel import TensorPlan, find_cuts
from reshard.state_dict import torch_state_dict
from reshard.state_dict.sections import TRAIN_STATE
from reshard.state_dict.slots import RankFileLayouts, WholeSlots
from reshard.state_dict.torch_state_dict import StateTensor
from reshard.training import schedules
from reshard.training.state import WritableState, refuse_non_elementwise_slots


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
    grid: MeshGrid, plan: TensorPlan | None, weights: Mapping[str, StateTensor]
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
        scheduler = extra.get("scheduler")
        root = {"lr_scheduler": None if schedules.is_deepspeeds(scheduler) else scheduler}
        yield torch_writer.lay_out_object(name, root, stamp=state.stamp(name, rank, world))
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
