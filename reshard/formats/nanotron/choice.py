"""What a nanotron run is to become, once it is known that the source's files tell all of it."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.nanotron import layout, stages
from reshard.formats.nanotron.directory import MODEL_CONFIG
from reshard.formats.nanotron.layout import Layout
from reshard.formats.state_dict import written
from reshard.formats.training import Training
from reshard.manifest import PARAM
from reshard.model_parallel.sizes import Sizes, of_mesh

_TO = "--to nanotron"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Args:
        data: ranks that see different data.
        zero: whether they share the optimizer (ZeRO-1).
        dtype: of the weights; None: as trained.
    """

    sizes: Sizes
    data: int
    zero: bool
    dtype: DType | None
    weights_only: bool


def layout_of(state: Training) -> Layout:
    """What the source says of its own grid.

    Raises:
        UsageError: it is of another kind.
    """
    found = state.manifest.train.opaque.get(layout.KEY)
    if not isinstance(found, Layout):
        raise UsageError(
            _TO,
            "is written from nanotron's own checkpoints: how a parameter is cut, and on which"
            f" stage it is, is not in a {state.manifest.origin.format} checkpoint",
        )
    return found


def known(state: Training, wanted: Wanted) -> Layout:
    """The same, once it is known that it tells all that is asked for.

    Raises:
        UsageError: it does not.
        IncompleteError: a moment of a parameter, or a step, is missing.
        UnsupportedError: a parameter cut in a way that is not known here.
    """
    found, mesh = layout_of(state), state.manifest.origin.mesh
    before = of_mesh(mesh)
    if max(wanted.sizes.expert, before.expert, mesh.get("cp", 1)) > 1:
        raise UsageError(
            _TO,
            "does not write expert or context parallel ranks: nobody has seen such a checkpoint",
            "write the weights with reshard merge",
        )
    for fqn, cut in found.cuts.items():
        if cut is None:
            raise UnsupportedError(
                state.manifest.origin.path,
                f"the headers of {fqn!r} do not say how tensor-parallel ranks share it, or cut it"
                " in another way than nanotron's layers do",
                "write the weights with reshard merge",
            )
    if wanted.sizes.tensor > 1 and not found.cuts:
        raise UsageError(
            f"--tp {wanted.sizes.tensor}",
            "no parameter of the source says how ranks share it",
            "save it with nanotron's own layers, whose headers do at --tp 1 too",
        )
    if not wanted.weights_only:
        _check_optimizer(state, found)
    if wanted.sizes.pipeline == before.pipeline:
        return found
    return _restaged(state, found, before.pipeline, wanted.sizes.pipeline)


def _restaged(state: Training, found: Layout, before: int, after: int) -> Layout:
    """The run on another number of pipeline stages.

    Raises:
        UsageError: the model's configuration is not beside it, or a stage would be empty.
        UnsupportedError: the source's own stages are not those of nanotron's models.
    """
    path, entries = state.manifest.origin.path, state.manifest.entries
    fqns = [fqn for kind, fqn in entries if kind == PARAM]
    blocks = stages.blocks(path, found.config, fqns)
    own, others = blocks.stages(before), blocks.stages(after)
    for stage, (here, held) in enumerate(zip(own, found.stages, strict=False)):
        there = {fqn for group in held.groups for fqn in group.fqns}
        if there and there != set(here):
            odd = ", ".join(sorted(there.symmetric_difference(here))[:_SHOWN])
            raise UnsupportedError(
                path,
                f"stage {stage} of {before} is not the one that nanotron makes of the model in its"
                f" {MODEL_CONFIG}, by {odd}",
                f"write it at its own --pp {before}",
            )
    saved = {fqn: cut.stage for fqn, cut in found.cuts.items() if cut}
    made = found.on(own, found.stages)
    if any(cut and cut.stage != saved[fqn] for fqn, cut in made.cuts.items()):
        raise UnsupportedError(
            path,
            f"weights lie on other stages than those that nanotron makes of its {MODEL_CONFIG}",
            f"write it at its own --pp {before}",
        )
    empty = next((stage for stage, held in enumerate(others) if not held), None)
    if empty is not None:
        raise UsageError(
            f"--pp {after}",
            f"leaves stage {empty} without a parameter, by what blocks cost: nanotron does not"
            " train that",
            "give fewer stages",
        )
    return found.on(others, stages.dealt(path, found.stages, others) if found.stages else ())


def _check_optimizer(state: Training, found: Layout) -> None:
    """Refuse an optimizer that would not be the source's.

    Raises:
        UsageError: it is made anew, or in other groups.
        IncompleteError: it lacks a moment of a parameter, or a step.
        UnsupportedError: it lacks parameters, or has some on the first rank alone.
    """
    path, alone = state.manifest.origin.path, "write the weights alone: --weights-only"
    if state.made or state.regrouped:
        raise UsageError(
            "--init-optimizer zeros, --param-groups", f"are nothing that {_TO} writes", alone
        )
    if found.unnamed:
        raise UnsupportedError(
            path,
            f"{found.unnamed} parameters were never stepped, and have no name in the optimizer:"
            " nanotron loads none that lacks one",
            alone,
        )
    for trained in state.groups:
        for member in trained.members:
            written.check_slots(state, trained, member)
    for group in (group for stage in found.stages for group in stage.groups):
        if not written.is_faithful(group.hyper):
            raise UnsupportedError(path, "a param group has settings that are no values", alone)
        for fqn in group.fqns:
            above = found.cuts.get(f"{fqn.removesuffix('.bias')}.weight")
            if fqn.endswith(".bias") and fqn not in found.cuts and above and above.dim == 1:
                raise UnsupportedError(
                    path,
                    f"{fqn!r} is of the first tensor-parallel rank alone, as the bias of a layer"
                    " that is cut along its input: such an optimizer is not written",
                    alone,
                )
