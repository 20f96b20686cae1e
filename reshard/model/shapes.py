"""Names and shapes of a model's tensors in PyTorch's order, and its FSDP 1 units.

Source: torch 2.13 ``torch/distributed/fsdp``: ``_init_utils.py`` ``_get_orig_params`` and
``_flat_param.py`` ``_init_flat_param_and_metadata`` (which parameters a wrapped module owns, in
which order).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from reshard.core.box import Index
from reshard.core.manifest import ParamGroup
from reshard.errors import UnsupportedError, UsageError
from reshard.model.wrap import Policy, find_wrapped, get_batch_norm

if TYPE_CHECKING:
    from torch import nn

    from reshard.model.published import Published

    _Owners = Mapping[nn.Module, nn.Module]
    # By unit as well, because a parameter of two units has a first name in each of them.
    _Firsts = dict[tuple[nn.Module, nn.Parameter], str]


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP1 flat parameter.

    Args:
        prefix: name of the wrapped module; empty for the root.
        members: names of its parameters in flat order, shared ones once.
        full_precision: mixed precision excludes the unit (batch norm): forward uses its own dtype.
    """

    prefix: str
    members: tuple[str, ...]
    full_precision: bool = False


def _find_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Names and shapes of a model's tensors, in the order of PyTorch's names.

    Args:
        source: the config or code that describes the model, and its class.
        parameters: shapes by name, tied ones once, in ``named_parameters()`` order. A parameter
            that two units share is listed once per unit: FSDP1 trains it as two.
        buffers: shapes of the buffers that are saved; shared ones once.
        tied: every further name of a parameter or a saved buffer -> its first name.
        units: in the order in which FSDP1 numbers its flat parameters; empty if not requested.
        tensor_plan: tensor-parallel plans of the transformers models in it: pattern -> style.
        embeddings: every name of the weights of ``nn.Embedding``.
        layer_norms: every name of the parameters of ``nn.LayerNorm``.
        frozen: the parameters that need no gradient.
        names: every name of the parameters, in the order of the modules.
        groups: the param groups of a live optimizer; empty if there is none.
        is_converted: whether transformers may hold the model in another form than its files do.
        trace: returns the form of the model in files, which other tools read; None if it is not of
            transformers.
    """

    source: str
    parameters: Mapping[str, Index]
    buffers: Mapping[str, Index]
    tied: Mapping[str, str]
    units: tuple[Unit, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    layer_norms: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    groups: tuple[ParamGroup, ...] = ()
    is_converted: bool = False
    trace: Callable[[], Published | None] = field(default=_find_nothing, compare=False, repr=False)

    def find_published(self, names: Iterable[str]) -> Published | None:
        """Return the published form; None if tensors with these names are in the form in memory.

        Names that the model does not have in memory can be those of a former release.
        """
        known = {*self.parameters, *self.buffers, *self.tied}
        return self.trace() if self.is_converted or not known.issuperset(names) else None

    def rename(self, name: Callable[[str], str]) -> ModelShapes:
        """Return the model with other names of its tensors and its units' modules."""
        units = (
            replace(
                unit,
                prefix=name(unit.prefix).removesuffix("."),
                members=tuple(map(name, unit.members)),
            )
            for unit in self.units
        )
        return replace(
            self,
            parameters={name(fqn): shape for fqn, shape in self.parameters.items()},
            buffers={name(fqn): shape for fqn, shape in self.buffers.items()},
            tied={name(alias): name(kept) for alias, kept in self.tied.items()},
            units=tuple(units),
            embeddings=frozenset(map(name, self.embeddings)),
            layer_norms=frozenset(map(name, self.layer_norms)),
            frozen=frozenset(map(name, self.frozen)),
            names=tuple(map(name, self.names)),
            groups=tuple(replace(g, fqns=tuple(map(name, g.fqns))) for g in self.groups),
        )


def describe_module(
    root: nn.Module, source: str, policy: Policy | None, *, mixed_precision: bool
) -> ModelShapes:
    """Return the names, shapes and units of a module.

    Args:
        policy: how FSDP 1 wrapped the module; None if that is unknown, and the result has no units.
    """
    from torch import nn

    units, owners, firsts = _find_units(root, policy, mixed_precision=mixed_precision)
    source = f"{source} ({type(root).__name__})"
    is_converted, trace = _plan_trace(root, source)
    return replace(
        _name_tensors(root, source, owners, firsts),
        units=units,
        tensor_plan=_collect_tensor_plans(root),
        embeddings=_collect_parameters_of(nn.Embedding, root),
        layer_norms=_collect_parameters_of(nn.LayerNorm, root),
        frozen=frozenset(fqn for (_, first), fqn in firsts.items() if not first.requires_grad),
        is_converted=is_converted,
        trace=trace,
    )


def _find_units(
    root: nn.Module, policy: Policy | None, *, mixed_precision: bool
) -> tuple[tuple[Unit, ...], _Owners, _Firsts]:
    wrapped = find_wrapped(root, policy or Policy(), mixed_precision=mixed_precision)
    owners = _find_owners(root, wrapped)
    prefixes = {module: fqn for fqn, module in root.named_modules()}
    excluded = get_batch_norm() if mixed_precision else ()
    units: list[Unit] = []
    firsts: _Firsts = {}
    for unit in root.modules():
        if unit is not root and unit not in wrapped:
            continue
        members = _collect_members(unit, prefixes[unit], owners)
        firsts.update({(unit, parameter): fqn for parameter, fqn in members.items()})
        if policy is not None and members:
            _refuse_unflattenable(members)
            full = unit is not root and isinstance(unit, excluded)
            units.append(Unit(prefixes[unit], tuple(members.values()), full))
    return tuple(units), owners, firsts


def _name_tensors(root: nn.Module, source: str, owners: _Owners, firsts: _Firsts) -> ModelShapes:
    # A file may have any name of a tied tensor.
    parameters: dict[str, Index] = {}
    buffers: dict[str, Index] = {}
    tied: dict[str, str] = {}
    names: list[str] = []
    saved: dict[Any, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = _join(path, name)
            names.append(fqn)
            first = firsts[owners[module], parameter]
            if fqn == first:
                # ZeRO 3 leaves an empty tensor in the module, with the full shape beside it.
                shape = getattr(parameter, "ds_shape", parameter.shape)
                parameters[fqn] = tuple(shape)
            else:
                tied[fqn] = first
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:  # noqa: SLF001 - no public name
                continue
            fqn = _join(path, name)
            if saved.setdefault(buffer, fqn) == fqn:
                buffers[fqn] = tuple(buffer.shape)
            else:
                tied[fqn] = saved[buffer]
    return ModelShapes(source, parameters, buffers, tied, names=tuple(names))


def _collect_tensor_plans(root: nn.Module) -> dict[str, str]:
    # An outer model includes its parts' plans (transformers 5.23 ``distributed/mixin.py``,
    # ``init_parallel_plans``).
    plans: dict[str, str] = {}
    for path, module in root.named_modules():
        plan = getattr(module, "tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            plans.setdefault(_join(path, pattern), style)
    return plans


def _collect_parameters_of(module_class: type[nn.Module], root: nn.Module) -> frozenset[str]:
    return frozenset(
        _join(path, name)
        for path, module in root.named_modules(remove_duplicate=False)
        if isinstance(module, module_class)
        for name, _ in module.named_parameters(recurse=False)
    )


def _plan_trace(root: nn.Module, source: str) -> tuple[bool, Callable[[], Published | None]]:
    transformers = sys.modules.get("transformers")  # a model of transformers has imported it
    if transformers is None or not isinstance(root, transformers.PreTrainedModel):
        return False, _find_nothing
    from reshard.model.library import may_be_converted
    from reshard.model.published import trace_published

    config = {**root.config.to_dict(), "architectures": [type(root).__name__]}
    return may_be_converted(config), cache(lambda: trace_published(root, source))


def _find_owners(root: nn.Module, wrapped: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    # FSDP1 wraps from the leaves up; the first unit keeps a module.
    owners: dict[nn.Module, nn.Module] = {}
    for unit in _post_order(root, {root}):
        if unit in wrapped or unit is root:
            for module in unit.modules():
                owners.setdefault(module, unit)
    return owners


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(child, seen)
    yield module


def _collect_members(
    unit: nn.Module, prefix: str, owners: Mapping[nn.Module, nn.Module]
) -> dict[nn.Parameter, str]:
    # A parameter of two modules in two units is in both: with ``use_orig_params=False`` they are
    # trained as two from then on. With ``use_orig_params=True`` FSDP1 gives it to the first unit,
    # and no forward of the second succeeds.
    members: dict[nn.Parameter, str] = {}
    for path, module in unit.named_modules(remove_duplicate=False):
        if owners[module] is unit:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                members.setdefault(parameter, _join(prefix, path, name))
    return members


def _refuse_unflattenable(members: Mapping[nn.Parameter, str]) -> None:
    for parameter, fqn in members.items():
        if parameter.dim() == 0:
            raise UsageError(
                fqn,
                "is a scalar, which FSDP 1 does not support",
                "check that this is the trained model",
            )
        if not parameter.is_contiguous():
            raise UnsupportedError(
                fqn,
                f"has strides {parameter.stride()}, but FSDP 1 flattens it in memory order",
                "open an issue that names the model's class",
            )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
