"""Resolution of a target's keys to a checkpoint's values, whatever prefix the keys have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from reshard.errors import UsageError
from reshard.keys import Edits, canonical, edit
from reshard.manifest import MASTER, WEIGHT_KINDS, Entry, Manifest

MODEL_NAMES = ("model",)
OPTIMIZER_NAMES = ("optim", "optimizer")
STATE = "state"
GROUPS = "param_groups"
STEP = "step"


@dataclass(frozen=True, slots=True)
class Step:
    """The number of updates that the optimizer has applied to one parameter."""

    value: float


@dataclass(frozen=True, slots=True)
class Hyper:
    """A hyperparameter of the target's ``group``-th group, or of the group that owns ``fqn``."""

    name: str
    group: int | None = None
    fqn: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """A key of the target that the checkpoint lacks."""


Found = Entry | Step | Hyper | Missing
Find = Callable[[str], Found | None]


class State:
    """The values of a checkpoint by the target's names without prefix."""

    def __init__(self, manifest: Manifest) -> None:
        manifest = edit(manifest, Edits()).manifest
        self.path = manifest.origin.path
        self.tied = manifest.tied
        self.weights = {entry.fqn: entry for entry in manifest.of_kind(*WEIGHT_KINDS[:2])}
        self.weights.update((entry.fqn, entry) for entry in manifest.of_kind(MASTER))
        self.bare = {canonical(fqn): fqn for fqn in [*self.tied, *self.weights]}
        self.slots = {
            (entry.fqn, entry.kind): entry
            for entry in manifest.entries.values()
            if entry.kind not in WEIGHT_KINDS
        }
        self.steps = manifest.train.optimizer_step
        self.groups = manifest.train.param_groups
        self.group_of = {fqn: n for n, group in enumerate(self.groups) for fqn in group.fqns}

    def kept(self, name: str) -> str:
        """Return the fqn under which the checkpoint stores a parameter."""
        bare = canonical(name)
        fqn = name if name in self.weights else self.bare.get(bare, bare)
        return self.tied.get(fqn, fqn)

    def weight(self, name: str) -> Found | None:
        """Return a weight: its fp32 master if the checkpoint has one."""
        return self.weights.get(self.kept(name))

    def optimizer(self, name: str) -> Found | None:
        """Resolve ``state.FQN.SLOT``, ``param_groups.N.HYPER`` or ``param_groups.FQN.HYPER``."""
        part, _, rest = name.partition(".")
        owner, _, leaf = rest.rpartition(".")
        fqn = self.kept(owner) if owner else ""
        if part == STATE and leaf == STEP:
            return Step(self.steps[fqn]) if fqn in self.steps else None
        if part == STATE:
            return self.slots.get((fqn, leaf))
        if part == GROUPS and self.groups and owner.isdecimal() and fqn not in self.group_of:
            return Hyper(leaf, group=int(owner))
        if part == GROUPS and fqn in self.group_of:
            return Hyper(leaf, fqn=fqn)
        return None

    def names(self) -> Iterator[tuple[tuple[str | int, ...], Found]]:
        """Yield the path of every value in the nested form of the state dict."""
        for (fqn, slot), entry in self.slots.items():
            yield (STATE, fqn, slot), entry
        for fqn, step in self.steps.items():
            yield (STATE, fqn, STEP), Step(step)
        for number, group in enumerate(self.groups):
            for name in ("params", *group.hyper):
                yield (GROUPS, number, name), Hyper(name, group=number)


class Keys(dict[str, torch_metadata.STORAGE_TYPES]):
    """The metadata of every key of a target, resolved when the planner looks it up.

    Iteration yields the keys under the given prefixes, or under ``model`` and ``optim``. A lookup
    of a key that the checkpoint lacks returns metadata without bytes. Only the later read can tell
    whether that is an error, because it depends on the planner.
    """

    def __init__(self, state: State, model: str | None, optimizer: str | None) -> None:
        super().__init__()
        self.state = state
        self.fixed = {"model": model, "optimizer": optimizer}
        self.used: dict[str, str] = {}
        self.found: dict[str, Found] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        for entry in state.weights.values():
            self._list(MODEL_NAMES[0] if model is None else model, (entry.fqn,), entry)
        for path, found in state.names():
            self._list(OPTIMIZER_NAMES[0] if optimizer is None else optimizer, path, found)

    def _list(self, prefix: str, path: tuple[str | int, ...], found: Found) -> None:
        path = (*filter(None, prefix.split(".")), *path)
        key = ".".join(map(str, path))
        self.paths[key] = path
        super().__setitem__(key, _described(found))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str)

    def __getitem__(self, key: str) -> torch_metadata.STORAGE_TYPES:
        if key not in self.found:
            self.found[key] = self._resolve(key)
        return _described(self.found[key])

    def _resolve(self, key: str) -> Found:
        """Return the value that a key refers to.

        Raises:
            UsageError: it can be read in two ways, or under two prefixes.
        """
        for option, find, names in self._readings():
            matches = {
                prefix: found
                for prefix, rest in splits(key)
                if self._may_be(prefix, option, names) and (found := find(rest))
            }
            if not matches:
                continue
            prefix = self.used.get(option, next(iter(matches)))
            if prefix not in matches or (option not in self.used and len(matches) > 1):
                several = " and ".join(map(repr, sorted({prefix, *matches})))
                raise UsageError(
                    key,
                    f"the target's {option} keys can be read under the prefixes {several}",
                    f'say which: StorageReader(..., {option}="...")',
                )
            self.used[option] = prefix
            return matches[prefix]
        return Missing()

    def _readings(self) -> tuple[tuple[str, Find, tuple[str, ...]], ...]:
        return (
            ("model", self.state.weight, MODEL_NAMES),
            ("optimizer", self.state.optimizer, OPTIMIZER_NAMES),
        )

    def _may_be(self, prefix: str, option: str, names: tuple[str, ...]) -> bool:
        fixed = self.fixed[option]
        if fixed is not None:
            return prefix == fixed
        return not prefix or prefix.rpartition(".")[2] in names

    def other_prefix(self, key: str) -> tuple[str, str] | None:
        """Return the option and the prefix that would make a missing key resolve, or None."""
        for option, find, _names in self._readings():
            for prefix, rest in splits(key):
                if option not in self.used and find(rest):
                    return option, prefix
        return None


def _described(found: Found) -> torch_metadata.STORAGE_TYPES:
    """Return the DCP metadata of a value; a tensor is one chunk, so blocks use its coordinates."""
    if not isinstance(found, Entry):
        return torch_metadata.BytesStorageMetadata()
    size = torch.Size(found.shape)
    properties = torch_metadata.TensorProperties(dtype=getattr(torch, found.dtype.name))
    chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return torch_metadata.TensorStorageMetadata(properties, size, [chunk])


def splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield every (prefix, rest) of a dotted key, the empty prefix first."""
    yield "", key
    for at, letter in enumerate(key):
        if letter == ".":
            yield key[:at], key[at + 1 :]
