"""Restore the form that the weights of PEFT's and transformers' files have in the trained model.

An optimizer refers to that form: by names, or by numbers in the order of the model. The files of
transformers have the names and shapes of the published model. ``adapter_model.safetensors`` sorts
its tensors and leaves the adapter's name out, and ``adapter_config.json`` lists the targets as a
set. So PEFT's two files decide no order (the queries come before the keys in Llama, after the
values in OPT).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.core.manifest import PARAM, Manifest, Origin, index_entries
from reshard.model import ModelShapes
from reshard.model.adapter_names import (
    DEFAULT,
    PROMPTS,
    SAVED_MODULE,
    SHARED,
    TOKENS,
    TRAINED,
    AdapterPart,
    find_parts,
    find_trained_names,
    name_in_model,
    parse_part,
    strip_root,
)
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import as_global

_BIAS = ".bias"
_OF_TOKENS = ".token_adapter"  # PEFT 0.21 ``tuners/trainable_tokens/model.py``
_BEHIND = (*TRAINED, TOKENS)  # tensors after the parameters of an adapted layer, in order


def restore_adapter_form(
    state: Mapping[str, Any],
    model: ModelShapes,
    modules: Sequence[str] = (),
    optimized: Iterable[str] = (),
) -> tuple[dict[str, Any], ModelShapes]:
    """Return an adapter's weights as the model has them, and the part of the model that they are.

    The weights are in the model's order; PEFT's files have whole modules after all matrices. A
    state dict that is not of PEFT's own form stays as it is, and so does the model.

    Args:
        model: the model with its adapters, or its base.
        modules: ``modules_to_save`` of the adapter's configuration.
        optimized: the names that optimizers store, which tell the adapter's name.
    """
    parts = find_parts(state)
    if not parts or not _is_of_adapters(state, parts) or state.keys() >= model.parameters.keys():
        return dict(state), model
    trained = [part.fqn for part in find_parts(model.parameters) if part.adapter]
    if trained:
        names = find_trained_names(state, trained)
        order = [fqn for fqn in model.parameters if fqn in {*names.values()} or fqn in state]
    else:
        adapters = {part.adapter for part in find_parts(optimized) if part.adapter}
        adapter = adapters.pop() if len(adapters) == 1 else DEFAULT
        names = {fqn: name_in_model(fqn, adapter, modules) for fqn in state}
        order = _order_by_base(names.values(), model)
    named = {names.get(fqn, fqn): leaf for fqn, leaf in state.items()}
    shared = {part.fqn for part in find_parts(named) if part.role in SHARED}
    if not order or named.keys() - {*order, *shared, *model.buffers}:
        return dict(state), model
    named = {fqn: named[fqn] for fqn in dict.fromkeys((*order, *named))}
    shapes = {fqn: as_global(named[fqn]) for fqn in order}
    parameters = {
        fqn: model.parameters.get(fqn, tensor.shape) for fqn, tensor in shapes.items() if tensor
    }
    found = {fqn: as_global(named[fqn]) for fqn in named if fqn in model.buffers or fqn in shared}
    buffers = {fqn: tensor.shape for fqn, tensor in found.items() if tensor}
    return named, replace(model, parameters=parameters, buffers=buffers, tied={}, units=())


def _is_of_adapters(state: Mapping[str, Any], parts: Sequence[AdapterPart]) -> bool:
    if not any(part.adapter for part in parts):
        return True
    others = state.keys() - {part.fqn for part in parts}
    return all(".base_layer." in fqn or fqn.endswith(_BIAS) for fqn in others)


def _order_by_base(names: Iterable[str], model: ModelShapes) -> list[str]:
    position = {fqn: number for number, fqn in enumerate(model.names or model.parameters)}
    places = {}
    for fqn in names:
        part = parse_part(fqn)
        if part is not None and part.role in SHARED:
            continue  # buffers, which have no place in an optimizer
        if part is not None and part.role == PROMPTS:
            places[fqn] = len(position), (0, False)  # its encoder is behind the base model
            continue
        near, rank = _find_place(fqn, part, position)
        if near not in position:
            return []
        places[fqn] = position[near], rank
    # The base does not show the order of two tensors at one place, as of two adapters.
    return sorted(places, key=places.__getitem__) if len({*places.values()}) == len(places) else []


def _find_place(
    fqn: str, part: AdapterPart | None, known: Container[str]
) -> tuple[str, tuple[int, bool]]:
    # An adapted layer has its own parameters first, then the adapter's in the order of `METHODS`
    # (PEFT 0.21 ``tuners/*/layer.py``).
    if part is None or part.role == SAVED_MODULE:
        own = fqn if part is None else part.saved_as
        return strip_root(own.replace(".base_layer.", ".")), (0, False)
    layer = strip_root(part.layer).removesuffix(_OF_TOKENS)
    last = f"{layer}{_BIAS}" if f"{layer}{_BIAS}" in known else f"{layer}.weight"
    return last, (1 + _BEHIND.index(part.role), fqn.endswith(_BIAS))


def has_published_names(names: Iterable[str], model: ModelShapes) -> bool:
    """Return whether an optimizer's parameters have names that the model has only in files."""
    names = {*names}
    published = model.find_published(names)
    if published is None:
        return False
    only_in_files = published.conversion.after.keys() - published.conversion.before.keys()
    return not only_in_files.isdisjoint(names)


def restore_memory_form(state: Mapping[str, Any], model: ModelShapes) -> dict[str, Any]:
    """Return a model's state dict in the form in memory, if it is in the published form.

    A state dict of another model stays as it is; so does one with tensors of unknown shape.
    """
    published = model.find_published(state)
    tensors = {fqn: as_global(leaf) for fqn, leaf in state.items()}
    if published is None or not all(tensors.values()):
        return dict(state)
    entries = index_entries(
        tensor.make_entry(fqn, PARAM) for fqn, tensor in tensors.items() if tensor is not None
    )
    manifest = Manifest(Origin("state dict", model.source), entries, {}, ordered=False)
    if not published.fits(manifest):
        return dict(state)
    restored = published.restore_memory_form(manifest).entries.values()
    return {
        entry.fqn: GlobalTensor(entry.dtype, entry.shape, tuple(entry.chunks)) for entry in restored
    }
