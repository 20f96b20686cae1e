"""A universal checkpoint: one file a tensor, which any number of ranks loads at stages 1 to 3.

DeepSpeed's own (0.19.8 ``checkpoint/ds_to_universal.py``) are of two kinds, by the stage of their
source, and each is loaded at such a stage only. This one has what both loaders ask for:

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

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.box import Index
from reshard.containers import skeletons, torch_writer
from reshard.containers.torch_writer import Slot, Storage
from reshard.dtypes import DType
from reshard.errors import UnsafeError
from reshard.formats.deepspeed.write import model_states
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.marks import Marks
from reshard.formats.deepspeed.write.objects import WRITTEN_AS, scaler, step
from reshard.formats.deepspeed.write.pieces import run_of
from reshard.formats.deepspeed.write.slots import dtype_of, master_dtype, names_of, step_of
from reshard.manifest import Entry, Skeleton
from reshard.training.state import TrainedGroup, TrainedParameter

_MODEL = "mp_rank_00_model_states.pt"
_MODEL3 = f"zero_pp_rank_0_{_MODEL}"
_STEP = "step.pt"


def files(choice: Choice, marks: Marks | None = None, models: Skeleton | None = None) -> Skeleton:
    """The run directory.

    Args:
        marks: how tensor-parallel ranks share each parameter; None: they do not.
        models: the model states of several model-parallel ranks; None: of one.

    Raises:
        UnsafeError: a name that would lead out of it.
        UnsupportedError: members of a group have seen different numbers of updates.
        IncompleteError: a parameter lacks a slot that others have.
    """
    zero = skeletons.join(_zero(choice, marks))
    zero = marks.shares(zero) if marks else zero
    models = models or skeletons.join(
        [_model(choice, _MODEL, weights=True), _model(choice, _MODEL3, weights=False)]
    )
    latest = skeletons.lay_out_bytes("latest_universal", choice.tag.encode())
    return Skeleton(
        latest.files + zero.files + models.files,
        zero.entries + models.entries,
        zero.checksums + models.checksums,
    )


def model_file(choice: Choice) -> Skeleton:
    """The model states of one rank of several."""
    return _model(choice, f"mp_rank_{choice.mp_rank:02d}_model_states.pt", weights=True)


def _model(choice: Choice, name: str, *, weights: bool) -> Skeleton:
    root = model_states.universal(choice, weights=weights)
    stamp = choice.stamp(name)
    return torch_writer.lay_out_object(f"{choice.tag}/{name}", root, stamp=stamp)


def steps(choice: Choice) -> list[float | None]:
    """The updates that each group has seen; None for one that never was updated."""
    path = choice.state.manifest.origin.path
    return [step_of(group.members, path) for group in choice.groups]


def common_hyper(choice: Choice) -> dict[str, Any]:
    """The hyper-parameters that all groups share.

    Stage 3 gives every group those of the first. What differs is kept from it, so that each group
    goes on with what its script gave it.
    """
    first, *others = (group.hyper for group in choice.groups)
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def _zero(choice: Choice, marks: Marks | None) -> Iterator[Skeleton]:
    folder, counts = f"{choice.tag}/zero", steps(choice)
    known = tuple(dict.fromkeys(name for g in choice.groups for name in names_of(g.members)))
    whole = _Alike({"cat_dim": 0})
    for group, count in zip(choice.groups, counts, strict=True):
        names = names_of(group.members) or known  # zeros for a group that was never updated
        dtypes = {name: dtype_of(name, group.members) for name in names}
        counter = None
        if names and _counts(counts):
            counter = torch_writer.lay_out_object(_STEP, step(count or 0, group.hyper))
        for member in group.members:
            listed = choice.listed(member.fqn)
            _check_name(choice, listed)
            place = f"{folder}/{listed}"
            files = _Alike(marks.of(member.fqn)) if marks else whole
            value, dtype = member.weight.value, master_dtype([member])
            yield files.file(f"{place}/fp32.pt", member, value, dtype)
            for name, dtype in dtypes.items():
                _check_name(choice, name)
                yield files.file(f"{place}/{name}.pt", member, member.slots.get(name), dtype)
            if counter is not None:
                yield skeletons.rename(counter, f"{place}/{_STEP}")
    name = f"{folder}/optimizer_state.pt"
    yield torch_writer.lay_out_object(name, _optimizer(choice, counts), stamp=choice.stamp(name))


def _counts(counts: list[float | None]) -> bool:
    """Whether the optimizer counts its updates."""
    return any(count is not None for count in counts)


class _Alike:
    """Files of tensors that ranks share in one way; those of like tensors and names share bytes.

    Args:
        cut: what each says of that.
    """

    def __init__(self, cut: Mapping[str, Any]) -> None:
        self._cut = cut
        self._made: dict[tuple[str, DType, Index, Index | None], Skeleton] = {}

    def file(
        self, name: str, member: TrainedParameter, value: Entry | None, dtype: DType
    ) -> Skeleton:
        """One tensor; zeros where the parameter has no such value."""
        shape, held = member.weight.shape, value.shape if value else None
        key = torch_writer.get_archive_root(name), dtype, shape, held
        made = self._made.get(key)
        if made is None:
            numel = member.weight.value.numel
            parts = run_of(value, 0, numel) if value else ()
            slot = Slot(Storage(dtype, numel, parts), _stored(shape))
            made = torch_writer.lay_out_object(name, {**self._cut, "param": slot})
            self._made[key] = made
            return made
        same = skeletons.rename(made, name)
        if value is None:
            return same
        own = (replace(entry, kind=value.kind, fqn=value.fqn) for entry in same.entries)
        return replace(same, entries=tuple(own))


def _stored(shape: Index) -> Index:
    """A 0-d parameter has a dim: DeepSpeed asks for a chunk of dim 0 (its converter fails)."""
    return shape or (1,)


def _check_name(choice: Choice, name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsafeError(
            choice.state.manifest.origin.path,
            f"names a tensor {name!r}, which cannot be the name of a directory",
            "rename it where it is saved, or write another layout",
        )


def _optimizer(choice: Choice, counts: list[float | None]) -> dict[str, Any]:
    """Scaler, clipping and hyper-parameters; what the run has itself stays where nothing is said.

    Stage 3 looks for all that it needs of the base optimizer in a dict of its own, and takes one
    counter for all parameters, that of the first group.
    """
    counted = {"step": _first_step(choice, counts)} if _counts(counts) else {}
    return {
        **({} if choice.scaler_is_new else _scaler(choice)),
        "overflow": False,
        **({} if choice.clip is None else {"clip_grad": choice.clip}),
        "ds_version": WRITTEN_AS,
        "param_groups": choice.param_groups(),
        "optimizer_state_dict": {
            "state": {0: counted},
            "param_groups": [{**common_hyper(choice), "params": [0]}],
        },
    }


def _scaler(choice: Choice) -> dict[str, Any]:
    return {
        "loss_scaler": scaler(choice.scaler),
        "dynamic_loss_scale": choice.scaler["dynamic"],
    }


def _first_step(choice: Choice, counts: list[float | None]) -> Slot | int:
    number, count = next((n, count) for n, count in enumerate(counts) if count is not None)
    owner: TrainedGroup = choice.groups[number]
    return step(count or 0, owner.hyper)
