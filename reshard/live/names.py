"""A checkpoint under the names of a live model.

A LightningModule or another wrapper keeps the model in an attribute, so that its parameters are
``model.layers...`` where a save of the model itself has ``layers...``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from reshard.core.keys import WITHOUT_DDP, Edits, edit, remove_wrappers, strip_wrappers
from reshard.core.manifest import BUFFER, PARAM, Manifest


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that the names of a checkpoint gain or lose to become those of a live model."""

    text: str
    is_added: bool

    def apply(self, fqn: str) -> str:
        """Return the name in the live model."""
        return self.text + fqn if self.is_added else fqn.removeprefix(self.text)

    def __str__(self) -> str:
        return f"names {'gain' if self.is_added else 'lose'} the prefix {self.text!r}"


def get_live_name(name: str) -> str:
    """Return the name of a parameter in a live model; DDP's ``module`` is a part of it."""
    return strip_wrappers([name], WITHOUT_DDP)[name]  # which does not depend on other names


def use_live_names(
    manifest: Manifest, parameters: Collection[str], buffers: Collection[str]
) -> tuple[Manifest, Prefix | None]:
    """Return a state under the names of a live model, and the prefix that has changed, if any.

    Args:
        parameters: the names of the model's parameters.
        buffers: the names of its buffers, which files do not always distinguish from parameters.
    """
    named, prefix = _change_prefix(manifest, parameters)
    return _mark_buffers(named, buffers), prefix


def fits_live_names(manifest: Manifest, parameters: Collection[str]) -> bool:
    """Return whether a state has all parameters of a live model, under its names."""
    live = set(strip_wrappers(parameters, WITHOUT_DDP).values())
    return live <= _list_names(edit(manifest, Edits()).manifest)


def _change_prefix(manifest: Manifest, fqns: Collection[str]) -> tuple[Manifest, Prefix | None]:
    """DDP does not wrap the live model, so that a ``module`` in its names is a part of it."""
    live = set(strip_wrappers(fqns, WITHOUT_DDP).values())
    if not live:
        return manifest, None
    unwrapped = replace(manifest, may_be_ddp=False)
    for state in (unwrapped, manifest):
        if fits_live_names(state, fqns):
            return state, None
    for state in (unwrapped, manifest):
        bare = replace(edit(state, Edits()).manifest, may_be_ddp=False)
        prefix = _find_prefix(_list_names(bare), live)
        if prefix is not None:
            # An empty name stays empty: a tensor without a name is an error of its own.
            pattern = f"^(?!$){'' if prefix.is_added else re.escape(prefix.text)}"
            rename = (pattern, prefix.text.replace("\\", r"\\") if prefix.is_added else "")
            return edit(bare, Edits(rename=[rename])).manifest, prefix
    return manifest, None


def _list_names(manifest: Manifest) -> set[str]:
    return manifest.weight_shapes.keys() | manifest.tied.keys()


def _mark_buffers(manifest: Manifest, fqns: Collection[str]) -> Manifest:
    names = set(map(remove_wrappers, fqns))
    return manifest.with_entries(
        replace(entry, kind=BUFFER)
        if entry.kind == PARAM and remove_wrappers(entry.fqn) in names
        else entry
        for entry in manifest.entries.values()
    )


def _find_prefix(stored: Collection[str], live: set[str]) -> Prefix | None:
    for prefix in _iterate_candidates(stored, min(live)):
        if live <= {prefix.apply(fqn) for fqn in stored}:
            return prefix
    return None


def _iterate_candidates(stored: Collection[str], name: str) -> Iterator[Prefix]:
    added = {name[: -len(fqn)] for fqn in stored if name.endswith(f".{fqn}")}
    removed = {fqn[: -len(name)] for fqn in stored if fqn.endswith(f".{name}")}
    for text in sorted(added, key=len):
        yield Prefix(text, is_added=True)
    for text in sorted(removed, key=len):
        yield Prefix(text, is_added=False)
