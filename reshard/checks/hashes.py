"""A manifest of contents: what each tensor holds, whatever layout it is stored in.

A tensor's digest is the SHA-256 of its elements, row-major, little-endian. A weight is its most
precise value, and has the digests of its casts to narrower dtypes besides, so that a file that was
merged in any of them is checked against the manifest of the sharded run that it came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.box import Index, as_index
from reshard.checks import names, pairs, train
from reshard.checks.result import Check
from reshard.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.errors import CorruptError, UsageError
from reshard.files import read_small_file
from reshard.manifest import Entry, Key, Manifest, Origin, ParamGroup, TrainState
from reshard.units import counted, some
from reshard.version import __version__

SCHEMA = 1
_KIND = "reshard-manifest"
_MERGED = (FLOAT32, BFLOAT16, FLOAT16)  # what merge writes weights as
_LOOSE = ("rng", "client")  # of one rank, of one script
# What not every layout has a place for.
_PLACELESS = ("samples", "skipped_steps", "optimizer state")


@dataclass(frozen=True, slots=True)
class Content:
    """One tensor: ``kind`` is ``weight`` or the optimizer's slot; digests by dtype."""

    kind: str
    fqn: str
    dtype: str
    shape: Index
    sha256: Mapping[str, str]


@dataclass(slots=True)
class Contents:
    """What a manifest file says."""

    tensors: dict[Key, Content] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    train: TrainState = field(default_factory=TrainState)
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def has_optimizer(self) -> bool:
        """Whether it lists any slot."""
        return any(kind != pairs.WEIGHT for kind, _ in self.tensors)


def wanted(manifest: Manifest) -> dict[Key, tuple[DType, ...]]:
    """In which dtypes each tensor is hashed for a new manifest, by the key of its entry."""
    return {
        entry.key: (entry.dtype, *(_others(entry.dtype) if kind == pairs.WEIGHT else ()))
        for (kind, _), entry in pairs.tensors(manifest).items()
        if entry.numel
    }


def wanted_for(manifest: Manifest, contents: Contents) -> dict[Key, tuple[DType, ...]]:
    """In which dtypes each tensor is hashed to be compared with a manifest."""
    found: dict[Key, tuple[DType, ...]] = {}
    for _, content, entry in _matched(manifest, contents):
        dtype = _common(entry, content)
        if dtype is not None and entry.numel:
            found[entry.key] = (*found.get(entry.key, ()), dtype)
    return {key: tuple(dict.fromkeys(held)) for key, held in found.items()}


def _others(dtype: DType) -> Iterator[DType]:
    """The further dtypes in which a weight is hashed: what merge may write, but for wider ones.

    A wider file is cast back to be compared, which loses nothing.
    """
    if dtype.family == "float":
        yield from (o for o in _MERGED if o != dtype and o.itemsize <= dtype.itemsize)


def _common(entry: Entry, content: Content) -> DType | None:
    """The dtype in which a tensor is compared with what a manifest says; None where there is none.

    A wider weight as the manifest's dtype, else its own, which the manifest must have a digest of.
    """
    narrower = {o.name: o for o in _others(entry.dtype) if o.itemsize < entry.dtype.itemsize}
    if content.kind == pairs.WEIGHT and content.dtype in narrower:
        return narrower[content.dtype]
    return entry.dtype if entry.dtype.name in content.sha256 else None


def contents(manifest: Manifest, digests: Mapping[Key, Mapping[str, str]]) -> Contents:
    """What a checkpoint holds, from what was hashed."""
    nothing = hashlib.sha256().hexdigest()
    made = Contents(tied=dict(manifest.tied), train=_plain(manifest.train))
    for (kind, fqn), entry in pairs.tensors(manifest).items():
        held = digests.get(entry.key) or {entry.dtype.name: nothing}
        made.tensors[kind, fqn] = Content(kind, fqn, entry.dtype.name, entry.shape, held)
    origin = manifest.origin
    made.source = {"format": origin.format, "detail": origin.detail, "mesh": dict(origin.mesh)}
    return made


# The file


def to_bytes(made: Contents) -> bytes:
    """The manifest as JSON; its ``digest`` tells whether the list of tensors was altered."""
    tensors = [asdict(made.tensors[key]) for key in sorted(made.tensors)]
    head = {
        "schema": SCHEMA,
        "kind": _KIND,
        "made_by": f"reshard {__version__}",
        "source": made.source,
        "digest": _digest(tensors),
        "tied": made.tied,
        "train": _train_to_json(made.train),
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    listed = ",\n".join(map(json.dumps, tensors))
    return ("{\n" + ",\n".join([*lines, f'"tensors": [\n{listed}\n]']) + "\n}\n").encode()


def read(path: Path) -> Contents:
    """A manifest file.

    Raises:
        UsageError: there is no such file.
        CorruptError: it is none, or was altered.
    """
    if not path.is_file():
        raise UsageError(path, "there is no such manifest")
    try:
        document = json.loads(read_small_file(path))
        if document["kind"] != _KIND or document["schema"] != SCHEMA:
            raise CorruptError(
                path,
                f"is no {_KIND} of schema {SCHEMA}",
                "make one with reshard verify SOURCE --write-manifest FILE",
            )
        tensors = document["tensors"]
        if _digest(tensors) != document["digest"]:
            raise CorruptError(path, "was altered: its digest is not that of its tensors")
        held = [
            Content(t["kind"], t["fqn"], t["dtype"], as_index(t["shape"]), dict(t["sha256"]))
            for t in tensors
        ]
        return Contents(
            tensors={(each.kind, each.fqn): each for each in held},
            tied=dict(document["tied"]),
            train=_train_of_json(document["train"]),
            source=dict(document["source"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(path, f"is no manifest of reshard ({error})") from error


def _digest(tensors: Any) -> str:
    text = json.dumps(tensors, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(state: TrainState) -> TrainState:
    """A train state as a manifest file gives it back."""
    return _train_of_json(json.loads(json.dumps(_train_to_json(state), default=str)))


def _train_to_json(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "skipped_steps": state.skipped_steps,
        "samples": state.samples,
        "optimizer_step": dict(state.optimizer_step),
        **({"loose": dict(state.non_tensor_state)} if state.non_tensor_state else {}),
        "param_groups": [
            {"hyper": dict(group.hyper), "fqns": list(group.fqns)} for group in state.param_groups
        ],
        "scheduler": state.scheduler,
        "scaler": state.scaler,
        "rng": state.rng,
        "client": dict(state.client),
    }


def _train_of_json(held: Mapping[str, Any]) -> TrainState:
    groups = tuple(ParamGroup(g["hyper"], tuple(g["fqns"])) for g in held["param_groups"])
    return replace(TrainState(**{**held, "param_groups": ()}), param_groups=groups)


# The check


def against(
    manifest: Manifest, listed: Contents, digests: Mapping[Key, Mapping[str, str]]
) -> Check:
    """Whether a checkpoint holds what a manifest lists.

    Weights alone are no failure where one side has no optimizer and no train state at all.
    """
    matched = list(_matched(manifest, listed))
    found = Check(names.AGAINST, "")
    both = manifest.has_optimizer and listed.has_optimizer
    narrow = []
    for name, content, entry in matched:
        problem = _unequal(content, entry, digests.get(entry.key, {}))
        if problem:
            found.failures.append(f"{content.kind} {name}: {problem}")
        elif entry.dtype.name != content.dtype:
            narrow.append(name)
    missing, extra = _unmatched(manifest, listed, {(c.kind, c.fqn) for _, c, _ in matched})
    found.failures += [f"{kind} {fqn} is missing" for kind, fqn in _asked(missing, both=both)]
    found.failures += [f"{kind} {fqn} is not listed" for kind, fqn in _asked(extra, both=both)]
    found.looked_at = f"{counted(len(matched), 'tensor')} of {len(listed.tensors)}"
    if narrow:
        found.looked_at += f", {len(narrow)} as cast"
    if both:
        _compare_train(manifest, listed, found)
    elif listed.has_optimizer or manifest.has_optimizer:
        found.looked_at += "; weights alone, as one side has no optimizer"
    return found


def _matched(manifest: Manifest, listed: Contents) -> Iterator[tuple[str, Content, Entry]]:
    """What both have, a tied weight under any of its names."""
    held = pairs.tensors(manifest)
    for (kind, fqn), content in listed.tensors.items():
        aliases = [fqn]
        if kind == pairs.WEIGHT:
            aliases += sorted(_names(fqn, listed.tied) | _names(fqn, manifest.tied))
        entry = next((held[kind, name] for name in aliases if (kind, name) in held), None)
        if entry is not None:
            yield fqn, content, entry


def _names(fqn: str, tied: Mapping[str, str]) -> set[str]:
    kept = tied.get(fqn, fqn)
    return {kept, *(alias for alias, first in tied.items() if first == kept)}


def _unmatched(
    manifest: Manifest, listed: Contents, matched: set[Key]
) -> tuple[list[Key], list[Key]]:
    """What the checkpoint lacks, and what the manifest does not list; slots without elements not.

    A tied name is known where any name of the weight is.
    """
    held = pairs.tensors(manifest)
    missing = [
        key
        for key, content in listed.tensors.items()
        if key not in matched and (key[0] == pairs.WEIGHT or 0 not in content.shape)
    ]
    extra = []
    for key, entry in held.items():
        aliases = _names(key[1], manifest.tied) | _names(key[1], listed.tied) | {key[1]}
        known = any((key[0], name) in listed.tensors for name in aliases)
        if not known and (key[0] == pairs.WEIGHT or entry.numel):
            extra.append(key)
    return missing, extra


def _asked(keys: Iterable[Key], *, both: bool) -> list[Key]:
    """Without the slots, where one side has no optimizer."""
    return [key for key in keys if both or key[0] == pairs.WEIGHT]


def _unequal(content: Content, entry: Entry, digests: Mapping[str, str]) -> str:
    """What is wrong with one tensor; nothing where it is what the manifest says."""
    if entry.shape != content.shape:
        return f"shape {list(entry.shape)}, {list(content.shape)} in the manifest"
    if not entry.numel:
        return ""
    dtype = _common(entry, content)
    if dtype is None:
        return f"{entry.dtype}, {content.dtype} in the manifest"
    if digests[dtype.name] != content.sha256[dtype.name]:
        return f"other contents than in the manifest (as {dtype})"
    return ""


def _compare_train(manifest: Manifest, listed: Contents, found: Check) -> None:
    here = replace(manifest, train=_plain(manifest.train))
    there = Manifest(Origin("manifest", ""), {}, {}, train=listed.train, ordered=False)
    for value in train.differences(here, there):
        name = value.name.split(":")[0]
        loose = name in _LOOSE or (name in _PLACELESS and bool(value.only))
        shown = (
            f"{value.name}: {_short(value.a)}, {_short(value.b)} in the manifest"
            if not value.only
            else f"{value.name} is only {'here' if value.only == 'a' else 'in the manifest'}"
        )
        (found.warnings if loose else found.failures).append(shown)
    found.looked_at += ", steps, groups, scheduler, scaler"


def _short(value: Any) -> str:
    return some([str(value)[:60]])
