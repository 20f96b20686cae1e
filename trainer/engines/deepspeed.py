"""The real DeepSpeed, driven by our loop: same model, data and files, its arithmetic (0.19.8).

DeepSpeed is an optional extra. Where it does not do what a setting says, `deepspeed_setup` refuses
it, or this file names the difference where it is made good.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import model
from trainer.checkpoint import files, foreign
from trainer.checkpoint.deepspeed import model_file, optimizer_file
from trainer.engines import deepspeed_setup as setup
from trainer.engines.base import ModelState, Update
from trainer.engines.deepspeed_config import ds_config
from trainer.errors import CheckpointError, SettingsError, TrainingError
from trainer.optimizer import hyperparameters, param_groups, trainable
from trainer.ranks import Ranks
from trainer.scaling import LossScaler, loss_scaler
from trainer.settings import Settings
from trainer.timer import Timer


class DeepSpeedEngine:
    """Implements Engine; what DeepSpeed calls its engine is ``live`` here."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        setup.check(settings)
        deepspeed = setup.imported(ranks)
        if "nvme" in (settings.offload_optimizer, settings.offload_param):
            setup.check_disk_operation()
        self.settings = settings
        self.ranks = ranks
        self.timer = Timer(synchronize=ranks.device.type == "cuda")
        self.scaler = loss_scaler(settings)
        built = model.build(settings)
        named = dict(trainable(built))
        shapes = [(name, tuple(p.shape)) for name, p in named.items()]
        self._groups = param_groups(shapes, settings)
        largest = max(math.prod(shape) for _, shape in shapes)
        try:
            self.live, *_ = deepspeed.initialize(
                model=built,
                model_parameters=[
                    {"params": [named[name] for name in g.names], "weight_decay": g.weight_decay}
                    for g in self._groups
                ],
                config=ds_config(settings, largest),
            )
        except (ValueError, NotImplementedError) as error:
            raise SettingsError(f"DeepSpeed refuses these settings: {error}") from error
        self.live.checkpoint_engine = self._files = setup.checkpoint_files()
        self.live._copy_recovery_script = setup.leave_out  # noqa: SLF001  (beside the checkpoint, unflushed)
        self._mirror_scaler()

    # The Engine protocol

    def microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """See Engine."""
        with self.timer("forward"):
            loss: Tensor = self.live(input_ids=tokens, labels=tokens).loss.float()
        with self.timer("backward"):
            # Stage 0 unscales fp16 gradients that it never scaled (engine.backward, 0.19.8).
            forgotten = self._stage_0_scale if self.settings.precision == "fp16" else None
            self.live.backward(loss if forgotten is None else loss * forgotten.cur_scale)
            if not last:
                self.live.step()  # only counts
        return loss.detach()

    def step(self, lr: float) -> Update:
        """See Engine.

        Raises:
            TrainingError: fp16 gradients overflow at the smallest loss scale.
        """
        with self.timer("step"), torch.no_grad():
            # Its scheduler has set the same rate; this holds for a constant one, and after a load.
            for group in self.live.basic_optimizer.param_groups:
                group["lr"] = lr
            scale, skipped = self.scaler.scale, self.live.skipped_steps
            plain = self.settings.zero_stage == 0 and self.settings.precision == "fp32"
            norm = self._plain_norm() if plain else 0.0
            try:
                self.live.step()
            except Exception as error:
                if "loss scale already at minimum" not in str(error):
                    raise
                raise TrainingError(
                    f"fp16 gradients overflow at the smallest loss scale ({scale:g})",
                    "lower the learning rate, or use --precision bf16",
                ) from error
            self._mirror_scaler()
            if self.live.skipped_steps > skipped:
                return Update(math.inf, skipped=True)
        if not plain:
            norm = float(self.live.get_global_grad_norm())
        if self._stage_0_scale is not None:
            norm /= scale  # as it was scaled
        elif self.settings.zero_stage == 3:
            norm *= self.scaler.scale / scale  # it divides by the scale of the next step
        return Update(norm, skipped=False)

    def discard(self) -> None:
        """Clear what autograd left; for an engine that takes no further step (`setup.check`)."""
        self.live.zero_grad()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine."""
        for name, parameter in self.live.module.named_parameters():
            yield name, self._whole(parameter).detach().cpu()

    def save(self, directory: Path, progress: dict[str, Any]) -> None:
        """See Engine: DeepSpeed saves, into files that are flushed.

        Raises:
            TrainingError: a rank could not write its part, or has counted other steps.
        """
        if self.live.global_steps != progress["step"]:
            raise TrainingError(
                f"DeepSpeed has counted {self.live.global_steps} steps, the loop {progress['step']}"
            )
        self._files.problem = None
        # With "." for the tag, everything lands in the directory itself.
        self.live.save_checkpoint(str(directory), tag=".", save_latest=False)
        if self._files.problem:
            raise TrainingError(
                f"rank {self.ranks.rank} could not write its part of the checkpoint: "
                f"{self._files.problem}"
            )

    def load(self, directory: Path) -> dict[str, Any]:
        """See Engine: what DeepSpeed loads, which is the same stage at the same number of ranks.

        What the settings say holds, also where DeepSpeed would take it from the checkpoint:
        clipping, hyper-parameters of AdamW, form and bounds of the loss scale.

        Raises:
            CheckpointError: DeepSpeed cannot load it into this run.
        """
        with self.ranks.together("read the checkpoint"):
            self._check_loadable(directory)
        kept = copy.copy(self._scale_keeper)
        try:
            with contextlib.redirect_stdout(None):  # BF16_Optimizer prints
                path, _ = self.live.load_checkpoint(str(directory), tag=".")
        except (RuntimeError, ValueError, LookupError, AssertionError, AttributeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise CheckpointError(
                f"{directory}: DeepSpeed cannot load it: {type(error).__name__}: {reason}",
                "give the same --model, --freeze, --param-groups, --tie-embeddings and "
                "--sub-group-size as the run that saved it, or use --engine native",
            ) from error
        if path is None:
            raise CheckpointError(f"{directory}: DeepSpeed finds no checkpoint there")
        self._keep_settings(kept)
        self._mirror_scaler()
        scheduler = self.live.lr_scheduler
        updates = self.live.global_steps - self.live.skipped_steps
        return {
            "step": self.live.global_steps,
            "skipped": self.live.skipped_steps,
            "samples": self.live.global_samples,
            "updates": scheduler.last_batch_iteration + 1 if scheduler else updates,
        }

    def model_state(self) -> ModelState:
        """See Engine; without DeepSpeed's communication buckets."""
        optimizer = self.live.optimizer
        parameters = list(self.live.module.parameters())
        pieces = [getattr(p, "ds_tensor", None) for p in parameters]
        gradients = [p.grad for p in parameters]
        for attribute in _GRADIENTS:
            gradients += _tensors(getattr(optimizer, attribute, None))
        basic = self.live.basic_optimizer
        states = [*basic.state, *(group["params"] for group in basic.param_groups)]
        counted: set[int] = set()
        return ModelState(
            parameters=_bytes([*(p.data for p in parameters), *pieces], counted),
            gradients=_bytes(gradients, counted),
            optimizer=_bytes(_tensors([*states, *basic.state.values()]), counted),
        )

    # Parameters

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            whole: Tensor | None = safe_get_full_fp32_param(parameter)
            return self._stage_0_master(parameter) if whole is None else whole
        if hasattr(parameter, "ds_id"):
            with GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter

    def _stage_0_master(self, parameter: nn.Parameter) -> Tensor:
        """A whole fp32 copy in 16 bits; in fp32 the parameter itself."""
        optimizer = self.live.optimizer
        if self.settings.precision == "fp32":
            return parameter
        for lows, highs in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for low, high in zip(lows, highs, strict=True):
                if low is parameter:
                    master: Tensor = high
                    return master
        raise KeyError

    def _plain_norm(self) -> float:
        """Of stage 0 in fp32, where DeepSpeed neither tells it nor looks for infinities.

        Raises:
            TrainingError: it is not finite, and DeepSpeed would update with that.
        """
        gradients = [p.grad for p in self.live.module.parameters() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        norm = float(torch.linalg.vector_norm(norms))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradients of step {self.live.global_steps + 1} are not finite",
                "lower --lr; earlier checkpoints are whole",
            )
        return norm

    # The loss scale

    @property
    def _stage_0_scale(self) -> Any:
        """Where stage 0 keeps its loss scale in 16 bits; it has no patience before it halves."""
        return getattr(self.live.optimizer, "loss_scale_config", None)

    @property
    def _scale_keeper(self) -> Any:
        """The live object with the loss scale, if there is one."""
        return self._stage_0_scale or getattr(self.live.optimizer, "loss_scaler", None)

    def _mirror_scaler(self) -> None:
        """Say in ``scaler`` what DeepSpeed does."""
        live = self._scale_keeper
        if self.settings.precision != "fp16":
            return
        if not _dynamic(live):
            self.scaler = LossScaler(scale=float(live.cur_scale))
            return
        stage_0 = self._stage_0_scale is not None
        self.scaler = LossScaler(
            scale=float(live.cur_scale),
            dynamic=True,
            window=live.scale_window,
            minimum=float(live.min_loss_scale if stage_0 else live.min_scale),
            hysteresis=1 if stage_0 else live.delayed_shift,
            iteration=live.cur_iter,
            last_overflow=live.last_overflow_iter,
            patience=1 if stage_0 else live.cur_hysteresis,
        )

    def _keep_settings(self, scale: Any) -> None:
        """Undo what ``load_checkpoint`` changes beyond the state.

        Args:
            scale: a copy of the loss scale's keeper, from before.
        """
        optimizer, settings = self.live.optimizer, self.settings
        for group, own in zip(self.live.basic_optimizer.param_groups, self._groups, strict=True):
            group.update(hyperparameters(settings, own.weight_decay, group["lr"]))
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = settings.clip
        loaded = self._scale_keeper
        if loaded is None:
            return
        if _dynamic(scale) and _dynamic(loaded):
            loaded.scale_window = settings.loss_scale_window
            if self._stage_0_scale is None:
                loaded.min_scale = settings.min_loss_scale
                loaded.delayed_shift = settings.hysteresis
        elif self._stage_0_scale is not None:
            optimizer.loss_scale_config = scale
        else:
            optimizer.loss_scaler = scale
            optimizer.dynamic_loss_scale = _dynamic(scale)

    # Checkpoints

    def _check_loadable(self, directory: Path) -> None:
        """What DeepSpeed would not notice, or say badly.

        Raises:
            CheckpointError: it says what was expected and found.
        """
        settings, rank = self.settings, self.ranks.rank
        stage = settings.zero_stage
        found = [s for s in (3, 0) if (directory / model_file(s, 0)).exists()]
        if not found:
            raise CheckpointError(f"{directory / model_file(stage, 0)} is missing")
        with foreign.allowed():
            world = int(files.load(directory / model_file(found[0], 0))["dp_world_size"])
        if world != self.ranks.world and (stage or found[0]):
            raise CheckpointError(
                f"{directory}: {world} ranks saved it, expected {self.ranks.world}, "
                "as DeepSpeed loads at the same number of ranks only",
                f"reshard split {directory} OUT --world-size {self.ranks.world}; "
                "or --engine native, which reads it as it is",
            )
        wanted = [model_file(stage, rank)]
        wanted += [optimizer_file(settings.precision, rank)] if stage else []
        for name in wanted:
            if not (directory / name).exists():
                there = ", ".join(sorted(path.name for path in directory.glob("*_states.pt")))
                raise CheckpointError(
                    f"{directory / name} is missing, expected of {settings.strategy} in "
                    f"{settings.precision}; there are {there}",
                    "DeepSpeed loads what its own stage and precision saved; "
                    "--engine native reads any stage",
                )


_GRADIENTS = (
    "averaged_gradients",  # stages 1 and 2
    "all_grad_tensors",
    "grad_partitions_flat_buffer",  # stage 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
)
"""Where DeepSpeed's optimizers keep gradients between backward pass and step."""


def _dynamic(scale: Any) -> bool:
    return bool(getattr(scale, "dynamic_loss_scale", getattr(scale, "dynamic", False)))


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested lists, dicts and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _bytes(tensors: Iterable[Tensor | None], counted: set[int]) -> int:
    """Bytes of the storages that were not counted before."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage() if tensor is not None else None
        if storage is not None and storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
