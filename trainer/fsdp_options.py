"""What the settings of FSDP mean: mesh axes, units, and which ranks read the initial weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.model import build_model, find_layer_classes, list_names
from trainer.core.ranks import Ranks
from trainer.errors import SettingsError
from trainer.settings import Settings

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def is_hybrid(settings: Settings) -> bool:
    """Return whether the model is sharded inside replicas, and not over all ranks."""
    return "HYBRID" in settings.fsdp_sharding_strategy and settings.nproc > 1


def list_data_mesh_axes(settings: Settings) -> dict[str, int]:
    """Return the mesh axes of the ranks: (shard), or (replicate, shard) if hybrid.

    Raises:
        SettingsError: the ranks cannot form replicas of that size.
    """
    world = settings.nproc
    if not is_hybrid(settings):
        return {"shard": world}
    half = world // 2 if world % 2 == 0 and world > 2 else world
    size = settings.fsdp_hybrid_size or half
    if size < 2 or world % size:
        raise SettingsError(
            f"fsdp_hybrid_size is {size}: {world} ranks cannot form replicas of {size} "
            f"rank{'s' if size != 1 else ''}",
            f"use a divisor of {world} from 2 on; for no sharding, use NO_SHARD",
        )
    return {"replicate": world // size, "shard": size}


def choose_units(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    """Return the modules that become FSDP units, by name in model order, without the root.

    Raises:
        SettingsError: no module fits the policy, or tied parameters would be in different units.
    """
    chosen: set[nn.Module] = set()
    if settings.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        classes = find_layer_classes(model, settings.fsdp_transformer_layer_cls_to_wrap)
        if not classes:
            raise SettingsError(
                f"{type(model).__name__} does not declare which of its layers repeat",
                "name their classes with --fsdp-transformer-layer-cls-to-wrap",
            )
        chosen = {module for module in model.modules() if isinstance(module, tuple(classes))}
    elif settings.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        _choose_large(model, settings.fsdp_min_num_params, chosen)
    units = {name: module for name, module in model.named_modules() if name and module in chosen}
    _check_ties(model, units)
    return units


def find_unit(fqn: str, units: dict[str, nn.Module]) -> str:
    """Return the name of the unit that a parameter is in; the root's is empty."""
    holders = (name for name in units if fqn.startswith(f"{name}."))
    return max(holders, key=len, default="")


def _choose_large(module: nn.Module, minimum: int, chosen: set[nn.Module]) -> int:
    """Choose as torch's ``size_based_auto_wrap_policy``; return the elements that are in units."""
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements < minimum or isinstance(module, nn.MultiheadAttention):
        return 0
    in_children = sum(_choose_large(child, minimum, chosen) for child in module.children())
    if elements - in_children < minimum or isinstance(module, _CONTAINERS):
        return in_children
    chosen.add(module)
    return elements


def _check_ties(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Refuse tied parameters in different units, because FSDP would untie them silently."""
    for tied in list_names(model).values():
        if len({find_unit(name, units) for name in tied}) > 1:
            raise SettingsError(
                f"{' and '.join(tied)} are one parameter, but would be in different FSDP units",
                "use --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP, or a larger "
                "--fsdp-min-num-params",
            )


class InitialWeights:
    """The model with its initial weights, ``model``.

    With ``fsdp_cpu_ram_efficient_loading``, ``model`` is on the meta device, and only rank 0 has
    weights, in a second model, its twin. ``fill`` broadcasts them module by module while the units
    are sharded, so that no other rank ever holds the whole model. (FSDP's own
    ``sync_module_states`` refuses the CPU, and unties tied parameters from the meta device.)

    Raises:
        SettingsError: efficient loading without synchronization.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._ranks = ranks
        self._twin: nn.Module | None = None
        if not settings.fsdp_cpu_ram_efficient_loading:
            self.model = build_model(settings)
            if settings.fsdp_sync_module_states:
                self._broadcast_model()
            return
        if not settings.fsdp_sync_module_states:
            raise SettingsError(
                "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: without it only "
                "rank 0 would have weights",
                "use both, or neither",
            )
        self._twin = build_model(settings) if ranks.is_first else None
        self.model = build_model(settings, meta=True)
        self._module_names = {module: name for name, module in self.model.named_modules()}
        # A tied parameter appears under two names and must stay one. The dictionary is weak, so
        # that a filled parameter is freed when its unit has been sharded.
        self._first_names = {blank: name for name, blank in self.model.named_parameters()}
        self._filled: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary()

    def fill(self, module: nn.Module) -> None:
        """Replace the meta tensors of one module, not of its children, by rank 0's. Collective."""
        name = self._module_names[module]
        twin = self._twin.get_submodule(name) if self._twin is not None else None
        for key, blank in list(_own_tensors(module)):
            if not blank.is_meta:
                continue
            if not isinstance(blank, nn.Parameter):
                setattr(module, key, self._receive(blank, _get_tensor(twin, key)))
                continue
            filled = self._filled.get(self._first_names[blank])
            if filled is None:
                tensor = self._receive(blank, _get_tensor(twin, key))
                filled = nn.Parameter(tensor, requires_grad=blank.requires_grad)
                self._filled[self._first_names[blank]] = filled
            setattr(module, key, filled)

    def fill_all(self, unit: nn.Module) -> None:
        """Fill a module and all modules inside it that are still on meta. Collective."""
        for module in unit.modules():
            if any(tensor.is_meta for _, tensor in _own_tensors(module)):
                self.fill(module)

    def _receive(self, blank: Tensor, real: Tensor | None) -> Tensor:
        """Return rank 0's ``real`` tensor, which has the shape of ``blank``."""
        tensor = torch.empty_like(blank, device=self._ranks.device)
        if real is not None:
            tensor.copy_(real.detach())
        dist.broadcast(tensor, src=0)
        return tensor

    def _broadcast_model(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            on_device = tensor.detach().to(self._ranks.device)
            dist.broadcast(on_device, src=0)
            tensor.detach().copy_(on_device)


def _get_tensor(module: nn.Module | None, key: str) -> Tensor | None:
    tensor: Tensor | None = getattr(module, key) if module is not None else None
    return tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of the module itself, under each of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


@contextmanager
def ignore_known_warnings() -> Iterator[None]:
    """Ignore torch's warnings about what the settings request on purpose."""
    known = (
        "The `NO_SHARD` sharding strategy is deprecated",
        "FSDP.state_dict_type",
        "FSDP.set_state_dict_type",
        "When using ``NO_SHARD`` for ``ShardingStrategy``",
        "Please use DTensor instead",
        ".* has both parameters with requires_grad=True and False",
        "`_get_pg_default_device` will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
        "FSDP2-wrapped module .* returned a view tensor",  # nothing is done in place here
    )
    # It warns that a parameter that is cut by tensor and then sharded takes two gathers.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in known:
            warnings.filterwarnings("ignore", message=message)
        yield
