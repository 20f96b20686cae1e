"""FSDP checkpoints: the four forms that Accelerate and PyTorch write, under Accelerate's names.

=====  ===========================================  ============================================
full   pytorch_model_fsdp.bin, optimizer.bin        whole tensors: any number of ranks
dcp    pytorch_model_fsdp_0/, optimizer_0/          DCP: any number of ranks
rank   pytorch_model_fsdp_0_rank<r>.bin,            shards by name: the same ranks
       optimizer_0_rank<r>.bin
local  pytorch_model_fsdp_rank<r>.bin,              what lies in memory: the same ranks, units
       optimizer_0_rank<r>.bin                      and generation of FSDP
=====  ===========================================  ============================================

Where a pipeline gives ranks different layers, ``full`` has no writer, and the optimizer's DCP has
its hyper-parameters under each parameter's name (``flatten_optimizer_state_dict``, as torchtitan
saves it): a list of groups would be that of one stage. Either is read, into any stages.

Whatever is read is compared with the live state first: a checkpoint of another shape is an error by
name, not a model that goes on from something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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

from trainer.checkpoint import files, fsdp_dcp, fsdp_match
from trainer.errors import CheckpointError
from trainer.ranks import Ranks

NAMES = {
    "full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "dcp": ("pytorch_model_fsdp_0", "optimizer_0"),
    "rank": ("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"),
    "local": ("pytorch_model_fsdp_rank{}.bin", "optimizer_0_rank{}.bin"),
}
State = dict[str, Any]
Result = TypeVar("Result")


def save(directory: Path, form: str, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Write the model, then the optimizer. Collective."""
    model_name, optimizer_name = NAMES[form]
    _write(directory / model_name, form, {"model": _model(model, form, ranks)}, ranks)
    flat = form == "dcp" and _staged(model, ranks)
    state = _optimizer(model, optimizer, form, ranks, flat=flat)
    _write(directory / optimizer_name, form, {"optimizer": state}, ranks)


def load(directory: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read model and optimizer from whichever form lies there. Collective.

    Raises:
        CheckpointError: a file is missing or damaged, or the state is of another shape.
    """
    form = _agreed(ranks, lambda: _found(directory, ranks.world))
    model_path, optimizer_path = (directory / name.format(ranks.rank) for name in NAMES[form])
    try:
        live = _model(model, _cut(form), ranks)
    except RuntimeError as error:  # FSDP 1 with a mesh
        raise CheckpointError(
            f"{directory} is a local state dict, which this run cannot take: {error}",
            "resume with --state-dict-type local",
        ) from error
    taken = _taken(model, form)
    state = _read(model_path, form, taken, {"model": live}, ranks)
    if form != "local" or not _is_live(state):
        set_model_state_dict(model, state, options=_options(taken))
    del live, state
    flat = form == "dcp" and _agreed(ranks, lambda: fsdp_dcp.is_flat(optimizer_path))
    live = _optimizer(model, optimizer, _cut(form), ranks, flat=flat)
    state = _read(optimizer_path, form, taken, {"optimizer": live}, ranks)
    if form != "local":
        set_optimizer_state_dict(model, optimizer, state, options=_options(taken, flat=flat))
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


# The state, in the form that a file has


def _model(model: nn.Module, form: str, ranks: Ranks) -> State:
    if form != "local":
        return get_model_state_dict(model, options=_options(form, offload=_offload(form, ranks)))
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def _optimizer(
    model: nn.Module, optimizer: Optimizer, form: str, ranks: Ranks, *, flat: bool = False
) -> State:
    if form == "local":
        return optimizer.state_dict()
    options = _options(form, offload=_offload(form, ranks), flat=flat)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _offload(form: str, ranks: Ranks) -> bool:
    """Whether torch moves what it gathers to the CPU, which lets it gather on rank 0 only.

    FSDP 1 fails on it where the run is on the CPU, whether the machine has a GPU or not.
    """
    return form == "full" and ranks.device.type == "cuda"


def _options(form: str, *, offload: bool = False, flat: bool = False) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=form == "full", cpu_offload=offload, flatten_optimizer_state_dict=flat
    )


def _staged(model: nn.Module, ranks: Ranks) -> bool:
    """Whether ranks have different layers."""
    names = [name for name, _ in model.named_parameters()]
    return any(other != names for other in ranks.gather(names))


def _is_live(state: State) -> bool:
    """Shards of a local state dict are the model's own; whole tensors (NO_SHARD) are copies."""
    return any(isinstance(value, ShardedTensor | DTensor) for value in state.values())


def _cut(form: str) -> str:
    """The form in which a rank takes what it reads: its own shards."""
    return "local" if form == "local" else "dcp"


def _taken(model: nn.Module, form: str) -> str:
    """The form in which torch is given what was read.

    FSDP 2 takes shards: torch does not cut whole tensors as it cuts what is cut twice (2.13).
    """
    whole = isinstance(model, FullyShardedDataParallel)
    return "dcp" if form == "full" and not whole else form


# One file, or one a rank, or one directory


def _write(path: Path, form: str, state: State, ranks: Ranks) -> None:
    if form == "dcp":
        fsdp_dcp.save(state, path)
        return
    mine = path.with_name(path.name.format(ranks.rank))
    with ranks.together(f"write {mine}"):
        if form != "full" or ranks.first:
            (content,) = state.values()
            files.save(content, mine)


def _read(path: Path, form: str, taken: str, state: State, ranks: Ranks) -> State:
    """The saved state, in the form ``taken`` that ``set_model_state_dict`` and its kind take.

    Args:
        state: what is live, under ``model`` or ``optimizer``.
    """
    (top,) = state
    live: State = state[top]
    if form == "dcp":
        groups = [{**group, "params": [*group["params"]]} for group in live.get("param_groups", [])]
        everyone = ranks.gather([*live] if top == "model" else [])
        names = {f"{top}.{name}" for theirs in everyone for name in theirs}
        _agreed(ranks, lambda: fsdp_dcp.check(state, names, path) if ranks.first else None)
        fsdp_dcp.load(state, path)
        saved = live.get("param_groups", [])
        _agreed(ranks, lambda: fsdp_match.check_groups({"param_groups": groups}, saved, path))
        return live

    whole = form == "full"
    others = {name for theirs in ranks.gather(fsdp_match.names(live)) for name in theirs}

    def checked() -> State:
        saved = fsdp_match.load(path)
        if whole:
            saved = fsdp_match.part(live, saved, others)
        remedy = "resume with the run's own model" if whole else _remedy(path.parent, ranks.world)
        fsdp_match.check(live, saved, path, remedy, whole=whole)
        return saved

    saved = _agreed(ranks, checked)
    if taken == "full":
        return saved
    fsdp_match.fill(live, saved, whole=whole)
    return live


def _found(directory: Path, world: int) -> str:
    """The form that lies in ``directory``, with a file for every rank."""
    for form, names in NAMES.items():
        if form in ("full", "dcp"):
            if (directory / names[0]).exists():
                _check_exists(directory / names[1])
                return form
            continue
        if _ranks_of(directory, names[0]):
            for name in names:
                _check_ranks(directory, name, world)
            return form
    raise CheckpointError(
        f"{directory} has no FSDP checkpoint: expected pytorch_model_fsdp.bin, "
        "pytorch_model_fsdp_0/ or a pytorch_model_fsdp file of every rank",
        "give the directory of one checkpoint",
    )


def _ranks_of(directory: Path, name: str) -> list[int]:
    pattern = re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _check_ranks(directory: Path, name: str, world: int) -> None:
    found = _ranks_of(directory, name)
    missing = [rank for rank in range(max([*found, 0]) + 1) if rank not in found]
    if missing:
        _check_exists(directory / name.format(missing[0]))
    if len(found) != world:
        raise CheckpointError(
            f"{directory} has {name.format('<r>')} of {len(found)} ranks, this run has {world}"
            + (f" ({name.format(len(found))} is missing)" if len(found) < world else ""),
            _remedy(directory, world),
        )


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing", "copy it from where the run was saved")


def _remedy(directory: Path, world: int) -> str:
    return (
        "resume with the ranks and the sharding that wrote it, or change it to yours: "
        f"reshard split {directory} OUT --world-size {world}"
    )


def _agreed(ranks: Ranks, read: Callable[[], Result]) -> Result:
    """Fail on every rank when reading fails on one, instead of leaving the others waiting.

    Raises:
        CheckpointError: the first rank's.
    """
    problem, result = None, None
    try:
        result = read()
    except CheckpointError as error:
        problem = (error.problem, error.remedy)
    problems = [each for each in ranks.gather(problem) if each]
    if problems:
        raise CheckpointError(*problems[0])
    return result  # type: ignore[return-value]
