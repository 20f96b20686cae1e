"""Weights that a checkpoint lacks, taken from a model that has them: ``--fill-missing-from``.

Frozen weights are left out of many checkpoints (DeepSpeed's ``exclude_frozen_parameters``, a
program's own filter): the base model that was trained has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard import escaped, keys, units
from reshard.commands.merge.options import FILL
from reshard.commands.reading import ReadOptions, trusted
from reshard.errors import UsageError
from reshard.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Manifest, index_entries


@dataclass(frozen=True, slots=True)
class Base:
    """A model from which weights are taken; its names are without wrappers."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path, allow_pickle: Sequence[str]) -> Base:
        """Read its headers.

        Raises:
            UsageError: it is a training checkpoint, whose weights are those of a step.
            ReshardError: it cannot be read or trusted.
        """
        manifest = trusted([path], ReadOptions(allow_pickle=allow_pickle))
        if any(manifest.of_kind(MASTER)):
            raise UsageError(
                f"{FILL} {path}",
                "is a training checkpoint, not a model",
                "merge that into a model first, or give the base model",
            )
        return cls(path, keys.edit(manifest, keys.Edits()).manifest)

    def fill(self, manifest: Manifest) -> tuple[Manifest, list[str]]:
        """A checkpoint with the base's weights of the names that it lacks, and those names.

        Raises:
            UsageError: the base is another model: no name is in both, or one has another shape.
        """
        held = {entry.fqn: entry for entry in manifest.of_kind(*WEIGHT_KINDS)}
        offered = {entry.fqn: entry for entry in self.manifest.of_kind(PARAM, BUFFER)}
        both = [fqn for fqn in offered if fqn in held]
        if not both:
            raise UsageError(
                f"{FILL} {self.path}",
                f"has no name of the checkpoint's: it has {units.some(list(offered))}, the"
                f" checkpoint {units.some(list(held))}",
                "give the model that was trained; --rename changes the checkpoint's names",
            )
        for fqn in both:
            if offered[fqn].shape != held[fqn].shape:
                raise UsageError(
                    f"{FILL} {self.path}",
                    f"is another model: {fqn!r} is of {offered[fqn].shape}, in the checkpoint of"
                    f" {held[fqn].shape}",
                )
        taken = [e for fqn, e in offered.items() if fqn not in held and fqn not in manifest.tied]
        names = [entry.fqn for entry in taken]
        files = {escaped.real(chunk.file) for entry in taken for chunk in entry.chunks}
        filled = replace(
            manifest,
            entries=index_entries((*manifest.entries.values(), *taken)),
            files={
                **manifest.files,
                **{path: source for path, source in self.manifest.files.items() if path in files},
            },
            trained_dtypes={
                **manifest.trained_dtypes,
                **{entry.fqn: entry.dtype for entry in taken},
            },
            frozen=manifest.frozen | set(names),
            absent=tuple(fqn for fqn in manifest.absent if fqn not in names),
        )
        return filled, names
