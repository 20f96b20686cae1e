"""Pipeline parallel: each stage has some consecutive layers, and micro batches flow through them.

A stage is the model with the other stages' layers taken out: what is left keeps the names that it
has in the whole model, and the forward pass is that of transformers.
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
        whole: the model; it is used up.
        index: of this stage, from 0.
        count: of stages.

    Raises:
        SettingsError: the model cannot be cut so.
    """

    def __init__(self, whole: nn.Module, index: int, count: int) -> None:
        super().__init__()
        _check(whole, count)
        self.first = index == 0
        last = index == count - 1
        inner: Any = whole.model
        layers = inner.layers
        mine = layers_of(len(layers), count)[index]
        for number in range(len(layers)):
            if number not in mine:
                # The list keeps the numbers of the others: they are part of the names.
                del layers._modules[str(number)]  # noqa: SLF001
        if not self.first:
            inner.embed_tokens = None
        if not last:
            inner.norm = nn.Identity()
        self.model = inner
        self.lm_head = cast("nn.Module", whole.lm_head) if last else None
        self._no_split_modules = getattr(whole, "_no_split_modules", None)

    def forward(self, received: Tensor) -> Tensor:
        """Tokens (batch, seq) or hidden states (batch, seq, hidden) to hidden states or logits."""
        told = {"input_ids" if self.first else "inputs_embeds": received}
        hidden: Tensor = self.model(**told).last_hidden_state
        if self.lm_head is not None:
            hidden = self.lm_head(hidden)
        return hidden


class Pipeline:
    """The stages at work: a step's micro batches through all of them, forward and back.

    Args:
        stage: this rank's, sharded over its data-parallel ranks or not.
        group: one rank of each stage, in order.
        schedule: 1f1b or gpipe.
        loss: of logits and tokens; what the last stage begins the backward pass from.
    """

    def __init__(
        self, stage: nn.Module, group: ProcessGroup, device: torch.device, schedule: str, loss: Loss
    ) -> None:
        self._index, self._count = group.rank(), group.size()
        self._schedule, self._loss, self._device = _SCHEDULES[schedule], loss, device
        self._stage = PipelineStage(stage, self._index, self._count, device, group=group)
        self._ready: dict[int, Any] = {}

    def run(self, batches: list[Tensor]) -> Tensor:
        """Add to the gradients. Collective, of the group.

        Args:
            batches: the same on all of its ranks, each (micro_batch, seq_len).

        Returns:
            On the last stage the loss of each, else zeros.
        """
        number = len(batches)
        if number not in self._ready:
            self._ready[number] = self._schedule(
                self._stage, number, loss_fn=self._loss, scale_grads=False
            )
        tokens = torch.cat(batches)
        losses: list[Tensor] = []
        last = self._index == self._count - 1
        told = {"target": tokens, "losses": losses} if last else {}
        self._ready[number].step(*([tokens] if self._index == 0 else []), **told)
        if not last:
            return torch.zeros(number, device=self._device)
        return torch.stack(losses).detach()


def layers_of(layers: int, stages: int) -> list[range]:
    """The layers of each stage: as many for each, the first ones taking what is left over.

    >>> layers_of(5, 2)
    [range(0, 3), range(3, 5)]
    """
    least, over = divmod(layers, stages)
    starts = [stage * least + min(stage, over) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _check(whole: nn.Module, count: int) -> None:
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
            f"pp {count}, and the model has {layers} layers", f"use --pp {layers} or less"
        )
    if cast("Any", inner).embed_tokens.weight is cast("Any", whole).lm_head.weight:
        raise SettingsError(
            f"pp {count} with tied embeddings: the first and the last stage would share one "
            "parameter",
            "use --no-tie-embeddings, or --pp 1",
        )
