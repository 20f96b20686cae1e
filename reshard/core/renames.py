"""Rename tensors in a manifest, and everything in it that refers to a tensor by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Key, Manifest, ParamGroup, index_entries
from reshard.errors import CorruptError, UsageError

NewNames = Callable[[str], tuple[str, ...]]
"""Returns the new names of a tensor: several if it is cut, a shared one if it is joined."""


def replace_tensors(
    manifest: Manifest, entries: Mapping[Key, Entry], tied_copies: Iterable[Entry], names: NewNames
) -> Manifest:
    """Return a manifest with other entries, and with everything else under their names.

    Args:
        entries: the tensors of the new manifest.
        tied_copies: its copies of tied tensors.
        names: returns the new names of a tensor of the old manifest.

    Raises:
        UsageError: the parts of one new tensor differ in a value of which it can have only one
            (param group, step, frozen or not).
    """
    old = manifest.train
    sources: dict[str, list[str]] = {}
    for fqn in manifest.weight_shapes:
        for name in names(fqn):
            sources.setdefault(name, []).append(fqn)
    groups = tuple(ParamGroup(g.hyper, _rename_all(g.fqns, names)) for g in old.param_groups)
    owner = {fqn: n for n, group in enumerate(old.param_groups) for fqn in group.fqns}
    if groups:  # only a check: no tensor can be in two param groups
        _find_common(sources, owner.get, "param group")
    steps = _find_common(sources, old.optimizer_step.get, "step")
    values = _find_common(sources, old.non_tensor_state.get, "optimizer state")
    frozen = _find_common(sources, lambda fqn: fqn in manifest.frozen, "frozen")
    dtypes = _find_common(sources, manifest.trained_dtypes.get, "dtype")
    tied = {
        alias: kept
        for aliases, kepts in manifest.tied.items()
        for alias, kept in zip(names(aliases), names(kepts), strict=True)
    }
    train = replace(
        old,
        param_groups=groups,
        optimizer_step=_drop_unknown(steps),
        non_tensor_state=_drop_unknown(values),
    )
    return replace(
        manifest,
        entries=entries,
        train=train,
        tied=tied,
        tied_copies=tuple(tied_copies),
        frozen=frozenset(name for name, is_frozen in frozen.items() if is_frozen),
        trained_dtypes=_drop_unknown(dtypes),
        placements={},  # the other side's module cuts tensors in its own way
        # The recorded name of a renamed tensor would bring its old name back.
        wrapped_names={
            fqn: listed for fqn, listed in manifest.wrapped_names.items() if names(fqn) == (fqn,)
        },
        absent=_rename_all(manifest.absent, names),
        ordered=False,  # the modules of the two sides are in different orders
    )


def rename_some(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """Return a manifest with some of its tensors under other names.

    Raises:
        CorruptError: two tensors would have one name.
    """

    def rename(fqn: str) -> str:
        return names.get(fqn, fqn)

    entries = (replace(entry, fqn=rename(entry.fqn)) for entry in manifest.entries.values())
    copies = (replace(copy, fqn=rename(copy.fqn)) for copy in manifest.tied_copies)
    return replace_tensors(manifest, index_entries(entries), copies, lambda fqn: (rename(fqn),))


def _rename_all(fqns: Iterable[str], names: NewNames) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for fqn in fqns for name in names(fqn)))


def check_parts_dtype(where: str, name: str, parts: Sequence[Entry]) -> DType:
    """Return the dtype of the parts of one tensor.

    Raises:
        CorruptError: they differ.
    """
    first = parts[0]
    odd = next((part for part in parts if part.dtype != first.dtype), None)
    if odd:
        raise CorruptError(
            where,
            f"{first.fqn!r} ({odd.kind}) is {first.dtype}, {odd.fqn!r} {odd.dtype}: they"
            f" cannot be one tensor, {name!r}",
        )
    return first.dtype


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _find_common(
    sources: Mapping[str, Iterable[str]], value_of: Callable[[str], Any], what: str
) -> dict[str, Any]:
    common: dict[str, Any] = {}
    for name, (first, *others) in sources.items():
        common[name] = value_of(first)
        for other in others:
            if value_of(other) != common[name]:
                raise UsageError(
                    f"{name!r}",
                    f"is one tensor for both {first!r} and {other!r}, which differ in their {what}:"
                    f" {_format_value(common[name])} and {_format_value(value_of(other))}",
                    "pass equal values for all its parts, e.g. with --param-groups, or write only"
                    " the weights: --weights-only",
                )
    return common


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value)
