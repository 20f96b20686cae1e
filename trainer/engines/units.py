"""Which modules FSDP gathers as one unit; both generations of FSDP follow the same choice."""

from __future__ import annotations

from torch import nn

from trainer.errors import SettingsError
from trainer.model import layer_classes
from trainer.settings import Settings

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    """Modules that become units of their own, by name in model order; the rest is the root's.

    Raises:
        SettingsError: no module fits the policy, or tied parameters would be in different units.
    """
    chosen: set[nn.Module] = set()
    if settings.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        classes = layer_classes(model, settings.fsdp_transformer_layer_cls_to_wrap)
        if not classes:
            raise SettingsError(
                f"{type(model).__name__} does not say which of its layers repeat",
                "name them with --fsdp-transformer-layer-cls-to-wrap",
            )
        chosen = {module for module in model.modules() if isinstance(module, tuple(classes))}
    elif settings.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        _choose_large(model, settings.fsdp_min_num_params, chosen)
    found = {name: module for name, module in model.named_modules() if name and module in chosen}
    _check_ties(model, found)
    return found


def owner(fqn: str, names: dict[str, nn.Module]) -> str:
    """The name of the unit that a parameter lies in; the root's is empty."""
    holders = (name for name in names if fqn.startswith(f"{name}."))
    return max(holders, key=len, default="")


def _choose_large(module: nn.Module, least: int, chosen: set[nn.Module]) -> int:
    """Choose as torch's ``size_based_auto_wrap_policy``; return the elements that are in units."""
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements < least or isinstance(module, nn.MultiheadAttention):
        return 0
    inside = sum(_choose_large(child, least, chosen) for child in module.children())
    if elements - inside < least or isinstance(module, _CONTAINERS):
        return inside
    chosen.add(module)
    return elements


def _check_ties(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """FSDP unties, without a word, what two units share."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        if len({owner(name, found) for name in tied}) > 1:
            raise SettingsError(
                f"{' and '.join(tied)} are one parameter, but would be in different FSDP units",
                "use --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP, or a larger "
                "--fsdp-min-num-params",
            )
