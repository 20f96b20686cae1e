"""The model that FSDP shards, with the weights that rank 0 has."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.errors import SettingsError
from trainer.model import build
from trainer.ranks import Ranks
from trainer.settings import Settings


class FirstWeights:
    """Builds ``model``. With ``fsdp_cpu_ram_efficient_loading`` it is on the meta device.

    Then only rank 0 has weights, in a twin of the model, and ``fill`` sends them module by module
    while the units are sharded: no other rank ever holds the whole model, and all ranks do the
    same. (FSDP's own ``sync_module_states`` refuses CPU, and unties what comes from meta.)

    Raises:
        SettingsError: efficient loading without synchronisation.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._ranks = ranks
        self._twin: nn.Module | None = None
        if not settings.fsdp_cpu_ram_efficient_loading:
            self.model = build(settings)
            if settings.fsdp_sync_module_states:
                self._synchronise()
            return
        if not settings.fsdp_sync_module_states:
            raise SettingsError(
                "fsdp_cpu_ram_efficient_loading without fsdp_sync_module_states: only rank 0 would "
                "have weights",
                "use both, or neither",
            )
        self._twin = build(settings) if ranks.first else None
        self.model = build(settings, meta=True)
        self._module_names = {module: name for name, module in self.model.named_modules()}
        # A tied parameter is met under two names and must stay one; weak, so that a filled
        # parameter goes when its unit has been sharded.
        self._first_names = {blank: name for name, blank in self.model.named_parameters()}
        self._filled: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary()

    def fill(self, module: nn.Module) -> None:
        """Give one module, not its children, rank 0's tensors for those on meta. Collective."""
        name = self._module_names[module]
        twin = self._twin.get_submodule(name) if self._twin is not None else None
        for key, blank in list(_own(module)):
            if not blank.is_meta:
                continue
            if not isinstance(blank, nn.Parameter):
                setattr(module, key, self._received(blank, _of(twin, key)))
                continue
            filled = self._filled.get(self._first_names[blank])
            if filled is None:
                tensor = self._received(blank, _of(twin, key))
                filled = nn.Parameter(tensor, requires_grad=blank.requires_grad)
                self._filled[self._first_names[blank]] = filled
            setattr(module, key, filled)

    def fill_all(self, unit: nn.Module) -> None:
        """``fill`` a module and all inside it that is still on meta."""
        for module in unit.modules():
            if any(tensor.is_meta for _, tensor in _own(module)):
                self.fill(module)

    def _received(self, blank: Tensor, real: Tensor | None) -> Tensor:
        tensor = torch.empty_like(blank, device=self._ranks.device)
        if real is not None:
            tensor.copy_(real.detach())
        dist.broadcast(tensor, src=0)
        return tensor

    def _synchronise(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            sent = tensor.detach().to(self._ranks.device)
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)


def _of(module: nn.Module | None, key: str) -> Tensor | None:
    tensor: Tensor | None = getattr(module, key) if module is not None else None
    return tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, under each of its names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
