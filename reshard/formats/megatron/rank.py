"""One rank's files of the torch format: ``model_optim_rng.pt`` and ``distrib_optim.pt``.

Sources: Megatron-LM core_v0.16.1 ``megatron/training/checkpointing.py`` (generate_state_dict),
``core/optimizer/optimizer.py``; Megatron-LM 2.x ``megatron/model/language_model.py`` for models
that are dicts in dicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import TorchFile
from reshard.core.location import Location
from reshard.core.schema import INTEGER, NUMBER, expect, fields, maybe
from reshard.errors import OTHER_FILE, CorruptError
from reshard.formats.megatron import arguments, names
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import OPTIMIZER, find_model_file
from reshard.state_dict import leaves, tree
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import as_global

# ``save_checkpoint`` with an optimizer whose name begins with ``dist_``
_LAYER_WISE = re.compile(r"layer_wise_optimizer_\d+\.pt")
_OLD_VERSION = 0.0  # files without a version are the oldest
_ROOT = fields(iteration=maybe(INTEGER), checkpoint_version=maybe(NUMBER))


@dataclass(slots=True)
class ModelChunk:
    """A model chunk of a rank: parameters and buffers under their local names, in order.

    Args:
        tied: second name -> name of the parameters that the file has under two names.
        mtp_since_017: whether the file has the names of core 0.17 and later: see `names.spell_mtp`.
        convolution_since_019: the same of core 0.19: see `names.spell_convolution`.
    """

    params: dict[str, GlobalTensor] = field(default_factory=dict)
    buffers: dict[str, GlobalTensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    mtp_since_017: bool = False
    convolution_since_019: bool = False

    @property
    def layers(self) -> int:
        """Number of transformer layers in it."""
        layers = (names.find_layer(name) for name in self.params)
        return len({layer for layer in layers if layer is not None})


@dataclass(slots=True)
class RankFile:
    """The files of one rank."""

    path: str  # of the file with the weights
    root: dict[str, Any]
    args: Arguments
    chunks: list[ModelChunk]
    files: tuple[TorchFile, ...]
    flat: Any = None  # the root of the distributed optimizer's own file
    is_layer_wise: bool = False  # whether each data-parallel rank has the states of some layers

    @property
    def version(self) -> float:
        """``checkpoint_version``."""
        stated = self.root.get("checkpoint_version", _OLD_VERSION)
        return float(stated) if isinstance(stated, (int, float)) else _OLD_VERSION


def open_rank(folder: Location) -> RankFile:
    """Open a rank's files.

    Raises:
        IncompleteError: the file with the weights is missing.
        CorruptError: a file is truncated or altered, or contains no model.
    """
    file = torch_reader.read(find_model_file(folder))
    root = tree.convert_file(file)
    if not isinstance(root, dict):
        raise CorruptError(
            file.path, "is not a Megatron checkpoint: its root is not a dict", OTHER_FILE
        )
    expect(file.path, root, _ROOT)
    args = arguments.parse(root.get("args"), file.path)
    chunks = _list_chunks(root, file.path)
    if OPTIMIZER not in folder.files:
        is_layer_wise = any(map(_LAYER_WISE.fullmatch, folder.files))
        return RankFile(file.path, root, args, chunks, (file,), is_layer_wise=is_layer_wise)
    flat = torch_reader.read(folder.files[OPTIMIZER])
    return RankFile(file.path, root, args, chunks, (file, flat), tree.convert_file(flat))


def _list_chunks(root: Mapping[str, Any], path: str) -> list[ModelChunk]:
    if "model" in root:
        return [_build_chunk(root, "model", path)]
    # The keys are counted, not sorted: as text, model10 would precede model2.
    keys = [f"model{number}" for number in range(len(root))]
    chunks = [_build_chunk(root, key, path) for key in keys if key in root]
    if not chunks:
        raise CorruptError(path, "has neither 'model' nor 'model0'", OTHER_FILE)
    return chunks


def _build_chunk(root: Mapping[str, Any], key: str, path: str) -> ModelChunk:
    chunk = ModelChunk()
    for stored, value in _walk(root[key], path):
        known, tensor = names.spell_convolution(stored), as_global(value)
        name = names.spell_mtp(known)
        chunk.convolution_since_019 |= known != stored
        chunk.mtp_since_017 |= name != known
        if not names.is_extra(name):  # raises for a weight in a form that is not read
            leaves.find_opaque(path, {name: value}, prefix=f"{key}.")
        if names.is_extra(name) or tensor is None:
            chunk.extra[name] = value
        elif names.is_buffer(name):
            chunk.buffers[name] = tensor
        else:
            chunk.params[name] = tensor
    for second, name in names.find_second_names(chunk.params).items():
        if chunk.params[second].chunks == chunk.params[name].chunks:  # one parameter, stored once
            chunk.tied[second] = name
            del chunk.params[second]
    return chunk


def open_args(path: Path) -> Arguments:
    """Return the arguments in a rank's file."""
    file = torch_reader.read(path)
    root = file.root if isinstance(file.root, dict) else {}
    return arguments.parse(root.get("args"), file.path)


def _walk(tree: Any, path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        raise CorruptError(
            path, f"its model is a {type(tree).__name__}, expected a state dict", OTHER_FILE
        )
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _walk(value, path, f"{name}.")
        else:
            yield names.spell_encoder(name), value
