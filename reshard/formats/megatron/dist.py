"""The torch_dist format: one DCP directory, with keys and objects of Megatron's own.

    decoder.layers.mlp.linear_fc2.weight             (layers, out, in), or with a number per layer
    decoder.layers.mlp.experts.experts.linear_fc1... (layers, experts, out, in)
    optimizer.state.exp_avg.<key>                    a slot, in the parameter's form
    [chained_1.]optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(...).bucket_idx_0.exp_avg
                                                     a bucket of the distributed optimizer, flat
    <key>/shard_0_4                                  an object, a list of one
    common_state/shard_0_1                           what common.pt held before core 0.20

Sources: Megatron-LM core_v0.16.1 ``core/dist_checkpointing/``,
``core/optimizer/distrib_optimizer.py`` (sharded_param_state_*); core 0.20
``core/dist_checkpointing/serialization.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reshard import counts
from reshard.box import Box
from reshard.errors import CorruptError, IncompleteError
from reshard.formats import torch_file
from reshard.formats.dcp import directory as dcp
from reshard.formats.megatron import (
    arguments,
    buckets,
    directory,
    grid,
    grouped,
    model,
    names,
    optimizer,
    own,
    train,
)
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import Rank
from reshard.formats.megatron.optimizer import Held
from reshard.formats.place import Place
from reshard.formats.state_dict import tree
from reshard.formats.state_dict.tree import Logical
from reshard.layout.partition import Member
from reshard.manifest import BUFFER, PARAM, Chunk, Entry, Manifest, Origin, SourceFile, keyed
from reshard.model_parallel.moves import layer
from reshard.model_parallel.rules import Table
from reshard.pickles import trust

_SHARD = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")
_CHAIN = re.compile(r"(?:chained_(\d{1,9})\.)?(optimizer\..+)")
_SLOT = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.gbuf_idx_(\d{1,9})\.dtype_(.+)\.bucket_idx_(\d{1,9})"
    r"\.(\w+)"
)
_GROUP = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.(\w+)")
_GATE, _UP = "_w", "_v"  # ends of the keys of a gated matrix that is kept as two
_COMMON = "common_state"


def read(place: Place, table: Table) -> Manifest:
    """The checkpoint in one directory.

    Raises:
        IncompleteError: a file is missing.
        CorruptError: files contradict each other.
        UnsupportedError: the optimizer is in a form that core 0.13 and older wrote.
    """
    found = dcp.read_flat(place)
    tensors, objects = _sorted(found.root)
    stored = _whole(tensors)
    common, files, seen = _common(place, objects)
    args = arguments.of(common.get("args"), str(place))
    keys = _Keys(table, args)
    weights = [
        replace(entry, kind=BUFFER if names.is_buffer(entry.fqn) else PARAM)
        for key, tensor in stored.items()
        if not _CHAIN.fullmatch(key)
        for entry in keys.entries(key, PARAM, tensor)
    ]
    if not weights:
        raise CorruptError(place, "holds no model")
    slots = [
        entry
        for key, tensor in stored.items()
        if (match := _CHAIN.fullmatch(key)) and (slot := _SLOT.fullmatch(match[2]))
        for entry in keys.entries(slot[2], optimizer.kind_of(slot[1]), tensor)
    ]
    whole = keyed(grid.in_model_order(weights))
    held = [Held(e.fqn, e.shape, e.dtype.name, 0) for e in whole.values() if e.kind == PARAM]
    chained = _own_optimizers(objects)
    state = optimizer.read(chained or common.get("optimizer"), held, args, str(place))
    flat = list(_Flat(stored, objects, whole, args, table, str(place)).entries())
    form = _form(common, flat, slots)
    made = Manifest(
        origin=Origin("megatron", str(place)),
        entries=keyed(grid.in_model_order([*whole.values(), *slots, *flat])),
        files={**found.files, **files},
        train=train.of_root({**common, own.RNG: _first(objects, own.RNG)}, args, state, 0, 0),
        tied={names.OUTPUT: names.EMBEDDING}
        if args.tied and (PARAM, names.EMBEDDING) in whole
        else {},
        warnings=tuple(found.notes + state.notes),
        unknown_globals=trust.unknown(found.globals | seen),
    )
    made = own.told(made, own.of_dist(found.root))
    return replace(made, origin=train.origin(place, args, form, made))


def _sorted(root: Mapping[str, Any]) -> tuple[dict[str, Logical], dict[str, list[Any]]]:
    """Tensors by key, without NeMo's prefix; and objects, each with all its shards."""
    stored: dict[str, Logical] = {}
    objects: dict[str, list[Any]] = defaultdict(list)
    for key, value in root.items():
        match = _SHARD.fullmatch(key)
        if isinstance(value, Logical):
            stored[key] = value
        else:
            one = isinstance(value, list) and len(value) == 1
            objects[match[1] if match else key].append(value[0] if one else value)
    return stored, dict(objects)


def _whole(stored: Mapping[str, Logical]) -> dict[str, Logical]:
    """Tensors with gate and up in one, also where they are kept apart (singleton_local_shards)."""
    found: dict[str, Logical] = {}
    for key, tensor in stored.items():
        base = key[: -len(_GATE)]
        gate, up = stored.get(base + _GATE), stored.get(base + _UP)
        if not gate or not up or key not in (base + _GATE, base + _UP):
            found[key] = tensor
        elif key.endswith(_GATE):
            rows = gate.shape[0]
            chunks = [replace(chunk, box=_below(chunk.box, rows)) for chunk in up.chunks]
            shape = (rows + up.shape[0], *gate.shape[1:])
            found[base] = replace(gate, shape=shape, chunks=(*gate.chunks, *chunks))
    return found


def _below(box: Box, rows: int) -> Box:
    return Box((box.origin[0] + rows, *box.origin[1:]), box.shape)


def _common(
    place: Place, objects: Mapping[str, list[Any]]
) -> tuple[dict[str, Any], dict[str, SourceFile], set[str]]:
    """What all ranks share: arguments, counters, param groups. Its file, and its globals."""
    path = place.files.get(directory.COMMON)
    if path is not None:
        file = torch_file.read(path)
        root = tree.of_file(file)
        if not isinstance(root, dict):
            raise CorruptError(path, "is no dict")
        return root, {file.path: file.source()}, file.globals
    held = _first(objects, _COMMON)
    if not isinstance(held, dict):
        raise IncompleteError(
            place,
            f"holds neither {directory.COMMON} nor {_COMMON}: the run's arguments are in it",
            "copy it here, or read the weights alone with --from torch",
        )
    return held, {}, set()


def _first(objects: Mapping[str, list[Any]], key: str) -> Any:
    return next(iter(objects.get(key, ())), None)


def _own_optimizers(objects: Mapping[str, list[Any]]) -> list[Any]:
    """The states of the chain that model-parallel groups keep by themselves: the first group's."""
    found: dict[int, dict[str, Any]] = {}
    for key in sorted(objects):
        chain = _CHAIN.fullmatch(key)
        match = _GROUP.fullmatch(chain[2]) if chain else None
        if chain and match and match[2] in ("optimizer", "grad_scaler"):
            found.setdefault(int(chain[1] or 0), {}).setdefault(match[2], objects[key][0])
    return [found[number] for number in sorted(found)]


def _form(common: Mapping[str, Any], flat: Sequence[Entry], slots: Sequence[Entry]) -> str:
    """What is said of the format: how a distributed optimizer is kept."""
    about = common.get("content_metadata")
    kept = about.get("distrib_optim_sharding_type") if isinstance(about, dict) else None
    if kept is None and flat:
        kept = "flat"
    if kept and (flat or slots):
        return f"torch_dist, distributed optimizer ({kept})"
    return "torch_dist"


class _Keys:
    """Keys of torch_dist as names of the saving model."""

    def __init__(self, table: Table, args: Arguments) -> None:
        self._table = table
        self._args = args

    def entries(self, key: str, kind: str, tensor: Logical) -> Iterator[Entry]:
        """The parameters that one stored tensor holds."""
        name = names.stacked(key)
        if name is None:
            yield from self._experts(key, kind, tensor)
            return
        for index, one in enumerate(_slices(tensor)):
            yield from self._experts(name.replace("{}", str(index), 1), kind, one)

    def _experts(self, name: str, kind: str, tensor: Logical) -> Iterator[Entry]:
        found = names.of_dist_expert(name)
        if found is None:
            yield self._entry(name, kind, tensor)
            return
        pattern, number = found
        held = enumerate(_slices(tensor)) if number is None else [(number, tensor)]
        for index, one in held:
            yield self._entry(pattern.replace("{}", str(index), 1), kind, one)

    def _entry(self, name: str, kind: str, tensor: Logical) -> Entry:
        fqn = names.as_saved(self._table, name, self._args)
        return Entry(fqn, kind, tensor.dtype, tensor.shape, tensor.chunks)


def _slices(tensor: Logical) -> Iterator[Logical]:
    """The tensors that are stacked along dim 0."""
    by_index: dict[int, list[Chunk]] = defaultdict(list)
    where = tensor.chunks[0].file if tensor.chunks else "a tensor of layers without elements"
    total = counts.count(where, "the number of stacked layers", tensor.shape[0])
    for chunk in tensor.chunks:
        if not chunk.box.fits(tensor.shape):
            raise CorruptError(chunk.file, f"{chunk.box} lies outside of {tensor.shape}")
        start, count = chunk.box.origin[0], chunk.box.shape[0]
        for index in range(start, start + count):
            by_index[index] += layer([chunk], index)
    for index in range(total):
        yield replace(tensor, shape=tensor.shape[1:], chunks=tuple(by_index[index]))


class _Flat:
    """The distributed optimizer's buffers, kept by each model-parallel group as they are."""

    def __init__(
        self,
        stored: Mapping[str, Logical],
        objects: Mapping[str, list[Any]],
        whole: Mapping[tuple[str, str], Entry],
        args: Arguments,
        table: Table,
        path: str,
    ) -> None:
        self._args = args
        self._table = table
        self._path = path
        self._whole = {fqn: entry for (kind, fqn), entry in whole.items() if kind == PARAM}
        self._model = model.model(self._whole)
        # (optimizer, group) -> buffer -> slot -> buckets; and what gather_scatter keeps
        self._buckets: dict[tuple[int, int], dict[int, dict[str, dict[int, Logical]]]] = {}
        self._states: dict[tuple[int, int], Any] = {}
        for key, tensor in stored.items():
            chain = _CHAIN.fullmatch(key)
            match = _BUCKET.fullmatch(chain[2]) if chain else None
            if chain and match:
                place = int(chain[1] or 0), int(match[1])
                held = self._buckets.setdefault(place, {}).setdefault(int(match[2]), {})
                held.setdefault(match[5], {})[int(match[4])] = tensor
        for key, values in objects.items():
            chain = _CHAIN.fullmatch(key)
            match = _GROUP.fullmatch(chain[2]) if chain else None
            if chain and match and match[2] == "param_state":
                self._states[int(chain[1] or 0), int(match[1])] = values[0]

    def entries(self) -> list[Entry]:
        """Every slot of the whole model."""
        if not self._buckets and not self._states:
            return []
        places = directory.saving(self._args)
        ranks = {
            rank: self._manifest(rank)
            for pp in range(self._args.pp)
            for tp, ep in places
            for rank in [Rank(pp, ep, tp)]
        }
        return list(grid.joined(ranks, self._args, self._table).entries.values())

    def _manifest(self, rank: Rank) -> Manifest:
        params = model.of_rank(rank, self._model, self._whole, self._args, self._table)
        chain = [number for number, _ in (*self._buckets, *self._states)]
        shared = optimizer.parts(max(chain) + 1, params, self._args)
        found: list[Entry] = []
        for number, mine in enumerate(shared):
            place = number, self._group(rank, experts=number > 0 and number == len(shared) - 1)
            if place in self._buckets and self._saves(rank, number):
                found += self._unpacked(place, mine)
            elif place in self._states and self._saves(rank, number):
                found += optimizer.flat_entries(
                    self._states[place], 1, mine, self._args, self._path, stage=rank.pp
                )
        experts = self._args.experts // self._args.ep
        restated = grouped.separate(found, experts, rank.ep * experts)
        return Manifest(Origin("megatron", self._path), keyed(restated), {})

    def _saves(self, rank: Rank, number: int) -> bool:
        """Dense buffers are kept once, by the ranks of the first experts."""
        return number > 0 or rank.ep == self._first_ep(rank.tp)

    def _first_ep(self, tp: int) -> int:
        return min(ep for at, ep in directory.saving(self._args) if at == tp)

    def _group(self, rank: Rank, *, experts: bool) -> int:
        """The number of a model-parallel group: tensor, then expert, then pipeline ranks.

        ``dp_group_idx`` (get_megatron_optimizer).
        """
        args = self._args
        if not experts:
            return rank.tp + args.tp * rank.pp
        return args.expert_place(rank.tp, rank.ep) + args.etp * (rank.ep + args.ep * rank.pp)

    def _unpacked(self, place: tuple[int, int], params: Sequence[Held]) -> Iterator[Entry]:
        buffers = optimizer.buffers_of(params, self._args)
        held = self._buckets[place]
        for number, (_, members) in enumerate(buffers):
            if number not in held:
                raise CorruptError(
                    self._path,
                    f"holds no flat buffer {number} of group {place[1]}, which {len(members)}"
                    " parameters fill",
                )
            for slot, tensors in held[number].items():
                ordered = [tensors[index] for index in sorted(tensors)]
                numels = [prod(tensor.shape) for tensor in ordered]
                found = buckets.fitted(members, numels)
                what = f"buffer {number} of group {place[1]}"
                if found is None:
                    raise optimizer.unplaced(self._path, what, members, sum(numels))
                for bucket, tensor in zip(found, ordered, strict=True):
                    pieces = [(chunk.box.origin[0], chunk) for chunk in tensor.chunks]
                    if not _on_edges(bucket.members, pieces):
                        raise optimizer.unplaced(self._path, what, members, sum(numels))
                    yield from optimizer.split(slot, bucket.members, pieces)


def _on_edges(members: Sequence[Member], pieces: Iterable[tuple[int, Chunk]]) -> bool:
    """Whether no stored piece reaches over the edge of a parameter: each is of one, or padding."""
    edges = sorted({edge for member in members for edge in (member.start, member.stop)})
    return not any(start < edge < start + c.box.volume for start, c in pieces for edge in edges)
