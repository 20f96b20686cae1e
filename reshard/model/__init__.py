"""A model's names, shapes and FSDP1 units, from its config or its code, on the meta device.

Some checkpoints need them: an FSDP1 flat parameter (``LOCAL_STATE_DICT``, the raw optimizer) is one
long vector, and only the wrapped model shows which parameters are in it.

build          the module itself
wrap           which of its modules FSDP 1 wraps
shapes         names and shapes of its parameters, and which of them each wrapped module owns
fp8_modules    which weights transformers quantises to fp8 in blocks
published      the names and shapes that save_pretrained writes, and how they are made
conversion     a training state between two forms of a model
tracing        tensors without values that record how they are made
adapter_names  names of LoRA tensors in the model and in PEFT's file
library        whether transformers converts a model, without importing it
model_order    weights and training states in the order of the model
norm_buffers   the buffers of batch norms, by their names alone
weight_decay   which parameters HF Trainer's optimizer decays
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.model import library
from reshard.model import wrap as wrapping
from reshard.model.build import build, build_configured
from reshard.model.shapes import ModelShapes, Unit, describe_module
from reshard.system import optional

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelHint", "ModelShapes", "Unit", "describe", "describe_config", "shapes_of"]


class ModelHint(NamedTuple):
    """The user's description of a model: ``--model`` and ``--wrap``.

    Args:
        by_blocks: without ``wrap``: FSDP wrapped the classes that transformers declares as blocks,
            see `wrap.make_block_policy`.
        known: the shapes of a running program's model, which do not show how FSDP 1 wrapped it.
    """

    model: str
    wrap: str | None = None
    by_blocks: bool = False
    known: ModelShapes | None = None

    def shapes(self, units: Iterable[str] = ()) -> ModelShapes:
        """Return the names, shapes and units of the model.

        Args:
            units: prefixes of the flat parameters in the checkpoint. They show whether FSDP had a
                ``MixedPrecision``: it makes every batch norm a unit of its own.

        Raises:
            MissingModuleError: the library that builds the model is not installed.
        """
        if self.known is not None:
            return self.known
        with optional.needed_for(f"building the model of {self.model}", library.INSTALL):
            return self._build(units)

    def _build(self, units: Iterable[str]) -> ModelShapes:
        if self.by_blocks and self.wrap is None:
            root = build(self.model)
            return describe_module(
                root, self.model, wrapping.make_block_policy(root), mixed_precision=False
            )
        plain = describe(self.model, self.wrap)
        prefixes = set(units)
        if not prefixes or {unit.prefix for unit in plain.units} == prefixes:
            return plain
        mixed = describe(self.model, self.wrap, mixed_precision=True)
        return mixed if {unit.prefix for unit in mixed.units} == prefixes else plain


def describe(model: str, wrap: str | None = None, *, mixed_precision: bool = False) -> ModelShapes:
    """Return the names, shapes and units of a model, without its memory and without the network.

    ``module:factory`` **imports and calls the user's own code**, found on Python's path or in the
    working directory, and only when the user passes it. Code beside a config is never run.

    Args:
        model: a transformers ``config.json`` or a directory with one, or ``module:factory``, a
            function without arguments that returns the module which FSDP wrapped.
        wrap: how FSDP1 wrapped the model: class names, which include their subclasses, like
            ``transformer_auto_wrap_policy`` and ``ModuleWrapPolicy``; ``size=N`` like
            ``size_based_auto_wrap_policy`` with ``min_num_params=N``; ``none`` for the root only;
            ``_no_split_modules`` for the classes that a transformers model names so.
        mixed_precision: FSDP had a ``MixedPrecision``: it then wraps every batch norm by itself,
            and ``size=`` also applies inside ``nn.MultiheadAttention``.

    Raises:
        UsageError: the model or class does not exist, or FSDP1 could not have wrapped it so.
        UnsupportedError: its units depend on facts that are not known here.
    """
    policy = None if wrap is None else wrapping.parse(wrap)
    return describe_module(build(model), model, policy, mixed_precision=mixed_precision)


def describe_config(config: Mapping[str, Any], source: str) -> ModelShapes:
    """Describe the model of a transformers ``config.json``, given its content; see `describe`.

    Raises:
        UsageError: transformers has no such model.
    """
    return describe_module(build_configured(config, source), source, None, mixed_precision=False)


def shapes_of(
    root: nn.Module, wrap: str | None = None, *, mixed_precision: bool = False
) -> ModelShapes:
    """Return the names, shapes and units of an existing module, without reading its values."""
    policy = None if wrap is None else wrapping.parse(wrap)
    return describe_module(root, "model", policy, mixed_precision=mixed_precision)
