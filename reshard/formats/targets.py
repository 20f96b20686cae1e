"""The targets: what a training state can be written as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from reshard.dtypes import FLOAT32, DType
from reshard.errors import IncompleteError, UsageError
from reshard.formats import hf_trainer
from reshard.formats.dcp import target as dcp
from reshard.formats.deepspeed import target as deepspeed
from reshard.formats.state_dict import flat_target, written
from reshard.formats.state_dict import target as state_dict
from reshard.formats.state_dict.distributed import Grid
from reshard.formats.training import Training
from reshard.manifest import Skeleton
from reshard.model import ModelShapes

StateDictType = Literal["full", "local", "sharded", "unsharded"]
STATE_DICT_TYPES = get_args(StateDictType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, with nothing left open but what a target decides."""

    world_size: int
    zero_stage: int = 2
    dtype: DType | None = None  # of the module's parameters; None: as trained
    weights_only: bool = False
    state_dict_type: StateDictType = "sharded"
    deepspeed: bool = False  # whether DeepSpeed's directory is written, by itself or in another
    model: ModelShapes | None = None
    device: str = "cuda"  # of the mesh that DTensors are saved on, which must be the model's

    @property
    def master(self) -> DType:
        """Of the weights that an optimizer updates, where it begins anew."""
        return FLOAT32 if self.deepspeed or self.dtype is None else self.dtype

    @property
    def form(self) -> str:
        """What the target's name leaves open, in words."""
        return f"stage {self.zero_stage}" if self.deepspeed else self.state_dict_type


@dataclass(frozen=True, slots=True)
class Target:
    """One layout.

    Args:
        lay_out: the files.
        notes: what was derived or is dropped.
        keeps_rng: whether it has a place for the random states of ranks.
    """

    name: str
    what: str
    lay_out: Callable[[Training, Request], Skeleton]
    notes: Callable[[Training, Request], tuple[str, ...]]
    keeps_rng: Callable[[Request], bool] = lambda _asked: False


def _deepspeed(state: Training, asked: Request) -> Skeleton:
    if not state.manifest.ordered and not asked.weights_only:
        raise IncompleteError(
            state.manifest.origin.path,
            "DeepSpeed knows parameters by their place in the model, and nothing says which that is"
            " (FSDP's units and safetensors have an order of their own)",
            "say which model it is: --model config.json|DIR|module:factory",
        )
    return deepspeed.lay_out(
        state,
        world_size=asked.world_size,
        stage=asked.zero_stage,
        precision=asked.dtype,
        weights_only=asked.weights_only,
    )


def _deepspeed_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return deepspeed.notes(
        state,
        world_size=asked.world_size,
        stage=asked.zero_stage,
        precision=asked.dtype,
        weights_only=asked.weights_only,
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
            Grid((asked.world_size,), naming.mesh, asked.device),
            naming=naming,
            weights_only=asked.weights_only,
            model=asked.model,
            dtype=asked.dtype,
        )

    return lay_out


def _fsdp(state: Training, asked: Request) -> Skeleton:
    if asked.state_dict_type == "full":
        return state_dict.fsdp1_full(
            state, ranks=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
        )
    if asked.state_dict_type == "sharded":
        return _accelerate(state, asked)
    if asked.state_dict_type == "unsharded":
        raise UsageError(
            "--state-dict-type unsharded",
            "is no form of FSDP's",
            "write --to hf-trainer, or --to torch for one file",
        )
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


def _hf_trainer(state: Training, asked: Request) -> Skeleton:
    if asked.deepspeed:
        held = _deepspeed(state, asked)
    elif asked.state_dict_type == "unsharded":
        held = hf_trainer.unsharded(
            state, weights_only=asked.weights_only, model=asked.model, dtype=asked.dtype
        )
    elif asked.state_dict_type == "full":
        held = state_dict.fsdp1_full(state, weights_only=asked.weights_only, dtype=asked.dtype)
    elif asked.state_dict_type == "sharded":
        held = dcp.fsdp(
            state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
        )
    else:
        raise UsageError(
            "--state-dict-type local",
            "is no form that the Trainer resumes from",
            "choose sharded, full or unsharded",
        )
    return hf_trainer.run(
        state,
        held,
        ranks=asked.world_size,
        deepspeed=asked.deepspeed,
        weights_only=asked.weights_only,
    )


def _hf_trainer_notes(state: Training, asked: Request) -> tuple[str, ...]:
    inner = _deepspeed_notes(state, asked) if asked.deepspeed else _dropped(state, asked)
    own = hf_trainer.notes(state, deepspeed=asked.deepspeed, weights_only=asked.weights_only)
    return (*inner, *own)


def _dropped(state: Training, _asked: Request) -> tuple[str, ...]:
    return tuple(f"not carried: {name}" for name in written.dropped(state.manifest.train))


def _always(_asked: Request) -> bool:
    return True


TARGETS = {
    target.name: target
    for target in (
        Target("deepspeed", "DeepSpeed's native directory", _deepspeed, _deepspeed_notes),
        Target("dcp", "a DCP directory, which any number of ranks reads", _dcp, _dropped),
        Target("accelerate", "Accelerate's FSDP directory (DCP)", _accelerate, _dropped, _always),
        Target(
            "hf-trainer", "a checkpoint-N of HF Trainer", _hf_trainer, _hf_trainer_notes, _always
        ),
        Target("fsdp2", "a file of DTensors a rank", _ranks(state_dict.PAIR), _dropped),
        Target("verl", "verl's rank files", _ranks(state_dict.VERL), _dropped),
        Target(
            "fsdp",
            "FSDP under Accelerate's names: DCP, whole or flat",
            _fsdp,
            _dropped,
            lambda asked: asked.state_dict_type != "local",
        ),
        Target("torch", "one file with torch.optim's own state", _plain, _dropped),
    )
}
NAMES = tuple(TARGETS)
