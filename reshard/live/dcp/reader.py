"""The storage reader; its methods are in the order in which DCP calls them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from reshard import formats, naming
from reshard.checks.identity import Trust, check_identity
from reshard.core.box import Box
from reshard.core.manifest import PARAM, Entry, Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import registry
from reshard.formats.base import Source
from reshard.formats.coded_values import dequantise
from reshard.live.comparison import Expected, compare_on_rank
from reshard.live.dcp.blocks import BlockRead, read, refuse_different_aliases, refuse_other_shape
from reshard.live.dcp.plain_items import PlainItems
from reshard.live.dcp.target import Hyper, Keys, Resolved, State
from reshard.live.files import log_warnings
from reshard.live.memory import iterate_state_dict
from reshard.model import library
from reshard.naming.options import NameOptions
from reshard.naming.published import ModelConfig, choose_form, restore_memory_form
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path


class StorageReader(storage.StorageReader):
    """A reader of any checkpoint that reshard supports, for `torch.distributed.checkpoint.load`.

    A published transformers model, with its ``config.json`` beside it, is read in the form that the
    live model has in memory, and under its published names. So is a Megatron run whose model
    transformers has: in the form of that model in memory, and under Megatron's names.

    A weight is read from its fp32 master if the checkpoint has one. Floats are cast once, to the
    target's dtype; buffers and integers are not cast. A key of the target that the checkpoint lacks
    is an error, unless the planner allows a partial load.

    Args:
        source: a path as for `reshard.open`, or a manifest.
        model: the dotted prefix of the weights' keys in the target, "" for none. By default the
            target may use any that ends in ``model``, or none.
        optimizer: the prefix of the optimizer's keys; by default ``optim``, ``optimizer`` or none.
        tag: the checkpoint to read in a run directory.
        key: the dotted key of the state dict in a ``torch.save`` file.
        trust: how to check that the files belong to one save, see `reshard.checks.identity`.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt, or its files do not belong
            together.
    """

    def __init__(
        self,
        source: formats.Paths | Manifest,
        *,
        model: str | None = None,
        optimizer: str | None = None,
        tag: str | None = None,
        key: str | None = None,
        trust: Trust = "sampled",
    ) -> None:
        self._trust: Trust = trust
        self._prefixes = (model, optimizer)
        self._choice: dict[str, Any] = {"tag": tag, "key": key}
        self._open(source)

    def _open(self, source: formats.Paths | Manifest) -> None:
        if not isinstance(source, Manifest):
            source = formats.read(source, **self._choice)
            log_warnings(source)
        check_identity(source, self._trust)
        source, _ = dequantise(source)
        self.manifest = source
        in_memory = _find_live_form(source)
        self._state = State(in_memory or source)
        # A target may also have the names of the files: the published ones, or Megatron's.
        self._find_other = cache(lambda: _find_other_names(source, in_memory))
        self._keys = Keys(self._state, self._find_other, *self._prefixes)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open another checkpoint if ``checkpoint_id`` names one."""
        if checkpoint_id is not None:
            self._open(os.fspath(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a file or directory of this name."""
        return as_path(checkpoint_id).exists()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> torch_metadata.Metadata:
        """Return metadata whose keys are resolved when the planner looks them up."""
        # Another load may pass a state dict with other prefixes.
        self._keys = Keys(self._state, self._find_other, *self._prefixes)
        return torch_metadata.Metadata(self._keys, planner_data=self._keys.paths)

    def set_up_storage_reader(
        self, metadata: torch_metadata.Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """Do nothing: every rank reads its own blocks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the number of the target's parameter groups before any byte moves.

        Raises:
            UsageError: the checkpoint has another number of parameter groups.
        """
        requested = {
            value.group
            for item in plan.items
            if isinstance(value := self._resolve(item), Hyper) and value.group is not None
        }
        available = len(self._state.groups)
        if requested and requested != set(range(available)):
            raise UsageError(
                self._state.path,
                f"has {available} parameter groups, but the target has {len(requested)}",
                "create the optimizer with the same groups, or take its state dict with"
                " StateDictOptions(flatten_optimizer_state_dict=True), with which torch gives each"
                " group the hyperparameters of its first parameter",
            )
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items.

        Raises:
            IncompleteError: the checkpoint lacks a key of the target.
            UsageError: the target's keys or parameter groups do not match the checkpoint's.
            DifferentError: a dtype cannot be cast, a value does not fit the target's dtype, or a
                tensor of the target then differs from the checkpoint.
        """
        values = PlainItems(self._keys, planner)
        jobs = []
        for item in plan.items:
            value = self._resolve(item)
            if isinstance(value, Entry):
                refuse_other_shape(item, value, values.targets)
                if not value.chunks:  # of a parameter that was never updated, or empty
                    target = planner.resolve_tensor(item).detach().zero_()
                    planner.commit_tensor(item, target)
                    continue
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                jobs.append(BlockRead(item, value, box))
            else:
                values.add(item, value)
        values.load()
        with SourceFiles(self.manifest.files) as pool:
            refuse_different_aliases(pool, jobs, values.targets)
            read(pool, jobs, planner)
            # DCP calls nothing of the reader after this. The tensors of `get_state_dict` are those
            # of the model and of the optimizer, which `set_state_dict` finds by the same names.
            entries = {(PARAM, key): entry for key, entry in self.list_read().items()}
            loaded = {key: values.targets[key] for _, key in entries if key in values.targets}
            compare_on_rank(iterate_state_dict(loaded), Expected(entries, {}), pool, self._trust)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def list_read(self) -> dict[str, Entry]:
        """Return the tensors of the source that the last load has read, by the target's keys."""
        resolved = self._keys.resolved.items()
        return {key: value for key, value in resolved if isinstance(value, Entry)}

    def _resolve(self, item: ReadItem) -> Resolved:
        key = item.storage_index.fqn
        self._keys[key]  # the lookup resolves the key
        return self._keys.resolved[key]


def _find_live_form(manifest: Manifest) -> Manifest | None:
    """Return None if the checkpoint has the live form, or states no model of transformers."""
    source = registry.describe_source(manifest)
    if not source.names.of_own_models:
        return restore_memory_form(manifest)
    try:
        return _rename(manifest, source)
    except (UsageError, UnsupportedError):  # no family fits, or transformers cannot build the model
        return None


def _find_other_names(source: Manifest, in_memory: Manifest | None) -> State | None:
    # `in_memory` is the source in the form with the usual names; None if the source has it.
    if in_memory is not None:
        return State(source)
    if registry.describe_source(source).names.of_own_models:
        return None
    usual = restore_memory_form(source, may_be_former=True)
    return None if usual is None else State(usual)


def _rename(manifest: Manifest, source: Source) -> Manifest | None:
    named = naming.choose_names(manifest, source.names, NameOptions())
    if named.config is None:
        return None
    state = named.manifest
    if library.may_be_converted(named.config):
        state = choose_form(state, ModelConfig(named.config), "module").manifest
    return state if source.translate is None else source.translate(state)[0]
