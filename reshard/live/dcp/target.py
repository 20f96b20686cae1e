"""Resolution of a target's keys to a checkpoint's values, whatever prefix the keys have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from reshard.core.keys import Edits, edit, remove_wrappers
from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.errors import UsageError
from reshard.training.fresh_adam import find_idle

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


Resolved = Entry | Step | Hyper | Missing
Find = Callable[[str], Resolved | None]


class State:
    """The values of a checkpoint by the target's names without prefix."""

    def __init__(self, manifest: Manifest) -> None:
        manifest = edit(manifest, Edits()).manifest
        self.path = manifest.origin.path
        self.tied = manifest.tied
        self.weights = manifest.select_weights()
        self.canonical_names = {remove_wrappers(fqn): fqn for fqn in [*self.tied, *self.weights]}
        self.slots = {
            (entry.fqn, entry.kind): entry
            for entry in manifest.entries.values()
            if entry.kind not in WEIGHT_KINDS
        }
        self.steps = dict(manifest.train.optimizer_step)
        self.groups = manifest.train.param_groups
        self._start_idle()
        self.group_of = {fqn: n for n, group in enumerate(self.groups) for fqn in group.fqns}

    def _start_idle(self) -> None:
        held: dict[str, dict[str, Entry]] = {}
        for (fqn, slot), entry in self.slots.items():
            held.setdefault(fqn, {})[slot] = entry
        dtypes = {slot: entry.dtype for (_, slot), entry in self.slots.items()}
        groups = ((group.hyper, group.fqns) for group in self.groups)
        numel = {fqn: weight.numel for fqn, weight in self.weights.items()}
        for fqn, slots in find_idle(groups, held, numel).items():
            weight = self.weights.get(fqn)
            if weight is None or not weight.numel:
                continue
            self.steps[fqn] = 0.0
            for slot in slots:
                dtype = dtypes.get(slot, weight.dtype)
                self.slots[fqn, slot] = Entry(fqn, slot, dtype, weight.shape, ())

    def resolve_fqn(self, name: str) -> str:
        """Return the fqn under which the checkpoint stores a parameter."""
        short = remove_wrappers(name)
        fqn = name if name in self.weights else self.canonical_names.get(short, short)
        return self.tied.get(fqn, fqn)

    def find_weight(self, name: str) -> Resolved | None:
        """Return a weight: its fp32 master if the checkpoint has one."""
        return self.weights.get(self.resolve_fqn(name))

    def find_optimizer_value(self, name: str) -> Resolved | None:
        """Resolve ``state.FQN.SLOT``, ``param_groups.N.HYPER`` or ``param_groups.FQN.HYPER``."""
        part, owner, leaf = split_optimizer_key(name)
        fqn = self.resolve_fqn(owner) if owner else ""
        if part == STATE and leaf == STEP:
            return Step(self.steps[fqn]) if fqn in self.steps else None
        if part == STATE:
            return self.slots.get((fqn, leaf))
        if part == GROUPS and self.groups and owner.isdecimal() and fqn not in self.group_of:
            return Hyper(leaf, group=int(owner))
        if part == GROUPS and fqn in self.group_of:
            return Hyper(leaf, fqn=fqn)
        return None

    def iterate_values(self) -> Iterator[tuple[tuple[str | int, ...], Resolved]]:
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

    Args:
        state: the values of the checkpoint.
        find_other: returns the values under other names, if there are any. It is called for keys
            that ``state`` lacks.
        model: the prefix of the weights' keys; None to find it.
        optimizer: the prefix of the optimizer's keys; None to find it.

    Iteration yields the keys under the given prefixes, or under ``model`` and ``optim``. A lookup
    of a key that the checkpoint lacks returns metadata without bytes. Only the later read decides
    whether that is an error, because it depends on the planner.
    """

    def __init__(
        self,
        state: State,
        find_other: Callable[[], State | None],
        model: str | None,
        optimizer: str | None,
    ) -> None:
        super().__init__()
        self.state = state
        self._find_other = find_other
        self.given_prefixes = {"model": model, "optimizer": optimizer}
        self.prefixes: dict[str, str] = {}
        self.resolved: dict[str, Resolved] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        for entry in state.weights.values():
            self._add_key(MODEL_NAMES[0] if model is None else model, (entry.fqn,), entry)
        for path, value in state.iterate_values():
            self._add_key(OPTIMIZER_NAMES[0] if optimizer is None else optimizer, path, value)

    def _add_key(self, prefix: str, path: tuple[str | int, ...], value: Resolved) -> None:
        path = (*filter(None, prefix.split(".")), *path)
        key = ".".join(map(str, path))
        self.paths[key] = path
        super().__setitem__(key, _build_metadata(value))

    def __contains__(self, key: object) -> bool:
        # torch 2.13 `create_default_local_load_plan` tests whether a key exists before the look-up.
        return isinstance(key, str)

    def __getitem__(self, key: str) -> torch_metadata.STORAGE_TYPES:
        if key not in self.resolved:
            self.resolved[key] = self._resolve(key)
        return _build_metadata(self.resolved[key])

    def _resolve(self, key: str) -> Resolved:
        for option, find, names in self._iterate_readings():
            matches = {
                prefix: value
                for prefix, rest in iterate_splits(key)
                if self._may_be(prefix, option, names) and (value := find(rest))
            }
            if not matches:
                continue
            prefix = self.prefixes.get(option, next(iter(matches)))
            if prefix not in matches or (option not in self.prefixes and len(matches) > 1):
                several = " and ".join(map(repr, sorted({prefix, *matches})))
                raise UsageError(
                    key,
                    f"the target's {option} keys match several prefixes: {several}",
                    f'choose one: StorageReader(..., {option}="...")',
                )
            self.prefixes[option] = prefix
            return matches[prefix]
        return Missing()

    def _iterate_readings(self) -> Iterator[tuple[str, Find, tuple[str, ...]]]:
        for state in self._iterate_states():
            yield "model", state.find_weight, MODEL_NAMES
            yield "optimizer", state.find_optimizer_value, OPTIMIZER_NAMES

    def _iterate_states(self) -> Iterator[State]:
        yield self.state
        other = self._find_other()
        if other is not None:
            yield other

    def _may_be(self, prefix: str, option: str, names: tuple[str, ...]) -> bool:
        given = self.given_prefixes[option]
        if given is not None:
            return prefix == given
        return not prefix or prefix.rpartition(".")[2] in names

    def suggest_prefix(self, key: str) -> tuple[str, str] | None:
        """Return the option and the prefix that would make a missing key resolve, or None."""
        for option, find, _names in self._iterate_readings():
            for prefix, rest in iterate_splits(key):
                if option not in self.prefixes and find(rest):
                    return option, prefix
        return None


def _build_metadata(value: Resolved) -> torch_metadata.STORAGE_TYPES:
    """Return the DCP metadata of a value; a tensor is one chunk, so blocks use its coordinates."""
    if not isinstance(value, Entry):
        return torch_metadata.BytesStorageMetadata()
    size = torch.Size(value.shape)
    properties = torch_metadata.TensorProperties(dtype=value.dtype.to_torch())
    chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return torch_metadata.TensorStorageMetadata(properties, size, [chunk])


def split_optimizer_key(key: str) -> tuple[str, str, str]:
    """Return the part of an optimizer's flat state dict, the parameter or group, and the value.

    >>> split_optimizer_key("state.layers.0.weight.exp_avg")
    ('state', 'layers.0.weight', 'exp_avg')
    """
    part, _, rest = key.partition(".")
    owner, _, name = rest.rpartition(".")
    return part, owner, name


def iterate_splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield every (prefix, rest) of a dotted key, the empty prefix first."""
    yield "", key
    for at, character in enumerate(key):
        if character == ".":
            yield key[:at], key[at + 1 :]
