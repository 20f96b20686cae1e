"""Lay out a universal checkpoint: one file for each tensor, for any number of ranks and stages 1-3.

DeepSpeed's own (0.19.8 ``checkpoint/ds_to_universal.py``) are of two kinds, by the stage of their
source, and each is loaded at such a stage only. This one has what both loaders need:

    latest_universal                          the tag
    TAG/zero/FQN/{fp32,exp_avg,...}.pt        ``{"cat_dim": 0, "param": tensor}``
    TAG/zero/FQN/step.pt                      stages 1, 2: the bare counter
    TAG/zero/optimizer_state.pt               ``param_groups`` for stages 1 and 2, and
                                              ``optimizer_state_dict`` for stage 3
    TAG/mp_rank_00_model_states.pt            stages 1, 2: counters, scheduler, client; the module
    TAG/zero_pp_rank_0_mp_rank_00_model_states.pt   stage 3: the same, with placeholders

Loaders: ``runtime/base_optimizer.py`` (``load_hp_checkpoint_state_from_checkpoint_dir``),
``checkpoint/universal_checkpoint.py`` (``load_hp_checkpoint_state``), ``runtime/zero/stage3.py``
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``), ``runtime/engine.py``
(``_get_all_ckpt_names``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.torch_writer import Storage, StorageView
from reshard.core.box import Index
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Entry, Skeleton
from reshard.errors import UnsafeError
from reshard.formats.deepspeed.write.flat_tensors import (
    build_run_parts,
    choose_master_dtype,
    collect_slot_dtypes,
    find_common_step,
)
from reshard.formats.deepspeed.write.model_states import make_universal_file
from reshard.formats.deepspeed.write.pickled_objects import (
    WRITTEN_AS,
    make_scaler_object,
    make_step_counter,
)
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.formats.deepspeed.write.split_metadata import SplitMetadata
from reshard.state_dict.optimizers.hyper_parameters import build_tensors
from reshard.training import fresh_adam, optimizers
from reshard.training.state import TrainedParameter

_STEP = "step.pt"


def lay_out_files(
    spec: OutputSpec, metadata: SplitMetadata | None = None, models: Skeleton | None = None
) -> Skeleton:
    """Lay out the run directory.

    Args:
        metadata: how tensor-parallel ranks share each parameter; None: they do not.
        models: the model states of several model-parallel ranks; None: those of a single rank.
    """
    zero = skeletons.join(_lay_out_zero(spec, metadata))
    zero = metadata.divide_sums(zero) if metadata else zero
    models = models or skeletons.join(
        [lay_out_model(spec), lay_out_model(spec, "zero_pp_rank_0_", weights=False)]
    )
    latest = skeletons.lay_out_bytes("latest_universal", spec.tag.encode())
    return Skeleton(
        latest.files + zero.files + models.files,
        zero.entries + models.entries,
    )


def lay_out_model(spec: OutputSpec, prefix: str = "", *, weights: bool = True) -> Skeleton:
    """Lay out the model states of one model-parallel rank."""
    name = f"{prefix}mp_rank_{spec.mp_rank:02d}_model_states.pt"
    root = make_universal_file(spec, weights=weights)
    return torch_writer.lay_out_object(f"{spec.tag}/{name}", root, stamp=spec.stamp(name))


def find_new_slots(spec: OutputSpec) -> tuple[str, ...]:
    """Return the slots of an Adam that has made no step; none for any other optimizer.

    Stage 3 loads no optimizer without moments. Those of an Adam start as zeros, so writing them
    changes nothing. The files do not show the slots of other optimizers and their first values.
    """
    hypers = [group.hyper for group in spec.groups]
    if spec.state.slots or not all(map(optimizers.is_adam, hypers)):
        return ()
    return tuple(dict.fromkeys(name for hyper in hypers for name in fresh_adam.list_slots(hyper)))


def count_steps(spec: OutputSpec) -> list[float | None]:
    """Return the number of updates of each group.

    A group that was never updated has None, except in an Adam that has made no step: there it is 0.
    """
    if find_new_slots(spec):
        return [0.0] * len(spec.groups)
    return [find_common_step(spec.state, group, group.members) for group in spec.groups]


def find_common_hyper(spec: OutputSpec) -> dict[str, Any]:
    """Return the hyper-parameters that all groups share.

    Stage 3 gives every group those of the first. Values that differ are left out, so that each
    group keeps the value that its script sets.
    """
    first, *others = (group.hyper for group in spec.groups)
    return build_tensors(
        {
            key: value
            for key, value in first.items()
            if all(key in other and other[key] == value for other in others)
        }
    )


def _lay_out_zero(spec: OutputSpec, metadata: SplitMetadata | None) -> Iterator[Skeleton]:
    folder, counts = f"{spec.tag}/zero", count_steps(spec)
    is_counted = any(count is not None for count in counts)
    dtypes_of = [collect_slot_dtypes(group.members) for group in spec.groups]
    all_dtypes = {name: dtype for dtypes in dtypes_of for name, dtype in dtypes.items()}
    all_dtypes = all_dtypes or dict.fromkeys(find_new_slots(spec), FLOAT32)
    whole = _TensorFiles({"cat_dim": 0})
    for group, count, own_dtypes in zip(spec.groups, counts, dtypes_of, strict=True):
        dtypes = own_dtypes or dict.fromkeys(all_dtypes, FLOAT32)  # never updated: zeros
        counter = None
        if dtypes and is_counted:
            counter = torch_writer.lay_out_object(
                _STEP, make_step_counter(count or 0, group.hyper, dtypes)
            )
        for member in group.members:
            name = spec.get_listed_name(member.fqn)
            for part in (name, *dtypes):
                _check_name(spec, part)
            files = _TensorFiles(metadata.describe(member.fqn)) if metadata else whole
            value, dtype = member.weight.value, choose_master_dtype([member])
            yield files.lay_out(f"{folder}/{name}/fp32.pt", member, value, dtype)
            for slot, dtype in dtypes.items():
                path = f"{folder}/{name}/{slot}.pt"
                yield files.lay_out(path, member, member.slots.get(slot), dtype)
            if counter is not None:
                yield skeletons.rename(counter, f"{folder}/{name}/{_STEP}")
    name = f"{folder}/optimizer_state.pt"
    yield torch_writer.lay_out_object(
        name, _make_optimizer_state(spec, counts), stamp=spec.stamp(name)
    )


class _TensorFiles:
    """Files of tensors that ranks share alike; equal shapes, dtypes and names are laid out once."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._known: dict[tuple[str, DType, Index, Index | None], Skeleton] = {}

    def lay_out(
        self, name: str, member: TrainedParameter, value: Entry | None, dtype: DType
    ) -> Skeleton:
        """Lay out one tensor; it has zeros if the parameter has no such value."""
        shape, stored = member.weight.shape, value.shape if value else None
        key = torch_writer.get_archive_root(name), dtype, shape, stored
        known = self._known.get(key)
        if known is None:
            numel = member.weight.value.numel
            parts = build_run_parts(value, 0, numel) if value else ()
            # DeepSpeed cuts along dim 0, so a 0-d parameter needs a dim (its converter fails).
            slot = StorageView(Storage(dtype, numel, parts), shape or (1,))
            known = torch_writer.lay_out_object(name, {**self._metadata, "param": slot})
            self._known[key] = known
            return known
        same = skeletons.rename(known, name)
        if value is None:
            return same
        own = (replace(entry, kind=value.kind, fqn=value.fqn) for entry in same.entries)
        return replace(same, entries=tuple(own))


def _check_name(spec: OutputSpec, name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsafeError(
            spec.state.manifest.origin.path,
            f"contains a tensor {name!r}, whose name cannot be a directory name",
            "rename it where it is saved, or write another layout",
        )


def _make_optimizer_state(spec: OutputSpec, counts: Sequence[float | None]) -> dict[str, Any]:
    # Stage 3 reads the base optimizer from a separate dict, with one counter for all parameters,
    # that of the first group. The new run keeps its own values for what is missing.
    state: dict[str, Any] = {}
    for group, count in zip(spec.groups, counts, strict=True):
        if count is not None and not state:
            slots = collect_slot_dtypes(group.members)
            state["step"] = make_step_counter(count, group.hyper, slots)
    scaler = {
        "loss_scaler": make_scaler_object(spec.scaler),
        "dynamic_loss_scale": spec.scaler["dynamic"],
    }
    return {
        **({} if spec.scaler_is_new else scaler),
        "overflow": False,
        **({} if spec.clip is None else {"clip_grad": spec.clip}),
        "ds_version": WRITTEN_AS,
        "param_groups": spec.build_param_groups(),
        "optimizer_state_dict": {
            "state": {0: state},
            "param_groups": [{**find_common_hyper(spec), "params": [0]}],
        },
    }
