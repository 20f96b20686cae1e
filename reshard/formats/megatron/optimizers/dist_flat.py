"""The distributed optimizer in torch_dist: flat buffers of each model-parallel group.

Sources: Megatron-LM core_v0.16.1 ``core/optimizer/distrib_optimizer.py`` (sharded_param_state_*),
``core/optimizer/__init__.py`` (get_megatron_optimizer).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from operator import le
from typing import Any

from reshard.core.chunks import Chunk
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest, Origin, index_entries
from reshard.core.schema import COUNT, expect, sequence
from reshard.errors import MIXED, CorruptError
from reshard.formats.megatron import directory, grid, grouped, model
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import GridPosition
from reshard.formats.megatron.model_chunk import list_experts
from reshard.formats.megatron.optimizers import buckets, flat_buffers, rank_optimizer
from reshard.formats.megatron.optimizers.buckets import Param
from reshard.formats.megatron.optimizers.frozen import (
    Element,
    Sample,
    sample_block,
    transpose_elements,
)
from reshard.formats.megatron.optimizers.rank_optimizer import RankParam
from reshard.formats.megatron.stated import compare_groups
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.partition import Member
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.system.files import SourceFiles

CHAIN = re.compile(r"(?:chained_(\d{1,9})\.)?(optimizer\..+)")
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.gbuf_idx_(\d{1,9})\.dtype_(.+)\.bucket_idx_(\d{1,9})"
    r"\.(\w+)"
)
_UNPADDED = "per_bucket_numel_unpadded"
_GROUP = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.(\w+)")


def find_group_states(objects: Mapping[str, list[Any]], common: Any, path: str) -> list[Any]:
    """Return the state of each optimizer, as its first model-parallel group saved it.

    Args:
        common: the states that all groups share; a chain may have some of both kinds.

    Raises:
        CorruptError: the param groups of two model-parallel groups have different settings.
    """
    states: dict[int, dict[str, dict[str, Any]]] = {}
    # Sorting makes the choice independent of the order in the file.
    for key in sorted(objects):
        chain = CHAIN.fullmatch(key)
        match = _GROUP.fullmatch(chain[2]) if chain else None
        if chain and match and match[2] in ("optimizer", "grad_scaler"):
            of_groups = states.setdefault(int(chain[1] or 0), {})
            of_groups.setdefault(match[1], {}).setdefault(match[2], objects[key][0])
    for of_groups in states.values():
        for number, (what, usual, own) in compare_groups([*of_groups.values()]):
            raise CorruptError(
                path,
                f"states that {what} is {own} in the model-parallel group"
                f" {[*of_groups][number]}, but {usual} in others",
                MIXED,
            )
    first = {number: next(iter(of_groups.values())) for number, of_groups in states.items()}
    shared = dict(enumerate(rank_optimizer.list_states(common))) if common is not None else {}
    known = {**shared, **first}
    return [known[number] for number in sorted(known)]


class FlatBuffers:
    """The distributed optimizer's buffers as each model-parallel group saves them."""

    def __init__(
        self,
        stored: Mapping[str, GlobalTensor],
        objects: Mapping[str, list[Any]],
        whole: Mapping[tuple[str, str], Entry],
        args: Arguments,
        table: Table,
        path: str,
        named: Collection[str],
    ) -> None:
        """Find the buffers.

        Args:
            named: the parameters whose states are stored by name, outside of buffers: those of
                Muon, which begins a chain.
        """
        self._args = args
        self._table = table
        self._path = path
        self._whole = {fqn: entry for (kind, fqn), entry in whole.items() if kind == PARAM}
        self._named = frozenset(named)
        self._model = model.index_parameters(self._whole, table)
        # (optimizer, group) -> buffer -> slot -> buckets. The form dp_zero_gather_scatter has whole
        # states instead.
        self._buckets: dict[tuple[int, int], dict[int, dict[str, dict[int, GlobalTensor]]]] = {}
        self._states: dict[tuple[int, int], Any] = {}
        self._unpadded: dict[tuple[int, int], Any] = {}
        for key, tensor in stored.items():
            chain = CHAIN.fullmatch(key)
            match = _BUCKET.fullmatch(chain[2]) if chain else None
            if chain and match:
                group = int(chain[1] or 0), int(match[1])
                slots = self._buckets.setdefault(group, {}).setdefault(int(match[2]), {})
                slots.setdefault(match[5], {})[int(match[4])] = tensor
        for key, values in objects.items():
            chain = CHAIN.fullmatch(key)
            match = _GROUP.fullmatch(chain[2]) if chain else None
            if not chain or not match:
                continue
            group = int(chain[1] or 0), int(match[1])
            if match[2] == "param_state":
                self._states[group] = values[0]
            elif match[2] == _UNPADDED:
                self._unpadded[group] = values[0]
        self._unread = {*self._buckets, *self._states}

    @property
    def _numbers(self) -> range:
        numbers = [number for number, _ in (*self._buckets, *self._states)]
        first = min(numbers) if self._named else 0
        return range(first, 1 + max(numbers))

    def find_problem(self) -> str:
        """Return why the buffers cannot be divided among the parameters; empty if they can be."""
        if not (self._buckets or self._states):
            return ""
        if self._args.values and not directory.covers_experts(self._args):
            return (
                "reshard does not read the flat buffers of a distributed optimizer if more ranks"
                f" share an expert ({self._args.etp}) than share a layer ({self._args.tp})"
            )
        if not self._args.values:
            return (
                "the checkpoint does not have the arguments of the run, by which the flat buffers"
                " of the distributed optimizer are divided"
            )
        layers = self._args.number("num_layers", "encoder_num_layers")
        if layers % (self._args.pp * self._args.vp) and not self._args.states_layers:
            return (
                f"the arguments of the run do not state how {layers} layers are divided among"
                f" {self._args.pp} pipeline stages (pipeline_model_parallel_layout ...), by which"
                " the flat buffers of the distributed optimizer are divided"
            )
        if self._states and not self._args.states_experts:
            return (
                "the arguments of the run do not state moe_grouped_gemm and"
                " moe_use_legacy_grouped_gemm, by which the flat buffers of experts are divided"
            )
        count = len(self._numbers)
        known = len(rank_optimizer.divide_params(count, (), self._args, self._table))
        return rank_optimizer.describe_long_chain(count, known) if count > known else ""

    def read_entries(self) -> list[Entry]:
        """Return every slot of the whole model.

        Raises:
            CorruptError: a buffer is missing, its buckets are not those of its parameters, or no
                rank of the grid has it.
        """
        if not self._buckets and not self._states:
            return []
        savers = directory.list_saving_ranks(self._args)
        ranks = {
            rank: self._read_rank(rank)
            for pp in range(self._args.pp)
            for tp, ep in savers
            for rank in [GridPosition(pp, ep, tp)]
        }
        unread = [group for _, group in self._unread]
        if unread:
            args = self._args
            raise CorruptError(
                self._path,
                f"contains flat buffers of group {min(unread)}, but no rank of the grid that its"
                f" arguments state (tp {args.tp}, pp {args.pp}, ep {args.ep}) has these",
                MIXED,
            )
        return list(grid.join_ranks(ranks, self._args, self._table).entries.values())

    def _read_rank(self, rank: GridPosition) -> Manifest:
        params = model.list_params(rank, self._model, self._whole, self._args, self._table)
        params = [param for param in params if param.fqn not in self._named]
        numbers = self._numbers
        shared = rank_optimizer.divide_params(len(numbers), params, self._args, self._table)
        entries: list[Entry] = []
        for number, own in enumerate(shared):
            # A chain of optimizers ends with the experts'; a single one has all parameters.
            experts = number > 0 and number == len(shared) - 1
            group = numbers.start + number, self._get_group(rank, experts=experts)
            self._unread.discard(group)
            if group in self._buckets and self._saves(rank, number):
                entries += self._unpack(group, own, self._make_sample(rank))
            elif group in self._states and self._saves(rank, number):
                entries += flat_buffers.read_flat(
                    self._states[group],
                    1,
                    own,
                    self._args,
                    self._table,
                    self._path,
                    stage=rank.pp,
                    sample=self._make_sample(rank),
                ).entries
        separated = grouped.separate(
            entries, list_experts(rank.ep, self._args.ep, self._args.experts)
        )
        return Manifest(Origin("megatron", self._path), index_entries(separated), {}, ordered=True)

    def _saves(self, rank: GridPosition, number: int) -> bool:
        """Return whether a rank saves a buffer; only the first experts' ranks save dense ones."""
        return number > 0 or rank.ep == min(
            ep for other, ep in directory.list_saving_ranks(self._args) if other == rank.tp
        )

    def _get_group(self, rank: GridPosition, *, experts: bool) -> int:
        # ``dp_group_idx`` counts by tensor rank, then expert rank, then pipeline stage
        # (get_megatron_optimizer).
        args = self._args
        if not experts:
            return rank.tp + args.tp * rank.pp
        return args.get_expert_tensor_rank(rank.tp, rank.ep) + args.etp * (
            rank.ep + args.ep * rank.pp
        )

    def _make_sample(self, rank: GridPosition) -> Sample:
        experts = list_experts(rank.ep, self._args.ep, self._args.experts)

        @cache
        def sample(fqn: str) -> Sequence[Element]:
            name = grouped.name_separated(fqn, experts[:1])[0]
            stored, shape, blocks = model.locate_piece(
                name, self._whole, rank, self._args, self._table
            )
            with SourceFiles() as files:
                elements = sample_block(shape, stored.chunks, *blocks[0], files) if blocks else []
            # The first of several experts side by side begins the tensor, transposed.
            return elements if name == fqn else transpose_elements(elements, shape)

        return sample

    def _unpack(
        self, group: tuple[int, int], params: Sequence[RankParam], sample: Sample
    ) -> Iterator[Entry]:
        buffers = flat_buffers.group_buffers(params, self._args)
        stored = self._buckets[group]
        flat_buffers.refuse_unfilled_buffers(self._path, stored, len(buffers))
        for number, (chunk, members) in enumerate(buffers):
            if number not in stored:
                raise CorruptError(
                    self._path,
                    f"does not contain flat buffer {number} of group {group[1]}, which"
                    f" {len(members)} parameters fill",
                )
            own: Sequence[Param] = members
            for slot, tensors in stored[number].items():
                ordered = [tensors[index] for index in sorted(tensors)]
                stored_numels = [prod(tensor.shape) for tensor in ordered]
                numels = self._get_unpadded(group, number, stored_numels)
                fitted = buckets.fit_buckets(own, numels)
                if fitted is None and own is members:
                    own = self._leave_out_frozen(members, chunk, stored[number], numels, sample)
                    fitted = buckets.fit_buckets(own, numels)
                what = f"buffer {number} of group {group[1]}"
                if fitted is None:
                    raise flat_buffers.make_layout_error(self._path, what, members, sum(numels))
                for bucket, tensor in zip(fitted, ordered, strict=True):
                    pieces = [(chunk.box.origin[0], chunk) for chunk in tensor.chunks]
                    if not _respect_edges(bucket.members, pieces):
                        raise flat_buffers.make_layout_error(self._path, what, members, sum(numels))
                    yield from flat_buffers.split_flat(slot, bucket.members, pieces)

    def _leave_out_frozen(
        self,
        members: Sequence[Param],
        chunk: int,
        slots: Mapping[str, Mapping[int, GlobalTensor]],
        numels: Sequence[int],
        sample: Sample,
    ) -> Sequence[Param]:
        masters = next(
            (slots[slot] for slot in slots if rank_optimizer.get_kind(slot) == MASTER), {}
        )
        pieces = [
            [(piece.box.origin[0], piece) for piece in masters[index].chunks]
            for index in sorted(masters)
        ]
        # Padding may be stored behind a bucket, and does not count as elements of it.
        inside = [
            [(start, piece) for start, piece in bucket if start + piece.box.volume <= numel]
            for bucket, numel in zip(pieces, numels, strict=False)
        ]
        size = self._args.get_bucket_size(stage=0, chunk=chunk)
        return flat_buffers.leave_out_frozen(members, size, inside, sample) or members

    def _get_unpadded(
        self, group: tuple[int, int], number: int, stored: Sequence[int]
    ) -> Sequence[int]:
        # The form of core up to 0.14, ``fully_sharded_bucket_space``, stores the padding too, and
        # the numbers of elements without it in an object beside the buckets.
        try:
            (numels,) = self._unpadded[group][number].values()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return stored
        expect(self._path, numels, sequence(COUNT), _UNPADDED)
        fits = len(numels) == len(stored) and all(map(le, numels, stored))
        return numels if fits else stored


def _respect_edges(members: Sequence[Member], pieces: Iterable[tuple[int, Chunk]]) -> bool:
    edges = sorted({edge for member in members for edge in (member.start, member.stop)})
    # Megatron stores each parameter's range on a rank, and each gap, as a piece of its own
    # (sharded_param_state_dp_reshardable): a piece across an edge proves another layout.
    return not any(start < edge < start + c.box.volume for start, c in pieces for edge in edges)
