"""Lay out a nanotron run for other ranks, with ZeRO-1 or without.

Sources: nanotron at 2411b02 ``serialize/weights.py`` (``save_weights``), ``serialize/optimizer.py``
(``save_optimizer``, ``save_lr_scheduler``), ``serialize/metadata.py`` (``save_meta``),
``optim/zero.py`` (``_partition_parameters``), ``optim/gradient_accumulator.py`` (fp32 copies end to
end in one buffer).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from reshard.containers import safetensors, skeletons, torch_writer
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.box import Index
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import MASTER, PARAM, Entry, OutputFile, Skeleton
from reshard.state_dict import torch_state_dict
from reshard.training.state import TrainedParameter, Weight, WritableState
from reshard_nanotron import slices, target
from reshard_nanotron.directory import METADATA, MODEL_CONFIG, SCHEDULER, TRACKER
from reshard_nanotron.layout import RunFacts
from reshard_nanotron.optimizer import compute_piece
from reshard_nanotron.slices import TensorShard
from reshard_nanotron.target import TargetRun


def lay_out(state: WritableState, wanted: TargetRun) -> Skeleton:
    """Lay out the run's directory: the directory of its step, and ``latest.txt``."""
    run = _RunWriter(state, wanted, target.resolve_layout(state, wanted))
    step = str(state.step)
    inside = [*run.lay_out_weights()]
    if not wanted.weights_only:
        inside += [*run.lay_out_optimizers(), *run.lay_out_schedulers()]
    inside += run.lay_out_descriptions()
    moved = (skeletons.move_into(part, step) for part in inside)
    return skeletons.join([skeletons.lay_out_bytes(TRACKER, step.encode()), *moved])


def describe_omissions(state: WritableState, wanted: TargetRun) -> Iterator[str]:
    """Yield a note on each part of the source that is not copied."""
    train = state.manifest.train
    if not wanted.weights_only:
        for name in (
            *torch_state_dict.list_dropped(train),
            *train.client.keys() & train.objects.keys(),
        ):
            yield f"not copied: {name}"
    for name in target.get_layout(state).beside:
        why = " (nanotron does not load it either)" if name == "random" else ""
        yield f"not copied: {name}{why}"


class _RunWriter:
    def __init__(self, state: WritableState, wanted: TargetRun, known: RunFacts) -> None:
        self._state, self._wanted, self._known = state, wanted, known
        self._members = {member.fqn: member for member in state.members}
        self._ranks = wanted.sizes.tensor

    def lay_out_weights(self) -> Iterator[Skeleton]:
        """Yield one file per parameter and rank, or a single one if no rank cuts it."""
        for weight in self._state.weights:
            entry, dtype = self._find_source(weight)
            *modules, leaf = weight.fqn.split(".")
            path = "/".join(("model", *modules, f"model_{leaf}"))
            cut = self._known.cuts.get(weight.fqn)
            if cut is None:  # every rank has the same tensor, and nanotron saves it once
                whole = slices.make_whole_part(weight.shape)
                yield _lay_out_weight(f"{path}.safetensors", entry, dtype, whole, {})
                continue
            for rank in range(self._ranks):
                name = f"{path}_{self._format_suffix(cut.stage, rank, '-rank')}.safetensors"
                header = cut.make_header(weight.fqn, weight.shape, self._ranks, rank)
                yield _lay_out_weight(name, entry, dtype, self._find_part(weight, rank), header)

    def _find_source(self, weight: Weight) -> tuple[Entry, DType]:
        dtype = self._wanted.dtype if weight.dtype.family == "float" else None
        trained = self._state.manifest.entries.get((PARAM, weight.fqn))
        # A stored working copy is written as it is; only another dtype is rounded from the master.
        if trained is None or dtype not in (None, trained.dtype):
            return weight.value, dtype or weight.dtype
        return trained, trained.dtype

    def _find_part(self, weight: Weight, rank: int) -> TensorShard:
        cut = self._known.cuts.get(weight.fqn)
        if cut is None:
            return slices.make_whole_part(weight.shape)
        header = cut.make_header(weight.fqn, weight.shape, self._ranks, rank)
        return slices.parse_part(
            weight.fqn, header, cut.compute_local_shape(weight.shape, self._ranks)
        )

    def _format_suffix(self, stage: int, rank: int, word: str = "", data: int | None = None) -> str:
        sizes = self._wanted.sizes
        parts = [f"pp{word}-{stage}-of-{sizes.pipeline}"]
        parts += [] if data is None else [f"dp{word}-{data}-of-{self._wanted.data}"]
        return "_".join((*parts, f"tp{word}-{rank}-of-{sizes.tensor}"))

    def _iterate_writers(self) -> Iterator[tuple[int, int, int | None, str]]:
        data = range(self._wanted.data) if self._wanted.zero else (None,)
        for stage in range(self._wanted.sizes.pipeline):
            for data_rank in data:
                for rank in range(self._ranks):
                    at = self._format_suffix(stage, rank, data=data_rank)
                    yield stage, rank, data_rank, f"{at}_exp-0-of-1"

    def lay_out_optimizers(self) -> Iterator[Skeleton]:
        config = json.dumps(self._build_config()).encode()
        yield skeletons.lay_out_bytes("optimizer/optimizer_config.json", config)
        for stage, rank, data, at in self._iterate_writers():
            root = self._build_optimizer(stage, rank, data)
            yield torch_writer.lay_out_object(f"optimizer/optimizer_{at}.pt", root)

    def lay_out_schedulers(self) -> Iterator[Skeleton]:
        for stage, _, _, at in self._iterate_writers():
            scheduler = self._known.stages[stage].scheduler
            if scheduler is not None and torch_state_dict.is_restorable(scheduler):
                yield torch_writer.lay_out_object(f"{SCHEDULER}/{SCHEDULER}_{at}.pt", scheduler)

    def lay_out_descriptions(self) -> Iterator[Skeleton]:
        about, config = self._state.manifest.train.client.get(METADATA), self._known.config
        if about is not None:
            grid = {"tp": self._ranks, "dp": self._wanted.data}
            text = json.dumps({**about, **grid}, indent=2, sort_keys=True)
            yield skeletons.lay_out_bytes(METADATA, text.encode())
        if config is not None:
            yield skeletons.lay_out_bytes(MODEL_CONFIG, json.dumps(config).encode())

    # The optimizer

    def _build_config(self) -> dict[str, Any]:
        wanted = self._wanted
        kind = "NamedOptimizer"
        if any(self._state.manifest.of_kind(MASTER)):
            kind = "OptimizerFromGradientAccumulator"
        configs: dict[str, Any] = {}
        if wanted.zero:
            kind = "ZeroDistributedOptimizer"
            shapes = {
                fqn: self._find_part(self._members[fqn].weight, 0).local
                for group in self._known.stages[0].groups
                for fqn in group.fqns
            }
            configs = {
                "param_name_to_dp_rank_offsets": {
                    fqn: dict(self._iterate_offsets(prod(shape))) for fqn, shape in shapes.items()
                },
                "orig_param_shapes": {fqn: [*map(str, shape)] for fqn, shape in shapes.items()},
            }
        sizes = {
            "tp_size": str(self._ranks),
            "dp_size": str(wanted.data),
            "pp_size": str(wanted.sizes.pipeline),
            "expert_parallel_size": "1",
        }
        return {"type": kind, "parallelism": sizes, "configs": configs}

    def _iterate_offsets(self, numel: int) -> Iterator[tuple[str, list[str]]]:
        for rank in range(self._wanted.data):
            start, stop = compute_piece(numel, self._wanted.data, rank)
            if start < stop:
                yield str(rank), [str(start), str(stop)]

    def _build_optimizer(self, stage: int, rank: int, data: int | None) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        own: list[_OptimizedRun] = []
        for group in self._known.stages[stage].groups:
            pieces = (self._build_piece(fqn, rank, data) for fqn in group.fqns)
            # If a parameter has fewer elements than there are data ranks, the last ones get none.
            mine = [piece for piece in pieces if piece.start < piece.stop]
            numbers = range(len(own), len(own) + len(mine))
            groups.append({**group.hyper, "params": [*numbers]})
            own += mine
        root = {
            "state": {number: self._build_slots(piece) for number, piece in enumerate(own)},
            "param_groups": groups,
            "names": {number: piece.member.fqn for number, piece in enumerate(own)},
        }
        masters = [piece for piece in own if piece.member.weight.value.kind == MASTER]
        return {**root, "gradient_accumulator": _concatenate_masters(masters)} if masters else root

    def _build_piece(self, fqn: str, rank: int, data: int | None) -> _OptimizedRun:
        member = self._members[fqn]
        part = self._find_part(member.weight, rank)
        numel = prod(part.local)
        if data is None:
            return _OptimizedRun(member, part, 0, numel, part.local)
        start, stop = compute_piece(numel, self._wanted.data, data)
        return _OptimizedRun(member, part, start, stop, (stop - start,))

    def _build_slots(self, own: _OptimizedRun) -> dict[str, Any]:
        member, slots = own.member, dict[str, Any]()
        if member.step is not None:
            data = struct.pack("<f", member.step)
            slots["step"] = StorageView(Storage(FLOAT32, 1, data=data), ())
        for name, entry in member.slots.items():
            parts = tuple(own.make_parts(entry))
            slots[name] = StorageView(Storage(entry.dtype, own.numel, parts), own.shape)
        return {**slots, **torch_state_dict.get_non_tensor_state(self._state, member)}


@dataclass(frozen=True, slots=True)
class _OptimizedRun:
    member: TrainedParameter
    part: TensorShard
    start: int
    stop: int
    shape: Index

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def make_parts(self, entry: Entry) -> Iterator[StorageBlock]:
        for box, at in self.part.list_runs(self.start, self.stop):
            yield StorageBlock(entry.kind, entry.fqn, entry.shape, box, at)


def _concatenate_masters(pieces: list[_OptimizedRun]) -> dict[str, StorageView]:
    parts: list[StorageBlock] = []
    starts: list[int] = []
    numel = 0
    for piece in pieces:
        starts.append(numel)
        value = piece.member.weight.value
        parts += (replace(part, offset=part.offset + numel) for part in piece.make_parts(value))
        numel += piece.numel
    storage = Storage(FLOAT32, numel, tuple(parts))
    return {
        piece.member.fqn: StorageView(storage, piece.shape, offset=start, requires_grad=True)
        for piece, start in zip(pieces, starts, strict=True)
    }


def _lay_out_weight(
    name: str, entry: Entry, dtype: DType, part: TensorShard, header: Mapping[str, str]
) -> Skeleton:
    stored = Entry("data", entry.kind, dtype, part.local, ())
    head, (local,), nbytes = safetensors.lay_out(name, [(stored, dtype)], header)
    start = local.chunks[0].byte_offset
    chunks = tuple(
        contiguous(name, start + at * dtype.itemsize, dtype, box)
        for box, at in part.list_runs(0, prod(part.local))
    )
    laid_out = Entry(entry.fqn, entry.kind, dtype, entry.shape, chunks)
    return Skeleton((OutputFile(name, nbytes, ((0, head),)),), (laid_out,))
