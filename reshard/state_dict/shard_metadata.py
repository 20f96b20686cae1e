"""Resolve the shards that ``shard_metadata`` describes: FairScale's FSDP and that of torch_xla.

Each rank saves 1-d pieces of flat parameters, or of parameters that are cut one by one, and beside
its state dict which parameters they are.

Sources: fairscale 0.4.13 ``nn/data_parallel/fully_sharded_data_parallel.py``
(``local_metadata_dict``); torch_xla 2.9 ``distributed/fsdp/xla_fully_sharded_data_parallel.py``
(``get_shard_metadata``, ``_get_shard``), ``distributed/fsdp/state_dict_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reshard.core.box import Index, as_index
from reshard.core.keys import strip_wrappers
from reshard.core.schema import COUNT, SHAPE, TEXT, expect, mapping, record, row, sequence
from reshard.errors import FETCH_MISSING, CorruptError
from reshard.state_dict import flat_params
from reshard.state_dict.flat_params import FlatUnit
from reshard.state_dict.sharded_reader import XLA_SHARDS
from reshard.state_dict.tree import LocalTensors

KEY = "shard_metadata"
_FLAT = record(names=sequence(TEXT), shapes=sequence(SHAPE), numels=sequence(COUNT))
_FAIRSCALE = record(param_metadata=sequence(record(fsdp_path=TEXT, params=mapping(TEXT, _FLAT))))
_SHARD = record(_orig_name=TEXT, _orig_size=SHAPE)
_XLA = record(
    shard_info=mapping(TEXT, mapping(TEXT, _SHARD)),
    flatten_info=mapping(TEXT, row(sequence(TEXT), sequence(SHAPE), sequence(COUNT))),
)
_XLA_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_fpw_module"))


def resolve(
    state: Mapping[str, Any], metadata: Any, where: str
) -> tuple[dict[str, Any], list[FlatUnit]]:
    """Return a model's state dict without sharded parameters, and its units.

    Args:
        state: every rank's state dict, joined.
        metadata: the first rank's ``shard_metadata``.

    Raises:
        CorruptError: the metadata contradict themselves or the tensors.
    """
    of_xla = is_xla(metadata)
    known = (_read_xla if of_xla else _read_fairscale)(metadata, where)
    tensors: dict[str, Any] = {}
    units: list[FlatUnit] = []  # in the optimizer's order, which is that of the state dict
    for key, value in state.items():
        if key not in known:
            tensors[_strip(key) if of_xla else key] = value
            continue
        if not isinstance(value, LocalTensors):
            raise CorruptError(where, f"{KEY} lists {key!r} as a flat parameter, but it is not one")
        pieces = [value.pieces[rank] for rank in sorted(value.pieces)]
        unit = known[key]
        if of_xla:
            unit = _pad(unit, sum(piece.box.volume for piece in pieces), where)
        tensors.update(unit.build_tensors(flat_params.locate_pieces(pieces, unit.numel)))
        units.append(unit)
    return tensors, units


def is_xla(metadata: Any) -> bool:
    """Return whether metadata are those of torch_xla."""
    return isinstance(metadata, Mapping) and XLA_SHARDS in metadata


def _read_fairscale(metadata: Any, where: str) -> dict[str, FlatUnit]:
    expect(where, metadata, _FAIRSCALE, KEY)
    units = {}
    for entry in metadata["param_metadata"]:
        path = entry["fsdp_path"]
        for name, flat in entry["params"].items():
            key, total = _join(path, name), sum(flat["numels"])
            members = _list_members(path, flat["names"], flat["shapes"], key, where)
            units[key] = flat_params.build_unit(path, members, total, where)
    return units


def _read_xla(metadata: Any, where: str) -> dict[str, FlatUnit]:
    expect(where, metadata, _XLA, KEY)
    units = {}
    for module, shards in metadata[XLA_SHARDS].items():
        for key, shard in shards.items():
            name, shape = _join(module, shard["_orig_name"]), as_index(shard["_orig_size"])
            flat = metadata["flatten_info"].get(name)
            if flat is None:
                members = [(name, shape)]  # a parameter that is cut by itself
            else:
                members = _list_members(name.rpartition(".")[0], flat[0], flat[1], name, where)
            members = [(_strip(fqn), own) for fqn, own in members]
            unit = flat_params.build_unit(_strip(module), members, prod(shape), where)
            units[_join(module, key)] = unit
    return units


def _pad(unit: FlatUnit, numel: int, where: str) -> FlatUnit:
    # Each rank's piece is a multiple of ``_shard_size_multiple`` elements, or of rows of the
    # parameter. The metadata do not state which.
    if numel < unit.numel:
        raise CorruptError(
            where,
            f"the pieces of {unit.members[0].fqn!r} ... have {numel} elements together, but {KEY}"
            f" states {unit.numel}",
            FETCH_MISSING,
        )
    return replace(unit, numel=numel)


def _list_members(
    path: str, names: Sequence[str], shapes: Sequence[Any], key: str, where: str
) -> list[tuple[str, Index]]:
    if len(names) != len(shapes):
        raise CorruptError(where, f"{KEY} of {key!r} does not have one shape for each name")
    if not names:
        raise CorruptError(where, f"{KEY} of {key!r} names no parameter")
    named = zip(names, shapes, strict=True)
    return [(_join(path, name), as_index(shape)) for name, shape in named]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _strip(name: str) -> str:
    """Return a name without the modules that torch_xla's FSDP inserts."""
    return strip_wrappers([name], _XLA_WRAPPERS)[name]
