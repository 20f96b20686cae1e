"""Keep a script's own values (enums, namespaces, tensors, arrays) for targets that are pickles.

`to_plain` converts every value for printing; the values here are those that it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.containers.numpy_arrays import Array
from reshard.containers.pickles.script_values import (
    OF_CALLS,
    SCHEDULER,
    can_be_written,
    is_namespace,
    iterate_parts,
)
from reshard.containers.pickles.values import Call, DictObject, ListObject
from reshard.containers.torch_objects import Tensor
from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry, TrainState
from reshard.state_dict.plain_values import is_plain, to_plain
from reshard.state_dict.tree import LocalTensors, as_global, is_tensor
from reshard.training.copied_files import TENSOR


def keep_own_values(root: Mapping[Any, Any], names: Iterable[Any]) -> dict[str, Any]:
    """Return those of a pickle's values that `to_plain` changes and that can be written again.

    A namespace is kept without the attributes that cannot be written.
    """
    changed = {str(name): root[name] for name in names if _is_changed(root[name])}
    copier = _Copier()
    copies = {name: _describe_tensors(copier, value, name) for name, value in changed.items()}
    kept = {name: _drop_attributes(value) for name, value in copies.items()}
    return {name: value for name, value in kept.items() if can_be_written(value, Entry)}


def _is_changed(value: Any) -> bool:
    """Return whether `to_plain` changes a value; of an OrderedDict it changes only the class."""
    has_class = any(isinstance(part, (DictObject, ListObject)) for part in iterate_parts(value))
    return has_class or bool(to_plain(value) != value)


def _describe_tensors(copier: _Copier, value: Any, name: str) -> Any:
    replaced = (Tensor, DictObject, ListObject)
    is_plain = not any(isinstance(p, replaced) or is_tensor(p) for p in iterate_parts(value))
    return value if is_plain else copier.copy(value, name)


def find_scheduler(train: TrainState) -> Any:
    """Return the scheduler's state as it was saved; None if the manifest only describes it."""
    if SCHEDULER in train.objects:
        return train.objects[SCHEDULER]
    return train.scheduler if is_plain(train.scheduler) else None


class _Copier:
    """Copies a value: tensors become entries, arrays and OrderedDicts the calls that build them.

    A tensor of several ranks, which may differ, stays as it is, and so does a tensor in a value
    that refers to itself: such a value cannot be written.
    """

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}
        self._entries: dict[tuple[Chunk, ...], Entry] = {}  # a tensor under two names stays one

    def copy(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor) or is_tensor(value):
            return self._describe(value, name)
        if not isinstance(value, (Call, dict, list, tuple)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value  # a cycle ends here
            self._done[id(value)] = self._copy_container(value, name)
        return self._done[id(value)]

    def _copy_container(self, value: Any, name: str) -> Any:
        if isinstance(value, Call):
            parts = {part: self.copy(getattr(value, part), f"{name}.{part}") for part in OF_CALLS}
            return replace(value, **parts)
        if isinstance(value, dict):
            items = {key: self.copy(item, f"{name}.{key}") for key, item in value.items()}
            return _describe_dict(value.call, items) if isinstance(value, DictObject) else items
        elements = [self.copy(item, f"{name}.{at}") for at, item in enumerate(value)]
        if isinstance(value, ListObject):
            return replace(value.call, args=(elements, *value.call.args[1:]))
        return type(value)(elements)

    def _describe(self, value: Any, name: str) -> Any:
        array = getattr(value, "call" if isinstance(value, Array) else "array", None)
        if array is not None:
            return array
        if isinstance(value, LocalTensors) and len(value.pieces) > 1:
            return value
        tensor = as_global(LocalTensors({0: value.chunk}) if isinstance(value, Tensor) else value)
        if tensor is None:
            return value
        entry = tensor.make_entry(name, TENSOR)
        return self._entries.setdefault(tensor.chunks, entry)


def _describe_dict(call: Call, items: dict[Any, Any]) -> Call:
    # A defaultdict and a deque get their content as an argument, because torch.load with
    # weights_only adds items only to other containers (2.13 ``_weights_only_unpickler.py``,
    # SETITEMS, APPENDS).
    if call.args:  # the factory of a defaultdict
        return replace(call, args=(*call.args, items))
    return replace(call, items=items)


def _drop_attributes(value: Any) -> Any:
    if not is_namespace(value):
        return value
    attributes = {key: part for key, part in value.state.items() if can_be_written(part, Entry)}
    return replace(value, state=attributes)
