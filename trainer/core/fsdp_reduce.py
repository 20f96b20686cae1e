"""Gradients of FSDP, added in micro batch order: the same bits at any number of ranks.

FSDP's reduce-scatter adds on the way, in an order that depends on the number of ranks. Both
generations let a program replace it. The replacement sends each rank's piece to its owner, which
adds the pieces in rank order to the sum that it keeps for the unit, as `reduce.Reducer` does::

    unit "layer 0", micro batches 0 and 1 on 2 ranks       then 2 and 3
    rank 0   |gg|gg|     owner 0   0 + gg0 + gg1                 + gg2 + gg3
    rank 1   |gg|gg|     owner 1   0 + gg0 + gg1                 + gg2 + gg3

The exchange moves the same bytes as a reduce-scatter, and keeps one more shard of gradients. After
each micro batch, FSDP gets the sum so far as the gradient, so that its last gradient is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from trainer.core.errors import SettingsError, TrainingError

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
else:
    ReduceScatter = object  # torch 2.6 does not have this abstract class


class UnitSums:
    """This rank's sums of a step; units must reduce in the same order in every backward pass.

    Args:
        get_active_ranks: returns the number of ranks that have a micro batch in this round (see
            ``loop``), because torch, which calls ``add``, does not pass it on.
    """

    def __init__(self, get_active_ranks: Callable[[], int]) -> None:
        self._get_active_ranks = get_active_ranks
        self._sums: list[Tensor] = []
        self._reduced = 0

    def add(self, pieces: Sequence[Tensor]) -> Tensor:
        """Add the pieces of all ranks to the sum of the next unit, and return the sum.

        Raises:
            TrainingError: another unit reduced at this place in an earlier micro batch.
        """
        if self._reduced == len(self._sums):
            self._sums.append(torch.zeros_like(pieces[0]))
        total = self._sums[self._reduced]
        self._reduced += 1
        if total.numel() != pieces[0].numel():
            raise _make_order_error()
        for piece in pieces[: self._get_active_ranks()]:
            total.add_(piece)
        return total

    def end_microbatch(self) -> None:
        """Begin again with the first unit.

        Raises:
            TrainingError: a unit had no gradient.
        """
        if self._reduced != len(self._sums):
            raise _make_order_error()
        self._reduced = 0

    def clear(self) -> None:
        """Forget the sums, after a step."""
        self._sums.clear()
        self._reduced = 0

    def add_exchanged(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send row r of ``rows`` to rank r; add what arrives to the sum of the next unit."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return self.add(received.chunk(group.size()))


def _make_order_error() -> TrainingError:
    return TrainingError(
        "the units of the model do not have gradients in every micro batch, in one order",
        "use --reduction fast",
        one_rank=True,
    )


class _OrderedReduceScatter(ReduceScatter):
    """Takes the place of FSDP 2's reduce-scatter."""

    def __init__(self, sums: UnitSums) -> None:
        self._sums = sums

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT002 - as torch declares it
    ) -> None:
        """Fill ``output_tensor`` with the sum so far."""
        del op, async_op
        output_tensor.copy_(self._sums.add_exchanged(input_tensor, group))


def order_additions(model: nn.Module, sums: UnitSums, world: int) -> None:
    """Let FSDP of either generation add in micro batch order, without a division.

    Raises:
        SettingsError: this torch has no replacement for the reduce-scatter of FSDP 2.
    """
    if isinstance(model, FullyShardedDataParallel):
        _order_fsdp1(model, sums)
    else:
        _order_fsdp2(model, sums, world)


def _order_fsdp2(model: nn.Module, sums: UnitSums, world: int) -> None:
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise SettingsError(
            f"--reduction canonical: FSDP 2 of torch {torch.__version__} always adds by its own"
            " reduce-scatter",
            "use --reduction fast, --strategy fsdp, or a newer torch",
        )
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(enable=True)
        if world > 1:
            unit.set_custom_reduce_scatter(_OrderedReduceScatter(sums))
        else:  # torch calls no collective then, but this hook
            unit.set_all_reduce_hook(partial(_add_alone, sums))


def _add_alone(sums: UnitSums, gradient: Tensor) -> None:
    gradient.copy_(sums.add([gradient]))


def _order_fsdp1(model: FullyShardedDataParallel, sums: UnitSums) -> None:
    def reduce(group: dist.ProcessGroup, whole: Tensor, shard: Tensor | None = None) -> None:
        if shard is None:  # one rank: FSDP 1 does not shard
            _add_alone(sums, whole)
        else:
            shard.copy_(sums.add_exchanged(whole.contiguous(), group))

    model.register_comm_hook(model.process_group, reduce)
