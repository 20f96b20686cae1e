"""Detect weights of shape [0], which ZeRO 3 leaves in a module that was not gathered before saving.

A model may have a parameter without elements, so a weight of shape [0] is judged by what else is
known: the config beside the checkpoint, else its own name and the same weight of other layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.core.location import Location, get_directory
from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.units import abridge, counted

if TYPE_CHECKING:
    from reshard.model import ModelHint

_NUMBER = re.compile(r"\d+")
_ALWAYS_FILLED = re.compile(r"(.*\.)?(weight|bias)")  # of every module of torch's own


def warn(manifest: Manifest, *, is_filled: bool) -> Manifest:
    """Return the checkpoint with a warning of its placeholders.

    Args:
        is_filled: whether another model fills them, so that any number of them is accepted.

    Raises:
        IncompleteError: more than half of the weights are placeholders.
    """
    empty = manifest.placeholders
    if not empty:
        return manifest
    weights = {entry.fqn for entry in manifest.entries.values()}
    # A single weight without elements may be a real one, even in a model of one weight.
    if 2 * len(empty) > len(weights) and len(empty) > 1 and not is_filled:
        raise _build_incomplete_error(manifest, empty, len(weights))
    text = f"{_describe(empty)}, unless the model has parameters without elements"
    return replace(manifest, warnings=(*manifest.warnings, text + _describe_ranks(manifest)))


def refuse(manifest: Manifest, written: Iterable[Entry]) -> None:
    """Refuse to write a model whose weights are placeholders.

    Raises:
        IncompleteError: some of them are placeholders; the message names them.
    """
    chosen = {entry.fqn for entry in written}
    empty = find(manifest, chosen)
    if empty:
        raise _build_incomplete_error(manifest, empty, len(chosen))


def refuse_beside_ranks(manifest: Manifest, empty: Sequence[str]) -> None:
    """Refuse to fill placeholders whose weights are in a DeepSpeed checkpoint near the file.

    Raises:
        IncompleteError: there is such a checkpoint; the message names it.
    """
    if empty and _find_ranks(manifest):
        raise _build_incomplete_error(manifest, empty, len(manifest.weight_shapes))


def find(manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """Return the weights of shape [0] that have elements in the model, as far as files show.

    Args:
        names: the weights to judge. Default: all.
    """
    suspects = [fqn for fqn in manifest.placeholders if names is None or fqn in names]
    shapes = _read_shapes_beside(manifest) if suspects else {}
    if shapes is None:
        # Several weights of shape [0] are hardly all without elements in the model; one may be.
        return suspects if len(suspects) > 1 else _find_odd_ones(manifest, suspects)
    return [fqn for fqn in suspects if 0 not in shapes.get(fqn, ())]


def _build_incomplete_error(
    manifest: Manifest, empty: Sequence[str], weights: int
) -> IncompleteError:
    checkpoint, have = _find_ranks(manifest), "has" if len(empty) == 1 else "have"
    advice = "merge the checkpoint directory that contains those files"
    if _read_shapes_beside(manifest) is None:
        advice += (
            ". If the model has no elements there, put its config.json beside the file, or pass"
            " --exclude for these weights"
        )
    return IncompleteError(
        manifest.origin.path,
        f"{len(empty)} of {weights} weights {have} size 0 ({abridge(empty)}): ZeRO-3 placeholders,"
        " the real weights are in the ranks' *_optim_states.pt",
        f"merge {checkpoint}" if checkpoint else advice,
    )


def _describe(empty: Sequence[str]) -> str:
    return (
        f"{counted(len(empty), 'weight')} of size 0 ({abridge(empty)}): ZeRO-3 placeholders, the"
        " real weights are in the ranks' *_optim_states.pt"
    )


def _find_ranks(manifest: Manifest) -> str:
    """Return the DeepSpeed checkpoint near the file that has the weights; empty without one."""
    directory = get_directory(manifest.origin.path)
    near = [p for p in (directory, *directory.glob("global_step*")) if p.is_dir()]
    return next((str(p) for p in near if any(p.glob("*_optim_states.pt"))), "")


def _describe_ranks(manifest: Manifest) -> str:
    checkpoint = _find_ranks(manifest)
    return f"; see {checkpoint}" if checkpoint else ""


def _read_shapes_beside(manifest: Manifest) -> dict[str, tuple[int, ...]] | None:
    from reshard.formats import adjacent_files  # imported here: only placeholders need it

    model_hint: ModelHint | None = adjacent_files.find_model(
        Location([get_directory(manifest.origin.path)]), None
    )
    if model_hint is None:
        return None
    try:
        shapes = model_hint.shapes()
    except (UsageError, UnsupportedError):
        return None
    return {**shapes.parameters, **shapes.buffers}


def _find_odd_ones(manifest: Manifest, suspects: Iterable[str]) -> list[str]:
    """Return the suspects whose name, or namesake in another layer, implies elements."""
    filled = {_mask_numbers(e.fqn) for e in manifest.of_kind(*WEIGHT_KINDS) if e.numel}
    return [
        fqn for fqn in suspects if _ALWAYS_FILLED.fullmatch(fqn) or _mask_numbers(fqn) in filled
    ]


def _mask_numbers(fqn: str) -> str:
    return _NUMBER.sub("#", fqn)
