"""Edits of a manifest's names: wrapper prefixes stripped, renames, selection. No bytes move."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.errors import UsageError
from reshard.manifest import Entry, Manifest, ParamGroup

# DDP and DeepSpeed, torch.compile, FSDP1, torch activation checkpointing, Lightning.
WRAPPERS = frozenset(
    (
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    )
)


def canonical(fqn: str) -> str:
    """The name without wrapper components, at any depth; the last component always stays.

    >>> canonical("module.model._orig_mod.layers.0.weight")
    'model.layers.0.weight'
    """
    *path, leaf = fqn.split(".")
    return ".".join([part for part in path if part not in WRAPPERS] + [leaf])


def stripped(names: Iterable[str]) -> dict[str, str]:
    """Names -> the same without wrappers, where all names of a model are known.

    DDP has nothing beside its ``module``: one with others beside is a part of the model that is
    called so. (What averages weights counts how many.)

    >>> stripped(["module.b.module.weight", "module.b.norm.weight", "module._orig_mod.c"])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'module.b.module.weight': 'b.module.weight',
     'module.b.norm.weight': 'b.norm.weight',
     'module._orig_mod.c': 'c'}
    """
    names = list(names)
    beside: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        path = tuple(name.split("."))
        for depth, part in enumerate(path):
            if part != "n_averaged":
                beside.setdefault(path[:depth], set()).add(part)

    def bare(name: str) -> str:
        *path, leaf = name.split(".")
        kept = [
            part
            for depth, part in enumerate(path)
            if part not in WRAPPERS or (part == "module" and len(beside[tuple(path[:depth])]) > 1)
        ]
        return ".".join([*kept, leaf])

    return {name: bare(name) for name in names}


@dataclass(frozen=True, slots=True)
class Edits:
    """What a user asks of the names, in the order in which it is applied."""

    strip_wrappers: bool = True
    rename: Sequence[tuple[str, str]] = ()  # (regex, replacement), each applied to every name
    include: Sequence[str] = ()  # regexes searched in the new name; none means all
    exclude: Sequence[str] = ()


@dataclass(slots=True)
class Edited:
    """The edited manifest, and what was done."""

    manifest: Manifest
    stripped: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)  # options that no name answers to


def compiled(patterns: Iterable[str], option: str) -> list[re.Pattern[str]]:
    """Regular expressions from the command line.

    Raises:
        UsageError: one does not compile.
    """
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise UsageError(
            option, f"{error.pattern!r} is not a regular expression: {error}"
        ) from error


def edit(manifest: Manifest, edits: Edits) -> Edited:
    """Apply the edits to every name in the manifest: tensors, tied names, groups, steps.

    Raises:
        UsageError: two tensors would have the same name, or a pattern is wrong or matches nothing.
    """
    rename = [
        (pattern, text)
        for pattern, (_, text) in zip(
            compiled((p for p, _ in edits.rename), "--rename"), edits.rename, strict=True
        )
    ]
    done = Edited(manifest)
    names: dict[str, str] = {}
    used: set[str] = set()
    without = stripped(_every_name(manifest)) if edits.strip_wrappers else {}

    def new_name(fqn: str) -> str:
        if fqn not in names:
            bare = without.get(fqn, fqn)
            if bare != fqn:
                done.stripped.append((fqn, bare))
            names[fqn] = _renamed(bare, rename, used)
            if names[fqn] != bare:
                done.renamed.append((bare, names[fqn]))
        return names[fqn]

    entries = [replace(entry, fqn=new_name(entry.fqn)) for entry in manifest.entries.values()]
    tied = {new_name(alias): new_name(kept) for alias, kept in manifest.tied.items()}
    absent = tuple(map(new_name, manifest.absent))
    include = compiled(edits.include, "--include")
    exclude = compiled(edits.exclude, "--exclude")

    def wanted(fqn: str) -> bool:
        return (not include or any(p.search(fqn) for p in include)) and not any(
            p.search(fqn) for p in exclude
        )

    _refuse_collisions({old: new for old, new in names.items() if wanted(new)})
    heirs, tied = _inherit(tied, wanted)
    done.unmatched = [f"--rename {p}={text}" for p, text in edits.rename if p not in used]
    done.unmatched += _unmatched("--include", include, names.values())
    done.unmatched += _unmatched("--exclude", exclude, names.values())
    done.excluded = sorted({e.fqn for e in entries if not wanted(e.fqn)})
    entries = [replace(entry, fqn=heirs.get(entry.fqn, entry.fqn)) for entry in entries]
    kept = [entry for entry in entries if wanted(entry.fqn)]
    if entries and not kept:
        raise UsageError("--include/--exclude", f"none of {len(names)} tensors is left")
    done.manifest = replace(
        _renamed_manifest(manifest, kept, tied, new_name),
        tied_copies=tuple(
            replace(again, fqn=new_name(again.fqn))
            for again in manifest.tied_copies
            if wanted(new_name(again.fqn))
        ),
        absent=tuple(filter(wanted, absent)),
    )
    return done


def _every_name(manifest: Manifest) -> dict[str, None]:
    """Each once, in the order of the manifest."""
    train = manifest.train
    names = [*(entry.fqn for entry in manifest.entries.values()), *manifest.absent]
    names += [fqn for pair in manifest.tied.items() for fqn in pair]
    names += [fqn for group in train.param_groups for fqn in group.fqns]
    names += [*train.optimizer_step, *manifest.frozen, *manifest.trained_dtypes]
    return dict.fromkeys(names)


def _unmatched(
    option: str, patterns: Iterable[re.Pattern[str]], names: Collection[str]
) -> list[str]:
    """Patterns that are in no name."""
    lost = (pattern for pattern in patterns if not any(map(pattern.search, names)))
    return [f"{option} {pattern.pattern}" for pattern in lost]


def only(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """The tensors of these names alone, each under its new one; groups keep all their names.

    A tied value stays if any of its names is wanted.

    Raises:
        UsageError: two of them would have the same name.
    """
    _refuse_collisions(dict(names))
    heirs, tied = _inherit(dict(manifest.tied), names.__contains__)
    moved = [
        replace(entry, fqn=heirs.get(entry.fqn, entry.fqn)) for entry in manifest.entries.values()
    ]
    kept = [replace(each, fqn=names[each.fqn]) for each in moved if each.fqn in names]

    def new(fqn: str) -> str:
        return names.get(fqn, fqn)

    return replace(
        _renamed_manifest(manifest, kept, {new(alias): new(to) for alias, to in tied.items()}, new),
        tied_copies=tuple(
            replace(again, fqn=new(again.fqn))
            for again in manifest.tied_copies
            if again.fqn in names
        ),
        absent=tuple(new(fqn) for fqn in manifest.absent if fqn in names),
    )


def _inherit(
    tied: dict[str, str], wanted: Callable[[str], bool]
) -> tuple[dict[str, str], dict[str, str]]:
    """Tied names under a selection: kept name -> the alias that takes its place, and the rest.

    A value stays as long as one of its names is wanted; an alias that is not wanted goes.
    """
    heirs: dict[str, str] = {}
    rest: dict[str, str] = {}
    for alias, kept in tied.items():
        if not wanted(alias):
            continue
        if wanted(kept):
            rest[alias] = kept
        elif heirs.setdefault(kept, alias) != alias:
            rest[alias] = heirs[kept]
    return heirs, rest


def _renamed(fqn: str, rename: Sequence[tuple[re.Pattern[str], str]], used: set[str]) -> str:
    for pattern, text in rename:
        try:
            fqn, count = pattern.subn(text, fqn)
            if count:
                used.add(pattern.pattern)
        except (re.error, IndexError) as error:
            raise UsageError("--rename", f"{text!r} is not a replacement: {error}") from error
    if not fqn:
        raise UsageError("--rename", "a name would become empty")
    return fqn


def _refuse_collisions(names: dict[str, str]) -> None:
    owners: dict[str, str] = {}
    for old, new in names.items():
        if new in owners:
            raise UsageError(
                new,
                f"both {owners[new]!r} and {old!r} would get this name",
                "give --no-strip, or tell them apart with --rename or --exclude",
            )
        owners[new] = old


def _renamed_manifest(
    manifest: Manifest, kept: list[Entry], tied: dict[str, str], new: Callable[[str], str]
) -> Manifest:
    train = replace(
        manifest.train,
        optimizer_step={new(fqn): step for fqn, step in manifest.train.optimizer_step.items()},
        param_groups=tuple(
            ParamGroup(group.hyper, tuple(map(new, group.fqns)))
            for group in manifest.train.param_groups
        ),
        non_tensor_state={new(fqn): held for fqn, held in manifest.train.non_tensor_state.items()},
    )
    return replace(
        manifest.with_entries(kept),
        train=train,
        tied=tied,
        frozen=frozenset(map(new, manifest.frozen)),
        trained_dtypes={new(fqn): dtype for fqn, dtype in manifest.trained_dtypes.items()},
        wrapped_names={
            fqn: listed for fqn, listed in manifest.wrapped_names.items() if new(fqn) == fqn
        },
    )
