"""Which optimizers of a checkpoint are those of its model, where there are several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.files import SourceFiles
from reshard.manifest import PARAM, Entry
from reshard.model import ModelShapes
from reshard.state_dict import flat_params, optimizer_state, sections
from reshard.state_dict.optimizer_layouts import KnownParameters
from reshard.state_dict.optimizer_state import ParsedOptimizer
from reshard.state_dict.tree import ParsedTree, format_path


def select_optimizers(
    split: sections.Sections,
    weights: dict[str, Entry],
    units: Sequence[flat_params.FlatUnit],
    model: ModelShapes | None,
    found: ParsedTree,
    pool: SourceFiles,
) -> tuple[list[ParsedOptimizer], dict[str, Entry]]:
    """The model's optimizers, and the weights with those that turn out to be trained parameters.

    Args:
        weights: by fqn; of what kind each is so far.
        units: the flat parameters that the model has, or had.

    Raises:
        ReshardError: as `optimizer_state.read`.
    """
    read: dict[sections.Path, ParsedOptimizer] = {}
    known = KnownParameters({}, units, found.world, ordered=found.ordered or model is not None)
    every = {fqn: entry.shape for fqn, entry in weights.items()}
    for path, value in split.optimizers.items():
        shapes = {fqn: entry.shape for fqn, entry in weights.items() if entry.kind == PARAM}
        shapes = dict(model.parameters) if model else shapes
        one = optimizer_state.read(value, replace(known, shapes=shapes), pool)
        if not one.entries and model is None and len(shapes) < len(every):
            # plain tensors beside sharded ones are parameters where only some modules are sharded
            second = optimizer_state.read(value, replace(known, shapes=every), pool)
            one = second if second.entries else one
        read[path] = one
    kept = _select_own(split, read, set(every))
    trained = {entry.fqn for one in kept for entry in one.entries}
    return kept, {
        fqn: replace(entry, kind=PARAM) if fqn in trained else entry
        for fqn, entry in weights.items()
    }


def _select_own(
    split: sections.Sections, read: Mapping[sections.Path, ParsedOptimizer], weights: set[str]
) -> list[ParsedOptimizer]:
    """The optimizers of the chosen model, where a checkpoint holds those of several."""
    if len(read) == 1:
        return list(read.values())
    number = sections.parse_number(split.model_path)
    fitting = {p: one for p, one in read.items() if weights & {e.fqn for e in one.entries}}
    claimed = Counter(fqn for one in fitting.values() for fqn in {e.fqn for e in one.entries})
    numbered = len({sections.parse_number(path) for path in read}) == len(read)
    if any(n > 1 for n in claimed.values()) or (numbered and split.other_models):
        fitting = {p: one for p, one in read.items() if sections.parse_number(p) == number}
        fitting = _select_nearest(split.model_path, fitting)
    lost = [path for path in read if path not in fitting and not split.other_models]
    if len(fitting) > 1:
        shown = ", ".join(map(format_path, fitting))
        text = f"{len(fitting)} optimizers become one, which has the param groups of all: {shown}"
        next(iter(fitting.values())).notes.append(text)
    if not lost:
        return list(fitting.values())
    notes = [note for path in lost for note in read[path].notes]
    shown = ", ".join(map(format_path, lost))
    notes.append(f"optimizers that fit no parameter are left out: {shown}")
    stated = tuple(
        format_path(path) for path in lost if optimizer_state.has_state(split.optimizers[path])
    )
    return [*fitting.values(), ParsedOptimizer(notes=notes, unnamed_optimizers=stated)]


def _select_nearest(
    model: sections.Path, fitting: Mapping[sections.Path, ParsedOptimizer]
) -> dict[sections.Path, ParsedOptimizer]:
    """Those under the model's own root, or those of as many files: not a copy's beside them."""
    if len(fitting) < 2:
        return dict(fitting)
    same = {p: one for p, one in fitting.items() if p and model and p[0] == model[0]}
    files = {p: len({c.file for e in one.entries for c in e.chunks}) for p, one in fitting.items()}
    widest = {p: one for p, one in fitting.items() if files[p] == max(files.values())}
    return same or widest


def iterate_slots(read: Iterable[ParsedOptimizer], tied: Mapping[str, str]) -> Iterable[Entry]:
    """Every optimizer's entries; a state under an alias is the kept name's."""
    for one in read:
        for entry in one.entries:
            yield replace(entry, fqn=tied.get(entry.fqn, entry.fqn))
