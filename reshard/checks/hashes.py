"""Manifests of contents: the digest of each tensor, independent of the layout of the checkpoint.

A tensor's digests (`digests`) are those of its elements, row-major, little-endian. A weight is
listed at its highest precision, also with the digests of its casts to narrower dtypes, so that a
file merged in any of these dtypes can be compared with the manifest of the sharded run that it came
from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.checks import names, pairs, train
from reshard.checks.digests import BLAKE3, SHA256, Digest, list_algorithms, start
from reshard.checks.files import FileDigests, to_json
from reshard.checks.result import Check
from reshard.core.box import Index, as_index
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.core.manifest import Entry, Key, Manifest, Origin, ParamGroup, TrainState
from reshard.errors import CorruptError, UsageError
from reshard.system.files import read_small_file
from reshard.units import abridge, counted, shorten
from reshard.version import __version__

SCHEMA = 1
_KIND = "reshard-manifest"
_MERGED = (FLOAT32, BFLOAT16, FLOAT16)  # the dtypes that merge can write weights in
_LOCAL = ("rng", "client")  # they belong to one rank or one script
# Values that not every layout can store.
_OPTIONAL = ("samples", "skipped_steps", "optimizer state")


@dataclass(frozen=True, slots=True)
class Content:
    """One tensor; ``kind`` is ``weight`` or the optimizer's slot.

    The digests are by dtype; those of BLAKE3 are empty if it was not installed.
    """

    kind: str
    fqn: str
    dtype: str
    shape: Index
    sha256: Mapping[str, str]
    blake3: Mapping[str, str] = field(default_factory=dict)

    def list_digests(self, algorithm: str) -> Mapping[str, str]:
        """Return the digests of an algorithm, by dtype."""
        return self.blake3 if algorithm == BLAKE3 else self.sha256

    def choose_digest(self, dtype: DType) -> Digest:
        """Return the fastest digest in a dtype that the manifest lists and that can be computed.

        Raises:
            UsageError: it lists only BLAKE3, which is not installed.
        """
        for algorithm in list_algorithms():
            if dtype.name in self.list_digests(algorithm):
                return Digest(algorithm, dtype)
        raise UsageError(
            "--against",
            f"the manifest contains only a BLAKE3 digest of {self.fqn!r}, and blake3 is not"
            " installed",
            "pip install blake3",
        )


@dataclass(slots=True)
class Contents:
    """The contents of a manifest file."""

    tensors: dict[Key, Content] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    train: TrainState = field(default_factory=TrainState)
    source: dict[str, Any] = field(default_factory=dict)
    files: tuple[FileDigests, ...] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether the manifest lists optimizer slots."""
        return any(kind != pairs.WEIGHT for kind, _ in self.tensors)


def choose_digests(manifest: Manifest) -> dict[Key, tuple[Digest, ...]]:
    """Return the digests of each tensor for a new manifest, by the entry's key."""
    chosen = {}
    for (kind, _), entry in pairs.collect_tensors(manifest).items():
        if entry.numel:
            narrower = _list_narrower_dtypes(entry.dtype) if kind == pairs.WEIGHT else ()
            found = itertools.product(list_algorithms(), (entry.dtype, *narrower))
            chosen[entry.key] = tuple(itertools.starmap(Digest, found))
    return chosen


def choose_digests_to_compare(
    manifest: Manifest, contents: Contents
) -> dict[Key, tuple[Digest, ...]]:
    """Return the digests of each tensor that are compared with a manifest."""
    chosen: dict[Key, tuple[Digest, ...]] = {}
    for _, content, entry in _match(manifest, contents):
        dtype = _choose_common_dtype(entry, content)
        if dtype is not None and entry.numel:
            chosen[entry.key] = (*chosen.get(entry.key, ()), content.choose_digest(dtype))
    return {key: tuple(dict.fromkeys(digests)) for key, digests in chosen.items()}


def _list_narrower_dtypes(dtype: DType) -> Iterator[DType]:
    """Yield the dtypes of merge that are not wider: a wider file is cast back without loss."""
    if dtype.family == "float":
        yield from (o for o in _MERGED if o != dtype and o.itemsize <= dtype.itemsize)


def _choose_common_dtype(entry: Entry, content: Content) -> DType | None:
    # A wider weight is compared in the manifest's dtype, others in their own if it is listed.
    narrower = {
        o.name: o for o in _list_narrower_dtypes(entry.dtype) if o.itemsize < entry.dtype.itemsize
    }
    if content.kind == pairs.WEIGHT and content.dtype in narrower:
        return narrower[content.dtype]
    listed = content.sha256.keys() | content.blake3.keys()
    return entry.dtype if entry.dtype.name in listed else None


def build_contents(
    manifest: Manifest,
    digests: Mapping[Key, Mapping[Digest, str]],
    files: Iterable[FileDigests],
) -> Contents:
    """Build the contents of a checkpoint from the digests of its tensors and of its files."""
    contents = Contents(tied=dict(manifest.tied), train=_round_trip(manifest.train))
    contents.files = tuple(files)
    for (kind, fqn), entry in pairs.collect_tensors(manifest).items():
        found: dict[str, dict[str, str]] = {SHA256: {}, BLAKE3: {}}
        for digest, value in (digests.get(entry.key) or _hash_nothing(entry.dtype)).items():
            found[digest.algorithm][digest.dtype.name] = value
        contents.tensors[kind, fqn] = Content(
            kind, fqn, entry.dtype.name, entry.shape, found[SHA256], found[BLAKE3]
        )
    origin = manifest.origin
    contents.source = {"format": origin.format, "detail": origin.detail, "mesh": dict(origin.mesh)}
    return contents


def _hash_nothing(dtype: DType) -> dict[Digest, str]:
    return {Digest(name, dtype): start(name).hexdigest() for name in list_algorithms()}


# The file


def to_bytes(contents: Contents) -> bytes:
    """Return the manifest as JSON.

    ``digest`` and ``files_digest`` show whether the lists of tensors and files were altered.
    """
    tensors = [to_json(contents.tensors[key]) for key in sorted(contents.tensors)]
    files = list(map(to_json, contents.files))
    head = {
        "schema": SCHEMA,
        "kind": _KIND,
        "made_by": f"reshard {__version__}",
        "source": contents.source,
        "digest": _compute_digest(tensors),
        "files_digest": _compute_digest(files),
        "tied": contents.tied,
        "train": _train_to_json(contents.train),
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    for name, listed in (("tensors", tensors), ("files", files)):
        items = ",\n".join(map(json.dumps, listed))
        lines.append(f'"{name}": [\n{items}\n]')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _content_from_json(document: Mapping[str, Any]) -> Content:
    shape = as_index(document["shape"])
    sha256, blake3 = dict(document.get(SHA256, {})), dict(document.get(BLAKE3, {}))
    if not (sha256 or blake3):
        raise ValueError(f"{document['fqn']!r} has no digest")
    return Content(document["kind"], document["fqn"], document["dtype"], shape, sha256, blake3)


def read(path: Path) -> Contents:
    """Read a manifest file.

    Raises:
        UsageError: the file does not exist, or is a directory.
        CorruptError: the file is not a manifest, or was altered.
    """
    if path.is_dir():
        remedy = f"to compare with a checkpoint: reshard diff SOURCE {path}"
        raise UsageError(path, "is a directory, not the file of a manifest", remedy)
    if not path.is_file():
        raise UsageError(
            path,
            "the manifest does not exist",
            f"write it: reshard verify SOURCE --write-manifest {path}",
        )
    try:
        document = json.loads(read_small_file(path))
        if document["kind"] != _KIND or document["schema"] != SCHEMA:
            raise CorruptError(
                path,
                f"is not a {_KIND} with schema {SCHEMA}",
                "create one with reshard verify SOURCE --write-manifest FILE",
            )
        for name, digest in (("tensors", "digest"), ("files", "files_digest")):
            if _compute_digest(document[name]) != document[digest]:
                raise CorruptError(
                    path,
                    f"was altered: its digest does not match its list of {name}",
                    "fetch it again, or write a new one from the run: reshard verify RUN"
                    " --write-manifest FILE",
                )
        listed = map(_content_from_json, document["tensors"])
        return Contents(
            tensors={(content.kind, content.fqn): content for content in listed},
            tied=dict(document["tied"]),
            train=_train_from_json(document["train"]),
            source=dict(document["source"]),
            files=tuple(map(FileDigests.from_json, document["files"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            path, f"is not a manifest that reshard wrote ({type(error).__name__}: {error})"
        ) from error


def _compute_digest(tensors: Any) -> str:
    text = json.dumps(tensors, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _round_trip(state: TrainState) -> TrainState:
    """Return a train state as it is after it was written to a manifest file and read back."""
    return _train_from_json(json.loads(json.dumps(_train_to_json(state), default=str)))


def _train_to_json(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "skipped_steps": state.skipped_steps,
        "samples": state.samples,
        "optimizer_step": dict(state.optimizer_step),
        "non_tensor_state": dict(state.non_tensor_state),
        "param_groups": [
            {"hyper": dict(group.hyper), "fqns": list(group.fqns)} for group in state.param_groups
        ],
        "scheduler": state.scheduler,
        "scaler": state.scaler,
        "rng": state.rng,
        "client": dict(state.client),
    }


def _train_from_json(document: Mapping[str, Any]) -> TrainState:
    groups = tuple(ParamGroup(g["hyper"], tuple(g["fqns"])) for g in document["param_groups"])
    return TrainState(**{**document, "param_groups": groups})


# The check


def check_against(
    manifest: Manifest,
    listed: Contents,
    digests: Mapping[Key, Mapping[Digest, str]],
    ignored: Callable[[str], bool],
) -> Check:
    """Check that a checkpoint has the contents that a manifest lists.

    If one side has no optimizer, only weights are compared, which is not a failure.

    Args:
        ignored: whether a value of the train state, by its name, may differ.
    """
    matched = list(_match(manifest, listed))
    check = Check(names.AGAINST, "")
    both = manifest.has_optimizer and listed.has_optimizer
    narrow = []
    for name, content, entry in matched:
        problem = _describe_difference(content, entry, digests.get(entry.key, {}))
        if problem:
            check.failures.append(f"{content.kind} {name} {problem}")
        elif entry.dtype.name != content.dtype:
            narrow.append(name)
    missing, extra = _find_unmatched(manifest, listed, {(c.kind, c.fqn) for _, c, _ in matched})
    for keys, problem in ((missing, "is missing"), (extra, "is not listed")):
        check.failures += [
            f"{kind} {fqn} {problem}" for kind, fqn in keys if both or kind == pairs.WEIGHT
        ]
    check.looked_at = f"{counted(len(matched), 'tensor')} of {len(listed.tensors)}"
    if narrow:
        check.looked_at += f", {len(narrow)} as cast"
    if both:
        _compare_train(manifest, listed, check, ignored)
    elif listed.has_optimizer or manifest.has_optimizer:
        check.looked_at += "; weights alone, as one side has no optimizer"
    return check


def _match(manifest: Manifest, listed: Contents) -> Iterator[tuple[str, Content, Entry]]:
    stored = pairs.collect_tensors(manifest)
    for (kind, fqn), content in listed.tensors.items():
        aliases = [fqn]
        if kind == pairs.WEIGHT:
            aliases += sorted(pairs.find_aliases(fqn, listed.tied, manifest.tied))
        entry = next((stored[kind, name] for name in aliases if (kind, name) in stored), None)
        if entry is not None:
            yield fqn, content, entry


def _find_unmatched(
    manifest: Manifest, listed: Contents, matched: set[Key]
) -> tuple[list[Key], list[Key]]:
    """Slots without elements are left out. A tied name is known if any name of the weight is."""
    stored = pairs.collect_tensors(manifest)
    missing = [
        key
        for key, content in listed.tensors.items()
        if key not in matched and (key[0] == pairs.WEIGHT or 0 not in content.shape)
    ]
    extra = []
    for key, entry in stored.items():
        aliases = pairs.find_aliases(key[1], manifest.tied, listed.tied)
        known = any((key[0], name) in listed.tensors for name in aliases)
        if not known and (key[0] == pairs.WEIGHT or entry.numel):
            extra.append(key)
    return missing, extra


def _describe_difference(content: Content, entry: Entry, digests: Mapping[Digest, str]) -> str:
    if entry.shape != content.shape:
        return f"has the shape {list(entry.shape)}, but {list(content.shape)} in the manifest"
    if not entry.numel:
        return ""
    dtype = _choose_common_dtype(entry, content)
    if dtype is None:
        return f"is {entry.dtype}, but {content.dtype} in the manifest"
    digest = content.choose_digest(dtype)
    if digests[digest] != content.list_digests(digest.algorithm)[dtype.name]:
        return f"has other contents than in the manifest (as {dtype})"
    return ""


def _compare_train(
    manifest: Manifest, listed: Contents, check: Check, ignored: Callable[[str], bool]
) -> None:
    here = replace(manifest, train=_round_trip(manifest.train))
    there = Manifest(Origin("manifest", ""), {}, {}, train=listed.train, ordered=False)
    left_out = []
    for value in train.find_differences(here, there):
        if ignored(value.name):
            left_out.append(value.name)
            continue
        name = value.name.split(":")[0]
        is_minor = name in _LOCAL or (name in _OPTIONAL and bool(value.only))
        shown = (
            f"{value.name} is {shorten(value.a, 60)}, but {shorten(value.b, 60)} in the manifest"
            if not value.only
            else f"{value.name} is only {'here' if value.only == 'a' else 'in the manifest'}"
        )
        (check.warnings if is_minor else check.failures).append(shown)
    check.looked_at += ", steps, groups, scheduler, scaler"
    if left_out:
        check.looked_at += f"; differs, but ignored: {abridge(left_out)}"
