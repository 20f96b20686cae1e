"""Lay out a DeepSpeed run directory for any number of ranks, ZeRO stages 0 to 3.

    choice        what is to be written, decided once: groups in the user's order, dtypes, config
    model_states  ``*_model_states.pt``
    flat          stages 1 and 2: one flat tensor a group, in equal pieces
    partitioned   stage 3: every parameter in equal pieces
    whole         stage 0: whole tensors under an index
    pieces        runs of parameters in a flat tensor
    slots         the optimizer state of one flat tensor's members
    order         flat orders and sub-groups
    scaling       the loss scaler
    carried       plain values beside DeepSpeed's own
    objects       what is pickled by the name of its class
    report        what a user must be told

The layout is that of DeepSpeed 0.19.8, which loads it at exactly the world size and the stage that
it was made for, under the options of the ``ds_config`` that the source kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.dtypes import BFLOAT16, DType
from reshard.formats import skeletons, torch_writer
from reshard.formats.deepspeed.target import flat, model_states, partitioned, report
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
