"""Open DeepSpeed's two kinds of file, model states and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from reshard.containers import torch_reader
from reshard.containers.pickle_cache import PickleCache
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core import counts
from reshard.core.box import Index
from reshard.core.differences import describe_first
from reshard.core.manifest import BUFFER, PARAM, Entry
from reshard.core.schema import expect
from reshard.errors import MIXED, OTHER_FILE, CorruptError, UnsupportedError
from reshard.formats.deepspeed import elastic, schemas
from reshard.layouts.partition import require_dense
from reshard.quantised import moments
from reshard.state_dict import leaves
from reshard.state_dict.optimizers import nested_slots
from reshard.state_dict.plain_values import is_plain, to_plain
from reshard.system import escaped
from reshard.training import optimizers

# An enum is pickled as a call of its class with a value. Only the value is kept.
BUILDERS = {"deepspeed.runtime.zero.config.ZeroStageEnum": lambda stage: stage}

# Wrappers whose names are not in the saved module, but in the lists beside it: that of torch's
# ``checkpoint_wrapper`` in all lists, that of DeepSpeed's random-LTD in the lists that are made at
# the save (0.19.8 ``data_routing/helper.py``, ``remove_random_ltd_state_dict``).
_HIDDEN = frozenset({"_checkpoint_wrapped_module", "random_ltd_layer"})
_FRAGMENTS = "frozen_param_fragments"

AnyStates = TypeVar("AnyStates", "ModelStates", "OptimizerStates")
Shapes = list[dict[str, Index]]  # one dict for each flat tensor: fqn -> shape, in flat order


@dataclass(slots=True)
class ModelStates:
    """One ``*_model_states.pt``.

    Args:
        layer_tensors: tensors of the module that are in the files of a pipeline's layers.
        expert_ranks: for each group of ``shapes``, the number of expert-parallel ranks whose
            members it lists, rank by rank; each rank's members have a separate flat tensor. 0: the
            group is read elsewhere. Empty: 1 for every group.
        wrapped_names: fqn -> the name that DeepSpeed lists, where it is not the module's.
    """

    file: TorchFile
    root: dict[str, Any]
    layer_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    expert_ranks: tuple[int, ...] = ()
    wrapped_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> dict[str, Tensor]:
        """Fqn -> tensor, as ``state_dict`` returned it; aliases included."""
        module = self.root.get("module") or {}
        own = {name: value for name, value in module.items() if isinstance(value, Tensor)}
        return {**own, **self.layer_tensors}

    def find_tensor(self, name: str) -> Tensor | None:
        """Return a tensor of `module`, or None; of many ranks, this takes less time."""
        own = (self.root.get("module") or {}).get(name)
        return self.layer_tensors.get(name, own if isinstance(own, Tensor) else None)

    @property
    def unread(self) -> dict[str, str]:
        """The values of the module's state dict that are no tensors; see `leaves.find_opaque`."""
        module = self.root.get("module") or {}
        return leaves.find_opaque(self.file.path, module, prefix="module.")

    @property
    def shapes(self) -> Shapes:
        """``param_shapes``: before DeepSpeed 0.3.17 one dict, since then a list."""
        shapes = self.root.get("param_shapes") or []
        return [dict(group) for group in ([shapes] if isinstance(shapes, dict) else shapes)]

    @property
    def data_ranks(self) -> int:
        """``dp_world_size``; 0 if the file does not declare it."""
        declared = self.root.get("dp_world_size")
        return counts.check_count(self.file.path, "dp_world_size", declared, default=0)

    @property
    def model_ranks(self) -> int:
        """``mp_world_size``; 1 if the file does not declare it."""
        declared = self.root.get("mp_world_size")
        return counts.check_count(self.file.path, "mp_world_size", declared, default=1)

    @property
    def buffers(self) -> frozenset[str]:
        """Fqns of the persistent buffers."""
        return frozenset(self.root.get("buffer_names") or ())

    @property
    def config(self) -> dict[str, Any]:
        """``ds_config``, the configuration of the engine."""
        return self.get_section("ds_config")

    @property
    def version(self) -> str:
        """The version of DeepSpeed that wrote the file."""
        return str(self.root.get("ds_version", "unknown"))

    @property
    def tensor_parallel_info(self) -> dict[str, Any]:
        """``universal_checkpoint_info``, which says how ranks share parameters; may be empty."""
        info = to_plain(self.root.get("universal_checkpoint_info"))
        return info if isinstance(info, dict) else {}

    @property
    def declared_names(self) -> dict[str, Index | None]:
        """Names of the module that the file lists beside its tensors -> shape, or None."""
        declared: dict[str, Index | None] = dict.fromkeys(self.buffers)
        frozen = self.get_section("frozen_param_shapes").items()
        declared.update((str(name), tuple(shape)) for name, shape in frozen)
        trained = {name: tuple(shape) for group in self.shapes for name, shape in group.items()}
        return declared | trained

    def get_section(self, key: str) -> dict[str, Any]:
        """Return a section of the file; empty if it is absent or None."""
        value = self.root.get(key)
        return value if isinstance(value, dict) else {}

    def iterate_whole_tensors(self, skip: Container[str]) -> Iterable[Entry]:
        """Yield the buffers and the parameters of ``module``, without the names in ``skip``."""
        buffers = self.buffers
        for name, tensor in self.module.items():
            if name not in skip:
                yield make_whole_entry(name, BUFFER if name in buffers else PARAM, tensor)

    def _are_both_empty(self, alias: str, kept: str) -> bool:
        # DeepSpeed 0.19.8 compares addresses (``_get_shared_params``), and all tensors without
        # elements have the same. At stage 3, which has placeholders, it compares its own numbers.
        stage = self.config.get("zero_optimization", {}).get("stage")
        tensors = (self.find_tensor(alias), self.find_tensor(kept))
        return stage != 3 and all(tensor is not None and not tensor.numel for tensor in tensors)

    def find_tied_copies(self, tied: Mapping[str, str]) -> Iterator[Entry]:
        """Yield the aliases that have a storage of their own, which DeepSpeed never writes.

        Args:
            tied: alias -> the name that is kept.
        """
        module = self.module
        for alias, kept in tied.items():
            tensor, first = module.get(alias), module.get(kept)
            if tensor and first and tensor.numel and tensor.place != first.place:
                yield make_whole_entry(alias, PARAM, tensor)

    def find_aliases(self) -> dict[str, str]:
        """Return the tied names, alias -> kept: ``shared_params``, and equal views of a storage.

        DeepSpeed 0.19.8 leaves out of ``shared_params`` the second name that a module has for one
        part (``_get_shared_params``), and before 0.9.2 it wrote no such list. In stage 3, the empty
        placeholders of one parameter are one view, too. If one view has several names, the one that
        the optimizer lists is kept, else the first that the file lists beside its tensors.
        """
        module, declared = self.module, self.declared_names
        tied = {
            str(alias): str(kept)
            for alias, kept in self.get_section("shared_params").items()
            if not self._are_both_empty(str(alias), str(kept))
        }
        trained = {name for group in self.shapes for name in group}
        names_of_view: dict[Any, list[str]] = {}
        for name, tensor in module.items():
            if name not in tied:
                names_of_view.setdefault(tensor.place, []).append(name)
        for names in names_of_view.values():
            # `reshard` writes one empty view for all placeholders, which are of several parameters.
            if not module[names[0]].numel and sum(name in declared for name in names) != 1:
                continue
            kept = min(names, key=lambda name: (name not in trained, name not in declared))
            tied |= {name: kept for name in names if name != kept}
        return tied


@dataclass(slots=True)
class OptimizerStates:
    """One ``*_optim_states.pt``; ``root`` is its ``optimizer_state_dict``."""

    file: TorchFile
    root: dict[str, Any]
    rank: int
    ds_version: str
    _decoded: dict[int, dict[str, Any]] = field(init=False, repr=False, default_factory=dict)

    @property
    def is_stage_3(self) -> bool:
        """Whether the optimizer is that of stage 3."""
        return "fp32_flat_groups" in self.root

    @property
    def optimizer(self) -> dict[str, Any]:
        """State dict of the wrapped optimizer."""
        inner = self.root.get("optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state")
        return inner if isinstance(inner, dict) else {}

    def get_group_state(self, index: int) -> dict[str, Any]:
        """Return the optimizer's state of one flat tensor, with values for bitsandbytes' codes."""
        if index not in self._decoded:  # several readers ask for it
            stored = self.optimizer.get("state", {}).get(index) or {}
            self._decoded[index] = moments.decode_state(flatten_state(stored))
        return self._decoded[index]

    @property
    def common_state(self) -> dict[str, Any]:
        """The optimizer's state that belongs to no flat tensor; see `select_common_state`."""
        return select_common_state(self.optimizer)

    def require_list(self, key: str) -> list[Any]:
        """Return a list of the file.

        Raises:
            CorruptError: the file does not have it.
        """
        values = self.root.get(key)
        if values is None:
            raise CorruptError(self.file.path, f"has no {key}, but other ranks have it", MIXED)
        return list(values)


def flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without nested dicts and lists of tensors (`nested_slots.flatten`)."""
    return nested_slots.flatten(state, lambda value: isinstance(value, Tensor))


def select_common_state(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that belongs to no parameter, such as MADGRAD's counter ``k``."""
    state = optimizer.get("state", {})
    return {name: value for name, value in state.items() if isinstance(name, str)}


def select_flat_slots(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the flat tensors of an optimizer's state, without the step, which is 0-d."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and len(value.shape) == 1
    }


def select_scalar_slots(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the 0-d tensors of a state that are not its step (NAdam's ``mu_product``)."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and not value.shape and name != "step"
    }


def is_of_another_length(
    name: str, pieces: Sequence[Tensor | None], expected: Sequence[int]
) -> bool:
    """Return whether a slot is not per element, because no rank's tensor has the expected length.

    Prodigy with ``slice_p`` keeps every ``slice_p``-th element. A slot that is known to be per
    element has a wrong length if the file is damaged.
    """
    found = [(p.numel, numel) for p, numel in zip(pieces, expected, strict=True) if p is not None]
    return name not in optimizers.PER_ELEMENT and all(numel != other for numel, other in found)


def describe_lost_state(
    states: Iterable[tuple[Iterable[str], Mapping[str, Any], Collection[str]]],
) -> dict[str, dict[str, Any]]:
    """Return fqn -> its optimizer state in objects, or in tensors that are not per element.

    Args:
        states: the parameters that share a state, the state, and its parts that are not read.
    """
    lost: dict[str, dict[str, Any]] = {}
    for fqns, state, unread in states:
        described = {name: to_plain(state[name]) for name in sorted(unread) if name in state}
        own = {name: value for name, value in described.items() if not is_plain(value)}
        if own:
            for fqn in fqns:
                lost[fqn] = lost.get(fqn, {}) | own
    return lost


def require_raw(file: TorchFile, tensor: Tensor) -> Tensor:
    """Return one rank's part of a flat tensor, whose bytes are raw in an opened file.

    Raises:
        UnsupportedError: it is a numpy array, or has gaps between its elements.
    """
    if escaped.is_escaped(tensor.storage.file):
        raise UnsupportedError(
            file.path,
            "contains a flat partition that is a numpy array, which reshard does not read",
        )
    require_dense(tensor.chunk)
    return tensor


def make_whole_entry(fqn: str, kind: str, tensor: Tensor) -> Entry:
    """Return the entry of a tensor that one file holds whole."""
    return Entry(fqn, kind, tensor.dtype, tensor.shape, (tensor.chunk,))


def open_model(path: Path, cache: PickleCache | None = None) -> ModelStates:
    """Open one model states file.

    Args:
        cache: pickles of the ranks' model states before, which at stage 3 are mostly equal. Only
            the first rank's file, opened without a cache, is checked in full.

    Raises:
        CorruptError: it is not a file of model states.
    """
    file = torch_reader.read(path, builders=BUILDERS, cache=cache)
    if not isinstance(file.root, dict) or "module" not in file.root:
        raise CorruptError(
            path, "is not a DeepSpeed model states file: it does not contain 'module'", OTHER_FILE
        )
    if not file.is_known:
        kind = schemas.MODEL_STATES if cache is None else schemas.OTHER_MODEL_STATES
        expect(path, file.root, kind)
    return ModelStates(file, file.root)


def unwrap_name(listed: str, module: Container[str]) -> str:
    """Return the module's name of a tensor that a list names with its wrapper (see `_HIDDEN`).

    DeepSpeed takes the names that it lists from ``named_parameters``, which shows the wrapper.
    """
    if not _is_wrapped(listed) or listed in module:
        return listed
    bare = ".".join(part for part in listed.split(".") if part not in _HIDDEN)
    return bare if bare in module else listed


def _is_wrapped(name: str) -> bool:
    return not _HIDDEN.isdisjoint(name.split("."))


def _find_dropped_prefix(first: ModelStates) -> str:
    # A model may save a part of itself without the part's name. The state dict of TRL 0.11's
    # ``AutoModelForCausalLMWithValueHead`` has ``model.norm.weight`` and ``v_head.summary.weight``;
    # its ``named_parameters``, which DeepSpeed lists, ``pretrained_model.model.norm.weight``.
    module = first.module
    declared = {unwrap_name(n, module): shape for n, shape in first.declared_names.items()}
    lacking = {name: shape for name, shape in declared.items() if name not in module}
    parts = next(iter(lacking), "").split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        bare = {unwrap_name(n.removeprefix(prefix), module): shape for n, shape in lacking.items()}
        if all(name.startswith(prefix) for name in lacking) and all(
            name in module and name not in declared and _may_be(module[name], shape)
            for name, shape in bare.items()
        ):
            return prefix
    return ""


def _may_be(tensor: Tensor, shape: Index | None) -> bool:
    """Return whether a tensor of the module has a shape, or is a placeholder of stage 3."""
    return shape is None or tensor.shape == shape or not tensor.numel


def unwrap_names(models: Sequence[ModelStates]) -> list[ModelStates]:
    """Return the ranks' model states with all lists under the module's names.

    Only the fragments of frozen parameters are used from the ranks after the first.
    """
    first = models[0]
    module, root = first.module, first.root
    prefix = _find_dropped_prefix(first)
    if not prefix and not any(map(_is_wrapped, first.declared_names)):
        return list(models)

    def unwrap(listed: Any) -> str:
        name = str(listed)
        if prefix and name not in module and name.startswith(prefix):
            name = name.removeprefix(prefix)
        return unwrap_name(name, module)

    def rename(values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {unwrap(name): value for name, value in values.items()}

    own: dict[str, Any] = {
        "param_shapes": [rename(group) for group in first.shapes],
        "shared_params": {
            unwrap(alias): unwrap(kept)
            for alias, kept in first.get_section("shared_params").items()
        },
        "buffer_names": [unwrap(name) for name in sorted(first.buffers)],
    }
    if first.get_section("frozen_param_shapes"):
        own["frozen_param_shapes"] = rename(first.get_section("frozen_param_shapes"))
    own = {key: value for key, value in own.items() if key in root}
    listed = map(str, (*first.declared_names, *first.get_section("shared_params")))
    wrapped = {unwrap(name): name for name in listed}
    if prefix:  # stages 0 and 1 do not list frozen weights
        below = {fqn.split(".")[0] for fqn, name in wrapped.items() if name == prefix + fqn}
        unlisted = (name for name in module if name not in wrapped and name.split(".")[0] in below)
        wrapped |= {name: prefix + name for name in unlisted}
    wrapped = {fqn: name for fqn, name in wrapped.items() if fqn != name}
    found = [replace(first, root={**root, **own}, wrapped_names=wrapped), *models[1:]]
    return [
        replace(model, root={**model.root, _FRAGMENTS: rename(fragments)})
        if (fragments := model.get_section(_FRAGMENTS))
        else model
        for model in found
    ]


def open_optimizer(path: Path, rank: int, cache: PickleCache | None = None) -> OptimizerStates:
    """Open one optimizer states file.

    Args:
        cache: pickles of the ranks' optimizer states before, which at stage 3 are mostly equal.

    Raises:
        CorruptError: it is not a file of optimizer states.
    """
    file = torch_reader.read(path, builders=BUILDERS, cache=cache)
    inner = file.root.get("optimizer_state_dict") if isinstance(file.root, dict) else None
    if not isinstance(inner, dict):
        raise CorruptError(
            path,
            "is not a DeepSpeed optimizer states file: it does not contain 'optimizer_state_dict'",
            OTHER_FILE,
        )
    if not file.is_known:
        expect(path, file.root, schemas.VERSIONED)
        expect(path, inner, schemas.OPTIMIZER_STATES, "optimizer_state_dict")
    version = str(file.root.get("ds_version") or inner.get("ds_version") or "")
    return OptimizerStates(file, elastic.restore(path, inner), rank, version)


def require_equal(what: str, values: Mapping[str, Any]) -> Any:
    """Return the value that all files have.

    Args:
        values: file -> its value.

    Raises:
        CorruptError: two files differ.
    """
    items = iter(values.items())
    first_file, first = next(items)
    last = first
    for file, value in items:
        if value is last:
            continue
        last = value
        if value != first:
            there = Path(first_file).name
            raise CorruptError(file, describe_first(what, value, first, there), MIXED)
    return first


def select_distinct(states: Iterable[AnyStates]) -> list[AnyStates]:
    """Return the opened states without those whose pickle equals that of others before them.

    Such files differ in the elements of their tensors alone.
    """
    return [state for state in states if not state.file.is_known]


def read_by_file(states: Iterable[Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    """Return file -> the value that ``read`` returns for its opened states."""
    return {state.file.path: read(state) for state in states}
