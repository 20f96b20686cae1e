"""The items of a load that are not blocks of tensors: steps, hyperparameters and missing keys."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from reshard.core.manifest import MEMBER_LISTS, WEIGHT_KINDS, Entry, ParamGroup
from reshard.errors import DifferentError, IncompleteError, UsageError
from reshard.live.dcp.target import STATE, STEP, Hyper, Keys, Resolved, Step, iterate_splits
from reshard.training.param_groups import THAW
from reshard.units import abridge, counted

# What torch's schedulers add to param groups (torch 2.13 ``optim/lr_scheduler.py``,
# ``optim/swa_utils.py``).
_OF_SCHEDULERS = frozenset("initial_lr base_momentum max_momentum max_lr min_lr swa_lr".split())
_NAMED = 5  # missing names spelled out in a message


@dataclass
class PlainItems:
    """The steps, hyperparameters and missing keys of one load."""

    keys: Keys
    planner: LoadPlanner
    targets: Mapping[str, Any] = field(init=False)
    steps: list[tuple[ReadItem, Step]] = field(default_factory=list)
    hypers: list[tuple[ReadItem, Hyper]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    # The target's group -> the checkpoint's group.
    used_groups: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # DefaultLoadPlanner's flat view of the target; another planner may have none.
        self.targets = getattr(self.planner, "state_dict", {})

    def add(self, item: ReadItem, value: Resolved) -> None:
        """Add an item of the plan."""
        if isinstance(value, Step):
            self.steps.append((item, value))
        elif isinstance(value, Hyper):
            self.hypers.append((item, value))
        else:
            self.missing.append(item.dest_index.fqn)

    def load(self) -> None:
        """Pass every value to the planner.

        Raises:
            IncompleteError: the checkpoint lacks a key.
            UsageError: the target's keys or groups do not match the checkpoint's.
            DifferentError: a value does not fit the target's dtype.
        """
        loaded = [(item, self._read_hyper(item, hyper)) for item, hyper in self.hypers]
        self._refuse_missing()
        self._refuse_empty_optimizer()
        for item, step in self.steps:
            self._put(item, self._convert_step(item, step.value))
        for item, value in loaded:
            if value is not None:
                self._put(item, value[0])

    def _put(self, item: ReadItem, value: Any) -> None:
        key = item.dest_index.fqn
        target = self.targets.get(key)
        if isinstance(target, torch.Tensor):
            zeros = torch.Size([0] * target.ndim)
            index = torch_metadata.MetadataIndex(key, zeros)
            as_tensor = ReadItem(
                LoadItemType.TENSOR, index, zeros, item.storage_index, zeros, target.size()
            )
            tensor = self.planner.resolve_tensor(as_tensor).detach()
            tensor.fill_(value)
            if bool((tensor.double() != float(value)).any()) and not tensor.is_floating_point():
                raise DifferentError(key, f"{value} does not fit the target's {tensor.dtype}")
            self.planner.commit_tensor(as_tensor, tensor)
            return
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        self.planner.load_bytes(item, stream)

    def _convert_step(self, item: ReadItem, step: float) -> Any:
        target = self.targets.get(item.dest_index.fqn)
        if isinstance(target, torch.Tensor | float):
            return step
        if isinstance(target, int) and step == int(step):
            return int(step)
        return torch.tensor(step, dtype=torch.float32)

    def _read_hyper(self, item: ReadItem, hyper: Hyper) -> tuple[Any] | None:
        """Return the value in a tuple, or None if the target keeps its own.

        A switch (a bool or None, such as ``foreach``) that is missing is the target's choice:
        DeepSpeed's own Adams store none of torch's. So is what a scheduler has added to the live
        optimizer: the run that saved may have had none.
        """
        key = item.dest_index.fqn
        target = self.targets.get(key)
        if hyper.name in MEMBER_LISTS and isinstance(target, list):
            return None
        group = self._find_group(key, hyper)
        value = group.fqns if hyper.name in MEMBER_LISTS else group.hyper.get(hyper.name)
        if value is None and hyper.name not in group.hyper:
            is_own = target is None or isinstance(target, bool) or hyper.name in _OF_SCHEDULERS
            if key in self.targets and is_own:
                return None
            self.missing.append(key)
            return None
        if isinstance(value, list | tuple):
            return (tuple(value) if isinstance(target, tuple) else list(value),)
        return (value,)

    def _find_group(self, key: str, hyper: Hyper) -> ParamGroup:
        groups, group_of = self.keys.state.groups, self.keys.state.group_of
        if hyper.group is None:
            return groups[group_of[hyper.fqn]]
        params = self.targets.get(f"{key.removesuffix(hyper.name)}params")
        owned = (
            [self.keys.state.resolve_fqn(str(p)) for p in params]
            if isinstance(params, list)
            else []
        )
        numbers = {fqn: group_of[fqn] for fqn in owned if fqn in group_of}
        if len(set(numbers.values())) > 1:
            a = next(iter(numbers))
            b = next(fqn for fqn in numbers if numbers[fqn] != numbers[a])
            self._refuse_groups(
                f"{a!r} and {b!r} are in one group of the target, but in two of the checkpoint"
            )
        number = next(iter(numbers.values()), hyper.group)
        self.used_groups[hyper.group] = number
        if list(self.used_groups.values()).count(number) > 1:
            self._refuse_groups(
                f"two groups of the target are one group of the checkpoint, number {number}"
            )
        return groups[number]

    def _refuse_groups(self, problem: str) -> NoReturn:
        raise UsageError(
            self.keys.state.path,
            f"the parameter groups differ from those of the target: {problem}",
            "create the optimizer with the same groups",
        )

    def _refuse_missing(self) -> None:
        missing = [key for key in self.missing if not self._is_harmless(key)]
        partial = getattr(self.planner, "allow_partial_load", False)
        if not missing or (partial and self.keys.prefixes):
            return
        path = self.keys.state.path
        for key in missing:
            other = self.keys.suggest_prefix(key)
            if other:
                option, prefix = other
                raise UsageError(
                    key,
                    f"is in {path}, but not under a known prefix of the {option}",
                    f'pass the prefix: StorageReader(..., {option}="{prefix}")',
                )
            rest = next((r for _, r in iterate_splits(key) if r.startswith(f"{STATE}.")), "")
            if rest.split(".")[1:2] and rest.split(".")[1].isdecimal() and self.keys.state.slots:
                raise UsageError(
                    key,
                    "identifies a parameter by its number, which has no meaning in another run",
                    "take the state dict with"
                    " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
                )
        names = abridge([repr(name) for name in missing], _NAMED)
        remedy = (
            "leave it out of the state dict (StorageReader has weights and optimizer state alone)"
            ", or load with planner=DefaultLoadPlanner(allow_partial_load=True)"
        )
        if all(any(r.startswith(f"{STATE}.") for _, r in iterate_splits(key)) for key in missing):
            remedy += (
                f"; if the run trains more parameters now, first pass {THAW} to reshard split"
                " --param-groups FILE"
            )
        raise IncompleteError(path, f"does not have {names}, which the target requests", remedy)

    def _refuse_empty_optimizer(self) -> None:
        """DCP loads only keys of the target, so it would leave out the moments without an error."""
        state = self.keys.state
        if not self.hypers or not state.slots:
            return
        if not any(_is_optimizer_state(value) for value in self.keys.resolved.values()):
            raise UsageError(
                state.path,
                f"has {counted(len(state.slots), 'tensor')} of optimizer state, but the target's"
                " optimizer has param groups and no state, so training would continue without it",
                "take the state dict with"
                " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which creates"
                " the state, or leave out the optimizer",
            )

    def _is_harmless(self, key: str) -> bool:
        # DeepSpeed leaves empty parameters out of its optimizer, and Hugging Face aliases out of
        # its files.
        target = self.targets.get(key)
        if not isinstance(target, torch.Tensor):
            return False
        if target.numel() == 0:
            return True
        owner, _, leaf = key.rpartition(".")
        if leaf == STEP:  # its parameter is empty if all of its slots are
            slots = [t for name, t in self._iterate_tensors() if name.rpartition(".")[0] == owner]
            return len(slots) > 1 and not any(t.numel() for t in slots if t is not target)
        return identify_memory(target) in self._loaded_memory

    def _iterate_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((n, t) for n, t in self.targets.items() if isinstance(t, torch.Tensor))

    @cached_property
    def _loaded_memory(self) -> set[tuple[object, ...]]:
        resolved = self.keys.resolved
        return {
            identify_memory(t)
            for name, t in self._iterate_tensors()
            if isinstance(resolved.get(name), Entry)
        }


def _is_optimizer_state(value: Resolved) -> bool:
    return isinstance(value, Step) or (isinstance(value, Entry) and value.kind not in WEIGHT_KINDS)


def identify_memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key of the memory of a rank's part of a tensor; equal keys mean the same memory."""
    local: Any = tensor
    if hasattr(local, "to_local"):  # DTensor
        local = local.to_local()
    if hasattr(local, "local_shards"):  # ShardedTensor
        local = next((shard.tensor for shard in local.local_shards()), torch.empty(0))
    address = (local.data_ptr(), local.dtype, local.stride()) if local.numel() else ()
    return (tuple(tensor.size()), local.device, *address)
