"""The targets: what a training state can be written as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from reshard.dtypes import DType
from reshard.errors import IncompleteError, UsageError
from reshard.formats.dcp import target as dcp
from reshard.formats.deepspeed import target as deepspeed
from reshard.formats.state_dict import flat_target, written
from reshard.formats.state_dict import target as state_dict
from reshard.formats.state_dict.mesh import Grid
from reshard.formats.training import Training
from reshard.manifest import Skeleton
from reshard.model import ModelShapes
from reshard.tensor_parallel import Plan

StateDictType = Literal["full", "local", "sharded"]
STATE_DICT_TYPES = get_args(StateDictType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, with nothing left open but what a target decides."""

    world_size: int
    zero_stage: int = 2
    dtype: DType | None = None  # of the module's parameters; None: as trained
    weights_only: bool = False
    state_dict_type: StateDictType = "sharded"
    model: ModelShapes | None = None
    device: str = "cuda"  # of the mesh that DTensors are saved on, which must be the model's
    grid: Grid | None = None  # that mesh, of world_size ranks; None: one axis
    tensor: Plan | None = None  # what a tensor-parallel axis of it does

    @property
    def data_parallel(self) -> int:
        """How many ranks see different data."""
        return self.world_size // (self.grid.size("tensor") if self.grid else 1)


@dataclass(frozen=True, slots=True)
class Target:
    """One layout.

    Args:
        lay_out: the files.
        notes: what was derived or is dropped.
        has_mesh: whether its files are of one device mesh.
    """

    name: str
    what: str
    lay_out: Callable[[Training, Request], Skeleton]
    notes: Callable[[Training, Request], tuple[str, ...]]
    has_mesh: bool = False


def _deepspeed(state: Training, asked: Request) -> Skeleton:
    if not state.manifest.ordered:
        raise IncompleteError(
            state.manifest.origin.path,
            "DeepSpeed knows parameters by their place in the model, and these stand in the order"
            " of FSDP's units",
            "say which model it is: --model config.json|DIR|module:factory",
        )
    return deepspeed.lay_out(
        state, world_size=asked.world_size, stage=asked.zero_stage, precision=asked.dtype
    )


def _deepspeed_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return deepspeed.notes(
        state, world_size=asked.world_size, stage=asked.zero_stage, precision=asked.dtype
    )


def _dcp(state: Training, asked: Request) -> Skeleton:
    return dcp.lay_out(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _accelerate(state: Training, asked: Request) -> Skeleton:
    return dcp.accelerate(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _ranks(naming: state_dict.Naming) -> Callable[[Training, Request], Skeleton]:
    def lay_out(state: Training, asked: Request) -> Skeleton:
        return state_dict.fsdp2(
            state,
            _grid(naming, asked),
            naming=naming,
            tensor=asked.tensor,
            weights_only=asked.weights_only,
            model=asked.model,
            dtype=asked.dtype,
        )

    return lay_out


def _grid(naming: state_dict.Naming, asked: Request) -> Grid:
    """The mesh that was asked for, else the usual one of a single axis.

    Raises:
        UsageError: nothing that reads such files makes that mesh.
    """
    if asked.grid is None:
        usual = naming.meshes[0] if naming.meshes else None
        return Grid((asked.world_size,), usual, asked.device)
    if naming.meshes and asked.grid.names not in naming.meshes:
        known = (",".join(f"{name}=N" for name in names) for names in naming.meshes)
        raise UsageError(
            f"--mesh {asked.grid}",
            "is none under which these files are read",
            f"give {' or '.join(known)}, or write --to fsdp2",
        )
    return asked.grid


def _fsdp(state: Training, asked: Request) -> Skeleton:
    if asked.state_dict_type == "full":
        return state_dict.fsdp1_full(
            state, ranks=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
        )
    if asked.state_dict_type == "sharded":
        return _accelerate(state, asked)
    if asked.model is None or not asked.model.units:
        raise UsageError(
            "--state-dict-type local",
            "writes flat parameters, and nothing says which parameters lie in which",
            "say which model is wrapped and how: --model config.json|DIR|module:factory"
            " --wrap LlamaDecoderLayer|size=N|none",
        )
    return flat_target.fsdp1_local(
        state,
        asked.model,
        ranks=asked.world_size,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _plain(state: Training, asked: Request) -> Skeleton:
    return state_dict.plain(
        state, model=asked.model, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _dropped(state: Training, _asked: Request) -> tuple[str, ...]:
    return tuple(f"not carried: {name}" for name in written.dropped(state.manifest.train))


def _rank_notes(state: Training, asked: Request) -> tuple[str, ...]:
    """What a tensor-parallel axis does, and what is dropped."""
    dropped = _dropped(state, asked)
    if asked.tensor is None or asked.grid is None:
        return dropped
    divided = state_dict.is_divided(state, asked.model)
    weights = written.weights(state, divided=divided)
    touched = state_dict.tensor_cuts(asked.grid, asked.tensor, weights)
    parameters = {value.owner for value in weights.values() if value.divided}
    cut = sum(each is not None for each in touched.values())
    counts = f"{cut} of {len(parameters)} parameters cut, {len(touched) - cut} replicated"
    apart = f"{len(parameters) - len(touched)} named by no pattern: whole on each of its ranks"
    return (f"tensor parallel by the plan of {asked.tensor.source}: {counts}, {apart}", *dropped)


TARGETS = {
    target.name: target
    for target in (
        Target("deepspeed", "DeepSpeed's native directory", _deepspeed, _deepspeed_notes),
        Target("dcp", "a DCP directory, which any number of ranks reads", _dcp, _dropped),
        Target("accelerate", "Accelerate's FSDP directory (DCP)", _accelerate, _dropped),
        Target(
            "fsdp2",
            "a file of DTensors a rank",
            _ranks(state_dict.PAIR),
            _rank_notes,
            has_mesh=True,
        ),
        Target("verl", "verl's rank files", _ranks(state_dict.VERL), _rank_notes, has_mesh=True),
        Target("fsdp", "FSDP under Accelerate's names: DCP, whole or flat", _fsdp, _dropped),
        Target("torch", "one file with torch.optim's own state", _plain, _dropped),
    )
}
NAMES = tuple(TARGETS)
