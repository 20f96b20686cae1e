"""The real DeepSpeed, driven by our loop: same model, data and schedule, its arithmetic (0.19.8).

DeepSpeed is an optional extra. ``deepspeed_setup`` refuses settings that it cannot follow; comments
here name the differences that are corrected. ``deepspeed_files`` saves and loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.engine import ModelState, Update
from trainer.core.model import build_model
from trainer.core.optimizer import list_trainable, make_param_groups
from trainer.core.ranks import Ranks
from trainer.engines import deepspeed_files
from trainer.engines import deepspeed_setup as setup
from trainer.engines.deepspeed_config import make_ds_config
from trainer.errors import SettingsError, TrainingError
from trainer.scaling import LossScaler, make_loss_scaler
from trainer.settings import Settings
from trainer.timer import Timer


class DeepSpeedEngine:
    """Implements Engine with DeepSpeed's own engine, which is ``live``."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        setup.check_settings(settings)
        deepspeed = setup.import_deepspeed(ranks)
        if "nvme" in (settings.offload_optimizer, settings.offload_param):
            setup.build_disk_operation()
        self.settings = settings
        self.ranks = ranks
        self.timer = Timer(synchronize=ranks.device.type == "cuda")
        self.scaler = make_loss_scaler(settings)
        model = build_model(settings)
        named = dict(list_trainable(model))
        shapes = [(name, tuple(p.shape)) for name, p in named.items()]
        self.groups = make_param_groups(shapes, settings)
        largest = max(math.prod(shape) for _, shape in shapes)
        try:
            self.live, *_ = deepspeed.initialize(
                model=model,
                model_parameters=[
                    {"params": [named[name] for name in g.names], "weight_decay": g.weight_decay}
                    for g in self.groups
                ],
                config=make_ds_config(settings, largest),
            )
        except (ValueError, NotImplementedError) as error:
            raise SettingsError(
                f"DeepSpeed refuses these settings: {error}", "change them, or use --engine native"
            ) from error
        self.files = deepspeed_files.install_checkpoint_engine(self.live)
        self.mirror_scaler()

    # The Engine protocol

    def run_microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """Run forward and backward, see Engine."""
        with self.timer("forward"):
            loss: Tensor = self.live(input_ids=tokens, labels=tokens).loss.float()
        with self.timer("backward"):
            # Stage 0 unscales fp16 gradients that it never scaled (engine.backward, 0.19.8).
            scale = self.stage_0_scale if self.settings.precision == "fp16" else None
            self.live.backward(loss if scale is None else loss * scale.cur_scale)
            if not last:
                self.live.step()  # it only counts the micro batch
        return loss.detach()

    def step(self, lr: float) -> Update:
        """Clip and update, see Engine.

        Raises:
            TrainingError: fp16 gradients overflow at the smallest loss scale.
        """
        with self.timer("step"), torch.no_grad():
            # DeepSpeed's scheduler has set the same rate, unless it is constant or was just loaded.
            for group in self.live.basic_optimizer.param_groups:
                group["lr"] = lr
            scale, skipped = self.scaler.scale, self.live.skipped_steps
            computes_norm = self.settings.zero_stage == 0 and self.settings.precision == "fp32"
            norm = self._compute_norm() if computes_norm else 0.0
            try:
                self.live.step()
            except Exception as error:
                if "loss scale already at minimum" not in str(error):
                    raise
                raise TrainingError(
                    f"fp16 gradients overflow at the smallest loss scale ({scale:g})",
                    "lower the learning rate, or use --precision bf16",
                ) from error
            self.mirror_scaler()
            if self.live.skipped_steps > skipped:
                return Update(math.inf, skipped=True)
        if not computes_norm:
            norm = float(self.live.get_global_grad_norm())
        if self.stage_0_scale is not None:
            norm /= scale  # DeepSpeed gives the norm of the scaled gradients
        elif self.settings.zero_stage == 3:
            norm *= self.scaler.scale / scale  # DeepSpeed divides by the scale of the next step
        return Update(norm, skipped=False)

    def discard_gradients(self) -> None:
        """Clear what autograd left; the engine takes no further step (see `check_settings`)."""
        self.live.zero_grad()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the parameters one by one, see Engine."""
        for name, parameter in self.live.module.named_parameters():
            yield name, self._gather_parameter(parameter).detach().cpu()

    def measure_state(self) -> ModelState:
        """Measure the tensors of this rank without DeepSpeed's communication buckets."""
        optimizer = self.live.optimizer
        parameters = list(self.live.module.parameters())
        pieces = [getattr(p, "ds_tensor", None) for p in parameters]
        gradients = [p.grad for p in parameters]
        for attribute in _GRADIENTS:
            gradients += _find_tensors(getattr(optimizer, attribute, None))
        basic = self.live.basic_optimizer
        states = [*basic.state, *(group["params"] for group in basic.param_groups)]
        counted: set[int] = set()
        return ModelState(
            parameters=_count_bytes([*(p.data for p in parameters), *pieces], counted),
            gradients=_count_bytes(gradients, counted),
            optimizer=_count_bytes(_find_tensors([*states, *basic.state.values()]), counted),
        )

    # Parameters

    def _gather_parameter(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            whole: Tensor | None = safe_get_full_fp32_param(parameter)
            return self._find_stage_0_master(parameter) if whole is None else whole
        if hasattr(parameter, "ds_id"):
            with GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter

    def _find_stage_0_master(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 copy of a 16-bit parameter, or the fp32 parameter itself."""
        optimizer = self.live.optimizer
        if self.settings.precision == "fp32":
            return parameter
        for lows, highs in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for low, high in zip(lows, highs, strict=True):
                if low is parameter:
                    master: Tensor = high
                    return master
        raise KeyError

    def _compute_norm(self) -> float:
        """Return the gradient norm of stage 0 in fp32, for which DeepSpeed has none.

        Raises:
            TrainingError: the norm is not finite; DeepSpeed would update all the same.
        """
        gradients = [p.grad for p in self.live.module.parameters() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        norm = float(torch.linalg.vector_norm(norms))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradients of step {self.live.global_steps + 1} are not finite",
                "resume from an earlier --tag with a lower --lr",
            )
        return norm

    # The loss scale

    @property
    def stage_0_scale(self) -> Any:
        """The loss scale of stage 0 in 16 bits, which has no hysteresis; None in other stages."""
        return getattr(self.live.optimizer, "loss_scale_config", None)

    @property
    def live_scaler(self) -> Any:
        """DeepSpeed's object with the loss scale, None if there is none."""
        return self.stage_0_scale or getattr(self.live.optimizer, "loss_scaler", None)

    def mirror_scaler(self) -> None:
        """Copy DeepSpeed's loss scale into ``scaler``."""
        live = self.live_scaler
        if self.settings.precision != "fp16":
            return
        if not deepspeed_files.is_dynamic(live):
            self.scaler = LossScaler(scale=float(live.cur_scale))
            return
        stage_0 = self.stage_0_scale is not None
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


_GRADIENTS = (
    "averaged_gradients",  # stages 1 and 2
    "all_grad_tensors",
    "grad_partitions_flat_buffer",  # stage 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
)
"""Attributes in which DeepSpeed's optimizers keep gradients between backward pass and step."""


def _find_tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, dicts and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _find_tensors(each)]
    return []


def _count_bytes(tensors: Iterable[Tensor | None], counted: set[int]) -> int:
    """Return the bytes of the storages that are not in ``counted`` yet, and add them to it."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage() if tensor is not None else None
        if storage is not None and storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
