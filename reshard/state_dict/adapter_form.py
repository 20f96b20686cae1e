"""The weights of PEFT's own file under the names and in the order of the model that was trained.

``adapter_model.safetensors`` has neither: it sorts its tensors and leaves the adapter's name out.
``adapter_config.json`` lists the targets as a set. So the two files decide no order (the queries
come before the keys in Llama, after the values in OPT), and an optimizer that numbers its
parameters needs the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.model import ModelShapes
from reshard.model.adapter_names import (
    DEFAULT,
    MAGNITUDE,
    MATRICES,
    AdapterPart,
    find_parts,
    find_trained_names,
    strip_root,
)
from reshard.state_dict.tree import as_global

_BIAS = ".bias"


def restore_adapter_form(
    state: Mapping[str, Any], model: ModelShapes
) -> tuple[dict[str, Any], ModelShapes]:
    """Return an adapter's weights as the model has them, and the part of the model that they are.

    They are in the model's order; PEFT's is another, with whole modules after all matrices. A state
    dict that is not of PEFT's own form stays as it is, and so does the model.

    Args:
        model: the model with its adapters, or its base.
    """
    parts = find_parts(state)
    if not parts or any(part.adapter for part in parts):
        return dict(state), model
    trained = [part.fqn for part in find_parts(model.parameters) if part.adapter]
    if trained:
        names = find_trained_names(state, trained)
        order = [fqn for fqn in model.parameters if fqn in {*names.values()} or fqn in state]
    else:
        order, names = _order_by_base(parts, model)
    named = {names.get(fqn, fqn): leaf for fqn, leaf in state.items()}
    if not names or named.keys() - {*order, *model.buffers}:
        return dict(state), model
    named = {fqn: named[fqn] for fqn in dict.fromkeys((*order, *named))}
    shapes = {fqn: as_global(named[fqn]) for fqn in order}
    parameters = {
        fqn: model.parameters.get(fqn, tensor.shape) for fqn, tensor in shapes.items() if tensor
    }
    buffers = {fqn: shape for fqn, shape in model.buffers.items() if fqn in named}
    return named, replace(model, parameters=parameters, buffers=buffers, tied={}, units=())


def _order_by_base(
    parts: list[AdapterPart], model: ModelShapes
) -> tuple[list[str], dict[str, str]]:
    """Return the names in a model with adapters, in its order, and by name in PEFT's file.

    A module has ``lora_A`` before ``lora_B`` (PEFT 0.21 ``tuners/lora/layer.py``, ``LoraLayer``).
    Nothing is returned if the base lacks a module, or has another shape than its adapter.
    """
    position = {fqn: number for number, fqn in enumerate(model.parameters)}
    position |= {alias: position[kept] for alias, kept in model.tied.items() if kept in position}
    layers = [f"{strip_root(part.layer)}.weight" for part in parts]
    if any(
        layer not in position or part.role not in MATRICES
        for layer, part in zip(layers, parts, strict=True)
    ):
        return [], {}
    ranked = sorted(
        zip(layers, parts, strict=True),
        key=lambda pair: (
            position[pair[0]],
            MATRICES.index(pair[1].role),
            pair[1].fqn.endswith(_BIAS),
        ),
    )
    names = {part.fqn: _name_in_model(part) for _, part in ranked}
    return list(names.values()), names


def _name_in_model(part: AdapterPart) -> str:
    """Return the name that a tensor of the default adapter has in the model.

    PEFT saves an adapter of another name into a folder of that name.
    """
    head = f"{part.layer}.{part.role}"
    tail = ".weight" if part.role == MAGNITUDE else part.saved_as.removeprefix(head)
    return f"{head}.{DEFAULT}{tail}"
