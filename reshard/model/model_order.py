"""Bring weights and training states into the order of their model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.core.manifest import BUFFER, PARAM, Entry, Manifest
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.model.shapes import ModelShapes
from reshard.units import abridge, counted

_NUMBER = re.compile(r"\b\d+\.")


def restore_memory_form(manifest: Manifest, model: ModelShapes) -> Manifest:
    """Return a training state in the model's form in memory, if it is in the published form.

    Weights of another model stay as they are.
    """
    published = model.find_published(manifest.weight_shapes)
    if published is None or not published.fits(manifest):
        return manifest
    return published.restore_memory_form(manifest)


def match_weights(manifest: Manifest, model: ModelShapes) -> Manifest:
    """Return a model's weights under its names and in its order, with buffers and tied names.

    Raises:
        UsageError: the weights belong to another model.
        UnsupportedError: the files hold both names of a tied tensor.
    """
    manifest = restore_memory_form(manifest, model)
    _check_weights({entry.fqn: entry.shape for entry in manifest.entries.values()}, model)
    stored: dict[str, Entry] = {}
    dtypes: dict[str, DType] = {}
    for entry in manifest.entries.values():
        first = model.tied.get(entry.fqn, entry.fqn)
        dtypes[first] = manifest.trained_dtypes.get(entry.fqn, entry.dtype)
        if first in stored:
            raise UnsupportedError(
                manifest.origin.path,
                f"stores {stored[first].fqn!r} and {entry.fqn!r}, which are one tensor in the"
                " model",
                "merge the checkpoint first: reshard merge compares the two and writes one",
            )
        # A live model's optimizer has the first name of a tied weight, whichever a file has.
        kind = BUFFER if first in model.buffers else PARAM
        stored[first] = replace(entry, fqn=first, kind=kind)
    ordered = manifest.with_entries(stored[fqn] for fqn in (*model.parameters, *model.buffers))
    return replace(
        ordered, tied=model.tied, trained_dtypes=dtypes, ordered=True, ordered_by_model=True
    )


def order_by_model(manifest: Manifest, model: ModelShapes) -> Manifest:
    """Return a training state in the model's order, param groups included."""
    stored = manifest.weight_shapes
    _check_weights(stored, model)
    positions = {fqn: number for number, fqn in enumerate((*model.parameters, *model.buffers))}
    order = {fqn: positions[model.tied.get(fqn, fqn)] for fqn in stored}
    buffers = {fqn for fqn in stored if model.tied.get(fqn, fqn) in model.buffers}
    entries = [
        replace(entry, kind=BUFFER) if entry.kind == PARAM and entry.fqn in buffers else entry
        for entry in sorted(manifest.entries.values(), key=lambda entry: order[entry.fqn])
    ]
    train = manifest.train.sort_groups(order)
    ordered = manifest.with_entries(entries)
    return replace(ordered, train=train, ordered=True, ordered_by_model=True)


def _check_weights(stored: Mapping[str, Index], model: ModelShapes) -> None:
    expected = {**model.parameters, **model.buffers}
    refuse_other_shapes(stored, model)
    for fqn in stored:
        if model.tied.get(fqn, fqn) not in expected:
            raise UsageError(model.source, f"is another model: {fqn!r} is not in the model")
    found = {model.tied.get(fqn, fqn) for fqn in stored}
    missing = [fqn for fqn in expected if fqn not in found]
    if of_layers := list_missing_in_layers(missing, found, expected):
        raise IncompleteError(
            model.source,
            f"the model has {counted(len(of_layers), 'tensor')} in its layers that no file"
            f" contains: {abridge(of_layers)}",
            "take them from another model: reshard merge SOURCE WHOLE --fill-missing-from MODEL,"
            " and convert WHOLE",
        )
    if missing:
        raise UsageError(model.source, f"is another model: no file contains {missing[0]!r}")


def list_missing_in_layers(
    missing: Iterable[str], stored: Collection[str], shapes: Mapping[str, Index]
) -> list[str]:
    """Return the missing matrices of layers whose other tensors are stored.

    Without them, the model computes nothing useful. A missing head, or a missing part of a model
    that consists of several models, can be intended.

    Args:
        shapes: the shapes of all tensors of the model.
    """
    stacks = {_get_stack(fqn) for fqn in stored} - {None}
    return [fqn for fqn in missing if len(shapes[fqn]) >= 2 and _get_stack(fqn) in stacks]


def _get_stack(fqn: str) -> str | None:
    match = _NUMBER.search(fqn)
    return fqn[: match.start()] if match else None


def refuse_other_shapes(stored: Mapping[str, Index], model: ModelShapes) -> None:
    """Refuse a model that has a stored weight in another shape.

    Args:
        stored: the shape of each stored weight, under any name of a tied one.

    Raises:
        UsageError: it has one.
    """
    expected = {**model.parameters, **model.buffers}
    for fqn, shape in stored.items():
        own = expected.get(model.tied.get(fqn, fqn), shape)
        if own != shape:
            raise UsageError(
                model.source,
                f"is another model: {fqn!r} has shape {shape}, in the model {own}",
                "pass the model that was trained: no command changes the shape of a weight",
            )
