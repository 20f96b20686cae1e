"""``merge --adapter``: a LoRA adapter as the directory that PeftModel.from_pretrained loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard import formats, keys
from reshard.adapters import config as configs
from reshard.adapters import names
from reshard.adapters.names import Part
from reshard.containers import safetensors_shards as writer
from reshard.errors import ReshardError, UnsupportedError, UsageError
from reshard.files import SourceFiles, read_small_file
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest, OutputFile, Skeleton
from reshard.tensors import is_zero
from reshard.training import companion_files as companions
from reshard.units import counted, some
from reshard.weights import Weights

FILE = "adapter_model.safetensors"
_FILES = (FILE, "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is to be written.

    Args:
        manifest: its tensors alone, under the names of PEFT's file.
        texts: name -> content of the files beside its weights.
        changes: what was decided.
        notes: what a user should know of it.
    """

    manifest: Manifest
    texts: dict[str, bytes]
    changes: list[str]
    notes: list[str]

    def lay_out(self, chosen: Weights) -> Skeleton:
        """PEFT's file, which it never shards, and those beside it."""
        made = writer.lay_out_file(FILE, chosen.tensors, writer.METADATA)
        texts = (OutputFile(name, len(data), ((0, data),)) for name, data in self.texts.items())
        return Skeleton((*made.files, *texts), made.entries)


def untrained(held: Sequence[Entry], pool: SourceFiles) -> list[str]:
    """Of matrices that begin at zero, which still are: those adapt nothing.

    Raises:
        ReshardError: a file cannot be read.
    """
    start = [entry for entry in held if _role(entry.fqn) in names.START_AT_ZERO]
    zero = [entry.fqn for entry in start if is_zero(pool, entry)]
    if not zero:
        return []
    effect = "the adapter changes nothing" if len(zero) == len(start) else "those change nothing"
    count = f"{len(zero)} of {len(start)} lora_B"
    return [f"{count} are all zero ({some(zero)}), as before training: {effect}"]


def _role(fqn: str) -> str:
    found = names.parse_part(fqn)
    return found.role if found else ""


def taken(manifest: Manifest, name: str, hf_dir: Path | None, near: Sequence[Path]) -> Adapter:
    """Return the adapter of this name, checked against the files beside it.

    Raises:
        UsageError: there is none of that name, or no configuration in ``hf_dir``.
        UnsupportedError: tensors that look like a LoRA layer's and are not known.
        IncompleteError: no configuration, or a half of a layer.
        CorruptError: the configuration is another adapter's.
    """
    where = manifest.origin.path
    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(*WEIGHT_KINDS)}
    tied = {alias: kept for alias, kept in manifest.tied.items() if _role(alias) != names.TOKENS}
    shapes |= {alias: shapes[kept] for alias, kept in tied.items() if kept in shapes}
    found = names.find_parts(shapes)
    in_names = _name_in_names(where, name, found)
    strange = names.find_unknown(shapes)
    if strange:
        raise UnsupportedError(where, f"{some(strange)}: no part of LoRA that reshard knows")
    own = [each for each in found if each.adapter == in_names]
    config = configs.find(name, hf_dir, near)
    if config is None:
        raise configs.build_missing_error(where, own, shapes)
    configs.check(config, own, shapes)
    saved = names.choose_saved(shapes, found, in_names, config.values)
    left = f"; {len(shapes) - len(saved)} others are left out" if len(shapes) > len(saved) else ""
    beside = companions.others(config.path.parent, {})
    return Adapter(
        keys.select(manifest, saved),
        {path.name: read_small_file(path) for path in (*beside, config.path)},
        [f"adapter {name}: {len(saved)} tensors, with {config.path}{left}"],
        [*_trained_and_left(manifest, saved, found), *_hollow(manifest, near)],
    )


def _name_in_names(where: str, name: str, found: Sequence[Part]) -> str:
    """Return the adapter's name as its tensors contain it; empty where PEFT itself saved it.

    Raises:
        UsageError: there is none of this name.
    """
    held = list(dict.fromkeys(each.adapter for each in found))
    if not held:
        raise UsageError(where, "holds no LoRA adapter", "leave out --adapter")
    if held == [""]:
        return ""
    if name not in held:
        raise UsageError(
            f"--adapter {name}",
            f"is none of those in {where}: {', '.join(filter(None, held))}",
            "name one of them",
        )
    return name


def _trained_and_left(
    manifest: Manifest, saved: Mapping[str, str], found: Sequence[Part]
) -> list[str]:
    """Weights of the base model that the optimizer trained, which PEFT's file has no place for."""
    apart = {*saved, *manifest.frozen, *(each.fqn for each in found)}
    groups = manifest.train.param_groups
    left = [fqn for group in groups for fqn in group.fqns if fqn not in apart]
    count = counted(len(left), "trained weight")
    text = (
        f"{count} of the base model ({some(left)}) left out, as PEFT saves none with this adapter:"
        " a merge without --adapter writes them"
    )
    return [text] if left else []


def _hollow(manifest: Manifest, near: Sequence[Path]) -> list[str]:
    """Return what training left of the adapter beside its shards, if nothing was gathered."""
    paths = [folder / name for folder in near for name in _FILES]
    notes = []
    for path in dict.fromkeys(path for path in paths if path.is_file()):
        if str(path) in manifest.files:
            continue
        try:
            held = formats.read_outputs(path.parent, [path.name])
        except ReshardError as error:
            notes.append(f"{path} is not read: {error.problem}")
            continue
        empty = sum(1 for entry in held.values() if not entry.numel)
        if empty == len(held):
            notes.append(
                f"{path} holds no values ({counted(empty, 'tensor')} of size 0): what is written"
                f" is from the shards in {manifest.origin.path}"
            )
    return notes
