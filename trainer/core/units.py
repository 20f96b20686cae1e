"""ZeRO stage 3: parameters that are whole only while a layer uses them.

A unit is a layer of the model, or what is left outside the layers. Between uses this rank keeps
1/N of each of its parameters::

    shard of rank r      | a_r . | b_r | c_r . |        piece r of each parameter, end to end
    gather               | a_0 a_1 ... | b_0 b_1 ... | c_0 c_1 ... |
    release              storages of size zero

A released parameter keeps its tensor object, so that every view that autograd has saved of it is
valid again after the next gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.core.ranks import Ranks


@dataclass(frozen=True)
class Member:
    """A parameter of a unit: this rank's piece is [offset, offset + piece) of the unit's shard."""

    name: str
    parameter: nn.Parameter
    offset: int
    piece: int
    """ceil(numel / world) elements; the pieces of the last ranks are padded with zeros."""


class Unit:
    """Parameters that are gathered and released together.

    Args:
        parameters: (fqn, parameter) with full values; released on return.
        ranks: all ranks of the run.
        device: where the shard is kept.

    Attributes:
        shard: this rank's pieces of all members, end to end, each with its padding.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.members: list[Member] = []
        self.gathered = True
        self._ranks = ranks
        pieces = []
        offset = 0
        for name, parameter in parameters:
            # Each parameter needs a storage of its own, which can be released alone.
            parameter.data = parameter.data.detach().clone(memory_format=torch.contiguous_format)
            member = Member(name, parameter, offset, math.ceil(parameter.numel() / ranks.world))
            pieces.append(_copy_own_piece(parameter.data, ranks.rank, member.piece))
            self.members.append(member)
            offset += member.piece
        self.trainable = [m.parameter for m in self.members if m.parameter.requires_grad]
        self.frozen = [m.parameter for m in self.members if not m.parameter.requires_grad]
        self._numel = offset
        self.shard = torch.cat(pieces).to(device)
        self.release()

    def gather(self) -> None:
        """Make the parameters whole."""
        if self.gathered:
            return
        with torch.no_grad():
            world = self._ranks.world
            shard = self.shard.to(self._ranks.device)
            rows = shard.new_empty(world * self._numel)
            self._ranks.all_gather(rows, shard)
            rows = rows.view(world, self._numel)
            for member in self.members:
                whole = member.parameter.data
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
                part = rows[:, member.offset : member.offset + member.piece].reshape(-1)
                whole.view(-1).copy_(part[: whole.numel()])
        self.gathered = True

    def release(self) -> None:
        """Keep only this rank's pieces."""
        if self.gathered:
            for member in self.members:
                member.parameter.data.untyped_storage().resize_(0)
            self.gathered = False

    def write(self, values: dict[str, Tensor]) -> None:
        """Set this rank's pieces (without padding) of the parameters that ``values`` names."""
        for member in self.members:
            if member.name in values:
                new = values[member.name]
                self.shard[member.offset : member.offset + new.numel()].copy_(new)


def _copy_own_piece(whole: Tensor, rank: int, piece: int) -> Tensor:
    padded = whole.new_zeros(piece)
    own = whole.reshape(-1)[rank * piece : (rank + 1) * piece]
    padded[: own.numel()] = own
    return padded


def split_into_units(
    model: nn.Module, layers: set[type[nn.Module]]
) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Parameter]]]]:
    """Yield (module, its parameters) for each layer, then for the model with all that is left.

    A parameter that a layer shares with anything outside it belongs to what is left. Modules
    without parameters of their own are left out.
    """
    units = [*(module for module in model.modules() if type(module) in layers), model]
    layer_of = {part: layer for layer in units[:-1] for part in layer.modules()}
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(layer_of.get(module, model))
    owner = {p: found.pop() if len(found) == 1 else model for p, found in users.items()}
    for unit in units:
        own = [(name, p) for name, p in model.named_parameters() if owner[p] is unit]
        if own:
            yield unit, own
