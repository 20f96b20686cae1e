"""Give torchtune's optimizer the names of the weights beside it, if these are Hugging Face's.

torchtune's Hugging Face checkpointer renames the weights, and moves the rows of Llama's queries and
keys, but saves the optimizer of the model in memory as it is, in ``recipe_state.pt``.

Source: torchtune 0.6.1 ``training/checkpointing/_checkpointer.py`` (``FullModelHFCheckpointer``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.core.manifest import WEIGHT_KINDS, Manifest, TrainState
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel import names
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.rules import load_table
from reshard.state_dict.assemble import NOT_AMONG_WEIGHTS
from reshard.training.companion_files import find_config

_EMBEDDING = "model.embed_tokens.weight"  # Hugging Face's name
_EPOCH = re.compile(r"epoch_(\d+)")
_RENAMED = (
    "the optimizer has torchtune's names and order of rows: it is read with those of the weights,"
    " which are Hugging Face's"
)
_TABLES = {"llama": "torchtune", "mistral": "torchtune", "qwen2": "torchtune_qwen2"}


def name_optimizer(manifest: Manifest) -> Manifest:
    """Return a manifest whose optimizer has the names and rows of the weights.

    The manifest is returned as it is if its optimizer is not that of the weights by torchtune's
    names, or if the config beside the weights is of a model without a table.
    """
    weights = {key: e for key, e in manifest.entries.items() if e.kind in WEIGHT_KINDS}
    slots = {key: e for key, e in manifest.entries.items() if key not in weights}
    held = {entry.fqn for entry in weights.values()}
    if not slots or not held.isdisjoint(entry.fqn for entry in slots.values()):
        return manifest
    path = find_config(manifest)
    config = read_json_object(path) if path else {}
    table, heads = _TABLES.get(config.get("model_type", "")), config.get("num_attention_heads")
    size = config.get("head_dim") or (config.get("hidden_size") or 0) // (heads or 1)
    if table is None or not heads or not size:
        return manifest
    model, rules = Architecture(source=str(path), head_dim=size), load_table(table)
    alone = replace(
        manifest, entries=weights, train=TrainState(), tied={}, tied_copies=(), absent=()
    )
    try:
        own = names.rename_from_hf(alone, rules, model).manifest
        both = replace(own, entries={**own.entries, **slots}, train=manifest.train)
        renamed = names.rename_to_hf(both, rules, model, keep_padding=True).manifest
    except UsageError:  # a name that the table does not have, as those of adapters
        return manifest
    moved = {key: e for key, e in renamed.entries.items() if e.kind not in WEIGHT_KINDS}
    named = {entry.fqn for entry in moved.values()}
    if not named <= held:
        return manifest
    kept = (note for note in manifest.warnings if not note.startswith(NOT_AMONG_WEIGHTS))
    return replace(
        manifest,
        entries={**weights, **moved},
        train=renamed.train,
        frozen=manifest.frozen - named,
        warnings=(*kept, _RENAMED),
    )


def refuse_numbers(manifest: Manifest, root: Mapping[str, Any]) -> None:
    """Refuse an optimizer by index beside weights with Hugging Face's names.

    ``full_finetune_single_device`` saves ``optimizer.state_dict()``. Its numbers are in the order
    of the model in memory, and so are its rows: shapes that fit the published model prove nothing.

    Raises:
        UnsupportedError: the checkpoint is of this kind, and the numbers were given names.
    """
    recipe = root.get("recipe_state")
    optimizer = recipe.get("optimizer") if isinstance(recipe, dict) else None
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    is_numbered = isinstance(state, dict) and any(isinstance(key, int) for key in state)
    if is_numbered and manifest.has_optimizer and _EMBEDDING in manifest.weight_shapes:
        raise UnsupportedError(
            manifest.origin.path,
            "has torchtune's optimizer by index, in the order of torchtune's model, beside weights"
            " with the names and rows of Hugging Face's",
            "pass only the directory of the weights, or save with FullModelTorchTuneCheckpointer",
        )


def compare_epochs(manifest: Manifest) -> list[str]:
    """Return a note if the optimizer is of another epoch than the weights.

    torchtune saves weights for every epoch, but one optimizer, and none with the last weights.
    """
    run = manifest.train.client.get("recipe_state.epochs_run")
    folders = {PurePath(path).parent.name for path in manifest.files}
    epochs = [int(match[1]) + 1 for name in folders if (match := _EPOCH.fullmatch(name))]
    if type(run) is not int or epochs in ([], [run]):
        return []
    note = (
        f"recipe_state.pt is of the end of epoch_{run - 1}, but the weights are not: an optimizer"
        " continues only from the weights that were saved with it"
    )
    return [note]
