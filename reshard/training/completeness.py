"""Prove that an optimizer's state fits its weights: slots of the right shapes.

The proof needs only the manifest, so it covers every format, and every command that reads one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.core.box import Index
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Entry,
    Manifest,
    advise_weights_alone,
)
from reshard.errors import CorruptError
from reshard.training import optimizers

# GaLore, APOLLO and Fira keep the moments of a gradient that they project to this rank, under the
# names of Adam's. Sources: galore-torch 1.0 ``adamw.py``, apollo-torch 1.0 ``apollo.py``.
_PROJECTED = "rank"


def check_state(manifest: Manifest) -> None:
    """Check that each master weight and each slot per element has the shape of its weight.

    Raises:
        CorruptError: one has another shape.
    """
    for entry, shape in find_misshapen(manifest):
        raise CorruptError(
            entry.where,
            f"the {entry.kind} of {entry.fqn!r} has shape {list(entry.shape)}, but the weight"
            f" {list(shape)}",
            "the weight and its optimizer state are of two models or saves (was the vocabulary"
            f" resized?): fetch both of one save{advise_weights_alone(entry, manifest)}",
        )


def find_misshapen(manifest: Manifest) -> Iterator[tuple[Entry, Index]]:
    """Yield the masters and slots per element that have another shape than their weight, with it.

    A slot is per element by the table of optimizers, or if most weights whose shapes are telling
    have it in their own shape.
    """
    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(MASTER)}
    shapes |= {entry.fqn: entry.shape for entry in manifest.of_kind(PARAM, BUFFER)}
    fitting, others = Counter[str](), defaultdict[str, list[tuple[Entry, Index]]](list)
    for entry in manifest.entries.values():
        shape = shapes.get(manifest.kept_name(entry.fqn))
        if shape is None or entry.kind in (PARAM, BUFFER):
            continue
        if entry.shape != shape:
            others[entry.kind].append((entry, shape))
        # A matrix of Shampoo may have the shape of a square weight by chance.
        elif len(set(shape)) > 1 and 1 not in shape:
            fitting[entry.kind] += 1
    hypers = _index_hypers(manifest) if others else {}
    for kind, found in others.items():
        is_known = kind == MASTER or kind in optimizers.PER_ELEMENT
        if is_known or fitting[kind] > max(len(found), 1):
            for entry, shape in found:
                if kind == MASTER or not _may_differ(entry, shape, manifest, hypers):
                    yield entry, shape


def _index_hypers(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    return {fqn: group.hyper for group in manifest.train.param_groups for fqn in group.fqns}


def _may_differ(
    entry: Entry, shape: Index, manifest: Manifest, hypers: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Return whether an optimizer may keep a slot of this shape for a weight.

    NovoGrad has one number for a weight, and others one for each row or column: means of squares
    under the name of Adam's.
    """
    if not entry.shape or _PROJECTED in hypers.get(entry.fqn, {}):
        return True
    if entry.fqn in manifest.train.non_tensor_state:  # a projector, or another object
        return True
    is_mean = entry.kind in optimizers.NEVER_NEGATIVE or entry.kind not in optimizers.PER_ELEMENT
    return is_mean and _is_reduced(entry.shape, shape)


def _is_reduced(shape: Index, of: Index) -> bool:
    """Return whether a shape is another one of which some dims are 1 or left out.

    >>> _is_reduced((12, 1), (12, 4)), _is_reduced((4,), (12, 4)), _is_reduced((10, 4), (12, 4))
    (True, True, False)
    """
    rest = iter(of)
    kept = [size for size in shape if size != 1]
    return len(shape) <= len(of) and kept != list(of) and all(size in rest for size in kept)
