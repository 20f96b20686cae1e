"""Edits of the names in a manifest: removal of wrapper prefixes, renames, selection of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.core.manifest import Entry, Manifest, ParamGroup
from reshard.errors import UsageError
from reshard.options import Options, option

# DDP, torch.compile, FSDP1, torch activation checkpointing, Lightning.
WRAPPERS = frozenset(
    (
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    )
)
WITHOUT_DDP = WRAPPERS - {"module"}  # for a model that DDP has not wrapped


def remove_wrappers(fqn: str) -> str:
    """Return a name without any wrapper component; the last component always stays.

    It does not know the other names of the model, so it removes a ``module`` that is a part of the
    model, too. Compare its results only with each other; `strip_wrappers` is exact.

    >>> remove_wrappers("module.model._orig_mod.layers.0.weight")
    'model.layers.0.weight'
    """
    return _strip(fqn, lambda _: True)


def strip_wrappers(names: Iterable[str], wrappers: Container[str] = WRAPPERS) -> dict[str, str]:
    """Return name -> name without wrappers, given all names of a model.

    DDP's ``module`` has no siblings: a ``module`` with siblings is a part of the model with that
    name. (``n_averaged``, the counter of averaged models, does not count as one.)

    >>> strip_wrappers(["module.b.module.weight", "module.b.norm.weight", "module._orig_mod.c"])
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
        path = tuple(name.split("."))
        return _strip(name, lambda depth: len(beside[path[:depth]]) == 1, wrappers)

    return {name: bare(name) for name in names}


def _strip(fqn: str, is_alone: Callable[[int], bool], wrappers: Container[str] = WRAPPERS) -> str:
    """Return a name without wrapper components.

    DDP wraps a whole model or one of its named parts (the networks of a GAN). A ``module`` further
    down or in a list is a part of the model: transformers 5.23 has one in LeViT
    (``LevitResidualLayer.module``).

    Args:
        is_alone: whether the component at this depth has no siblings.
    """
    *path, leaf = fqn.split(".")
    kept: list[str] = []
    for depth, part in enumerate(path):
        is_part = part == "module" and (
            len(kept) > 1 or any(map(str.isdecimal, kept)) or not is_alone(depth)
        )
        if is_part or part not in wrappers:
            kept.append(part)
    return ".".join([*kept, leaf])


def _parse_rename(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"--rename {text}", "is not of the form REGEX=REPLACEMENT")
    return pattern, replacement


@dataclass(frozen=True, kw_only=True)
class Edits(Options):
    """The user's edits of names, in the order in which they are applied."""

    strip_wrappers: bool = option(
        True,
        "Keep wrapper prefixes such as module. in names.",
        group="Names",
        flags=("--no-strip",),
    )
    rename: Sequence[tuple[str, str]] = option(
        (),
        "Rename tensors; repeat for several rules, which apply in turn.",
        group="Names",
        metavar="REGEX=REPL",
        parse=_parse_rename,
    )
    include: Sequence[str] = option(
        (),
        "Write only tensors whose new name matches.",
        group="Names",
        metavar="REGEX",
    )
    exclude: Sequence[str] = option(
        (), "Leave out tensors whose new name matches.", group="Names", metavar="REGEX"
    )


@dataclass(slots=True)
class Edited:
    """The edited manifest, and a record of the edits."""

    manifest: Manifest
    stripped: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)  # options that match no name


def compile_patterns(patterns: Iterable[str], option: str) -> list[re.Pattern[str]]:
    """Compile regular expressions from the command line.

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
            compile_patterns((p for p, _ in edits.rename), "--rename"), edits.rename, strict=True
        )
    ]
    done = Edited(manifest)
    names: dict[str, str] = {}
    used: set[str] = set()
    wrappers = WRAPPERS if manifest.may_be_ddp else WITHOUT_DDP
    without = strip_wrappers(_collect_names(manifest), wrappers) if edits.strip_wrappers else {}

    def new_name(fqn: str) -> str:
        if fqn not in names:
            bare = without.get(fqn, fqn)
            if bare != fqn:
                done.stripped.append((fqn, bare))
            names[fqn] = _rename(bare, rename, used)
            if names[fqn] != bare:
                done.renamed.append((bare, names[fqn]))
        return names[fqn]

    entries = [_rename_entry(entry, new_name(entry.fqn)) for entry in manifest.entries.values()]
    tied = {new_name(alias): new_name(kept) for alias, kept in manifest.tied.items()}
    absent = tuple(map(new_name, manifest.absent))
    include = compile_patterns(edits.include, "--include")
    exclude = compile_patterns(edits.exclude, "--exclude")

    def is_selected(fqn: str) -> bool:
        return (not include or any(p.search(fqn) for p in include)) and not any(
            p.search(fqn) for p in exclude
        )

    # Excluded tensors are not written, so several of them may have one name.
    _refuse_collisions({old: new for old, new in names.items() if is_selected(new)})
    heirs, tied = _reassign_ties(tied, is_selected)
    done.unmatched = [f"--rename {p}={text}" for p, text in edits.rename if p not in used]
    done.unmatched += _find_unmatched("--include", include, names.values())
    done.unmatched += _find_unmatched("--exclude", exclude, names.values())
    done.excluded = sorted({e.fqn for e in entries if not is_selected(e.fqn)})
    entries = [_rename_entry(entry, heirs.get(entry.fqn, entry.fqn)) for entry in entries]
    kept = [entry for entry in entries if is_selected(entry.fqn)]
    if entries and not kept:
        raise UsageError("--include/--exclude", f"selects none of the {len(names)} tensors")
    done.manifest = replace(
        _rename_manifest(manifest, kept, tied, new_name),
        tied_copies=tuple(
            replace(copy, fqn=new_name(copy.fqn))
            for copy in manifest.tied_copies
            if is_selected(new_name(copy.fqn))
        ),
        absent=tuple(filter(is_selected, absent)),
    )
    return done


def _rename_entry(entry: Entry, fqn: str) -> Entry:
    """Return an entry under another name; a copy is made only if the name changes."""
    return entry if entry.fqn == fqn else replace(entry, fqn=fqn)


def _collect_names(manifest: Manifest) -> dict[str, None]:
    train = manifest.train
    names = [*(entry.fqn for entry in manifest.entries.values()), *manifest.absent]
    names += [fqn for pair in manifest.tied.items() for fqn in pair]
    names += [fqn for group in train.param_groups for fqn in group.fqns]
    names += [*train.optimizer_step, *manifest.frozen, *manifest.trained_dtypes]
    return dict.fromkeys(names)


def _find_unmatched(
    option: str, patterns: Iterable[re.Pattern[str]], names: Collection[str]
) -> list[str]:
    unmatched = (pattern for pattern in patterns if not any(map(pattern.search, names)))
    return [f"{option} {pattern.pattern}" for pattern in unmatched]


def select(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """Return a manifest with some of its tensors, under new names; param groups keep all names.

    A tied value stays if at least one of its names is selected.

    Args:
        names: name of a selected tensor -> its new name.

    Raises:
        UsageError: two tensors would have the same name.
    """
    _refuse_collisions(dict(names))
    heirs, tied = _reassign_ties(dict(manifest.tied), names.__contains__)
    moved = [
        _rename_entry(entry, heirs.get(entry.fqn, entry.fqn)) for entry in manifest.entries.values()
    ]
    kept = [_rename_entry(entry, names[entry.fqn]) for entry in moved if entry.fqn in names]

    def new(fqn: str) -> str:
        return names.get(fqn, fqn)

    return replace(
        _rename_manifest(manifest, kept, {new(alias): new(to) for alias, to in tied.items()}, new),
        tied_copies=tuple(
            replace(copy, fqn=new(copy.fqn)) for copy in manifest.tied_copies if copy.fqn in names
        ),
        absent=tuple(new(fqn) for fqn in manifest.absent if fqn in names),
    )


def _reassign_ties(
    tied: dict[str, str], is_selected: Callable[[str], bool]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return kept name -> the alias that replaces it under a selection, and the remaining ties."""
    heirs: dict[str, str] = {}
    rest: dict[str, str] = {}
    for alias, kept in tied.items():
        if not is_selected(alias):
            continue
        if is_selected(kept):
            rest[alias] = kept
        elif heirs.setdefault(kept, alias) != alias:
            rest[alias] = heirs[kept]
    return heirs, rest


def _rename(fqn: str, rename: Sequence[tuple[re.Pattern[str], str]], used: set[str]) -> str:
    was_empty = not fqn  # a state dict can have such a key
    for pattern, text in rename:
        try:
            fqn, count = pattern.subn(text, fqn)
            if count:
                used.add(pattern.pattern)
        except (re.error, IndexError) as error:
            raise UsageError("--rename", f"{text!r} is not a valid replacement: {error}") from error
    if not (fqn or was_empty):
        raise UsageError("--rename", "a name would become empty")
    return fqn


def _refuse_collisions(names: dict[str, str]) -> None:
    owners: dict[str, str] = {}
    for old, new in names.items():
        if new in owners:
            raise UsageError(
                new,
                f"both {owners[new]!r} and {old!r} would get this name",
                "pass --no-strip, or resolve it with --rename or --exclude",
            )
        owners[new] = old


def _rename_manifest(
    manifest: Manifest, kept: list[Entry], tied: dict[str, str], new: Callable[[str], str]
) -> Manifest:
    train = replace(
        manifest.train,
        optimizer_step={new(fqn): step for fqn, step in manifest.train.optimizer_step.items()},
        param_groups=tuple(
            ParamGroup(group.hyper, tuple(map(new, group.fqns)))
            for group in manifest.train.param_groups
        ),
        non_tensor_state={
            new(fqn): values for fqn, values in manifest.train.non_tensor_state.items()
        },
    )
    return replace(
        manifest.with_entries(kept),
        train=train,
        tied=tied,
        frozen=frozenset(map(new, manifest.frozen)),
        trained_dtypes={new(fqn): dtype for fqn, dtype in manifest.trained_dtypes.items()},
        placements={new(fqn): placement for fqn, placement in manifest.placements.items()},
        # The recorded name of a renamed tensor would bring its old name back.
        wrapped_names={
            fqn: listed for fqn, listed in manifest.wrapped_names.items() if new(fqn) == fqn
        },
    )
