"""Pairing of the tensors of two checkpoints that must be equal, whatever their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.core.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Manifest
from reshard.tensors.weights import find_heads, is_untrained

WEIGHT = "weight"
COPY = "copy"  # the module's weight, if both sides also have a master weight

PairKey = tuple[str, str]  # (kind, fqn): a weight, a copy, or an optimizer slot


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One tensor, as stored on both sides."""

    kind: str
    fqn: str
    a: Entry
    b: Entry


@dataclass(slots=True)
class Paired:
    """The tensors of both sides, paired or on one side only.

    Args:
        unnamed: tied names that one side lacks, although it has the value of the weight.
    """

    pairs: list[TensorPair] = field(default_factory=list)
    only_a: list[PairKey] = field(default_factory=list)
    only_b: list[PairKey] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


def pair(a: Manifest, b: Manifest) -> Paired:
    """Pair the tensors of two checkpoints by name.

    The value of a weight is the most precise one: the fp32 master weight, else the module's. A
    missing slot without elements is not reported. A tied weight is compared under each name that
    both sides have. An output head that the optimizer does not train, and that one side lacks, is
    compared with the input embedding of that side.
    """
    left, right = _collect_with_copies(a), _collect_with_copies(b)
    _add_untrained_heads(a, left, right)
    _add_untrained_heads(b, right, left)
    paired = Paired([TensorPair(*key, left[key], right[key]) for key in left if key in right])
    for has, own, other, others, only in (
        (a, left, b, right, paired.only_a),
        (b, right, a, left, paired.only_b),
    ):
        for key in own:
            if key in others:
                continue
            if not _is_known(key, has, other, others):
                only.append(key)
            elif key[0] == WEIGHT:
                paired.unnamed.append(key[1])
    return paired


def collect_tensors(manifest: Manifest) -> dict[PairKey, Entry]:
    """Collect the weights, at their highest precision and under all tied names, and the slots."""
    tensors = {(WEIGHT, fqn): entry for fqn, entry in manifest.select_weights().items()}
    for alias, kept in manifest.tied.items():
        if (WEIGHT, kept) in tensors:
            # An alias that is stored itself keeps its own value.
            tensors.setdefault((WEIGHT, alias), tensors[WEIGHT, kept])
    tensors.update(
        ((entry.kind, entry.fqn), entry)
        for entry in manifest.entries.values()
        if entry.kind not in WEIGHT_KINDS
    )
    return tensors


def _collect_with_copies(manifest: Manifest) -> dict[PairKey, Entry]:
    masters = {entry.fqn for entry in manifest.of_kind(MASTER)}
    copies = (e for e in manifest.of_kind(PARAM, BUFFER) if e.fqn in masters)
    return {**collect_tensors(manifest), **{(COPY, entry.fqn): entry for entry in copies}}


def _add_untrained_heads(
    has: Manifest, stored: Mapping[PairKey, Entry], others: dict[PairKey, Entry]
) -> None:
    """DCP and full state dicts store a tied head again, and do not say that it is tied."""
    names = [fqn for kind, fqn in stored if kind == WEIGHT]
    for head, embedding in find_heads(names):
        kept = others.get((WEIGHT, embedding))
        if kept is not None and is_untrained(has, head, embedding):
            others.setdefault((WEIGHT, head), kept)


def _is_known(
    key: PairKey, has: Manifest, other: Manifest, others: Mapping[PairKey, Entry]
) -> bool:
    # The module's copy is the cast of its master weight; the value of a tied name is stored under
    # another name; a slot without elements (FSDP writes one, DeepSpeed none) has no values.
    kind, fqn = key
    if kind == COPY:
        return True
    if kind != WEIGHT:
        entry = has.entries.get(key)
        return entry is not None and not entry.numel
    return any((WEIGHT, name) in others for name in find_aliases(fqn, has.tied, other.tied))


def find_aliases(fqn: str, *ties: Mapping[str, str]) -> set[str]:
    """Return all names of a weight, its own included; ``ties`` map aliases to the kept name."""
    names = set()
    for tied in ties:
        kept = tied.get(fqn, fqn)
        names |= {kept, *(alias for alias, first in tied.items() if first == kept)}
    return names
