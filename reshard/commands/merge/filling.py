"""``merge --fill-missing-from``: take weights that the checkpoint lacks from a model that has them.

Many checkpoints leave out frozen weights (DeepSpeed's ``exclude_frozen_parameters``, filters in
scripts), and a module that was saved under ZeRO 3 without being gathered has placeholders of shape
[0]. The base model of the training has these weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reshard import units
from reshard.commands.merge.options import FILL
from reshard.commands.output_options import ReadOptions
from reshard.commands.reading import read_trusted
from reshard.core import keys
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Manifest,
    index_entries,
)
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import placeholders
from reshard.formats.coded_values import dequantise
from reshard.quantised.pairs import find_evidence
from reshard.system.derived import list_files
from reshard.tensors import weights


def read_model(path: Path, flag: str, allow_pickle: Sequence[str]) -> tuple[Manifest, list[str]]:
    """Read the headers of another model; return its dequantised weights, and notes.

    Args:
        flag: the option that names the model, for messages.

    Raises:
        UsageError: the path is a training checkpoint, not a model.
        UnsupportedError: its weights are quantised by an unknown method, or not in safetensors.
        ReshardError: the model cannot be read or trusted.
    """
    manifest = read_trusted([path], ReadOptions(allow_pickle=allow_pickle))
    if any(manifest.of_kind(MASTER)):
        raise UsageError(
            f"{flag} {path}",
            "is a training checkpoint, not a model",
            "merge it into a model first, or pass the base model",
        )
    if not manifest.origin.weights_only and (entry := find_evidence(manifest)):
        raise UnsupportedError(
            f"{flag} {path}",
            f"{entry.fqn!r} ({entry.dtype}) is part of a quantised weight, but is not stored in"
            " safetensors",
            f"write the model as safetensors first: reshard merge {path} DIRECTORY",
        )
    manifest, notes = dequantise(manifest)
    return keys.edit(manifest, keys.Edits()).manifest, notes


def fill(manifest: Manifest, base: Manifest, path: Path) -> tuple[Manifest, list[str], list[str]]:
    """Fill a checkpoint; return it, the names of the weights from the base, and notes.

    A weight is also missing if the checkpoint has only a placeholder for it: shape [0] where the
    base has elements.

    Args:
        base: the model that supplies weights; its names are without wrappers.
        path: the path of that model, for messages.
    """
    offered = {entry.fqn: entry for entry in base.of_kind(PARAM, BUFFER)}
    empty = _find_placeholders(manifest, offered)
    placeholders.refuse_beside_ranks(manifest, empty)
    present = {e.fqn: e for e in manifest.of_kind(*WEIGHT_KINDS) if e.fqn not in empty}
    _check_same_model(path, present, offered)
    taken = [
        entry for fqn, entry in offered.items() if fqn not in present and fqn not in manifest.tied
    ]
    names = [entry.fqn for entry in taken]
    kept = (entry for entry in manifest.entries.values() if entry.fqn not in empty)
    files = {file for entry in taken for chunk in entry.chunks for file in list_files(chunk.file)}
    filled = replace(
        manifest,
        entries=index_entries((*kept, *taken)),
        files={
            **manifest.files,
            **{name: source for name, source in base.files.items() if name in files},
        },
        trained_dtypes={**manifest.trained_dtypes, **{entry.fqn: entry.dtype for entry in taken}},
        frozen=manifest.frozen | set(names),
        absent=tuple(fqn for fqn in (*manifest.absent, *empty) if fqn not in names),
    )
    return filled, names, list(_note_filled(names, empty))


def _find_placeholders(manifest: Manifest, offered: Mapping[str, Entry]) -> list[str]:
    # A base with a tied head stores no head; its embedding decides about the checkpoint's head.
    suspects = manifest.placeholders
    heads = dict(weights.find_heads(suspects))
    return [
        fqn
        for fqn in suspects
        if (base := offered.get(fqn) or offered.get(heads.get(fqn, ""))) and base.numel
    ]


def _check_same_model(
    path: Path, present: Mapping[str, Entry], offered: Mapping[str, Entry]
) -> None:
    both = [fqn for fqn in offered if fqn in present]
    if not both:
        raise UsageError(
            f"{FILL} {path}",
            f"no tensor name is in both: the model has {units.abridge(list(offered))}, the"
            f" checkpoint {units.abridge(list(present)) or 'only placeholders'}",
            "pass the model that was trained; --rename changes the names of the checkpoint",
        )
    for fqn in both:
        if offered[fqn].shape != present[fqn].shape:
            raise UsageError(
                f"{FILL} {path}",
                f"is another model: {fqn!r} has shape {offered[fqn].shape}, but shape"
                f" {present[fqn].shape} in the checkpoint",
            )


def _note_filled(names: Sequence[str], empty: Sequence[str]) -> Iterator[str]:
    if not names:
        yield f"{FILL}: the checkpoint has all weights of that model"
    if empty:
        yield (
            f"{FILL}: {units.abridge(empty)}: ZeRO-3 placeholders in the checkpoint; if these"
            " weights were trained, their trained values are not in the output"
        )
