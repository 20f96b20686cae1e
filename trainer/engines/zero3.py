"""ZeRO stage 3: parameters are cut too; a layer's are gathered while it runs, and freed after."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.engines.zero import ZeroEngine
from trainer.model import layer_classes
from trainer.ranks import Ranks
from trainer.settings import Settings
from trainer.zero.offload import Home
from trainer.zero.partition import Partition, Shapes, by_parameter
from trainer.zero.units import Unit, split_into_units


class Zero3Engine(ZeroEngine):
    """Units follow the layers; what is outside them is gathered for the whole of each pass.

    Forward: gather before a unit's module runs, release after it. Backward: gather when the
    gradient of the unit's output arrives, reduce and release when its last parameter has its own.
    Small parameters (``persistence_threshold``) stay gathered between steps.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self._home = Home(settings.offload_param, ranks.device, settings.nvme_path)
        self._backward = False
        self._arrived: Counter[Unit] = Counter()
        self.units: list[Unit] = []
        self._layers: list[Unit] = []
        layers = layer_classes(self.model)
        small: list[tuple[str, nn.Parameter]] = []
        for module, parameters in list(split_into_units(self.model, layers)):
            large: list[tuple[str, nn.Parameter]] = []
            for name, p in parameters:
                (large if p.numel() >= settings.persistence_threshold else small).append((name, p))
            if large:
                unit = self._unit(large)
                module.register_forward_pre_hook(partial(self._before_forward, unit))
                if module is not self.model:
                    self._layers.append(unit)
                    module.register_forward_hook(partial(self._after_forward, unit))
        self._resident = self._unit(small) if small else None
        if self._resident:
            self._resident.gather()

    def _unit(self, parameters: list[tuple[str, nn.Parameter]]) -> Unit:
        unit = Unit(parameters, self.ranks, self._home, self.timer)
        for parameter in unit.trainable:
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, unit))
        self.units.append(unit)
        return unit

    # Forward and backward

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        unit.gather()

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        if self._backward:
            return  # run again for activation checkpointing: its backward pass comes next
        unit.release()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        del gradient
        self._backward = True
        for other in self._layers:
            if other is not unit and other.frozen:
                other.release()  # no gradient tells that its frozen parameters are done with
        unit.gather()

    def _gradient_ready(self, unit: Unit, parameter: Tensor) -> None:
        del parameter
        self._arrived[unit] += 1
        if self._arrived[unit] == len(unit.trainable):
            self._reduce(unit)
            if not unit.frozen and unit is not self._resident:
                unit.release()

    def _reduce(self, unit: Unit) -> None:
        """Bring the gradients that the unit has to their owners."""
        gradients = [
            (member.name, member.parameter.grad)
            for member in unit.members
            if member.parameter.grad is not None
        ]
        self.reducer.add(gradients)
        for member in unit.members:
            member.parameter.grad = None

    def _after_backward(self, *, last: bool) -> None:
        del last
        for unit in self.units:
            self._reduce(unit)  # those with parameters that the loss does not depend on
            if unit is not self._resident:
                unit.release()
        self._backward = False
        self._arrived.clear()

    # The optimizer

    def _owned(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return by_parameter(groups, shapes, self.ranks.world, self.settings.sub_group_size)

    def _publish(self, index: int, master: Tensor) -> None:
        new = {
            run.name: master[run.offset : run.offset + run.numel]
            for name in self.shard.partition.flats[index].names
            for run in self.shard.partition.runs[name]
            if run.rank == self.ranks.rank
        }
        for unit in self.units:
            unit.update(new)

    def _published(self) -> None:
        if self._resident:
            self._resident.release()
            self._resident.gather()

    # Frozen parameters

    def _frozen(self, name: str) -> Tensor:
        for unit in self.units:
            if any(member.name == name for member in unit.members):
                gathered = unit.gathered
                unit.gather()
                value = self.model.get_parameter(name).detach().to("cpu", copy=True)
                if not gathered:
                    unit.release()
                return value
        raise KeyError(name)

    def set_frozen(self, name: str, whole: Tensor) -> None:
        """Keep this rank's piece of the value."""
        piece = math.ceil(whole.numel() / self.ranks.world)
        mine = whole.reshape(-1)[self.ranks.rank * piece : (self.ranks.rank + 1) * piece]
        for unit in self.units:
            unit.update({name: mine})

    def frozen_fragments(self) -> dict[str, Tensor]:
        """This rank's padded piece of each frozen parameter."""
        return {
            member.name: unit.piece(member)
            for unit in self.units
            for member in unit.members
            if not member.parameter.requires_grad
        }

    def _parameter_bytes(self) -> int:
        return sum(unit.resident for unit in self.units)
