"""Tell the parameters of a training state from its buffers.

FSDP and ZeRO 3 store parameters in shards and buffers whole, and load neither as the other. State
dicts do not distinguish them: an optimizer, the model, or the blocks of the source do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from reshard.core.chunks import find_boxes
from reshard.errors import IncompleteError, UsageError
from reshard.layouts import mesh
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.training.state import Weight, WritableState
from reshard.units import abridge, counted

_LISTED = 4
_PARAMETERS = ("weight", "bias")  # what the parameters of most modules are called
_STATISTIC = ".running_var"
_SAY_MODEL = "pass the model: --model config.json|DIR|module:factory"


def build_is_divided(state: WritableState, model: ModelShapes | None) -> Callable[[Weight], bool]:
    """Return a function that tells parameters, which are cut, from what each rank has whole.

    Buffers are whole, and so are the parameters that the source's run left to no FSDP unit
    (``ignored_params``, ``ignored_modules``).
    """
    owned = {member.fqn for member in state.members}
    owned |= state.manifest.frozen
    all_marked = marks_buffers(state)
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
        if all_marked or weight.fqn in owned or len(find_boxes(weight.value.chunks)) > 1:
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


def mark_buffers(
    state: WritableState, model: ModelShapes | None, why: str, otherwise: str = ""
) -> WritableState:
    """Return the state with every buffer marked.

    What torch's modules call ``weight`` or ``bias`` is a parameter, except in a frozen batch norm
    (torchvision's ``FrozenBatchNorm2d``), which has statistics beside it and no counter.

    Args:
        why: why the output needs to know them.
        otherwise: what else the user can do, after a comma.

    Raises:
        IncompleteError: nothing states what a tensor is.
    """
    owned = {member.fqn for member in state.members} | state.manifest.frozen
    unsure = [weight for weight in state.weights if weight.is_float and weight.fqn not in owned]
    statistics = {w.fqn.rpartition(".")[0] for w in unsure if w.fqn.endswith(_STATISTIC)}
    ranks, all_marked = _count_ranks_of_stage(state), marks_buffers(state)
    by_fsdp = bool(unsure) and not all_marked and _is_sharded_by_fsdp(state)
    buffers, unknown = set[str](), list[str]()
    for weight in unsure:
        module, _, name = weight.fqn.rpartition(".")
        first = model.tied.get(weight.fqn, weight.fqn) if model else weight.fqn
        if model and first in model.buffers:
            buffers.add(weight.fqn)
        elif all_marked or (model and first in model.parameters):
            continue
        elif len(find_boxes(weight.value.chunks)) > 1:
            continue  # FSDP shards parameters alone
        elif by_fsdp and _is_stored_whole(weight, ranks):
            buffers.add(weight.fqn)
        elif name not in _PARAMETERS or module in statistics:
            unknown.append(weight.fqn)
    if unknown:
        raise IncompleteError(
            state.manifest.origin.path,
            f"does not state whether {counted(len(unknown), 'tensor')}"
            f" ({abridge(unknown, _LISTED)}) are parameters or buffers: {why}",
            _SAY_MODEL + otherwise,
        )
    weights = (replace(w, is_buffer=True) if w.fqn in buffers else w for w in state.weights)
    return replace(state, weights=tuple(weights)) if buffers else state


def marks_buffers(state: WritableState) -> bool:
    """Return whether the files or a model told all buffers."""
    manifest = state.manifest
    is_marked = any(weight.is_buffer for weight in state.weights) and manifest.all_buffers_marked
    is_known = manifest.ordered_by_model or manifest.origin.facts.describes_model
    return is_marked or is_known


def _count_ranks_of_stage(state: WritableState) -> int:
    origin = state.manifest.origin
    return origin.world // origin.mesh.get("pp", 1)


def _is_stored_whole(weight: Weight, ranks: int) -> bool:
    # One block in one rank file may be the part of a flat parameter that this rank has, and the
    # only row of a parameter is one block in DCP, too, if FSDP shards it.
    chunks = [chunk for chunk in weight.value.chunks if chunk.box.volume]
    one_box = len({chunk.box for chunk in chunks}) == 1
    is_copied = 1 < len(chunks) >= ranks  # under HYBRID_SHARD, some ranks have copies of a block
    is_one_row = weight.shape[:1] == (1,)
    return one_box and (is_copied or (chunks[0].file.endswith(".distcp") and not is_one_row))


def _is_sharded_by_fsdp(state: WritableState) -> bool:
    # A tensor-parallel run cuts some weights along dim 1, and leaves some parameters whole, unless
    # FSDP shards what is left: then no trained weight is whole.
    if not state.manifest.origin.facts.shards_by_fsdp:
        return False
    placements = state.manifest.placements.values()
    if placements:
        return any(
            mesh.ROLES.get(axis) != "tensor" for placement in placements for axis, _ in placement
        )
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
