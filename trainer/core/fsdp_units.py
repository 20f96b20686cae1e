"""What the settings of FSDP mean: mesh axes, units, and warnings of torch that they cause."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trainer.core.errors import SettingsError
from trainer.core.model import find_layer_classes
from trainer.core.settings import CoreSettings

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def is_hybrid(settings: CoreSettings, world: int) -> bool:
    """Return whether the model is sharded inside replicas, and not over all ranks."""
    return "HYBRID" in settings.fsdp_sharding_strategy and world > 1


def list_mesh_axes(settings: CoreSettings, world: int) -> dict[str, int]:
    """Return the mesh axes of the ranks: (shard), or (replicate, shard) if hybrid.

    Raises:
        SettingsError: the ranks cannot form replicas of that size.
    """
    if not is_hybrid(settings, world):
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


def choose_units(model: nn.Module, settings: CoreSettings) -> dict[str, nn.Module]:
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
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        if len({find_unit(name, units) for name in tied}) > 1:
            raise SettingsError(
                f"{' and '.join(tied)} are one parameter, but would be in different FSDP units",
                "use --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP, or a larger "
                "--fsdp-min-num-params",
            )


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
    with warnings.catch_warnings():
        for message in known:
            warnings.filterwarnings("ignore", message=message)
        yield
