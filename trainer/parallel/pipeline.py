"""Pipeline parallelism: each stage has consecutive layers, and micro batches flow through them.

A stage is the model without the layers of the other stages. The layers that are left keep the names
that they have in the whole model, and the forward pass is that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from trainer.errors import SettingsError

Loss = Callable[[Tensor, Tensor], Tensor]
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Stage(nn.Module):
    """Layers of a causal language model of the Llama family.

    Args:
        whole: the model, which is modified.
        index: number of this stage, from 0.
        count: number of stages.

    Raises:
        SettingsError: the model cannot be cut into these stages.
    """

    def __init__(self, whole: nn.Module, index: int, count: int) -> None:
        super().__init__()
        _check_model(whole, count)
        self.first = index == 0
        last = index == count - 1
        inner: Any = whole.model
        layers = inner.layers
        own = split_layers(len(layers), count)[index]
        for number in range(len(layers)):
            if number not in own:
                # The list must keep the numbers of the other layers: they are part of the names.
                del layers._modules[str(number)]  # noqa: SLF001
        if not self.first:
            inner.embed_tokens = None
        if not last:
            inner.norm = nn.Identity()
        self.model = inner
        self.lm_head = cast("nn.Module", whole.lm_head) if last else None
        self._no_split_modules = getattr(whole, "_no_split_modules", None)

    def forward(self, received: Tensor) -> Tensor:
        """Turn tokens (batch, seq) or states (batch, seq, hidden) into hidden states or logits."""
        inputs = {"input_ids" if self.first else "inputs_embeds": received}
        hidden: Tensor = self.model(**inputs).last_hidden_state
        if self.lm_head is not None:
            hidden = self.lm_head(hidden)
        return hidden


class Pipeline:
    """Runs the micro batches of a step through all stages, forward and backward.

    Args:
        stage: this rank's stage, sharded over its data-parallel ranks or not.
        group: one rank of each stage, in order.
        device: the device of this rank.
        schedule: 1f1b or gpipe.
        loss: (logits, tokens) -> the scalar that the last stage starts the backward pass from.
    """

    def __init__(
        self, stage: nn.Module, group: ProcessGroup, device: torch.device, schedule: str, loss: Loss
    ) -> None:
        self._index, self._count = group.rank(), group.size()
        self._schedule, self._loss, self._device = _SCHEDULES[schedule], loss, device
        self._stage = PipelineStage(stage, self._index, self._count, device, group=group)
        self._schedules: dict[int, Any] = {}

    def run(self, batches: list[Tensor]) -> Tensor:
        """Run forward and backward, and add to the gradients. Collective over the group.

        Args:
            batches: tokens (micro_batch, seq_len) of each micro batch, the same on all stages.

        Returns:
            The loss of each micro batch on the last stage, zeros on the others.
        """
        number = len(batches)
        if number not in self._schedules:
            # scale_grads would divide by the number of micro batches, as the engine's step does.
            self._schedules[number] = self._schedule(
                self._stage, number, loss_fn=self._loss, scale_grads=False
            )
        tokens = torch.cat(batches)
        losses: list[Tensor] = []
        last = self._index == self._count - 1
        arguments = {"target": tokens, "losses": losses} if last else {}
        self._schedules[number].step(*([tokens] if self._index == 0 else []), **arguments)
        if not last:
            return torch.zeros(number, device=self._device)
        return torch.stack(losses).detach()


def split_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage: equally many, with one more in the first if needed.

    >>> split_layers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    minimum, remainder = divmod(layers, stages)
    starts = [stage * minimum + min(stage, remainder) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _check_model(whole: nn.Module, count: int) -> None:
    inner = getattr(whole, "model", None)
    parts = ("embed_tokens", "layers", "norm")
    if not all(hasattr(inner, part) for part in parts) or not hasattr(whole, "lm_head"):
        raise SettingsError(
            f"{type(whole).__name__} has no model.{', model.'.join(parts)} and lm_head to cut "
            "into stages",
            "use --pp 1, or a model of the Llama family (tiny-llama)",
        )
    layers = len(cast("Any", inner).layers)
    if layers < count:
        raise SettingsError(
            f"--pp is {count}, and the model has {layers} layers", f"use --pp {layers} or less"
        )
    if cast("Any", inner).embed_tokens.weight is cast("Any", whole).lm_head.weight:
        raise SettingsError(
            f"--pp is {count}, and the embeddings are tied: the first and last stage would share "
            "one parameter",
            "use --no-tie-embeddings, or --pp 1",
        )
