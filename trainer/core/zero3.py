"""ZeRO stage 3: parameters are partitioned too; a layer is gathered while it runs.

::

                 parameters   gradients   master, moments
    rank 0       [====    ]   [====    ]  [====    ]
    rank 1       [    ====]   [    ====]  [    ====]

    forward      gather layer 0, run, release | gather layer 1, run, release | ...
    backward     gather layer 1, run, reduce, release | gather layer 0, run, reduce, release
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.core.model import find_layer_classes
from trainer.core.partition import Partition, Shapes, partition_each_parameter
from trainer.core.ranks import Ranks
from trainer.core.settings import CoreSettings
from trainer.core.units import Unit, split_into_units
from trainer.core.zero import ZeroEngine


class Zero3Engine(ZeroEngine):
    """Gathers unit by unit; what is outside the layers stays gathered for the whole pass.

    Forward: gather before a unit's module runs, release after it. Backward: gather when the
    gradient of the unit's output arrives; reduce and release when the last parameter of the unit
    has its gradient, or release later if the unit has frozen parameters, which get none.
    """

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        shard_device = torch.device("cpu") if settings.offload_param == "cpu" else ranks.device
        self._backward = False
        self._gradients_done: Counter[Unit] = Counter()
        self.units: list[Unit] = []
        self._layers: list[Unit] = []
        layers = find_layer_classes(self.model)
        for module, parameters in split_into_units(self.model, layers):
            unit = Unit(parameters, ranks, shard_device)
            self.units.append(unit)
            module.register_forward_pre_hook(partial(self._before_forward, unit))
            if module is not self.model:
                self._layers.append(unit)
                module.register_forward_hook(partial(self._after_forward, unit))
            for parameter in unit.trainable:
                parameter.register_post_accumulate_grad_hook(partial(self._after_gradient, unit))

    # Forward and backward

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        unit.gather()

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        if self._backward:
            return  # activation checkpointing runs it again, and its backward pass comes next
        unit.release()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        del gradient
        self._backward = True
        for other in self._layers:
            if other is not unit and other.frozen:
                other.release()  # its backward pass is over, as that of another layer begins
        unit.gather()

    def _after_gradient(self, unit: Unit, parameter: Tensor) -> None:
        del parameter
        self._gradients_done[unit] += 1
        if self._gradients_done[unit] == len(unit.trainable):
            self._reduce_unit(unit)
            if not unit.frozen:
                unit.release()

    def _reduce_unit(self, unit: Unit) -> None:
        gradients = [
            (member.name, member.parameter.grad)
            for member in unit.members
            if member.parameter.grad is not None
        ]
        self.reducer.add(gradients, self.active_ranks)
        for member in unit.members:
            member.parameter.grad = None

    def _end_microbatch(self, *, last: bool) -> None:
        del last
        for unit in self.units:
            self._reduce_unit(unit)  # some units have parameters that the loss does not use
            unit.release()
        self._backward = False
        self._gradients_done.clear()

    # The optimizer

    def _partition_optimizer(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return partition_each_parameter(
            groups, shapes, self.ranks.world, self.settings.sub_group_size
        )

    def _write_parameters(self, index: int, master: Tensor) -> None:
        new = {
            run.name: master[run.offset : run.offset + run.numel]
            for name in self.shard.partition.flats[index].names
            for run in self.shard.partition.runs[name]
            if run.rank == self.ranks.rank
        }
        for unit in self.units:
            unit.write(new)

    def _exchange_parameters(self) -> None:
        """Do nothing: the next forward pass gathers the pieces."""

    # Frozen parameters

    def _get_frozen(self, name: str) -> Tensor:
        unit = next(each for each in self.units if any(m.name == name for m in each.members))
        unit.gather()
        value = self.model.get_parameter(name).detach().to("cpu", copy=True)
        unit.release()
        return value
