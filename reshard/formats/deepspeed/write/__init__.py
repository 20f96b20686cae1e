"""Lay out a DeepSpeed run directory: for a number of ranks at ZeRO stages 0 to 3, or universal.

    grid          the model-parallel ranks, each with a state of its own
    experts       a mixture of experts: what each rank holds of it
    expert_groups its param groups, for other expert-parallel ranks
    pipeline      the layers of a pipeline, and their stages
    choice        what is to be written, decided once: groups in the user's order, dtypes, config
    files         those of one rank, by name
    expert_files  those of a run with experts
    model_states  ``*_model_states.pt``
    flat          stages 1 and 2: one flat tensor a group, in equal pieces
    partitioned   stage 3: every parameter in equal pieces
    whole         stage 0: whole tensors under an index
    universal     a file a tensor, for any number of ranks
    marks         how it says that ranks share each parameter
    pieces        runs of parameters in a flat tensor
    slots         the optimizer state of one flat tensor's members
    scaling       the loss scaler
    carried       plain values beside DeepSpeed's own
    gpt_neox      the settings and sizes that GPT-NeoX wants of them
    objects       what is pickled by the name of its class
    report        what a user must be told

The layout is that of DeepSpeed 0.19.8. It loads the native one at exactly the world size and the
stage that it was made for, under the options of the ``ds_config`` that the source kept; the
universal one at any, with ``"checkpoint": {"load_universal": true}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.dtypes import BFLOAT16, DType
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.layers import TIED
from reshard.formats.deepspeed.write import (
    expert_files,
    experts,
    files,
    gpt_neox,
    report,
    universal,
)
from reshard.formats.deepspeed.write import grid as grids
from reshard.formats.deepspeed.write.choice import Choice, choose, precision_of
from reshard.formats.deepspeed.write.grid import Grid, ModelRank, Wanted
from reshard.formats.deepspeed.write.marks import Marks
from reshard.manifest import Skeleton
from reshard.training.state import Training


def lay_out(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    tag: str | None = None,
    weights_only: bool = False,
    wanted: Wanted | None = None,
) -> LaidOut:
    """The run directory: ``latest``, and the files of every rank in the tag's directory.

    An entry stands twice in the skeleton where both the module's copy and the fp32 master come from
    one source tensor: each of the two covers it exactly.

    Args:
        world_size: the data-parallel ranks.
        precision: of the module's parameters; None: each as it was trained.
        tag: the directory's name; None: ``global_step`` and the step.
        wanted: the model-parallel grid; None: a single rank.
        weights_only: what ``load_checkpoint(..., load_module_only=True)`` reads; stages 0 to 2 have
            one file for any number of ranks. Stage 3 needs ``load_optimizer_states=False`` with it
            (``engine.py``, ``_load_checkpoint``): DeepSpeed reads nothing but placeholders without.

    Raises:
        IncompleteError: the source lacks what DeepSpeed needs to go on training.
        UnsupportedError: an optimizer state that this stage has no place for.
        UsageError: no such stage, number of ranks, precision or tag.
    """
    wanted = wanted or Wanted()
    asked: dict[str, Any] = {
        "world_size": world_size,
        "stage": stage,
        "precision": precision,
        "tag": tag,
        "weights_only": weights_only,
    }
    of_settings = tuple(gpt_neox.notes(state, wanted.sizes))
    state = gpt_neox.of_ranks(state, wanted.sizes)
    mixed = experts.mixture(state, wanted, world_size, weights_only=weights_only)
    if mixed is not None:
        choice, models, optimizers = expert_files.laid(mixed, **asked)
        parts, said = [(models, optimizers)], mixed.notes
    elif grids.is_whole(state, wanted):
        choice = choose(state, **asked)
        parts, said = [_laid(choice)], of_settings
    else:
        grid = grids.grid(state, wanted)
        parts = [_laid(own, rank) for own, rank in _of_ranks(state, grid, wanted, **asked)]
        choice, said = choose(state, **asked), (*grid.notes, *of_settings)
    latest = skeletons.lay_out_bytes("latest", choice.tag.encode())
    first = skeletons.join(models for models, _ in parts)
    second = skeletons.join(optimizers for _, optimizers in parts)
    made = Skeleton(
        latest.files + first.files + second.files,
        first.entries + second.entries,
        first.checksums + second.checksums,
    )
    return LaidOut(_with_settings(made, state, choice.tag), (*report.notes(choice), *said))


def _laid(choice: Choice, rank: ModelRank | None = None) -> tuple[Skeleton, Skeleton]:
    """The model states and the optimizer states of a model-parallel rank; None: of the only one."""
    module = skeletons.join([*files.model_states(choice), *files.layers(choice, rank)])
    optimizer = skeletons.join(files.optimizer_states(choice))
    return (rank.lifted(module), rank.lifted(optimizer)) if rank else (module, optimizer)


def _of_ranks(
    state: Training,
    grid: Grid,
    wanted: Wanted,
    *,
    stage: int,
    weights_only: bool,
    **asked: Any,
) -> Iterator[tuple[Choice, ModelRank]]:
    """What is to be written of each model-parallel rank."""
    trained = precision_of(state)
    _refuse_stage(grid, stage, asked["precision"] or trained, weights_only=weights_only)
    for rank in grid.ranks:
        choice = choose(
            rank.state, stage=stage, weights_only=weights_only, trained=trained, **asked
        )
        own = replace(choice, sizes=wanted.sizes, mp_rank=rank.number, layered=grid.layered)
        yield own, rank


def _refuse_stage(grid: Grid, stage: int, precision: DType, *, weights_only: bool) -> None:
    """What DeepSpeed has not of a pipeline (0.19.8 ``runtime/pipe/engine.py``)."""
    if not grid.layered or weights_only:
        return
    if stage > 1:
        raise UsageError(
            f"--zero-stage {stage}",
            "DeepSpeed's pipelines have ZeRO stages 0 and 1",
            "give --zero-stage 1",
        )
    if stage == 0 and precision == BFLOAT16:
        raise UnsupportedError(
            "--zero-stage 0",
            "a pipeline in bf16 keeps its optimizer as at stage 1 there, which is not written",
            "give --zero-stage 1",
        )
    shared = [w.fqn for rank in grid.ranks for w in rank.state.weights if w.fqn.startswith(TIED)]
    if stage == 0 and shared:
        raise UnsupportedError(
            "--zero-stage 0",
            f"names no parameter of layers that share a module ({shared[0]!r}): its files could not"
            " be read again",
            "give --zero-stage 1",
        )


def lay_out_universal(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    tag: str | None = None,
    wanted: Wanted | None = None,
) -> LaidOut:
    """A universal checkpoint: ``latest_universal``, and a file a tensor in the tag's directory.

    Args:
        wanted: the model-parallel grid whose ranks' model states are written; None: a single one.
        world_size, stage: of the run to come, as the ``ds_config`` in it says; its layout does not
            depend on them. There is no universal checkpoint of stage 0: 1 is said instead.
        precision: as in `lay_out`.
        tag: the directory's name; None: ``global_step``, the step and ``_universal``.

    Raises:
        ReshardError: as `lay_out`; and UnsafeError for a parameter that cannot name a directory.
    """
    wanted = wanted or Wanted()
    of_settings = tuple(gpt_neox.notes(state, wanted.sizes))
    state = gpt_neox.of_ranks(state, wanted.sizes)
    if grids.is_whole(state, wanted):
        choice = _universal(state, world_size, stage, precision, tag)
        made = _with_settings(universal.files(choice), state, choice.tag)
        return LaidOut(made, (*report.notes_universal(choice), *of_settings))
    marks = Marks(state, wanted)
    whole = _universal(marks.without_padding(state), world_size, stage, precision, tag)
    whole = replace(whole, sizes=wanted.sizes)  # the stamps of all its files say one world size
    ranks = _of_ranks(
        state,
        grids.grid(state, wanted),
        wanted,
        world_size=world_size,
        stage=whole.stage,
        precision=precision,
        tag=whole.tag,
        weights_only=False,
        universal=True,
    )
    models = [rank.lifted(universal.model_file(choice)) for choice, rank in ranks]
    made = universal.files(whole, marks, skeletons.join(models))
    shapes = {key: entry.shape for key, entry in state.manifest.entries.items()}
    entries = tuple(replace(e, shape=shapes.get(e.key, e.shape)) for e in made.entries)
    made = replace(made, entries=entries)  # the words are rows of what the source has
    notes = (*report.notes_universal(whole, marked=True), *marks.notes(), *of_settings)
    return LaidOut(_with_settings(made, state, whole.tag), notes)


def _with_settings(made: Skeleton, state: Training, tag: str) -> Skeleton:
    return replace(made, files=made.files + gpt_neox.settings(state, tag).files)


def _universal(
    state: Training, world_size: int, stage: int, precision: DType | None, tag: str | None
) -> Choice:
    experts.refuse_universal(state)
    return choose(
        state,
        world_size=world_size,
        stage=max(stage, 1),
        precision=precision,
        tag=tag or f"global_step{state.step()}_universal",
        universal=True,
    )
