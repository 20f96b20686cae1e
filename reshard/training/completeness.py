"""Prove that an optimizer's state fits its weights, and that no part of it was lost.

This needs only the manifest, so it covers every format, and every command that reads one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import isfinite, isnan

from reshard.core.box import Index
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Manifest,
    ParamGroup,
    advise_weights_alone,
)
from reshard.errors import ALTERED, CorruptError, IncompleteError, shown
from reshard.training import loss_scale, optimizers
from reshard.units import abridge

# GaLore, APOLLO and Fira keep the moments of a gradient that they project to this rank, under the
# names of Adam's. Sources: galore-torch 1.0 ``adamw.py``, apollo-torch 1.0 ``apollo.py``.
_PROJECTED = "rank"
_REMEDY = (
    "fetch the checkpoint again; if the run never had this state, pass --trust none, or read only"
    " the weights"
)
_FLAT_STAGES = (1, 2, 3)  # of ZeRO: a gradient of zeros stands for that of an unused parameter


def check_state(manifest: Manifest) -> None:
    """Check that each master weight and each slot per element has the shape of its weight.

    Raises:
        CorruptError: one has another shape.
    """
    for entry, shape in find_misshapen(manifest):
        raise CorruptError(
            entry.where,
            f"the {entry.kind} of {entry.fqn!r} has shape {list(entry.shape)}, but the weight"
            f" {list(shape)}",
            "the weight and its optimizer state are of two models or saves (was the vocabulary"
            f" resized?): fetch both of one save{advise_weights_alone(entry, manifest)}",
        )


def find_misshapen(manifest: Manifest) -> Iterator[tuple[Entry, Index]]:
    """Yield the masters and slots per element that have another shape than their weight, with it.

    A slot is per element by the table of optimizers, or if most weights whose shapes are telling
    have it in their own shape.
    """
    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(MASTER)}
    shapes |= {entry.fqn: entry.shape for entry in manifest.of_kind(PARAM, BUFFER)}
    fitting, others = Counter[str](), defaultdict[str, list[tuple[Entry, Index]]](list)
    for entry in manifest.entries.values():
        shape = shapes.get(manifest.kept_name(entry.fqn))
        if shape is None or entry.kind in (PARAM, BUFFER):
            continue
        if entry.shape != shape:
            others[entry.kind].append((entry, shape))
        # A matrix of Shampoo may have the shape of a square weight by chance.
        elif len(set(shape)) > 1 and 1 not in shape:
            fitting[entry.kind] += 1
    groups = manifest.train.group_of if others else {}
    for kind, found in others.items():
        is_known = kind == MASTER or kind in optimizers.PER_ELEMENT
        if is_known or fitting[kind] > max(len(found), 1):
            for entry, shape in found:
                if kind == MASTER or not _may_differ(entry, shape, manifest, groups.get(entry.fqn)):
                    yield entry, shape


def check_optimizer(manifest: Manifest) -> None:
    """Check that no part of the optimizer's state was lost, and that its settings are possible.

    Raises:
        IncompleteError: a part is missing.
        CorruptError: a setting is not a value that an optimizer can have.
    """
    for lost in find_lost_state(manifest):
        raise IncompleteError(manifest.origin.path, f"the optimizer has {lost}", _REMEDY)
    for odd in find_impossible_settings(manifest):
        raise CorruptError(manifest.origin.path, odd, ALTERED)


def find_impossible_settings(manifest: Manifest) -> Iterator[str]:
    """Yield what no optimizer has: a NaN or a beta above 1 in a param group, a step of infinity."""
    for fqn, step in manifest.train.optimizer_step.items():
        if not isfinite(step):
            yield f"the optimizer's step of {fqn!r} is {step}"
    for number, group in enumerate(manifest.train.param_groups):
        for name, value in group.hyper.items():
            numbers = [
                n
                for n in (value if isinstance(value, (list, tuple)) else [value])
                if isinstance(n, float)
            ]
            is_beta = name.startswith("beta") and "decay" not in name
            if any(isnan(n) or (is_beta and not 0 <= n <= 1) for n in numbers):
                yield f"{name} of param group {number} is {shown(value)}"


def find_lost_state(manifest: Manifest) -> Iterator[str]:
    """Yield what the optimizer must have, but has not, by its own counters and other slots.

    A parameter without state may have been frozen or never used. But an optimizer that has made
    updates has some state, what counts its updates has the slots that they made, an Adam has both
    moments, and ZeRO, which updates flat tensors, has those of every parameter.
    """
    slots = _collect_slots(manifest)
    for group in manifest.train.param_groups:
        yield from _find_missing_slots(manifest, group, slots)
    keeping = [g for g in manifest.train.param_groups if optimizers.keeps_state(g.hyper)]
    fqns = [fqn for group in keeping for fqn in group.fqns]
    idle = [fqn for fqn in fqns if not slots.get(fqn) and _has_elements(manifest, fqn)]
    counted = [fqn for fqn in idle if manifest.train.optimizer_step.get(fqn)]
    # What the reader left out, and reports, may have the state of all of these.
    is_left_out = bool(manifest.unnamed or manifest.unnamed_optimizers)
    updates = _count_updates(manifest)
    if counted and not is_left_out:
        yield f"no state of {abridge(counted)}, but its number of updates"
    elif not updates or not (idle or keeping):
        return
    elif not any(slots.values()) and not is_left_out:
        yield f"no state of any parameter after {updates:g} updates"
    elif idle and manifest.origin.zero_stage in _FLAT_STAGES:
        yield f"no state of {abridge(idle)}, but of other parameters, which ZeRO updates with them"


def _collect_slots(manifest: Manifest) -> dict[str, set[str]]:
    slots = defaultdict[str, set[str]](set)
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            slots[entry.fqn].add(entry.kind)
    for fqn, kept in manifest.train.non_tensor_state.items():
        slots[fqn].update(kept)
    slots |= {alias: slots[kept] for alias, kept in manifest.tied.items() if kept in slots}
    return slots


def _find_missing_slots(
    manifest: Manifest, group: ParamGroup, slots: Mapping[str, set[str]]
) -> Iterator[str]:
    lacking = defaultdict[str, list[str]](list)
    for fqn in group.fqns:
        if own := slots.get(fqn):
            missing = optimizers.find_missing_of_adam(own, group.hyper, 0)
            if missing is not None and _has_elements(manifest, fqn):
                lacking[missing].append(fqn)
    for slot, fqns in lacking.items():
        yield f"no {slot} of {abridge(fqns)}, but other state of Adam"


def _has_elements(manifest: Manifest, fqn: str) -> bool:
    kept = manifest.kept_name(fqn)
    stored = (manifest.entries.get((kind, kept)) for kind in (PARAM, MASTER))
    return any(entry is not None and entry.numel for entry in stored)


def _count_updates(manifest: Manifest) -> float:
    # A scaler of torch does not state how many steps it has skipped.
    train = manifest.train
    if train.skipped_steps is None and not loss_scale.is_idle(train.scaler):
        return max(train.optimizer_step.values(), default=0)
    return train.updates or 0


def _may_differ(entry: Entry, shape: Index, manifest: Manifest, group: ParamGroup | None) -> bool:
    # NovoGrad has one number for a weight, and others one for each row or column: means of squares
    # under the name of Adam's.
    if not entry.shape or (group is not None and _PROJECTED in group.hyper):
        return True
    if entry.fqn in manifest.train.non_tensor_state:  # a projector, or another object
        return True
    is_mean = entry.kind in optimizers.NEVER_NEGATIVE or entry.kind not in optimizers.PER_ELEMENT
    return is_mean and _is_reduced(entry.shape, shape)


def _is_reduced(shape: Index, of: Index) -> bool:
    """Return whether a shape is another one of which some dims are 1 or left out.

    >>> _is_reduced((12, 1), (12, 4)), _is_reduced((4,), (12, 4)), _is_reduced((10, 4), (12, 4))
    (True, True, False)
    """
    rest = iter(of)
    kept = [size for size in shape if size != 1]
    return len(shape) <= len(of) and kept != list(of) and all(size in rest for size in kept)
