"""FSDP checkpoints in the four forms of Accelerate and PyTorch, under Accelerate's names.

=====  ===========================================  ============================================
full   pytorch_model_fsdp.bin, optimizer.bin        whole tensors: any number of ranks
dcp    pytorch_model_fsdp_0/, optimizer_0/          DCP: any number of ranks
rank   pytorch_model_fsdp_0_rank<r>.bin,            shards by name: the same ranks
       optimizer_0_rank<r>.bin
local  pytorch_model_fsdp_rank<r>.bin,              tensors as in memory: the same ranks, units
       optimizer_0_rank<r>.bin                      and generation of FSDP
=====  ===========================================  ============================================

All that is read is compared with the live state first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.checkpoint import fsdp_dcp, fsdp_match
from trainer.checkpoint.contents import Content, DcpDirectory, Nothing, TorchFile
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.fsdp import ShardedEngine
from trainer.core.fsdp_units import ignore_known_warnings
from trainer.core.ranks import Ranks

NAMES = {
    "full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "dcp": ("pytorch_model_fsdp_0", "optimizer_0"),
    "rank": ("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"),
    "local": ("pytorch_model_fsdp_rank{}.bin", "optimizer_0_rank{}.bin"),
}
State = dict[str, Any]
_READ = "read the checkpoint"


def collect(engine: ShardedEngine, progress: dict[str, Any]) -> Iterator[Content]:
    """Yield the model, then the optimizer. The files do not record progress. Collective."""
    del progress
    settings = engine.settings
    sharded = settings.state_dict_type == "sharded"
    form = settings.sharded_files if sharded else settings.state_dict_type
    model, optimizer, ranks = engine.model, engine.optimizer, engine.ranks
    model_name, optimizer_name = NAMES[form]
    with ignore_known_warnings():
        state = _get_model_state(model, form, ranks)
    yield _make_content(model_name, form, "model", state, ranks)
    del state
    with ignore_known_warnings():
        state = _get_optimizer_state(model, optimizer, form, ranks)
    yield _make_content(optimizer_name, form, "optimizer", state, ranks)


def read(directory: Path, engine: ShardedEngine) -> None:
    """Fill an engine from files in any form, which record no progress. Collective.

    Raises:
        CheckpointError: the checkpoint does not fit this run.
    """
    with ignore_known_warnings():
        load(directory, engine.model, engine.optimizer, engine.ranks)
    engine.keep_hyperparameters()  # torch has taken those of the checkpoint


def load(directory: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read model and optimizer from the form that the directory has. Collective.

    Raises:
        CheckpointError: a file is missing or damaged, or the state has another shape.
    """
    with ranks.raise_on_all(_READ):
        form = _detect_form(directory, ranks.world)
    model_path, optimizer_path = (directory / name.format(ranks.rank) for name in NAMES[form])
    try:
        live = _get_model_state(model, _sharded_form(form), ranks)
    except RuntimeError as error:  # FSDP 1 with a mesh
        raise LayoutError(
            f"{directory} has a local state dict, which this run cannot load: {error}"
        ) from error
    load_form = _choose_load_form(model, form)
    state = _read_state(model_path, form, load_form, {"model": live}, ranks)
    if form != "local" or not _is_live(state):
        set_model_state_dict(model, state, options=_make_options(load_form))
    del live, state
    live = _get_optimizer_state(model, optimizer, _sharded_form(form), ranks)
    state = _read_state(optimizer_path, form, load_form, {"optimizer": live}, ranks)
    if form != "local":
        set_optimizer_state_dict(model, optimizer, state, options=_make_options(load_form))
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


# The live state, in the form of a file


def _get_model_state(model: nn.Module, form: str, ranks: Ranks) -> State:
    if form != "local":
        options = _make_options(form, offload=_should_offload(form, ranks))
        return get_model_state_dict(model, options=options)
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def _get_optimizer_state(model: nn.Module, optimizer: Optimizer, form: str, ranks: Ranks) -> State:
    if form == "local":
        return optimizer.state_dict()
    options = _make_options(form, offload=_should_offload(form, ranks))
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _should_offload(form: str, ranks: Ranks) -> bool:
    """Return whether torch moves what it gathers to the CPU, so that it gathers on rank 0 only.

    FSDP 1 fails with it if the run is on the CPU, whether the machine has a GPU or not.
    """
    return form == "full" and ranks.device.type == "cuda"


def _make_options(form: str, *, offload: bool = False) -> StateDictOptions:
    return StateDictOptions(full_state_dict=form == "full", cpu_offload=offload)


def _is_live(state: State) -> bool:
    """Return whether a local state dict has the model's own shards; with NO_SHARD it has copies."""
    return any(isinstance(value, ShardedTensor | DTensor) for value in state.values())


def _sharded_form(form: str) -> str:
    """Return the form in which a rank gets its own shards of what it reads."""
    return "local" if form == "local" else "dcp"


def _choose_load_form(model: nn.Module, form: str) -> str:
    """Return the form in which torch gets what was read.

    FSDP 2 gets shards: torch 2.13 does not cut a whole tensor correctly along two mesh axes.
    """
    whole = isinstance(model, FullyShardedDataParallel)
    return "dcp" if form == "full" and not whole else form


# One file, one file for each rank, or one directory


def _make_content(name: str, form: str, top: str, state: State, ranks: Ranks) -> Content:
    """Return what this rank writes of a state; DCP has it under the key ``top``."""
    if form == "dcp":
        return DcpDirectory(name, {top: state})
    if form == "full" and not ranks.is_first:
        return Nothing()
    return TorchFile(name.format(ranks.rank), state)


def _read_state(path: Path, form: str, load_form: str, state: State, ranks: Ranks) -> State:
    """Return the saved state in the form ``load_form``, checked against the live state.

    Args:
        path: the file or directory.
        form: the form of the checkpoint.
        load_form: the form that ``set_model_state_dict`` or ``set_optimizer_state_dict`` gets.
        state: the live state, under the key ``model`` or ``optimizer``.
        ranks: all ranks of the run.
    """
    (top,) = state
    live: State = state[top]
    if form == "dcp":
        groups = [{**group, "params": [*group["params"]]} for group in live.get("param_groups", [])]
        everyone = ranks.all_gather_objects([*live] if top == "model" else [])
        names = {f"{top}.{name}" for theirs in everyone for name in theirs}
        with ranks.raise_on_all(_READ):
            if ranks.is_first:
                fsdp_dcp.check(state, names, path)
        fsdp_dcp.load(state, path)
        with ranks.raise_on_all(_READ):
            saved_groups = live.get("param_groups", [])
            fsdp_match.check_groups({"param_groups": groups}, saved_groups, path)
        return live

    whole = form == "full"
    everyone = ranks.all_gather_objects(fsdp_match.list_names(live))
    all_names = {name for theirs in everyone for name in theirs}
    with ranks.raise_on_all(_READ):
        saved = fsdp_match.load(path, *(("state", "param_groups") if top == "optimizer" else ()))
        if whole:
            saved = fsdp_match.select_own(live, saved, all_names)
        fsdp_match.check(live, saved, path, whole=whole)
    if load_form == "full":
        return saved
    fsdp_match.fill(live, saved, whole=whole)
    return live


def _detect_form(directory: Path, world: int) -> str:
    """Return the form of the checkpoint in ``directory``, which must have a file of every rank."""
    for form, names in NAMES.items():
        if form in ("full", "dcp"):
            if (directory / names[0]).exists():
                _check_exists(directory / names[1])
                return form
            continue
        if _find_ranks(directory, names[0]):
            for name in names:
                _check_ranks(directory, name, world)
            return form
    raise CheckpointError(
        f"{directory} has no FSDP checkpoint: expected pytorch_model_fsdp.bin, "
        "pytorch_model_fsdp_0/, or a pytorch_model_fsdp file of every rank",
        "give --resume the directory of one checkpoint",
    )


def _find_ranks(directory: Path, name: str) -> list[int]:
    pattern = re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _check_ranks(directory: Path, name: str, world: int) -> None:
    found = _find_ranks(directory, name)
    missing = [rank for rank in range(max([*found, 0]) + 1) if rank not in found]
    if missing:
        _check_exists(directory / name.format(missing[0]))
    if len(found) != world:
        raise LayoutError(
            f"{directory} has {name.format('<r>')} of {len(found)} ranks, and this run has {world}"
            + (f" ({name.format(len(found))} is missing)" if len(found) < world else "")
        )


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing", "copy it from where the run was saved")
