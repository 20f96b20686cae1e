"""What ZeRO stages 0 to 3 share: master weights, sums of gradients, and the step between them.

What each of N ranks holds, with 16-bit parameters and gradients and fp32 masters and moments
(Rajbhandari et al., "ZeRO", SC 2020)::

                  parameters   gradients   master, exp_avg, exp_avg_sq
    ddp           all          all         all
    zero1         all          all         1/N
    zero2         all          1/N         1/N
    zero3         1/N          1/N         1/N

A stage decides four things: which rank owns what (``_partition_optimizer``,
``_partition_gradients``), where gradients go as the backward pass makes them (``_end_microbatch``),
how their sums reach the optimizer (``_collect_gradients``), and how new masters become parameters
(``_write_parameters``, ``_exchange_parameters``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.engine import DTYPES, Engine
from trainer.core.model import build_model
from trainer.core.norm import compute_norm
from trainer.core.optimizer import list_trainable, make_param_groups
from trainer.core.partition import Partition, Shapes
from trainer.core.ranks import Ranks
from trainer.core.reduce import Reducer
from trainer.core.settings import CoreSettings
from trainer.core.shard import OptimizerShard


class ZeroEngine(Engine):
    """A 16-bit (or fp32) model whose fp32 masters and moments are partitioned over the ranks."""

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.dtype = DTYPES[settings.precision]
        self.model = build_model(settings).to(ranks.device)
        self.trainable = dict(list_trainable(self.model))
        shapes = {name: tuple(p.shape) for name, p in self.trainable.items()}
        self.groups = make_param_groups(self.model, settings)
        names = [group.names for group in self.groups]
        self.shard = OptimizerShard(
            self._partition_optimizer(names, shapes),
            self._optimizer_rank,
            self.groups,
            settings,
            torch.device("cpu") if settings.offload_optimizer == "cpu" else ranks.device,
            lambda name: self.trainable[name].detach(),
        )
        # The masters have the fp32 values now. Buffers keep their dtype.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.reducer = Reducer(
            self._partition_gradients(names, shapes),
            ranks,
            DTYPES[settings.grad_dtype],
            canonical=settings.reduction == "canonical",
        )

    # What a stage decides

    @property
    def _optimizer_rank(self) -> int:
        """Number of this rank's piece of the optimizer; ddp has one piece, number 0."""
        return self.ranks.rank

    @abstractmethod
    def _partition_optimizer(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        """Decide which rank owns which masters and moments."""

    def _partition_gradients(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        """Decide which rank sums which gradients: by default, the owner of the master."""
        del groups, shapes
        return self.shard.partition

    def _collect_gradients(self) -> list[Tensor]:
        return self.reducer.sums

    @abstractmethod
    def _write_parameters(self, index: int, master: Tensor) -> None:
        """Write the new master of flat tensor ``index`` into the parameters, rounded."""

    @abstractmethod
    def _exchange_parameters(self) -> None:
        """Get the other ranks' new values, after all masters of this rank are written."""

    # The step

    @property
    def _summed_microbatches(self) -> int:
        return self.settings.microbatches

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        partition = self.shard.partition
        reduce_on = self.ranks.device if partition.world > 1 else None
        return compute_norm(gradients, partition.numel, reduce_on=reduce_on)

    def _update_weights(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        self.shard.update(gradients, scale, lr)
        self.copy_masters_to_parameters()

    def copy_masters_to_parameters(self) -> None:
        """Round every new master into its parameter, on all ranks. Collective.

        It is public because a resume fills the masters from a file, and then calls it.
        """
        with torch.no_grad():
            for index, state in enumerate(self.shard.states):
                self._write_parameters(index, state.master)
            self._exchange_parameters()

    def _clear_gradients(self) -> None:
        self.reducer.clear()
        for parameter in self.trainable.values():
            parameter.grad = None

    # The full parameters

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield masters of trainable parameters and values of frozen ones, see Engine."""
        partition = self.shard.partition
        for name, parameter in self.model.named_parameters():
            if name not in self.trainable:
                yield name, self._get_frozen(name)
                continue
            whole = torch.empty(parameter.numel(), device=self.ranks.device)
            for run in partition.runs[name]:
                piece = whole[run.start : run.stop]
                if run.rank == self.shard.rank:
                    master = self.shard.states[run.flat].master
                    piece.copy_(master[run.offset : run.offset + run.numel])
                if partition.world > 1:
                    dist.broadcast(piece, src=run.rank)
            yield name, whole.view(parameter.shape).cpu()

    def _get_frozen(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().cpu()
