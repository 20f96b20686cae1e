"""A training run of Megatron-core: training steps and an evaluated loss, on any grid of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import megatron.core.optimizer as mcore_optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.judges import megatron_data as data
from tests.judges import megatron_models as models
from tests.judges.megatron_adam import FusedAdam, PrecisionAwareAdam, transformer_engine_stub
from tests.judges.megatron_cases import SEQUENCE

if TYPE_CHECKING:
    from tests.judges.megatron_cases import Case

LR, DECAY = 1e-2, 0.01
DTYPES = models.DTYPES


class Run:
    """A model with its optimizer and scheduler; every rank has one."""

    def __init__(self, case: Case) -> None:
        _choose_adam(case.adam)
        self.case = case
        self.config = models.config_of(case)
        self.chunks = models.build(case, self.config)
        with transformer_engine_stub() if case.precision_aware else nullcontext():
            told = OptimizerConfig(
                optimizer="adam",
                lr=LR,
                min_lr=0.0,
                weight_decay=DECAY,
                bf16=case.precision == "bf16",
                fp16=case.precision == "fp16",
                params_dtype=DTYPES[case.precision],
                use_distributed_optimizer=case.distributed,
                initial_loss_scale=2.0**10,
                clip_grad=1.0,
                use_precision_aware_optimizer=case.precision_aware,
                store_param_remainders=case.adam == "remainders",
            )
        overrides = mcore_optimizer.get_standard_config_overrides(told)
        self.optimizer = mcore_optimizer.get_megatron_optimizer(told, self.chunks, overrides)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=LR,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=80,
            lr_decay_style="linear",
            start_wd=DECAY,
            end_wd=DECAY,
            wd_incr_steps=80,
            wd_incr_style="constant",
        )
        self.step = 0
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if case.bucket is not None:
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]

    def models(self) -> list[Any]:
        """Return the unwrapped chunks of this rank."""
        return models.unwrapped(self.chunks)

    def train(self, steps: int) -> list[float]:
        """Train; returns the mean loss of each step (megatron/training/training.py train_step)."""
        found = []
        for _ in range(steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            found.append(self._pass(self.step, forward_only=False).mean().item())
            updated, _, _ = self.optimizer.step()
            assert updated
            self.scheduler.step(increment=data.SAMPLES)
            self.step += 1
        return found

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """Return the loss of every token of a batch that is never trained on."""
        for chunk in self.chunks:
            chunk.eval()
        found = self._pass(data.EVALUATED, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return found

    def _pass(self, step: int, *, forward_only: bool) -> torch.Tensor:
        """Pass all microbatches of a step through the pipeline; return the losses on every rank."""
        groups, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        tokens = data.batch(self.case.vocabulary, step)[replica::groups]
        micro = data.choose_micro_batch(self.case)
        micros = list(tokens.split(micro))
        found: list[torch.Tensor] = []
        get_forward_backward_func()(
            forward_step_func=partial(models.forward_step, found=found),
            data_iterator=[iter(micros) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micros),
            seq_length=SEQUENCE,
            micro_batch_size=micro,
            forward_only=forward_only,
        )
        losses = torch.zeros(data.SAMPLES, SEQUENCE)
        if found and mpu.get_tensor_model_parallel_rank() == 0:
            losses[replica::groups] = torch.cat(found)
        dist.all_reduce(losses)
        return losses


def _choose_adam(kind: str) -> None:
    """Set the Adam that Megatron-core would have found when it was imported."""
    fused = kind != "torch"
    aware = kind in ("precision_aware", "remainders")
    chosen = PrecisionAwareAdam if aware else FusedAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = not fused
    mcore_optimizer.is_te_min_version = lambda *_, **__: aware
    mcore_optimizer.Adam = chosen if fused else torch.optim.AdamW
    distrib_optimizer.Adam = chosen if fused else torch.optim.Adam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = fused
