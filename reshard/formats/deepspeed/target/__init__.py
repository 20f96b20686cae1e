"""Lay out a DeepSpeed run directory: for a number of ranks at ZeRO stages 0 to 3, or universal.

    choice        what is to be written, decided once: groups in the user's order, dtypes, config
    model_states  ``*_model_states.pt``
    flat          stages 1 and 2: one flat tensor a group, in equal pieces
    partitioned   stage 3: every parameter in equal pieces
    whole         stage 0: whole tensors under an index
    universal     a file a tensor, for any number of ranks
    pieces        runs of parameters in a flat tensor
    slots         the optimizer state of one flat tensor's members
    order         flat orders and sub-groups
    scaling       the loss scaler
    carried       plain values beside DeepSpeed's own
    objects       what is pickled by the name of its class
    report        what a user must be told

The layout is that of DeepSpeed 0.19.8. It loads the native one at exactly the world size and the
stage that it was made for, under the options of the ``ds_config`` that the source kept; the
universal one at any, with ``"checkpoint": {"load_universal": true}``.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.dtypes import BFLOAT16, DType
from reshard.formats import skeletons, torch_writer
from reshard.formats.deepspeed.target import flat, model_states, partitioned, report, universal
from reshard.formats.deepspeed.target.choice import Choice, choose
from reshard.formats.deepspeed.target.objects import WRITTEN_AS
from reshard.formats.training import Training
from reshard.manifest import Skeleton

_MODEL = "mp_rank_00_model_states.pt"


def lay_out(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    tag: str | None = None,
    weights_only: bool = False,
) -> Skeleton:
    """The run directory: ``latest``, and the files of every rank in the tag's directory.

    An entry stands twice in the skeleton where both the module's copy and the fp32 master come from
    one source tensor: each of the two covers it exactly.

    Args:
        precision: of the module's parameters; None: each as it was trained.
        tag: the directory's name; None: ``global_step`` and the step.
        weights_only: what ``load_checkpoint(..., load_module_only=True)`` reads; stages 0 to 2 have
            one file for any number of ranks. Stage 3 needs ``load_optimizer_states=False`` with it
            (``engine.py``, ``_load_checkpoint``): DeepSpeed reads nothing but placeholders without.

    Raises:
        IncompleteError: the source lacks what DeepSpeed needs to go on training.
        UnsupportedError: an optimizer state that this stage has no place for.
        UsageError: no such stage, number of ranks, precision or tag.
    """
    choice = choose(
        state,
        world_size=world_size,
        stage=stage,
        precision=precision,
        tag=tag,
        weights_only=weights_only,
    )
    models = skeletons.joined(_models(choice))
    optimizers = skeletons.joined(_optimizers(choice))
    latest = skeletons.of_bytes("latest", choice.tag.encode())
    return Skeleton(
        latest.files + models.files + optimizers.files,
        models.entries + optimizers.entries,
        models.checksums + optimizers.checksums,
    )


def notes(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    weights_only: bool = False,
) -> tuple[str, ...]:
    """What a user must be told about the directory that `lay_out` makes: derived and dropped.

    Raises:
        ReshardError: as `lay_out`.
    """
    choice = choose(
        state,
        world_size=world_size,
        stage=stage,
        precision=precision,
        weights_only=weights_only,
    )
    return tuple(report.notes(choice))


def lay_out_universal(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    tag: str | None = None,
) -> Skeleton:
    """A universal checkpoint: ``latest_universal``, and a file a tensor in the tag's directory.

    Args:
        world_size, stage: of the run to come, as the ``ds_config`` in it says; its layout does not
            depend on them. There is no universal checkpoint of stage 0: 1 is said instead.
        precision: as in `lay_out`.
        tag: the directory's name; None: ``global_step``, the step and ``_universal``.

    Raises:
        ReshardError: as `lay_out`; and UnsafeError for a parameter that cannot name a directory.
    """
    return universal.files(_universal(state, world_size, stage, precision, tag))


def notes_universal(
    state: Training, *, world_size: int, stage: int, precision: DType | None = None
) -> tuple[str, ...]:
    """As `notes`, of what `lay_out_universal` makes."""
    return tuple(report.notes_universal(_universal(state, world_size, stage, precision)))


def _universal(
    state: Training, world_size: int, stage: int, precision: DType | None, tag: str | None = None
) -> Choice:
    return choose(
        state,
        world_size=world_size,
        stage=max(stage, 1),
        precision=precision,
        tag=tag or f"global_step{state.step()}_universal",
        universal=True,
    )


def _models(choice: Choice) -> Iterator[Skeleton]:
    if choice.stage < 3:
        yield torch_writer.lay_out_object(f"{choice.tag}/{_MODEL}", model_states.whole_file(choice))
        return
    for rank in range(choice.world_size):
        name = f"{choice.tag}/zero_pp_rank_{rank}_{_MODEL}"
        yield torch_writer.lay_out_object(name, model_states.file_of(choice, rank))


def _optimizers(choice: Choice) -> Iterator[Skeleton]:
    """DeepSpeed asks for ``bf16_`` by the precision of the run, at every stage."""
    if choice.stage == 0:
        return
    prefix = "bf16_" if choice.precision == BFLOAT16 else ""
    states = flat.Flat(choice) if choice.stage < 3 else partitioned.Partitioned(choice)
    for rank in range(choice.world_size):
        root = {
            "optimizer_state_dict": states.of_rank(rank),
            "ds_config": choice.config,
            "ds_version": WRITTEN_AS,
        }
        name = f"{choice.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        yield torch_writer.lay_out_object(name, root)
