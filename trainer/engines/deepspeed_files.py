"""Checkpoints that the real DeepSpeed saves and loads, through flushed files and a safe reader."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from trainer.checkpoint import files, foreign
from trainer.checkpoint.contents import Content
from trainer.checkpoint.deepspeed import name_model_file, name_optimizer_file
from trainer.core.optimizer import make_hyperparameters
from trainer.core.ranks import Ranks
from trainer.errors import CheckpointError, TrainingError

if TYPE_CHECKING:
    from trainer.engines.deepspeed import DeepSpeedEngine


def install_checkpoint_engine(live: Any) -> Any:
    """Let DeepSpeed's engine flush what it writes, and read without running what files contain.

    Returns:
        DeepSpeed's checkpoint engine; ``problem`` is the error of the last save, or None.
    """
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        DynamicLossScaler,
        StaticLossScaler,
        ZeroStageEnum,
        fragment_address,
    ]

    class CheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
        # DeepSpeed's ranks wait for each other in a save, so that the error is raised after it.
        problem: Exception | None = None

        def save(self, state_dict: Any, path: str) -> None:
            try:
                files.save(state_dict, Path(path))
            except (OSError, RuntimeError) as error:
                self.problem = error

        def load(self, path: str, map_location: Any = None) -> Any:
            try:
                with torch.serialization.safe_globals(classes):
                    return torch.load(path, map_location=map_location, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
                raise files.make_read_error(path, error) from error

    live.checkpoint_engine = engine = CheckpointEngine()
    # It would write zero_to_fp32.py, which is part of DeepSpeed, beside the checkpoint, unflushed.
    live._copy_recovery_script = lambda path: None  # noqa: ARG005, SLF001
    return engine


def collect(engine: DeepSpeedEngine, progress: dict[str, Any]) -> Iterator[Content]:
    """Yield all that DeepSpeed saves, as one part."""
    yield _Saved(engine, progress)


@dataclass(frozen=True)
class _Saved:
    """What DeepSpeed writes of its engine."""

    engine: DeepSpeedEngine
    progress: dict[str, Any]

    def write(self, directory: Path, ranks: Ranks) -> None:
        """Let DeepSpeed save into ``directory``, see Content. Collective.

        Raises:
            TrainingError: a rank could not write its part, or DeepSpeed counted other steps.
        """
        engine = self.engine
        if engine.live.global_steps != self.progress["step"]:
            raise TrainingError(
                f"DeepSpeed has counted {engine.live.global_steps} steps, and the loop "
                f"{self.progress['step']}",
                "this is a bug of the trainer: please report it with the settings of the run",
            )
        engine.files.problem = None
        # The tag "." puts everything into the directory itself.
        engine.live.save_checkpoint(str(directory), tag=".", save_latest=False)
        if engine.files.problem:
            raise TrainingError(
                f"rank {ranks.rank} could not write its part of the checkpoint: "
                f"{engine.files.problem}"
            )

    def copied(self, copy: Callable[[Any], Any]) -> NoReturn:
        """Refuse; the settings have done so before."""
        raise NotImplementedError("DeepSpeed saves its live engine")


def read(directory: Path, engine: DeepSpeedEngine) -> dict[str, Any]:
    """Load what DeepSpeed can load: its own stage at the same number of ranks. Collective.

    The settings of this run hold also where DeepSpeed would take them from the checkpoint:
    clipping, hyper-parameters of AdamW, kind and bounds of the loss scale.

    Returns:
        The progress that the files record.

    Raises:
        CheckpointError: DeepSpeed cannot load it into this run.
    """
    live = engine.live
    with engine.ranks.raise_on_all("read the checkpoint"):
        _check_loadable(directory, engine)
    scaler_before = copy.copy(engine.live_scaler)
    try:
        with contextlib.redirect_stdout(None):  # BF16_Optimizer prints
            path, _ = live.load_checkpoint(str(directory), tag=".")
    except (RuntimeError, ValueError, LookupError, AssertionError, AttributeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"{directory}: DeepSpeed cannot load it: {type(error).__name__}: {reason}",
            "give the same --model, --freeze, --param-groups, --tie-embeddings and "
            "--sub-group-size as the run that saved it, or use --engine native",
        ) from error
    if path is None:
        raise CheckpointError(
            f"{directory}: DeepSpeed finds no checkpoint there", "resume with --engine native"
        )
    _restore_settings(engine, scaler_before)
    engine.mirror_scaler()
    scheduler = live.lr_scheduler
    updates = live.global_steps - live.skipped_steps
    return {
        "step": live.global_steps,
        "skipped": live.skipped_steps,
        "samples": live.global_samples,
        "updates": scheduler.last_batch_iteration + 1 if scheduler else updates,
    }


def _restore_settings(engine: DeepSpeedEngine, scaler: Any) -> None:
    """Undo what ``load_checkpoint`` changes beyond the state.

    Args:
        engine: the engine, after the load.
        scaler: a copy of the object with the loss scale, from before the load.
    """
    live, settings = engine.live, engine.settings
    optimizer = live.optimizer
    for group, own in zip(live.basic_optimizer.param_groups, engine.groups, strict=True):
        group.update(make_hyperparameters(settings, own.weight_decay, group["lr"]))
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = settings.clip
    loaded = engine.live_scaler
    if loaded is None:
        return
    if is_dynamic(scaler) and is_dynamic(loaded):
        loaded.scale_window = settings.loss_scale_window
        if engine.stage_0_scale is None:
            loaded.min_scale = settings.min_loss_scale
            loaded.delayed_shift = settings.hysteresis
    elif engine.stage_0_scale is not None:
        optimizer.loss_scale_config = scaler
    else:
        optimizer.loss_scaler = scaler
        optimizer.dynamic_loss_scale = is_dynamic(scaler)


def is_dynamic(scaler: Any) -> bool:
    """Return whether an object of DeepSpeed with a loss scale changes it."""
    return bool(getattr(scaler, "dynamic_loss_scale", getattr(scaler, "dynamic", False)))


def _check_loadable(directory: Path, engine: DeepSpeedEngine) -> None:
    """Raise CheckpointError for what DeepSpeed would not notice, or report badly."""
    settings, ranks = engine.settings, engine.ranks
    stage = settings.zero_stage
    stages = [s for s in (3, 0) if (directory / name_model_file(s, 0)).exists()]
    if not stages:
        raise CheckpointError(
            f"{directory / name_model_file(stage, 0)} is missing",
            "resume from a checkpoint in DeepSpeed's layout, or copy the file from where the run "
            "was saved",
        )
    with foreign.allow_classes():
        world = int(files.load(directory / name_model_file(stages[0], 0))["dp_world_size"])
    if world != ranks.world and (stage or stages[0]):
        raise CheckpointError(
            f"{directory} was saved by {world} ranks, and DeepSpeed loads it only with as many; "
            f"this run has {ranks.world}",
            f"reshard split {directory} OUT --world-size {ranks.world}; "
            "or --engine native, which reads it as it is",
        )
    expected = [name_model_file(stage, ranks.rank)]
    expected += [name_optimizer_file(settings.precision, ranks.rank)] if stage else []
    for name in expected:
        if not (directory / name).exists():
            there = ", ".join(sorted(path.name for path in directory.glob("*_states.pt")))
            raise CheckpointError(
                f"{directory / name} is missing, which {settings.strategy} in "
                f"{settings.precision} needs; the directory has {there}",
                "DeepSpeed loads only what its own stage and precision saved; "
                "--engine native reads any stage",
            )
