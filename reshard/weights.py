"""Which tensor is the weight, and in which dtype it is written: decided before any byte moves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Literal

from reshard import dtypes, keys
from reshard.dtypes import DType
from reshard.errors import DifferentError, IncompleteError, UnrecognisedError, UsageError
from reshard.files import SourceFiles
from reshard.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Entry,
    Manifest,
)
from reshard.tensors import first_difference
from reshard.units import some

Tied = Literal["auto", "keep", "drop"]

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
_LISTED = 8


@dataclass(slots=True)
class Weights:
    """The weights to write, in state-dict order, each with its dtype; and what was decided."""

    tensors: list[tuple[Entry, DType]]
    from_master: int = 0
    from_copy: int = 0  # stored only in the dtype of training
    buffers: int = 0
    dropped_aliases: dict[str, str] = field(default_factory=dict)
    written_aliases: dict[str, str] = field(default_factory=dict)
    kept_fp32: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select(manifest: Manifest, dtype: str | None, keep_fp32: Sequence[str] = ()) -> Weights:
    """One entry a weight: the fp32 master where there is one, else the trained copy.

    Args:
        dtype: as `dtypes.parse` takes it; ``keep``: as stored; None: as the model was trained.
        keep_fp32: regexes of weights that become float32 whatever ``dtype`` says.

    Raises:
        UsageError: ``dtype`` is not a float dtype, or a pattern matches nothing.
        UnrecognisedError: nothing to write.
    """
    target = None if dtype in (None, "keep") else dtypes.parse(str(dtype))
    if target is not None and target.family != "float":
        raise UsageError(f"--dtype {dtype}", "weights are written as bf16, fp16 or fp32")
    masters = {entry.fqn: entry for entry in manifest.of_kind(MASTER)}
    plain = {entry.fqn: entry for entry in manifest.of_kind(PARAM, BUFFER)}
    patterns = keys.compile_patterns(keep_fp32, "--keep-fp32")
    result = Weights([])
    for fqn in dict.fromkeys(e.fqn for e in manifest.of_kind(PARAM, BUFFER, MASTER)):
        source = masters.get(fqn) or plain[fqn]
        wanted = _dtype(manifest, source, target, dtype)
        castable = source.kind != BUFFER and source.dtype.family == "float"
        if castable and any(pattern.search(fqn) for pattern in patterns):
            wanted = dtypes.FLOAT32
            result.kept_fp32.append(fqn)
        _count(result, source)
        weight = replace(source, kind=PARAM if source.kind == MASTER else source.kind)
        result.tensors.append((weight, wanted))
    if keep_fp32 and not result.kept_fp32:
        raise UsageError("--keep-fp32", "matches no weight")
    refuse_nothing(manifest, result.tensors)
    return result


def refuse_nothing(manifest: Manifest, held: Sized) -> None:
    """Refuse a sound file without tensors, which safetensors allows.

    Raises:
        UnrecognisedError: there is nothing to write.
    """
    if not held:
        raise UnrecognisedError(
            manifest.origin.path,
            "is sound and holds no weights: there is nothing to write",
            "give the file or directory that holds the model",
        )


def _dtype(manifest: Manifest, source: Entry, target: DType | None, asked: str | None) -> DType:
    """Buffers, integers, bools and float8 are never cast."""
    if source.kind == BUFFER or source.dtype.family != "float" or asked == "keep":
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


def settle_ties(
    weights: Weights,
    manifest: Manifest,
    *,
    config: Mapping[str, object] | None,
    policy: Tied,
    pool: SourceFiles,
) -> bool:
    """Drop aliases of tied weights, or write them as copies; whether the result is untied.

    An alias goes only where it is the same storage, or bitwise equal. ``transformers`` expects it
    gone where the config ties the weights, and there where the config does not.

    Raises:
        DifferentError: two weights are tied, by the checkpoint or the config, and differ.
        IncompleteError: a weight is listed, and no rank holds a value for it.
    """
    if policy != "drop":
        refuse_diverged(manifest, pool)
    declared = config.get("tie_word_embeddings") if config else None
    by_name = {entry.fqn: (entry, dtype) for entry, dtype in weights.tensors}
    clone = policy == "keep" or (policy == "auto" and declared is False)
    for alias, kept in manifest.tied.items():
        if kept not in by_name or alias in by_name:
            continue
        if clone:
            entry, dtype = by_name[kept]
            weights.tensors.append((replace(entry, fqn=alias), dtype))
            weights.written_aliases[alias] = kept
        else:
            weights.dropped_aliases[alias] = kept
    if policy != "keep" and declared is not False:
        for head, embedding in heads(by_name):
            if declared is True or is_untrained(manifest, head, embedding):
                _drop_equal(weights, by_name, head, embedding, policy, pool, sure=declared is True)
    _refuse_absent(weights, manifest, tied=declared is True)
    return (clone and bool(weights.written_aliases)) or (policy == "keep" and _HEAD in by_name)


def _refuse_absent(weights: Weights, manifest: Manifest, *, tied: bool) -> None:
    """A weight without a value is an error, but for a head that the config ties.

    Raises:
        IncompleteError: there is one.
    """
    names = {entry.fqn for entry, _ in weights.tensors}
    embedding = next((name for name in _EMBEDDINGS if name in names), None)
    lacking = list(manifest.absent)
    if tied and embedding and _HEAD in lacking:
        lacking.remove(_HEAD)
        weights.dropped_aliases[_HEAD] = embedding
    if lacking:
        regex = f"'^({'|'.join(map(re.escape, lacking))})$'" if len(lacking) <= _LISTED else "REGEX"
        raise IncompleteError(
            manifest.origin.path,
            f"lists {without_value(lacking)}",
            f"what is tied to another weight, or not needed, can be left out: --exclude {regex};"
            " another model may have them: --fill-missing-from MODEL",
        )


def without_value(names: Sequence[str]) -> str:
    """That no rank holds a value for these names."""
    shown = some(list(map(repr, names)), _LISTED)
    return f"{shown}, but no rank holds a value for {'them' if len(names) > 1 else 'it'}"


def heads(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Output heads with the input embedding of the same model, which may lie inside another."""
    names = list(names)
    for head in names:
        if head == _HEAD or head.endswith(f".{_HEAD}"):
            prefix = head.removesuffix(_HEAD)
            found = next((prefix + name for name in _EMBEDDINGS if prefix + name in names), None)
            if found:
                yield head, found


def with_equal_heads_tied(manifest: Manifest, pool: SourceFiles) -> Manifest:
    """A manifest in which a head that repeats the input embedding is its alias.

    DCP and full state dicts store both; the optimizer holds the embedding only, and the values are
    bitwise equal.
    """
    stored = {entry.fqn: entry for entry in manifest.of_kind(PARAM, MASTER)}
    tied = dict(manifest.tied)
    for head, embedding in heads(stored):
        if not is_untrained(manifest, head, embedding):
            continue
        if _differ_at(pool, stored[head], stored[embedding]) is None:
            tied[head] = embedding
    if tied == manifest.tied:
        return manifest
    rest = [entry for entry in manifest.entries.values() if entry.fqn not in tied]
    return replace(manifest.with_entries(rest), tied=tied, frozen=manifest.frozen - tied.keys())


def refuse_diverged(manifest: Manifest, pool: SourceFiles) -> None:
    """Compare tied names of which a file has two copies: one of them is all that is taken.

    Raises:
        DifferentError: they hold different values.
    """
    for again in manifest.tied_copies:
        kept = manifest.entries.get((PARAM, manifest.kept_name(again.fqn)))
        if kept is None:
            continue
        at = _differ_at(pool, kept, again)
        if at is not None:
            raise DifferentError(
                again.fqn,
                f"is tied to {kept.fqn!r}, and another copy of it lies in {again.chunks[0].file},"
                f" which differs (first at element {at})",
                "fetch the file again; reshard merge --tied drop takes what the kept name holds",
            )


def _differ_at(pool: SourceFiles, a: Entry, b: Entry) -> int | None:
    """The first element in which two tensors differ, if they do; the first if in shape or dtype."""
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return first_difference(pool, a, b) if alike else 0


def is_untrained(manifest: Manifest, head: str, embedding: str) -> bool:
    """Whether the optimizer holds the embedding only: it lists a tied weight once."""
    trained = {fqn for group in manifest.train.param_groups for fqn in group.fqns}
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
    """The head is tied, but the checkpoint stores it by itself: compare, then drop.

    Raises:
        DifferentError: the config says that they are tied, and they differ.
    """
    stored, kept = by_name[head][0], by_name[embedding][0]
    at = _differ_at(pool, stored, kept)
    if at is not None:
        if policy == "drop":
            weights.notes.append(
                f"{head} differs from {embedding} (first at element {at}): its own values are left"
                " out (--tied drop)"
            )
        elif not sure:
            return
        else:
            raise DifferentError(
                head,
                f"config.json says tie_word_embeddings, but it differs from {embedding!r}"
                f" (first at element {at})",
                "write both with --tied keep, or drop it with --tied drop",
            )
    weights.tensors = [item for item in weights.tensors if item[0].fqn != head]
    weights.dropped_aliases[head] = embedding
