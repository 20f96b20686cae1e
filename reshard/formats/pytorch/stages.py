"""Find pipeline stages in what ranks saved, and join the manifests of all stages."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import gcd

from reshard.core.join import join
from reshard.core.manifest import WEIGHT_KINDS, Entry, Key, Manifest, Origin
from reshard.errors import MIXED, CorruptError, UnrecognisedError, UnsupportedError, UsageError
from reshard.formats.pytorch.ranks import OpenedRanks
from reshard.model import ModelHint
from reshard.state_dict import assemble, sections, tree
from reshard.state_dict.tree import ParsedTree

_LAYER = re.compile(r"(?:(.+?)\.)?(\d+)\.")
_STAGE = re.compile(r"(\w*?[A-Za-z])[_.-]?(\d+)")
Collected = tuple[ParsedTree, list[str]]  # a tree, and warnings about it
Layer = tuple[str, int]


def find_stages(families: Iterable[OpenedRanks], key: str | None) -> list[set[int]]:
    """Return the ranks of each pipeline stage, if no stage has a layer of another."""
    names: dict[int, set[str]] = {}
    for family in families:
        if len(family.files) > 1:
            found: dict[int, Iterable[str]] = {}  # by the id of a tree, which files may share
            for rank, root in family.trees.items():
                with contextlib.suppress(UnrecognisedError, UsageError):  # no model is in this file
                    if id(root) not in found:
                        found[id(root)] = sections.find(root, "", key).model
                    names.setdefault(rank, set()).update(found[id(root)])
    # Ranks with the same names belong to one stage.
    ranks: dict[frozenset[str], set[int]] = {}
    for rank, fqns in names.items():
        ranks.setdefault(frozenset(fqns), set()).add(rank)
    are_stages = len(ranks) > 1 and all(ranks) and _find_common([*ranks]) is None
    return list(ranks.values()) if are_stages else []


def divide_stages(whole: ParsedTree, warnings: list[str]) -> list[Collected]:
    """Return each pipeline stage of a tree that has all of them under numbered keys.

    The keys are ``model_0``, ``model_1`` ... and ``optim_0`` ... Models are stages only if each has
    other layers of one list (``layers.3``).
    """
    numbered: dict[str, dict[int, str]] = {}
    root = whole.root if isinstance(whole.root, dict) else {}
    for name in root:
        if match := _STAGE.fullmatch(str(name)):
            numbered.setdefault(match[1], {})[int(match[2])] = name
    every = {stem: keys for stem, keys in numbered.items() if sorted(keys) == [*range(len(keys))]}
    layers = {
        stem: [_find_layers(tree.collect_tensors(root[keys[number]])) for number in sorted(keys)]
        for stem, keys in every.items()
        if len(keys) > 1
    }
    models = [stem for stem, stages in layers.items() if _are_apart(stages)]
    if len(models) != 1:
        return [(whole, warnings)]
    count = len(every[models[0]])
    of_stages = [keys for keys in every.values() if len(keys) == count]
    other = {name: n for keys in of_stages for n, name in keys.items()}
    return [
        (
            replace(whole, root={k: v for k, v in root.items() if other.get(k, stage) == stage}),
            warnings if stage == 0 else [],
        )
        for stage in range(count)
    ]


def _find_layers(names: Iterable[str]) -> set[Layer]:
    """Return the layers of parameters: the name of their list, and their number in it."""
    matches = map(_LAYER.match, names)
    return {(match[1] or "", int(match[2])) for match in matches if match}


def _find_common(stages: Sequence[Collection[str]]) -> str | None:
    # Stages may have copies of a tensor that is in no layer, such as a tied weight or a buffer.
    counted = Counter(name for names in stages for name in names)
    common = next((name for name, times in counted.items() if times > 1), None)
    return None if _are_apart([_find_layers(names) for names in stages]) else common


def _are_apart(stages: Sequence[set[Layer]]) -> bool:
    lists = set.intersection(*({name for name, _ in layers} for layers in stages))
    return bool(lists) and len(set().union(*stages)) == sum(map(len, stages))


def count_ranks(saved: Sequence[Collected]) -> int:
    """Return the number of ranks whose files the stages are in, which stages of one tree share."""
    ranks = {tuple(found.files): found.world for found, _ in saved}
    return sum(ranks.values())


def join_stages(
    saved: Sequence[Collected],
    origin: Origin,
    key: str | None,
    model_hint: ModelHint | None,
    *,
    world: int,
) -> Manifest:
    """Join all pipeline stages, whose optimizers each number their own parameters.

    Raises:
        UnsupportedError: two stages have the same names for different layers.
        CorruptError: the copies of a tensor in two stages have different shapes or dtypes.
    """
    stages = [
        assemble.build_manifest(found, origin, key=key, warnings=warnings)
        for found, warnings in saved
    ]
    names = [
        dict.fromkeys(fqn for kind, fqn in stage.entries if kind in WEIGHT_KINDS)
        for stage in stages
    ]
    if (common := _find_common(names)) is not None:
        having = [s[0].where for s, own in zip(saved, names, strict=True) if common in own]
        raise UnsupportedError(
            having[1],
            f"contains {common!r}, and so does {having[0]}: the names do not show which layers of"
            " the whole model these are",
            "pass one of these directories to read what it has by itself",
        )
    # A rank can have several stages (an interleaved schedule), or a process all of them.
    mesh = {"world": world, "pp": gcd(world, len(stages))}
    joined = join(stages, _join_entries(stages))
    joined = replace(joined, origin=replace(joined.origin, mesh=mesh))
    if model_hint is None:
        return joined
    note = (
        f"the files state which parameters each stage has: --model {model_hint.model} was not"
        " needed"
    )
    return replace(joined, warnings=(*joined.warnings, note))


def _join_entries(stages: Sequence[Manifest]) -> list[Entry]:
    joined: dict[Key, Entry] = {}
    for stage in stages:
        for key, entry in stage.entries.items():
            first = joined.setdefault(key, entry)
            if first is entry:
                continue
            if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                raise CorruptError(
                    entry.where,
                    f"{entry.fqn!r} ({entry.kind}) is {entry.dtype} {entry.shape}, but"
                    f" {first.dtype} {first.shape} in {first.where}",
                    MIXED,
                )
            joined[key] = replace(first, chunks=(*first.chunks, *entry.chunks))
    return list(joined.values())
