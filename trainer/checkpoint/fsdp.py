"""FSDP checkpoints in the four forms of Accelerate and PyTorch, under Accelerate's names.

=====  ===========================================  ==============================
full   pytorch_model_fsdp.bin, optimizer.bin        whole tensors
dcp    pytorch_model_fsdp_0/, optimizer_0/          DCP: shards at their offsets
rank   pytorch_model_fsdp_0_rank<r>.bin,            shards by name
       optimizer_0_rank<r>.bin
local  pytorch_model_fsdp_rank<r>.bin,              tensors as they are in memory
       optimizer_0_rank<r>.bin
=====  ===========================================  ==============================

Here only DCP is read, which any number of ranks can do. `any_format` offers the other forms as DCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.optim import Optimizer

from trainer.checkpoint import fsdp_dcp
from trainer.checkpoint.contents import Content, DcpDirectory, Nothing, TorchFile
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.fsdp import FsdpEngine
from trainer.core.fsdp_units import ignore_known_warnings
from trainer.core.optimizer import make_hyperparameters
from trainer.core.ranks import Ranks

NAMES = {
    "full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "dcp": ("pytorch_model_fsdp_0", "optimizer_0"),
    "rank": ("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"),
    "local": ("pytorch_model_fsdp_rank{}.bin", "optimizer_0_rank{}.bin"),
}
State = dict[str, Any]


def collect(engine: FsdpEngine, progress: dict[str, Any]) -> Iterator[Content]:
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


def read(directory: Path, engine: FsdpEngine) -> None:
    """Fill an engine from DCP, which records no progress. Collective.

    Raises:
        CheckpointError: the checkpoint does not fit this run; LayoutError if it has another form.
    """
    model, optimizer, ranks = engine.model, engine.optimizer, engine.ranks
    model_path, optimizer_path = (directory / name for name in NAMES["dcp"])
    with ranks.raise_on_all(fsdp_dcp.READ):
        if not model_path.exists():
            raise LayoutError(f"{directory} has no {model_path.name}: it is not a DCP checkpoint")
        if not optimizer_path.exists():
            raise CheckpointError(
                f"{optimizer_path} is missing", "copy it from where the run was saved"
            )
    with ignore_known_warnings():
        state = _get_model_state(model, "dcp", ranks)
        fsdp_dcp.load({"model": state}, model_path, ranks)
        set_model_state_dict(model, state)
        state = _get_optimizer_state(model, optimizer, "dcp", ranks)
        fsdp_dcp.load({"optimizer": state}, optimizer_path, ranks)
        set_optimizer_state_dict(model, optimizer, state)
    # torch has taken the hyper-parameters of the checkpoint, of which only the lr is wanted.
    for group, own in zip(optimizer.param_groups, engine.groups, strict=True):
        group.update(make_hyperparameters(engine.settings, own.weight_decay, group["lr"]))


# The live state, in the form of a file


def _get_model_state(model: nn.Module, form: str, ranks: Ranks) -> State:
    if form != "local":
        return get_model_state_dict(model, options=_make_options(form, ranks))
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def _get_optimizer_state(model: nn.Module, optimizer: Optimizer, form: str, ranks: Ranks) -> State:
    if form == "local":
        return optimizer.state_dict()
    options = _make_options(form, ranks)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _make_options(form: str, ranks: Ranks) -> StateDictOptions:
    """Return torch's options; with offload, it gathers a full state dict on rank 0 only.

    FSDP 1 fails with offload if the run is on the CPU, whether the machine has a GPU or not.
    """
    full = form == "full"
    return StateDictOptions(full_state_dict=full, cpu_offload=full and ranks.device.type == "cuda")


def _make_content(name: str, form: str, top: str, state: State, ranks: Ranks) -> Content:
    """Return what this rank writes of a state; DCP has it under the key ``top``."""
    if form == "dcp":
        return DcpDirectory(name, {top: state})
    if form == "full" and not ranks.is_first:
        return Nothing()
    return TorchFile(name.format(ranks.rank), state)
