"""Choose the weights that transformers quantises to fp8 blocks, by its own rule.

It quantises every linear layer and the experts, but not the output layer, tied weights, the last
module and what the model's class keeps in fp32; routers and embeddings are no linear layers.

Source: transformers 5.24 ``quantizers/base.py`` (``get_modules_to_not_convert``),
``integrations/finegrained_fp8.py`` (``replace_with_fp8_linear``; ``Fp8Quantize`` leaves out
matrices that are not whole blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.core.box import Index
from reshard.errors import UnsupportedError
from reshard.model import library
from reshard.model.build import build_configured
from reshard.model.published import trace_published
from reshard.model.tracing import Traced


def choose(config: Mapping[str, Any], block: int) -> tuple[dict[str, Index], list[str]]:
    """Return which weights transformers quantises of the model of a ``config.json``.

    Args:
        config: the content of the file.
        block: the rows and the columns of a block.

    Returns:
        The shapes of these weights by their names in files, and the modules in memory that a list
        of what is not quantised must have.

    Raises:
        UsageError: transformers cannot build the model.
        UnsupportedError: its form in files is not known, or transformers is too old.
    """
    from torch import nn
    from transformers.quantizers.base import HfQuantizer

    try:
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError as error:
        raise UnsupportedError(
            "transformers", "states no rule for modules before version 5", library.INSTALL
        ) from error
    root: Any = build_configured(config, "config.json")
    published = trace_published(root, type(root).__name__)
    if published is None:
        raise UnsupportedError("config.json", "is not of a model whose form in files is known")
    kept = root._keep_in_fp32_modules  # noqa: SLF001 - as the quantizer reads it
    others: list[str] = HfQuantizer.get_modules_to_not_convert(root, None, kept)
    parts: dict[str, dict[str, Traced]] = {}
    for name, traced in published.conversion.after.items():
        for piece in traced.pieces if len(traced.shape) > 1 else ():
            parts.setdefault(piece.fqn.rpartition(".")[0], {})[name] = traced
    weights: dict[str, Index] = {}
    for name, module in root.named_modules():
        are_experts, held = name.endswith(".experts"), parts.get(name, {})
        if not held or not (are_experts or isinstance(module, nn.Linear)):
            continue
        is_plain = type(module) is nn.Linear and not any(
            piece.views for traced in held.values() for piece in traced.pieces
        )
        fits = all(_fits(part, traced, block) for part, traced in held.items())
        if fits and (are_experts or is_plain) and should_convert_module(name, others):
            weights |= {part: traced.shape for part, traced in held.items()}
        else:
            others.append(name)
    return weights, others


def _fits(name: str, traced: Traced, block: int) -> bool:
    """Return whether a tensor is a matrix of whole blocks; transformers divides others evenly."""
    is_matrix = len(traced.shape) == 2 and not traced.zeros and name.endswith(".weight")
    return is_matrix and all(size and size % block == 0 for size in traced.shape)
