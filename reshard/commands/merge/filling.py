"""Weights that a checkpoint lacks, taken from a model that has them: ``--fill-missing-from``.

Frozen weights are left out of many checkpoints (DeepSpeed's ``exclude_frozen_parameters``, a
program's own filter), and a module of ZeRO 3 that nobody gathered is saved with placeholders of
shape [0]: the base model that was trained has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard import escaped, keys, units, weights
from reshard.commands.merge.options import FILL
from reshard.commands.options import ReadOptions
from reshard.commands.reading import read_trusted
from reshard.errors import UsageError
from reshard.formats import placeholders
from reshard.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Manifest, index_entries


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
        manifest = read_trusted([path], ReadOptions(allow_pickle=allow_pickle))
        if any(manifest.of_kind(MASTER)):
            raise UsageError(
                f"{FILL} {path}",
                "is a training checkpoint, not a model",
                "merge that into a model first, or give the base model",
            )
        return cls(path, keys.edit(manifest, keys.Edits()).manifest)

    def fill(self, manifest: Manifest) -> tuple[Manifest, list[str], list[str]]:
        """Return a checkpoint with the base's weights that it lacks, their names, and notes.

        It lacks what it has only a placeholder of, too: a weight of shape [0] that the base has
        with elements.

        Raises:
            UsageError: the base is another model: no name is in both, or one has another shape.
            IncompleteError: the weights of the placeholders are in a checkpoint beside the source.
        """
        offered = {entry.fqn: entry for entry in self.manifest.of_kind(PARAM, BUFFER)}
        hollow = self._hollow(manifest, offered)
        placeholders.refuse_beside_ranks(manifest, hollow)
        held = {e.fqn: e for e in manifest.of_kind(*WEIGHT_KINDS) if e.fqn not in hollow}
        self._check_same_model(held, offered)
        taken = [e for fqn, e in offered.items() if fqn not in held and fqn not in manifest.tied]
        names = [entry.fqn for entry in taken]
        kept = (entry for entry in manifest.entries.values() if entry.fqn not in hollow)
        files = {escaped.real(chunk.file) for entry in taken for chunk in entry.chunks}
        filled = replace(
            manifest,
            entries=index_entries((*kept, *taken)),
            files={
                **manifest.files,
                **{path: source for path, source in self.manifest.files.items() if path in files},
            },
            trained_dtypes={
                **manifest.trained_dtypes,
                **{entry.fqn: entry.dtype for entry in taken},
            },
            frozen=manifest.frozen | set(names),
            absent=tuple(fqn for fqn in (*manifest.absent, *hollow) if fqn not in names),
        )
        return filled, names, list(_notes(names, hollow))

    def _hollow(self, manifest: Manifest, offered: Mapping[str, Entry]) -> list[str]:
        """Return the checkpoint's placeholders of weights that the base has.

        A model with a tied head stores no head: that of the checkpoint goes with its embedding.
        """
        suspects = manifest.placeholders
        heads = dict(weights.find_heads(suspects))
        return [
            fqn
            for fqn in suspects
            if (found := offered.get(fqn) or offered.get(heads.get(fqn, ""))) and found.numel
        ]

    def _check_same_model(self, held: Mapping[str, Entry], offered: Mapping[str, Entry]) -> None:
        """Check that names are in both, and that they have the same shapes.

        Raises:
            UsageError: the base is another model.
        """
        both = [fqn for fqn in offered if fqn in held]
        if not both:
            raise UsageError(
                f"{FILL} {self.path}",
                f"has no name of the checkpoint's: it has {units.some(list(offered))}, the"
                f" checkpoint {units.some(list(held)) or 'nothing but placeholders'}",
                "give the model that was trained; --rename changes the checkpoint's names",
            )
        for fqn in both:
            if offered[fqn].shape != held[fqn].shape:
                raise UsageError(
                    f"{FILL} {self.path}",
                    f"is another model: {fqn!r} is of {offered[fqn].shape}, in the checkpoint of"
                    f" {held[fqn].shape}",
                )


def _notes(names: Sequence[str], hollow: Sequence[str]) -> Iterator[str]:
    if not names:
        yield f"{FILL}: the checkpoint lacks none of that model's weights"
    if hollow:
        yield (
            f"{FILL}: {units.some(hollow)}: ZeRO-3 placeholders in the checkpoint; if they were"
            " trained, the values that training gave them are not in the output"
        )
