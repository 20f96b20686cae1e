"""The checkpoints of a run in their order, and what each states about its training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.core.manifest import BUFFER, WEIGHT_KINDS, Entry, Manifest, ParamGroup
from reshard.system.derived import list_files

_HIGHEST = ("initial_lr", "max_lr")  # torch's schedulers keep these in a param group
_HIGHEST_OF_SCHEDULER = ("base_lrs", "max_lrs", "max_lr", "warmup_max_lr", "peak_lr")


@dataclass(frozen=True)
class Tag:
    """One checkpoint of a run.

    Args:
        name: the name of its directory below the run.
        number: the number in that name.
    """

    name: str
    number: int
    manifest: Manifest

    @property
    def step(self) -> int | None:
        """The step that the files state."""
        return self.manifest.train.step

    @cached_property
    def updates(self) -> float | None:
        """The number of updates of the optimizer; None if the files do not state it."""
        train = self.manifest.train
        if train.optimizer_step:
            return max(train.optimizer_step.values())
        return train.updates

    def count_updates(self, fqn: str) -> float | None:
        """Return the number of updates of one parameter, or None."""
        return self.manifest.train.optimizer_step.get(fqn, self.updates)

    @cached_property
    def _directory(self) -> str:
        # pathlib does not have these functions for the names of URLs.
        paths = map(os.path.abspath, self.manifest.files)
        return os.path.commonpath(list(map(os.path.dirname, paths)))

    def name_file(self, file: str) -> str:
        """Return the path of a chunk's file below the directory of the checkpoint.

        Megatron's ranks have files of one name, each in a directory of its own.
        """
        return os.path.relpath(list_files(file)[0], self._directory)

    @cached_property
    def weights(self) -> dict[str, Entry]:
        """The float weights by name, each from its fp32 master weight if there is one."""
        return {
            fqn: entry
            for fqn, entry in self.manifest.select_weights().items()
            if entry.kind != BUFFER and entry.dtype.family == "float" and entry.numel
        }

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The names of the buffers."""
        return frozenset(entry.fqn for entry in self.manifest.of_kind(BUFFER))

    @cached_property
    def slots(self) -> dict[str, dict[str, Entry]]:
        """The float optimizer slots of each weight that have its shape."""
        found: dict[str, dict[str, Entry]] = {}
        for entry in self.manifest.entries.values():
            weight = self.weights.get(entry.fqn)
            is_slot = entry.kind not in WEIGHT_KINDS and entry.dtype.family == "float"
            if is_slot and weight is not None and entry.shape == weight.shape:
                found.setdefault(entry.fqn, {})[entry.kind] = entry
        return found

    @cached_property
    def trained(self) -> frozenset[str] | None:
        """The names of the trained weights; None if the files do not state them."""
        train = self.manifest.train
        listed = self.groups.keys() | self.slots.keys() | train.optimizer_step.keys()
        return frozenset(listed - self.manifest.frozen) if listed else None

    @cached_property
    def groups(self) -> dict[str, ParamGroup]:
        """The param group of each trained weight."""
        return self.manifest.train.group_of

    def find_rate(self, fqn: str) -> float | None:
        """Return the learning rate of a weight at the time of the save, or None."""
        group = self.groups.get(fqn)
        return None if group is None else _as_number(group.hyper.get("lr"))

    def find_highest_rate(self, fqn: str) -> float | None:
        """Return the highest learning rate that the schedule of a weight states, or None."""
        group = self.groups.get(fqn)
        hyper: Mapping[str, Any] = group.hyper if group is not None else {}
        stated = [_as_number(hyper.get(name)) for name in _HIGHEST]
        stated += _list_rates(self.manifest.train.scheduler)
        known = [rate for rate in stated if rate is not None]
        return max(known) if known else None


def _as_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _list_rates(scheduler: Any) -> Iterator[float]:
    if isinstance(scheduler, Mapping):
        for name, value in scheduler.items():
            if name in _HIGHEST_OF_SCHEDULER:
                values = value if isinstance(value, (list, tuple)) else [value]
                yield from (rate for item in values if (rate := _as_number(item)) is not None)
            else:
                yield from _list_rates(value)
    elif isinstance(scheduler, (list, tuple)):
        for item in scheduler:
            yield from _list_rates(item)
