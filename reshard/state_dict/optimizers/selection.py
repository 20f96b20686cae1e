"""Select the optimizers of the model, where a checkpoint has several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from reshard.core.box import Index
from reshard.core.chunks import find_boxes
from reshard.core.manifest import PARAM, Entry, UnnamedOptimizer
from reshard.model import ModelShapes
from reshard.model.weight_decay import divide_parameters
from reshard.state_dict import sections
from reshard.state_dict.optimizers import states
from reshard.state_dict.optimizers.layouts import KnownParameters
from reshard.state_dict.optimizers.states import ParsedOptimizer
from reshard.state_dict.tree import ParsedTree, format_path
from reshard.system.files import SourceFiles
from reshard.units import abridge

_MERGED = "{} optimizers are merged into one with all param groups: {}"


def select_optimizers(
    parts: sections.Sections,
    weights: dict[str, Entry],
    known: KnownParameters,
    model: ModelShapes | None,
    parsed: ParsedTree,
    pool: SourceFiles,
    *,
    by_trainer: bool,
) -> tuple[list[ParsedOptimizer], dict[str, Entry]]:
    """Return the model's optimizers, and the weights with trained ones marked as parameters.

    Args:
        weights: entries by fqn, with their kinds as known so far.
        known: with the model's flat parameters, including those that were already resolved.
        by_trainer: whether HF Trainer saved the checkpoint.
    """
    read: dict[sections.Path, ParsedOptimizer] = {}
    known = replace(known, world=parsed.world, ordered=parsed.ordered)
    tops = {fqn.partition(".")[0] for fqn in weights}
    known = replace(known, others=[file for file, top in parsed.modules.items() if top not in tops])
    if model is not None:
        divisions = divide_parameters(model) if by_trainer else ()
        known = replace(known, ordered=True, model=model.source)
        known = replace(known, divisions=divisions, live=model.groups)
    joined, whole = _read_jointly(parts, known, weights, model, pool)
    read |= dict.fromkeys(joined[:1], whole)
    for path, value in parts.optimizers.items():
        if path in joined:
            continue
        count = states.count_parameters(value)
        owner = weights.get(str(path[-1])) if path and count == 1 else None
        assumptions = _list_assumptions(known, count, weights, model)
        if owner is not None:
            # Where updates are made during the backward pass, each parameter has an optimizer,
            # which is saved under its name (torchtune 0.6 ``training/memory.py``).
            alone = replace(known, shapes={owner.fqn: owner.shape}, ordered=True)
            assumptions = chain([alone], assumptions)
        read[path] = _read_as_assumed(value, assumptions, pool)
    kept = _select_own(parts, read, set(weights))
    trained = {entry.fqn for optimizer in kept for entry in optimizer.entries}
    return kept, {
        fqn: replace(entry, kind=PARAM) if fqn in trained else entry
        for fqn, entry in weights.items()
    }


def _read_as_assumed(
    value: Mapping[str, Any], assumptions: Iterable[KnownParameters], pool: SourceFiles
) -> ParsedOptimizer:
    optimizer = ParsedOptimizer()
    for assumed in assumptions:
        optimizer = states.read(value, assumed, pool)
        if optimizer.entries or any(group.fqns for group in optimizer.groups):
            break
    return optimizer


def _read_jointly(
    parts: sections.Sections,
    known: KnownParameters,
    weights: Mapping[str, Entry],
    model: ModelShapes | None,
    pool: SourceFiles,
) -> tuple[list[sections.Path], ParsedOptimizer]:
    # There are none if fewer than two number their parameters, if not all of these can be named, or
    # if one may be that of another model.
    none: tuple[list[sections.Path], ParsedOptimizer] = ([], ParsedOptimizer())
    numbered = {
        path: value
        for path, value in parts.optimizers.items()
        if not (path and str(path[-1]) in weights) and states.can_be_joined(value)
    }
    if len(numbered) < 2 or sections.find_trained(parts):
        return none
    count = sum(map(states.count_parameters, numbered.values()))
    if parts.other_models and count not in map(len, _list_candidates(count, weights, model)):
        return none
    assumptions = (
        replace(assumed, are_joined=True)
        for assumed in _list_assumptions(known, count, weights, model)
    )
    whole = _read_as_assumed(states.join(numbered.values(), pool), assumptions, pool)
    if whole.why_unnamed or not whole.entries:
        return none
    shown = abridge(list(map(format_path, numbered)))
    whole.notes.append(_MERGED.format(len(numbered), shown))
    return list(numbered), whole


def _list_assumptions(
    known: KnownParameters, count: int, weights: Mapping[str, Entry], model: ModelShapes | None
) -> Iterator[KnownParameters]:
    # Shapes usually suffice. The last ones require that a state is stored in the same blocks as its
    # weight, which tells buffers and parameters that FSDP ignored from sharded ones.
    frozen = [model.frozen, frozenset[str]()] if model and model.frozen else [frozenset[str]()]
    for without_state in frozen:
        for shapes in _list_candidates(count, weights, model):
            yield replace(known, shapes=shapes, frozen=without_state)
    blocks = {fqn: find_boxes(entry.chunks) for fqn, entry in weights.items()}
    if any(len(boxes) > 1 for boxes in blocks.values()):
        for shapes in _list_candidates(count, weights, model):
            yield replace(known, shapes=shapes, blocks=blocks)


def _list_candidates(
    count: int, weights: Mapping[str, Entry], model: ModelShapes | None
) -> Iterator[dict[str, Index]]:
    # The most likely ones first. ``count``: parameters that the optimizer lists. Programs may give
    # it frozen ones too.
    if model is not None:
        trained = {f: shape for f, shape in model.parameters.items() if f not in model.frozen}
        if count == len(trained) < len(model.parameters):
            yield trained
        yield dict(model.parameters)
        return
    own = {fqn: entry for fqn, entry in weights.items() if entry.kind == PARAM}
    parameters = {fqn: entry.shape for fqn, entry in own.items()}
    trainable = {fqn: shape for fqn, shape in parameters.items() if own[fqn].dtype.can_train}
    if count == len(trainable) < len(parameters):
        yield trainable
    yield parameters
    if len(parameters) < len(weights):
        # Plain tensors beside sharded ones were taken for buffers. Where only some modules are
        # sharded, they are parameters, and the optimizer has a state for each of them.
        yield {fqn: entry.shape for fqn, entry in weights.items()}


def _select_own(
    parts: sections.Sections, read: Mapping[sections.Path, ParsedOptimizer], weights: set[str]
) -> list[ParsedOptimizer]:
    if trained := sections.find_trained(parts):
        reason = (
            f"{format_path(parts.model_path)} holds the averaged weights, and the optimizer trains"
            f" those of {trained}"
        )
        return [_leave_out(read, reason, f"choose the trained weights: --key {trained}")]
    if len(read) == 1:
        return list(read.values())
    number = sections.parse_number(parts.model_path)
    fitting = {
        p: optimizer
        for p, optimizer in read.items()
        if weights & {e.fqn for e in optimizer.entries}
    }
    numbered = len({sections.parse_number(path) for path in read}) == len(read)
    # Several models can share parameter names (a GAN, an EMA copy). Then the number in a section's
    # name decides: optimizer_1 belongs to model_1.
    if _share_states(fitting.values()) or (numbered and parts.other_models):
        fitting = {
            p: optimizer for p, optimizer in read.items() if sections.parse_number(p) == number
        }
        fitting = _select_nearest(parts.model_path, fitting)
    if _share_states(fitting.values()):
        names = " and ".join(map(format_path, fitting))
        reason = (
            f"{names} have states of the same parameters, and nothing shows which of them is the"
            f" optimizer of {format_path(parts.model_path) or 'the top level'}"
        )
        return [_leave_out(fitting, reason, "choose another model with --key NAME")]
    lost = [path for path in read if path not in fitting and not parts.other_models]
    if len(fitting) > 1:
        shown = abridge(list(map(format_path, fitting)))
        next(iter(fitting.values())).notes.append(_MERGED.format(len(fitting), shown))
    if not lost:
        return list(fitting.values())
    notes = list(dict.fromkeys(note for path in lost for note in read[path].notes))
    shown = abridge(list(map(format_path, lost)))
    notes.append(f"optimizers that match no parameter are left out: {shown}")
    stated = tuple(format_path(path) for path in lost if states.has_state(parts.optimizers[path]))
    why = next((read[path].why_unnamed for path in lost if read[path].why_unnamed), None)
    left = ParsedOptimizer(notes=notes, unnamed_optimizers=stated, why_unnamed=why)
    return [*fitting.values(), left]


def _leave_out(
    optimizers: Mapping[sections.Path, ParsedOptimizer], reason: str, advice: str
) -> ParsedOptimizer:
    left = "optimizer is" if len(optimizers) == 1 else "optimizers are"
    return ParsedOptimizer(
        notes=[f"the {left} left out: {reason}"],
        unnamed_optimizers=tuple(map(format_path, optimizers)),
        why_unnamed=UnnamedOptimizer(reason, advice=advice),
    )


def _select_nearest(
    model: sections.Path, fitting: Mapping[sections.Path, ParsedOptimizer]
) -> dict[sections.Path, ParsedOptimizer]:
    if len(fitting) < 2:
        return dict(fitting)
    depths = {path: _count_common(path, model) for path in fitting}
    files = {p: len({c.file for e in one.entries for c in e.chunks}) for p, one in fitting.items()}
    # Without such depths, the optimizer in the most files is preferred: a merged copy in one file
    # may be beside the rank files.
    ranks = depths if any(depths.values()) else files
    nearest = {p: one for p, one in fitting.items() if ranks[p] == max(ranks.values())}
    if len(nearest) < 2 or not _share_states(nearest.values()):
        return nearest
    # In {"models": {"actor": ...}, "optimizers": {"actor": ...}} the words of the paths decide.
    shared = {path: len(_list_words(path) & _list_words(model)) for path in nearest}
    return {p: one for p, one in nearest.items() if shared[p] == max(shared.values())}


def _count_common(one: sections.Path, other: sections.Path) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _list_words(path: sections.Path) -> set[str]:
    return {word for part in path for word in re.split(r"[\W_]+", str(part).lower()) if word}


def _share_states(optimizers: Iterable[ParsedOptimizer]) -> bool:
    claimed = Counter(fqn for one in optimizers for fqn in {e.fqn for e in one.entries})
    return any(count > 1 for count in claimed.values())


def iterate_slots(read: Iterable[ParsedOptimizer], tied: Mapping[str, str]) -> Iterable[Entry]:
    """Yield every optimizer's entries, under the kept name of a tied parameter."""
    for one in read:
        for entry in one.entries:
            yield replace(entry, fqn=tied.get(entry.fqn, entry.fqn))
