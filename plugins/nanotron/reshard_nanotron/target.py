"""Check that the files of the source determine the nanotron run that is to be written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reshard.core.dtypes import DType
from reshard.core.manifest import PARAM
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel.sizes import Sizes, parse_mesh
from reshard.state_dict import torch_state_dict
from reshard.training.state import WritableState
from reshard_nanotron import layout, stages
from reshard_nanotron.directory import MODEL_CONFIG, NAME
from reshard_nanotron.layout import RunFacts

_TO = "--to nanotron"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TargetRun:
    """The requested run.

    Args:
        zero: whether they share the optimizer (ZeRO-1).
        dtype: dtype of the weights; None: as trained.
    """

    sizes: Sizes
    data: int
    zero: bool
    dtype: DType | None
    weights_only: bool


def get_layout(state: WritableState) -> RunFacts:
    """Return the layout that the source states, or that was made for it."""
    stated = state.manifest.train.opaque.get(layout.KEY)
    if not isinstance(stated, RunFacts):
        raise TypeError("`new_run.add_layout` makes it for other sources")
    return stated


def resolve_layout(state: WritableState, wanted: TargetRun) -> RunFacts:
    """Return the layout of the requested run, if the source determines all of it.

    Raises:
        UsageError: the source does not determine it.
        IncompleteError: a moment of a parameter, or a step, is missing.
        UnsupportedError: a parameter is cut in an unknown way.
    """
    stated, mesh = get_layout(state), state.manifest.origin.mesh
    before = parse_mesh(mesh)
    if state.manifest.origin.format != NAME:  # the layout was made for the requested run
        before, mesh = replace(wanted.sizes, expert=1), {}
    if max(wanted.sizes.expert, before.expert, mesh.get("cp", 1)) > 1:
        raise UsageError(
            _TO,
            "does not support expert-parallel or context-parallel ranks",
            "write the weights with reshard merge",
        )
    for fqn, cut in stated.cuts.items():
        if cut is None:
            raise UnsupportedError(
                state.manifest.origin.path,
                f"the headers of {fqn!r} do not state how tensor-parallel ranks share it, or do"
                " not match nanotron's layers",
                "write the weights with reshard merge",
            )
    if wanted.sizes.tensor > 1 and not stated.cuts:
        raise UsageError(
            f"--tp {wanted.sizes.tensor}",
            "no parameter of the source states how ranks share it",
            "save it with nanotron's own layers, whose headers state it also at --tp 1",
        )
    if not wanted.weights_only:
        _check_optimizer(state, stated)
    if wanted.sizes.pipeline == before.pipeline:
        return stated
    return _change_stages(state, stated, before.pipeline, wanted.sizes.pipeline)


def _change_stages(state: WritableState, stated: RunFacts, before: int, after: int) -> RunFacts:
    path, entries = state.manifest.origin.path, state.manifest.entries
    fqns = [fqn for kind, fqn in entries if kind == PARAM]
    blocks = stages.list_blocks(path, stated.config, fqns)
    # The rule is trusted for the new stages only if it gives the stages of the source.
    own, others = blocks.assign_stages(before), blocks.assign_stages(after)
    for stage, (here, stored) in enumerate(zip(own, stated.stages, strict=False)):
        there = {fqn for group in stored.groups for fqn in group.fqns}
        if there and there != set(here):
            differing = ", ".join(sorted(there.symmetric_difference(here))[:_SHOWN])
            raise UnsupportedError(
                path,
                f"stage {stage} of {before} differs from the stage that nanotron derives from"
                f" {MODEL_CONFIG}: {differing}",
                f"keep the source's number of stages: --pp {before}",
            )
    # The weights' file names state their stages as well: both have to agree with the derived ones.
    saved = {fqn: cut.stage for fqn, cut in stated.cuts.items() if cut}
    derived = stated.move_to_stages(own, stated.stages)
    if any(cut and cut.stage != saved[fqn] for fqn, cut in derived.cuts.items()):
        raise UnsupportedError(
            path,
            f"weights are on other stages than nanotron derives from {MODEL_CONFIG}",
            f"keep the source's number of stages: --pp {before}",
        )
    stages.refuse_empty(others)
    # A source without an optimizer has stages without param groups; only weights are written then.
    has_groups = any(stage.groups for stage in stated.stages)
    optimizers = stages.redistribute(path, stated.stages, others) if has_groups else ()
    return stated.move_to_stages(others, optimizers)


def _check_optimizer(state: WritableState, stated: RunFacts) -> None:
    path, alone = state.manifest.origin.path, "write only the weights: --weights-only"
    if state.zero_slots or state.regrouped:
        raise UsageError(
            "--init-optimizer zeros, --param-groups", f"are not supported by {_TO}", alone
        )
    if stated.unnamed:
        raise UnsupportedError(
            path,
            f"{stated.unnamed} parameters were never stepped and have no name in the optimizer:"
            " nanotron cannot load such an optimizer",
            alone,
        )
    for trained in state.groups:
        for member in trained.members:
            torch_state_dict.check_adam_slots(state, trained, member)
    for group in (group for stage in stated.stages for group in stage.groups):
        if not torch_state_dict.is_restorable(group.hyper):
            raise UnsupportedError(
                path, "a param group has settings that are not plain values", alone
            )
        for fqn in group.fqns:
            above = stated.cuts.get(f"{fqn.removesuffix('.bias')}.weight")
            if fqn.endswith(".bias") and fqn not in stated.cuts and above and above.dim == 1:
                raise UnsupportedError(
                    path,
                    f"only the first tensor-parallel rank has {fqn!r}, the bias of a layer that is"
                    " cut along its input: reshard does not support such an optimizer",
                    alone,
                )
