"""Read every rank's file into one manifest, with the model's params.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.json_files import read_json_object
from reshard.containers.pickles import trust
from reshard.core.box import Index
from reshard.core.location import Location, list_missing_ranks
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    Manifest,
    Origin,
    TrainState,
    find_most_common_dtype,
    index_entries,
)
from reshard.core.schema import COUNT, INTEGER, NUMBER, expect, fields, maybe
from reshard.errors import FETCH_MISSING, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.meta.directory import EMBEDDING, FILE, NAME, PARAMS
from reshard.layouts.model_parallel.combine import join_tensor_ranks
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.shards import REPLICATED, Split
from reshard.layouts.model_parallel.traits import Traits
from reshard.state_dict import leaves, tree
from reshard.system.paths import as_path

_NORM = "norm.weight"
_GATE = "layers.0.feed_forward.w1.weight"
_FREQUENCIES = "rope.freqs"
_POSITIONS = {500000.0: 8192, 1000000.0: 16384}  # by rope_theta: Llama 3, Code Llama
_PARAMS = fields(
    dim=COUNT,
    n_layers=COUNT,
    n_heads=COUNT,
    n_kv_heads=maybe(COUNT),
    vocab_size=maybe(INTEGER),
    rope_theta=maybe(NUMBER),
    norm_eps=maybe(NUMBER),
)
_MIXED = "files of different models are mixed: fetch the checkpoint again as a whole"


def read(location: Location, table: Table) -> Manifest:
    """Read the files of all ranks into one manifest.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: files contradict each other, or params.json.
        UnsupportedError: there are more ranks than key and value heads.
        UsageError: no rule states how a tensor is cut.
    """
    files = {
        int(m[1]): path for name, path in location.files.items() if (m := FILE.fullmatch(name))
    }
    missing = list_missing_ranks(files, range(max(files) + 1))
    if missing:
        raise IncompleteError(
            location,
            f"has {files[max(files)].name}, but no file for rank {', '.join(map(str, missing))}",
            FETCH_MISSING,
        )
    params = read_json_object(location.files[PARAMS])
    expect(location.files[PARAMS], params, _PARAMS)
    groups = params.get("n_kv_heads") or params.get("n_heads")
    if type(groups) is int and groups % len(files):
        raise UnsupportedError(
            location,
            f"has {groups} key and value heads over {len(files)} ranks: how ranks share a head is"
            " not known",
        )
    ranks = [_read_rank(files[number], location, params, len(files)) for number in sorted(files)]

    def split_of(name: str, shape: Index) -> Split:
        if name == EMBEDDING:
            return Split(_find_embedding_dim(ranks[0], shape))
        if name == _FREQUENCIES:
            return REPLICATED
        return table.require(name, {}).rule.split(gated=True)

    manifest = join_tensor_ranks(ranks, split_of)
    _check_vocabulary(manifest, params, location)
    return manifest


def _read_rank(path: Path, location: Location, params: Mapping[str, Any], world: int) -> Manifest:
    file = torch_reader.read(path)
    state = tree.convert_file(file)
    unread = leaves.find_opaque(path, state) if isinstance(state, dict) else {}
    entries = [
        tensor.make_entry(name, BUFFER if name == _FREQUENCIES else PARAM)
        for name, leaf in tree.collect_tensors(state).items()
        if (tensor := tree.as_global(leaf))
    ]
    dims = {entry.fqn: len(entry.shape) for entry in entries}
    if (dims.get(EMBEDDING), dims.get(_NORM, 1)) != (2, 1):
        raise CorruptError(
            path,
            f"has no matrix {EMBEDDING!r} or no vector {_NORM!r}, so it is not a model in Meta's"
            " layout",
        )
    origin = Origin(
        format=NAME,
        path=str(location),
        detail="consolidated",
        mesh={"world": world, "tp": world},
        precision=find_most_common_dtype(entry.dtype for entry in entries),
    )
    source = file.source()
    return Manifest(
        origin,
        index_entries(entries),
        {source.path: source},
        TrainState(config=dict(params)),
        read_files=(str(location.files[PARAMS]),),
        ordered=False,  # the order is that of the program that wrote the file
        trained_dtypes={entry.fqn: entry.dtype for entry in entries if entry.kind == PARAM},
        unread=unread,
        unknown_globals=trust.list_unknown(file.globals),
    )


def _find_embedding_dim(rank: Manifest, shape: Index) -> int:
    """Return the dim along which the embedding is cut, by comparison with the width of a norm."""
    norm = rank.entries.get((PARAM, _NORM))
    if norm is None:
        raise IncompleteError(rank.origin.path, f"has no {_NORM!r}", "fetch it again")
    return 0 if shape[1] == norm.shape[0] else 1


def _check_vocabulary(manifest: Manifest, params: Mapping[str, Any], location: Location) -> None:
    rows, width = manifest.entries[PARAM, EMBEDDING].shape
    vocab_size = params.get("vocab_size")
    is_known = type(vocab_size) is int and vocab_size > 0  # -1 in Llama 2: see the tokenizer
    if (is_known and rows != vocab_size) or params.get("dim") not in (None, width):
        raise CorruptError(
            location.files[PARAMS],
            f"has vocab_size {vocab_size} and dim {params.get('dim')}, but the embedding"
            f" has {rows} rows of {width} elements",
            _MIXED,
        )


def find_traits(manifest: Manifest) -> Traits:
    """Return the properties of the model that params.json and the tensors state.

    Neither states the maximum number of positions, but no computed value depends on it.
    """
    params: Mapping[str, Any] = manifest.train.config
    heads, hidden = params.get("n_heads"), params.get("dim")
    gate = manifest.entries.get((PARAM, _GATE))
    # Files of Llama 1 and 2 do not state it: they have the default of ``precompute_freqs_cis``.
    theta = float(params.get("rope_theta") or 10000.0)
    unsupported = (
        "scales rotary positions by a factor that no file states (use_scaled_rope): Llama 3.1 has"
        " 8, Llama 3.2 has 32"
    )
    return Traits(
        source=str(as_path(manifest.origin.path) / PARAMS),
        layers=params.get("n_layers"),
        hidden=hidden,
        heads=heads,
        groups=params.get("n_kv_heads") or heads,
        head_dim=hidden // heads if hidden and heads else None,
        ffn=gate.shape[0] if gate else None,
        vocab=manifest.entries[PARAM, EMBEDDING].shape[0],
        positions="rope",
        max_positions=_POSITIONS.get(theta, 4096),
        rope_theta=theta,
        activation="silu",
        gated=True,
        norm="rmsnorm",
        norm_eps=params.get("norm_eps"),
        linear_bias=False,
        qkv_bias=False,
        unsupported=(unsupported,) if params.get("use_scaled_rope") else (),
    )
