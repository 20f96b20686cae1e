"""Which tensors of two checkpoints must be equal, whatever layout each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Manifest

WEIGHT = "weight"
COPY = "copy"  # the module's own, where both sides have masters beside it

Key = tuple[str, str]  # (kind, fqn): a weight, a copy, or an optimizer slot


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor as both sides have it."""

    kind: str
    fqn: str
    a: Entry
    b: Entry

    @property
    def is_weight(self) -> bool:
        """Whether it is no slot of the optimizer."""
        return self.kind in (WEIGHT, COPY)


@dataclass(slots=True)
class Paired:
    """All tensors of both sides.

    Args:
        unnamed: names of tied weights that one side does not know, whose value it has.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_a: list[Key] = field(default_factory=list)
    only_b: list[Key] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


def pair(a: Manifest, b: Manifest) -> Paired:
    """Pair by name.

    A weight is its most precise value: the fp32 master, else the module's. Tensors without elements
    count as there. A tied weight is compared under each name that both sides have.
    """
    left, right = _with_copies(a), _with_copies(b)
    paired = Paired()
    for key, entry in left.items():
        if key in right:
            paired.pairs.append(Pair(*key, entry, right[key]))
        elif not _is_known(key, a, b, right):
            paired.only_a.append(key)
        elif key[0] == WEIGHT:
            paired.unnamed.append(key[1])
    for key in right:
        if key in left:
            continue
        if not _is_known(key, b, a, left):
            paired.only_b.append(key)
        elif key[0] == WEIGHT:
            paired.unnamed.append(key[1])
    return paired


def tensors(manifest: Manifest) -> dict[Key, Entry]:
    """Weights, each as its most precise value and under each of its names, and slots."""
    found = {(WEIGHT, entry.fqn): entry for entry in manifest.of_kind(PARAM, BUFFER)}
    found.update(((WEIGHT, entry.fqn), entry) for entry in manifest.of_kind(MASTER))
    for alias, kept in manifest.tied.items():
        if (WEIGHT, kept) in found:
            found.setdefault((WEIGHT, alias), found[WEIGHT, kept])
    found.update(
        ((entry.kind, entry.fqn), entry)
        for entry in manifest.entries.values()
        if entry.kind not in WEIGHT_KINDS
    )
    return found


def _with_copies(manifest: Manifest) -> dict[Key, Entry]:
    """The same, and the module's own values of weights that have masters."""
    masters = {entry.fqn for entry in manifest.of_kind(MASTER)}
    copies = (e for e in manifest.of_kind(PARAM, BUFFER) if e.fqn in masters)
    return {**tensors(manifest), **{(COPY, entry.fqn): entry for entry in copies}}


def _is_known(key: Key, has: Manifest, other: Manifest, others: Mapping[Key, Entry]) -> bool:
    """Whether nothing is missing on the side that lacks a key.

    The module's copy is the cast of its master; a tied name is that of a value which is there; a
    slot without elements (FSDP writes one, DeepSpeed none) holds nothing.
    """
    kind, fqn = key
    if kind == COPY:
        return True
    if kind != WEIGHT:
        entry = has.entries.get(key)
        return entry is not None and not entry.numel
    aliases = _names_of(fqn, has) | _names_of(fqn, other)
    return any((WEIGHT, name) in others for name in aliases)


def _names_of(fqn: str, manifest: Manifest) -> set[str]:
    kept = manifest.tied.get(fqn, fqn)
    return {kept, *(alias for alias, first in manifest.tied.items() if first == kept)}
