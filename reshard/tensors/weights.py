"""Selection of the weights to write: their source tensors, dtypes and aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Literal

from reshard.core import dtypes, keys
from reshard.core.dtypes import DType
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Entry,
    Manifest,
)
from reshard.errors import DifferentError, IncompleteError, UnrecognisedError, UsageError
from reshard.model.library import EMBEDDINGS, HEAD
from reshard.quantised import remainders
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import find_first_difference
from reshard.units import abridge

Tied = Literal["auto", "keep", "drop"]

_LISTED = 8  # names listed in a message


@dataclass(slots=True)
class Weights:
    """The weights to write, in state-dict order, each with its dtype; and counts for the report."""

    tensors: list[tuple[Entry, DType]] = field(default_factory=list)
    from_master: int = 0  # weights that are read from an fp32 master
    from_copy: int = 0  # weights that are stored without an fp32 master
    buffers: int = 0
    dropped_aliases: dict[str, str] = field(default_factory=dict)
    written_aliases: dict[str, str] = field(default_factory=dict)
    kept_fp32: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select(manifest: Manifest, dtype: str | None, keep_fp32: Sequence[str] = ()) -> Weights:
    """Select one entry for each weight: the fp32 master if there is one, else the trained copy.

    Args:
        manifest: the checkpoint.
        dtype: a name for `dtypes.parse`; ``keep`` for the stored dtype; None for the dtype in which
            the model was trained.
        keep_fp32: regular expressions of weights that become float32 whatever ``dtype`` is.

    Raises:
        UsageError: ``dtype`` is not a float dtype, or the patterns match no weight.
        UnrecognisedError: there are no weights.
    """
    target = None if dtype == "keep" else dtypes.parse_float("--dtype", dtype)
    best = manifest.select_weights()
    plain = {entry.fqn: entry for entry in manifest.of_kind(PARAM, BUFFER)}
    patterns = keys.compile_patterns(keep_fp32, "--keep-fp32")
    result = Weights()
    for fqn in manifest.weight_shapes:
        source = best[fqn]
        written = _choose_dtype(manifest, source, target, dtype)
        if source.kind == MASTER and fqn in plain and written == plain[fqn].dtype:
            # Its optimizer rounded a computed master half up, where `merge` rounds half to even.
            source = plain[fqn] if remainders.is_computed(source) else source
        castable = source.kind != BUFFER and source.dtype.family == "float"
        if castable and any(pattern.search(fqn) for pattern in patterns):
            written = dtypes.FLOAT32
            result.kept_fp32.append(fqn)
        _count(result, source)
        weight = replace(source, kind=PARAM if source.kind == MASTER else source.kind)
        result.tensors.append((weight, written))
    if keep_fp32 and not result.kept_fp32:
        raise UsageError("--keep-fp32", "matches no weight")
    refuse_empty(manifest, result.tensors)
    codes = [entry.fqn for entry, dtype in result.tensors if dtype.family in ("float8", "float4")]
    if target is not None and codes:
        result.notes.append(f"weights keep their dtype, as no scales are known: {abridge(codes)}")
    return result


def refuse_empty(manifest: Manifest, tensors: Sized) -> None:
    """Refuse a checkpoint without tensors; a valid safetensors file can have none.

    Raises:
        UnrecognisedError: there is nothing to write.
    """
    if not tensors:
        raise UnrecognisedError(
            manifest.origin.path,
            "is valid but contains no weights, so there is nothing to write",
            "pass the file or directory that contains the model",
        )


def _choose_dtype(
    manifest: Manifest, source: Entry, target: DType | None, option: str | None
) -> DType:
    if source.kind == BUFFER or source.dtype.family != "float" or option == "keep":
        return source.dtype
    if target is not None:
        return target
    trained = manifest.trained_dtypes.get(source.fqn)
    if trained is None and manifest.origin.precision:
        trained = dtypes.parse(manifest.origin.precision)
    return trained or source.dtype


def _count(result: Weights, source: Entry) -> None:
    if source.kind == MASTER:
        result.from_master += 1
    elif source.kind == BUFFER:
        result.buffers += 1
    else:
        result.from_copy += 1


def resolve_ties(
    weights: Weights,
    manifest: Manifest,
    *,
    config: Mapping[str, object] | None,
    policy: Tied,
    pool: SourceFiles,
    aliases: Mapping[str, str] | None,
) -> bool:
    """Drop aliases of tied weights, or write them as copies.

    An alias is dropped only if it shares the storage of the kept weight or is bitwise equal to it.
    ``transformers`` expects no alias if the config ties the weights, and one if it does not.

    Args:
        weights: the selected weights, which are changed in place.
        manifest: the checkpoint.
        config: the model's config.json, or None.
        policy: the option --tied.
        pool: the open files.
        aliases: names that the model's class ties -> the name that is written; see
            `naming.published`.

    Returns:
        Whether the weights are written untied.

    Raises:
        DifferentError: two weights are tied by the checkpoint or the config, but differ.
        IncompleteError: a weight is listed, but no rank has a value for it.
    """
    # With `drop`, the user accepts that a copy differs.
    if policy != "drop":
        check_tied_copies(manifest, pool)
    declared = config.get("tie_word_embeddings") if config else None
    by_name = {entry.fqn: (entry, dtype) for entry, dtype in weights.tensors}
    clone = policy == "keep" or (policy == "auto" and declared is False)
    # A part of the model may tie its weights although the config of the whole denies it.
    tied_by_class = {} if policy == "keep" else aliases or {}
    for alias, kept in manifest.tied.items():
        if kept not in by_name or alias in by_name:
            continue
        if clone and alias not in tied_by_class:
            entry, dtype = by_name[kept]
            weights.tensors.append((replace(entry, fqn=alias), dtype))
            weights.written_aliases[alias] = kept
        else:
            weights.dropped_aliases[alias] = kept
    if policy != "keep":
        for alias, kept, sure in _find_aliases(weights, manifest, declared, aliases or {}):
            _drop_equal(weights, by_name, alias, kept, policy, pool, sure=sure)
    _check_no_missing(weights, manifest, tied=declared is True)
    return (clone and bool(weights.written_aliases)) or (policy == "keep" and HEAD in by_name)


def _find_aliases(
    weights: Weights, manifest: Manifest, declared: object, aliases: Mapping[str, str]
) -> Iterator[tuple[str, str, bool]]:
    """Yield each stored alias, its weight, and whether the model certainly ties the two."""
    names = dict.fromkeys(entry.fqn for entry, _ in weights.tensors)
    known = {alias: kept for alias, kept in aliases.items() if alias in names and kept in names}
    yield from ((alias, kept, True) for alias, kept in known.items())
    if declared is not False:
        for head, embedding in find_heads(name for name in names if name not in known):
            if declared is True or is_untrained(manifest, head, embedding):
                yield head, embedding, declared is True


def _check_no_missing(weights: Weights, manifest: Manifest, *, tied: bool) -> None:
    names = {entry.fqn for entry, _ in weights.tensors}
    embedding = next((name for name in EMBEDDINGS if name in names), None)
    lacking = list(manifest.absent)
    if tied and embedding and HEAD in lacking:
        # transformers ties the head to the embedding when it loads the model.
        lacking.remove(HEAD)
        weights.dropped_aliases[HEAD] = embedding
    if lacking:
        regex = f"'^({'|'.join(map(re.escape, lacking))})$'" if len(lacking) <= _LISTED else "REGEX"
        raise IncompleteError(
            manifest.origin.path,
            f"lists {describe_missing_values(lacking)}",
            f"if the weights are tied to others or not needed, pass --exclude {regex}; to take"
            " them from another model, pass --fill-missing-from MODEL",
        )


def describe_missing_values(names: Sequence[str]) -> str:
    """Return a part of a message: the names, and that no rank holds a value for them."""
    shown = abridge(list(map(repr, names)), _LISTED)
    return f"{shown}, but no rank holds a value for {'them' if len(names) > 1 else 'it'}"


def find_head_name(embedding: str) -> str | None:
    """Return the name of the output head of an input embedding's model; None for other weights."""
    for name in EMBEDDINGS:
        prefix = embedding.removesuffix(name)
        if embedding == prefix + name and (not prefix or prefix.endswith(".")):
            return prefix + HEAD
    return None


def find_heads(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each output head with the input embedding of its model, which may be a submodel."""
    names = list(names)
    for head in names:
        if head == HEAD or head.endswith(f".{HEAD}"):
            prefix = head.removesuffix(HEAD)
            embeddings = (prefix + name for name in EMBEDDINGS if prefix + name in names)
            embedding = next(embeddings, None)
            if embedding:
                yield head, embedding


def tie_equal_heads(manifest: Manifest, pool: SourceFiles) -> Manifest:
    """Return a manifest in which a head that equals the input embedding is an alias of it.

    DCP and full state dicts store both. They are tied if the optimizer does not have the head, and
    the values are bitwise equal: so a run that trains them from now on has one parameter.
    """
    trained = manifest.train.group_of
    stored = {entry.fqn: entry for entry in manifest.of_kind(PARAM, MASTER)}
    tied = dict(manifest.tied)
    for head, embedding in find_heads(stored):
        if not trained or head in trained:
            continue
        if find_first_difference(pool, stored[head], stored[embedding]) is None:
            tied[head] = embedding
    if tied == manifest.tied:
        return manifest
    rest = [entry for entry in manifest.entries.values() if entry.fqn not in tied]
    return replace(manifest.with_entries(rest), tied=tied, frozen=manifest.frozen - tied.keys())


def check_tied_copies(manifest: Manifest, pool: SourceFiles) -> None:
    """Check that stored copies of tied weights equal the weight that is kept.

    Raises:
        DifferentError: a copy has other values.
    """
    for copy in manifest.tied_copies:
        kept = manifest.entries.get((PARAM, manifest.kept_name(copy.fqn)))
        if kept is None:
            continue
        at = find_first_difference(pool, kept, copy)
        if at is not None:
            raise DifferentError(
                copy.fqn,
                f"is tied to {kept.fqn!r}, but its copy in {copy.chunks[0].file} differs (first at"
                f" element {at})",
                "fetch the file again, or pass --tied drop to merge the values of the kept weight",
            )


def is_untrained(manifest: Manifest, head: str, embedding: str) -> bool:
    """Return whether the optimizer has the embedding only; it lists a tied weight once."""
    trained = manifest.train.group_of
    return embedding in trained and head not in trained


def _drop_equal(
    weights: Weights,
    by_name: Mapping[str, tuple[Entry, DType]],
    head: str,
    embedding: str,
    policy: Tied,
    pool: SourceFiles,
    *,
    sure: bool,
) -> None:
    """Compare a head that is stored separately with the embedding it is tied to, then drop it."""
    stored, kept = by_name[head][0], by_name[embedding][0]
    at = find_first_difference(pool, stored, kept)
    if at is not None:
        if policy == "drop":
            weights.notes.append(
                f"{head} differs from {embedding} (first at element {at}); its own values were"
                " left out (--tied drop)"
            )
        elif not sure:
            return
        else:
            raise DifferentError(
                head,
                f"is tied to {embedding!r} by the model's config (tie_word_embeddings), but differs"
                f" from it (first at element {at})",
                "pass --tied keep to write both, or --tied drop to drop this one",
            )
    weights.tensors = [item for item in weights.tensors if item[0].fqn != head]
    weights.dropped_aliases[head] = embedding
