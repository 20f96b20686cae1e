"""The two kinds of DeepSpeed file, opened: model states and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard import counts
from reshard.box import Index
from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.containers.torch_reader import Alike
from reshard.dtypes import DType
from reshard.errors import CorruptError, UnsupportedError, shown
from reshard.formats.deepspeed import kinds
from reshard.manifest import BUFFER, PARAM, Entry
from reshard.schema import expect
from reshard.state_dict import leaves

BUILDERS = {"deepspeed.runtime.zero.config.ZeroStageEnum": lambda stage: stage}

_CHECKPOINTED = "_checkpoint_wrapped_module"
_FRAGMENTS = "frozen_param_fragments"

Shapes = list[dict[str, Index]]  # a dict a (sub-)group: fqn -> shape, in flat order


@dataclass(slots=True)
class ModelStates:
    """One ``*_model_states.pt``.

    Args:
        elsewhere: of the module, what lies in files of its own: layers of a pipeline.
        group_ranks: a group of ``shapes`` each, the expert-parallel ranks whose members it lists,
            rank by rank; every one has a flat tensor of its own. Empty: 1 of every group.
        wrapped_names: fqn -> the name that DeepSpeed lists, where it differs from the module's.
    """

    file: TorchFile
    root: dict[str, Any]
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)
    group_ranks: tuple[int, ...] = ()
    wrapped_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> dict[str, Tensor]:
        """Fqn -> tensor, as ``state_dict`` gave it; aliases included."""
        found = self.root.get("module") or {}
        own = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return {**own, **self.elsewhere}

    @property
    def unread(self) -> dict[str, str]:
        """What the module's state dict holds beside tensors, as `leaves.find_opaque` has it.

        Raises:
            UnsupportedError, IncompleteError: weights that nothing reads.
        """
        held = self.root.get("module") or {}
        return leaves.find_opaque(self.file.path, held, prefix="module.")

    @property
    def shapes(self) -> Shapes:
        """``param_shapes``: before DeepSpeed 0.3.17 one dict, since then a list."""
        shapes = self.root.get("param_shapes") or []
        return [dict(group) for group in ([shapes] if isinstance(shapes, dict) else shapes)]

    @property
    def data_ranks(self) -> int:
        """``dp_world_size``; 0 where it is not said."""
        said = self.root.get("dp_world_size")
        return counts.count(self.file.path, "dp_world_size", said, default=0)

    @property
    def buffers(self) -> frozenset[str]:
        """Fqns of the persistent buffers."""
        return frozenset(self.root.get("buffer_names") or ())

    @property
    def names(self) -> dict[str, Index | None]:
        """What it says of the module without holding it: name -> shape, where that is said."""
        said: dict[str, Index | None] = dict.fromkeys(self.buffers)
        frozen = self.mapping("frozen_param_shapes").items()
        said.update((str(name), tuple(shape)) for name, shape in frozen)
        return said | {name: tuple(shape) for group in self.shapes for name, shape in group.items()}

    def mapping(self, key: str) -> dict[str, Any]:
        """A section that may be absent or None."""
        value = self.root.get(key)
        return value if isinstance(value, dict) else {}

    def whole_tensors(self, skip: Mapping[str, str]) -> Iterable[Entry]:
        """Buffers and real (not placeholder) parameters of ``module``, without the aliases."""
        buffers = self.buffers
        for name, tensor in self.module.items():
            if name not in skip:
                kind = BUFFER if name in buffers else PARAM
                yield whole_entry(name, kind, tensor)

    def stored_again(self, tied: Mapping[str, str]) -> Iterator[Entry]:
        """Aliases that are no view of the kept name's storage, as DeepSpeed's own always are."""
        module = self.module
        for alias, kept in tied.items():
            tensor, first = module.get(alias), module.get(kept)
            if tensor and first and tensor.numel and tensor.place != first.place:
                yield whole_entry(alias, PARAM, tensor)

    def aliases(self) -> dict[str, str]:
        """Tied names, alias -> kept: ``shared_params``, and equal views of one storage.

        Of two names for one view the kept one is that which the optimizer knows.
        """
        tied = {str(alias): str(kept) for alias, kept in self.mapping("shared_params").items()}
        trained = {name for group in self.shapes for name in group}
        first: dict[Any, str] = {}
        for name, tensor in self.module.items():
            if tensor.numel == 0 or name in tied:
                continue
            kept = first.setdefault(tensor.place, name)
            if kept != name and name in trained:
                first[tensor.place] = name
                tied[kept] = name
            elif kept != name:
                tied[name] = kept
        return tied


@dataclass(slots=True)
class OptimizerStates:
    """One ``*_optim_states.pt``; ``root`` is its ``optimizer_state_dict``."""

    file: TorchFile
    root: dict[str, Any]
    rank: int
    ds_version: str

    def listed(self, key: str) -> list[Any]:
        """A list that all ranks have where one has.

        Raises:
            CorruptError: this one has none.
        """
        found = self.root.get(key)
        if found is None:
            raise CorruptError(self.file.path, f"has no {key}, which other ranks have", MIXED)
        return list(found)


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's flat tensor of a group: contiguous elements in a file."""

    file: str
    byte_offset: int
    numel: int
    dtype: DType


def piece_of(file: TorchFile, tensor: Tensor) -> Piece:
    """A flat tensor of an opened file.

    Raises:
        UnsupportedError: it is a numpy array, whose bytes do not lie raw in the file.
    """
    if tensor.storage.file != file.path:
        raise UnsupportedError(file.path, "holds a flat partition that is a numpy array")
    return Piece(file.path, tensor.chunk.byte_offset, tensor.numel, tensor.dtype)


def whole_entry(fqn: str, kind: str, tensor: Tensor) -> Entry:
    """A tensor that lies whole in one file."""
    return Entry(fqn, kind, tensor.dtype, tensor.shape, (tensor.chunk,))


def open_model(path: Path, alike: Alike | None = None) -> ModelStates:
    """Open one model states file.

    Args:
        alike: of other ranks' files, which at stage 3 differ in nothing; what the first rank's
            says counts.

    Raises:
        CorruptError: it is not what its name says.
    """
    file = torch_reader.read(path, builders=BUILDERS, alike=alike)
    if not isinstance(file.root, dict) or "module" not in file.root:
        raise CorruptError(path, "is not a DeepSpeed model states file: it has no 'module'")
    expect(path, file.root, kinds.MODEL_STATES if alike is None else kinds.OTHER_MODEL_STATES)
    return ModelStates(file, file.root)


def own_name(listed: str, module: Container[str]) -> str:
    """The name that the module has for a parameter which torch's ``checkpoint_wrapper`` is around.

    That hides itself from ``state_dict``, but not from ``named_parameters``, which DeepSpeed lists.
    """
    if _CHECKPOINTED not in listed or listed in module:
        return listed
    bare = ".".join(part for part in listed.split(".") if part != _CHECKPOINTED)
    return bare if bare in module else listed


def under_own_names(models: Sequence[ModelStates]) -> list[ModelStates]:
    """The ranks' model states, with what they say of parameters under the module's own names.

    Of the other ranks only the fragments of frozen parameters are used.
    """
    first = models[0]
    if not any(_CHECKPOINTED in name for name in first.names):
        return list(models)
    module, root = first.module, first.root

    def named(held: Mapping[Any, Any]) -> dict[Any, Any]:
        return {own_name(str(name), module): value for name, value in held.items()}

    own: dict[str, Any] = {
        "param_shapes": [named(group) for group in first.shapes],
        "shared_params": {
            own_name(str(alias), module): own_name(str(kept), module)
            for alias, kept in first.mapping("shared_params").items()
        },
        "buffer_names": [own_name(name, module) for name in sorted(first.buffers)],
    }
    if first.mapping("frozen_param_shapes"):
        own["frozen_param_shapes"] = named(first.mapping("frozen_param_shapes"))
    own = {key: value for key, value in own.items() if key in root}
    listed = [*first.names, *first.mapping("shared_params")]
    wrapped_names = {own_name(name, module): name for name in map(str, listed)}
    wrapped_names = {fqn: name for fqn, name in wrapped_names.items() if fqn != name}
    made = [replace(first, root={**root, **own}, wrapped_names=wrapped_names), *models[1:]]
    return [
        replace(model, root={**model.root, _FRAGMENTS: named(model.mapping(_FRAGMENTS))})
        if model.mapping(_FRAGMENTS)
        else model
        for model in made
    ]


def open_optimizer(path: Path, rank: int) -> OptimizerStates:
    """Open one optimizer states file.

    Raises:
        CorruptError: it is none.
    """
    file = torch_reader.read(path, builders=BUILDERS)
    inner = file.root.get("optimizer_state_dict") if isinstance(file.root, dict) else None
    if not isinstance(inner, dict):
        raise CorruptError(
            path, "is not a DeepSpeed optimizer states file: it has no 'optimizer_state_dict'"
        )
    expect(path, file.root, kinds.VERSIONED)
    expect(path, inner, kinds.OPTIMIZER_STATES, "optimizer_state_dict")
    version = str(file.root.get("ds_version") or inner.get("ds_version") or "")
    return OptimizerStates(file, inner, rank, version)


def agree(what: str, states: Mapping[str, Any], remedy: str) -> Any:
    """The value that all files give.

    Args:
        states: file -> its value.

    Raises:
        CorruptError: two files differ.
    """
    items = iter(states.items())
    first_file, first = next(items)
    for file, value in items:
        if value != first:
            raise CorruptError(
                file,
                f"{what} is {shown(value)}, but {shown(first)} in {Path(first_file).name}",
                remedy,
            )
    return first


MIXED = "files of different runs or steps are mixed: fetch the checkpoint again as a whole"


def each(states: Iterable[Any], pick: Callable[[Any], Any]) -> dict[str, Any]:
    """``pick`` of every opened file, by path."""
    return {state.file.path: pick(state) for state in states}
