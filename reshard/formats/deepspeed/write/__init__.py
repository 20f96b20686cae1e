"""Lay out a DeepSpeed run directory: for a number of ranks at ZeRO stages 0 to 3, or universal.

    grid             cut the state into what each model-parallel rank holds
    autotp           how AutoTP cuts a model of transformers
    pipeline         the layers of a pipeline, and their stages
    experts          cut a mixture of experts into what each rank holds
    expert_groups    its param groups, for other expert-parallel ranks
    spec             decide once what is written: groups in the user's order, dtypes, config
    files            the files of a rank and of experts, by name
    model_states     ``*_model_states.pt``
    stage0           whole tensors under an index
    stage12          stages 1 and 2: one flat tensor for each group, in equal pieces
    stage3           every parameter in equal pieces
    flat_tensors     runs of parameters in a flat tensor, and its optimizer state
    pickled_objects  what is pickled by the name of its class; the loss scaler
    universal        one file for each tensor, for any number of ranks
    split_metadata   how it describes the cut of each parameter
    gpt_neox         the settings and sizes that GPT-NeoX needs beside them
    report           notes for the user

The layout is that of DeepSpeed 0.19.8, which loads a native directory only at the world size and
the stage for which it was written, under the options of the ``ds_config`` that the source kept. It
loads a universal directory at any, with ``"checkpoint": {"load_universal": true}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.core.dtypes import BFLOAT16, DType
from reshard.core.manifest import Skeleton
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.layers import TIED
from reshard.formats.deepspeed.write import experts, files, gpt_neox, grid, report, universal
from reshard.formats.deepspeed.write.grid import DeepSpeedTarget, ModelGrid, ModelRank
from reshard.formats.deepspeed.write.pipeline import refuse_unknown_uses
from reshard.formats.deepspeed.write.spec import OutputSpec, find_precision, resolve_spec
from reshard.formats.deepspeed.write.split_metadata import SplitMetadata
from reshard.formats.request import NO_PROGRAM, Request
from reshard.training.state import WritableState, drop_recomputed_slots


def lay_out(state: WritableState, request: Request) -> LaidOut:
    """Lay out the run directory: ``latest``, and the files of every rank in the tag's directory.

    An entry is in the skeleton twice if both the module's copy and the fp32 master come from one
    source tensor: each of the two covers it exactly.

    Weights alone are only what ``load_checkpoint(..., load_module_only=True)`` reads. Stages 0 to 2
    have one file for any number of ranks. At stage 3 the user must also pass
    ``load_optimizer_states=False`` (``engine.py``, ``_load_checkpoint``): without it DeepSpeed
    reads only placeholders.
    """
    target = DeepSpeedTarget.of(request)
    notes = tuple(gpt_neox.describe_settings(state, target.parallel))
    state = gpt_neox.adapt_settings(state, target.parallel)
    if grid.has_experts(state):
        parts, spec, notes = _lay_out_mixture(state, target)
    elif grid.is_whole(state, target):
        spec = resolve_spec(state, target)
        parts = [files.lay_out_rank(spec)]
    else:
        if target.parallel.pipeline > 1 and not target.weights_only:
            refuse_unknown_uses(state.manifest)
        cut = grid.cut_state(state, target)
        parts = [files.lay_out_rank(own, rank) for own, rank in _resolve_ranks(state, cut, target)]
        # The notes and the tag are about the whole run, not about one rank of it.
        spec, notes = resolve_spec(state, target), (*cut.notes, *notes)
    models = skeletons.join(models for models, _ in parts)
    optimizers = skeletons.join(optimizers for _, optimizers in parts)
    latest = skeletons.lay_out_bytes("latest", spec.tag.encode())
    settings = gpt_neox.copy_settings(state, spec.tag).files
    skeleton = Skeleton(
        latest.files + models.files + optimizers.files + settings,
        models.entries + optimizers.entries,
    )
    return LaidOut(skeleton, (*report.describe_output(spec), *notes))


def _lay_out_mixture(
    state: WritableState, target: DeepSpeedTarget
) -> tuple[list[tuple[Skeleton, Skeleton]], OutputSpec, tuple[str, ...]]:
    trained = find_precision(state)
    cut = ModelGrid((ModelRank(0, state),), layered=False, notes=())
    if target.parallel.model > 1:
        cut = grid.cut_state(state, target)
    mixtures = [experts.make_mixture(rank.state, target, rank.number) for rank in cut.ranks]
    laid_out = [files.lay_out_experts(mixture, target, trained) for mixture in mixtures]
    parts = [
        (rank.lift(models), rank.lift(optimizers))
        for rank, (_, models, optimizers) in zip(cut.ranks, laid_out, strict=True)
    ]
    return parts, laid_out[0][0], (*cut.notes, *mixtures[0].notes)


def _resolve_ranks(
    state: WritableState, cut: ModelGrid, target: DeepSpeedTarget, *, universal: bool = False
) -> Iterator[tuple[OutputSpec, ModelRank]]:
    trained = find_precision(state)  # a single rank's parameters may have another dtype than most
    if cut.layered and not target.weights_only:
        _refuse_stage(cut, target.zero_stage, target.dtype or trained)
    for rank in cut.ranks:
        spec = resolve_spec(rank.state, target, universal=universal, trained=trained)
        yield replace(spec, mp_rank=rank.number, layered=cut.layered), rank


def _refuse_stage(cut: ModelGrid, stage: int, precision: DType) -> None:
    # Source: DeepSpeed 0.19.8 ``runtime/pipe/engine.py``.
    if stage > 1:
        raise UsageError(
            f"--zero-stage {stage}",
            "DeepSpeed supports ZeRO stages 0 and 1 in pipelines",
            "give --zero-stage 1",
        )
    if stage == 0 and precision == BFLOAT16:
        raise UnsupportedError(
            "--zero-stage 0",
            "DeepSpeed then stores the optimizer of a bf16 pipeline as at stage 1, which reshard"
            " does not write",
            "give --zero-stage 1",
        )
    shared = [w.fqn for rank in cut.ranks for w in rank.state.weights if w.fqn.startswith(TIED)]
    if stage == 0 and shared:
        raise UnsupportedError(
            "--zero-stage 0",
            "the files would not name the parameters of layers that share a module"
            f" ({shared[0]!r}), so they could not be read again",
            "give --zero-stage 1",
        )


def lay_out_universal(state: WritableState, request: Request) -> LaidOut:
    """Lay out a universal checkpoint: ``latest_universal``, and one file for each tensor.

    The number of data-parallel ranks and the stage are values for the ``ds_config`` of the new run;
    the layout does not depend on them. There is no universal checkpoint of stage 0: it becomes 1.
    """
    target = replace(
        DeepSpeedTarget.of(request),
        zero_stage=max(request.zero_stage, 1),
        tag=None,
        live=NO_PROGRAM,
    )
    neox_notes = tuple(gpt_neox.describe_settings(state, target.parallel))
    state = gpt_neox.adapt_settings(state, target.parallel)
    experts.refuse_universal(state)
    recomputed_notes = tuple(report.note_recomputed(state, "not copied"))
    state = drop_recomputed_slots(state)
    if grid.is_whole(state, target):
        spec = resolve_spec(state, target, universal=True)
        skeleton, notes = universal.lay_out_files(spec), tuple(report.describe_universal(spec))
    else:
        metadata = SplitMetadata(state, target)
        spec = resolve_spec(metadata.strip_padding(state), target, universal=True)
        ranks = _resolve_ranks(state, grid.cut_state(state, target), target, universal=True)
        models = [rank.lift(universal.lay_out_model(own)) for own, rank in ranks]
        skeleton = universal.lay_out_files(spec, metadata, skeletons.join(models))
        # Vocabularies without padding are the first rows of what the source has.
        shapes = {key: entry.shape for key, entry in state.manifest.entries.items()}
        entries = (replace(e, shape=shapes.get(e.key, e.shape)) for e in skeleton.entries)
        skeleton = replace(skeleton, entries=tuple(entries))
        notes = (*report.describe_universal(spec, described=True), *metadata.list_notes())
    settings = gpt_neox.copy_settings(state, spec.tag)
    skeleton = replace(skeleton, files=skeleton.files + settings.files)
    return LaidOut(skeleton, (*notes, *recomputed_notes, *neox_notes))
