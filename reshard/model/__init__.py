"""A model's names, shapes and FSDP1 units, from its config or its code, on the meta device.

For checkpoints whose files do not say: an FSDP1 flat parameter (``LOCAL_STATE_DICT``, the raw
optimizer) is one long vector, and only the model that was wrapped knows what lies in it.

build   the module itself
wrap    which of its modules FSDP 1 wraps
shapes  what it holds, and which parameters each wrapped module owns
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.model import wrap as wrapping
from reshard.model.build import build, build_configured
from reshard.model.shapes import ModelShapes, Unit, of_module

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelShapes", "Told", "Unit", "describe", "describe_config", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a user says of a model: ``--model`` and ``--wrap``.

    Args:
        by_blocks: without ``wrap``: FSDP wrapped the classes that transformers names as blocks,
            see `wrap.blocks_of`.
    """

    model: str
    wrap: str | None = None
    by_blocks: bool = False

    def shapes(self, units: Iterable[str] = ()) -> ModelShapes:
        """What the model would hold.

        Args:
            units: the flat parameters that there are. Whether FSDP had a ``MixedPrecision`` is not
                told; batch norms that are units of their own show it.

        Raises:
            UsageError, UnsupportedError: as `describe`.
        """
        if self.by_blocks and self.wrap is None:
            root = build(self.model)
            return of_module(root, self.model, wrapping.blocks_of(root), mixed_precision=False)
        plain = describe(self.model, self.wrap)
        wanted = set(units)
        if not wanted or {unit.prefix for unit in plain.units} == wanted:
            return plain
        mixed = describe(self.model, self.wrap, mixed_precision=True)
        return mixed if {unit.prefix for unit in mixed.units} == wanted else plain


def describe(model: str, wrap: str | None = None, *, mixed_precision: bool = False) -> ModelShapes:
    """The names, shapes and units of a model, without its memory and without the network.

    ``module:factory`` **imports and calls the user's own code**, found as Python finds it or in the
    working directory: only a user who names it asks for that. Code that lies beside a config is
    never run.

    Args:
        model: a transformers ``config.json`` or a directory with one, or ``module:factory``, a
            function without arguments that returns the module which FSDP wrapped.
        wrap: how FSDP1 was told to wrap it: class names, which also count for their subclasses, as
            ``transformer_auto_wrap_policy`` and ``ModuleWrapPolicy``; ``size=N`` as
            ``size_based_auto_wrap_policy`` with ``min_num_params=N``; ``none`` for the root alone.
        mixed_precision: FSDP had a ``MixedPrecision``: it then wraps every batch norm by itself,
            and ``size=`` looks into ``nn.MultiheadAttention`` too.

    Raises:
        UsageError: there is no such model or class, or FSDP1 could not have wrapped it so.
        UnsupportedError: which units it then has depends on what nothing here says.
    """
    policy = None if wrap is None else wrapping.parse(wrap)
    return of_module(build(model), model, policy, mixed_precision=mixed_precision)


def describe_config(config: Mapping[str, Any], source: str) -> ModelShapes:
    """`describe` for the content of a transformers ``config.json``.

    Raises:
        UsageError: transformers has no such model.
    """
    return of_module(build_configured(config, source), source, None, mixed_precision=False)


def shapes_of(
    root: nn.Module, wrap: str | None = None, *, mixed_precision: bool = False
) -> ModelShapes:
    """``describe`` for a module that is there; its values are not looked at.

    Raises:
        UsageError, UnsupportedError: as `describe`.
    """
    policy = None if wrap is None else wrapping.parse(wrap)
    return of_module(root, "model", policy, mixed_precision=mixed_precision)
