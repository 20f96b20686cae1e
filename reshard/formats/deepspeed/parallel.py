"""Read a model-parallel run: join what each model-parallel rank holds.

Ranks are numbered tensor-parallel first: ``mp_rank_MM`` is stage ``MM // TP``, tensor-parallel rank
``MM % TP`` (DeepSpeed 0.19.8 ``runtime/pipe/topology.py``, ``PipeModelDataParallelTopology``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.containers.torch_objects import is_zero
from reshard.core import counts
from reshard.core.chunks import Chunk
from reshard.core.manifest import BUFFER, PARAM, WEIGHT_KINDS, Manifest
from reshard.errors import TWO_RUNS, CorruptError, IncompleteError
from reshard.formats.deepspeed import layers, tag_directory
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.directory import RankFiles, TagFiles, advise_copying
from reshard.formats.deepspeed.experts import tensor_ranks
from reshard.formats.deepspeed.experts.tensor_ranks import TensorRanks
from reshard.formats.deepspeed.layers import StageModule
from reshard.formats.deepspeed.stage0 import unwrap_optimizer
from reshard.formats.deepspeed.states import ModelStates, open_optimizer
from reshard.layouts.model_parallel import combine
from reshard.system.files import SourceFiles
from reshard.system.threads import map_files


def read(files: TagFiles, first: ModelStates, rules: Path | None = None) -> Manifest:
    """Describe the training state that all ranks hold together.

    Args:
        first: the first rank's model states.
        rules: a user's table of how tensor-parallel ranks share parameters.

    Raises:
        IncompleteError: a rank's or a layer's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: experts in a pipeline that also has tensor-parallel ranks.
        UsageError: nothing says how tensor-parallel ranks share a parameter.
    """
    others = [rank for number, rank in sorted(files.ranks.items()) if number]
    firsts = [first, *map_files(others, tag_directory.open_first)]
    tensor = _find_tensor_size(files, firsts)
    mixture: TensorRanks | None = None
    if files.has_experts:
        mixture = tensor_ranks.read(files, firsts, tensor)
        ranks = mixture.ranks
    else:
        if files.layers:
            opened = _add_layers(files, firsts, tensor)
        else:
            opened = [(own, StageModule({}, ())) for own in firsts]
        ranks = [
            _add_copies(tag_directory.read(files.ranks[number], own, module.files), module)
            for number, (own, module) in enumerate(opened)
        ]
    stages = [ranks[at : at + tensor] for at in range(0, len(ranks), tensor)]
    whole = [mixture.experts] if mixture and mixture.experts else []
    entries = [
        entry
        for part in (*(stage[0] for stage in stages), *whole)
        for entry in part.entries.values()
    ]
    cuts = Cuts(
        str(files.location),
        first.tensor_parallel_info,
        {entry.fqn: entry.shape for entry in entries},
        ranks=tensor,
        buffers=[entry.fqn for entry in entries if entry.kind == BUFFER],
        rules=rules,
    )
    parts = [
        combine.join_tensor_ranks(_drop_unused(cuts, stages, number), cuts.find_split)
        for number in range(len(stages))
    ]
    joined = combine.join_stages([*parts, *whole])
    data = int(joined.origin.mesh["dp"])
    mesh = {"world": data * len(ranks), "dp": data, "tp": tensor, "pp": len(stages)}
    joined = replace(
        joined,
        origin=replace(joined.origin, mesh=mesh),
        warnings=(*joined.warnings, *cuts.notes),
    )
    return mixture.finish(joined) if mixture else joined


def _find_tensor_size(files: TagFiles, firsts: Sequence[ModelStates]) -> int:
    # The model states may declare the tensor-parallel ranks. In older versions of DeepSpeed they do
    # not: a pipeline's layer files show them, and without layers there is one stage, and all
    # model-parallel ranks are tensor-parallel ranks.
    count, where = len(firsts), firsts[0].file.path
    declared = firsts[0].get_section("checkpoint_parallel_dimensions")
    found = max((rank + 1 for ranks in files.layers.values() for rank in ranks), default=count)
    stated = counts.check_count(where, "tp_degree", declared.get("tp_degree"), default=found)
    if files.layers and found < stated:
        raise IncompleteError(
            where,
            f"was saved by {stated} tensor-parallel ranks; there are files of layers of {found}",
            advise_copying(files, "copy the missing layer_* files here"),
        )
    stages = counts.check_count(where, "pp_degree", declared.get("pp_degree"), default=1)
    expected = max(firsts[0].model_ranks, stages * stated)
    if count < expected:
        raise IncompleteError(
            where,
            f"was saved by {expected} model-parallel ranks; there are model states of {count}",
            advise_copying(files, "copy the missing mp_rank_* files here"),
        )
    tensor = found if files.layers else stated
    if count % tensor:
        raise CorruptError(
            files.location,
            f"contains model states of {count} ranks, and files of {tensor} tensor-parallel ranks",
            TWO_RUNS,
        )
    return tensor


def _add_layers(
    files: TagFiles, firsts: Sequence[ModelStates], tensor: int
) -> list[tuple[ModelStates, StageModule]]:
    opened: dict[int, tuple[ModelStates, StageModule]] = {}
    for tensor_rank in range(tensor):
        numbers = range(tensor_rank, len(firsts), tensor)
        members = [_list_flat_members(files.ranks[number], firsts[number]) for number in numbers]
        declared = [
            layers.DeclaredStage(
                first.declared_names | {name: None for group in groups for name in group},
                None if groups or first.shapes else _count_parameters(first),
            )
            for first, groups in zip(firsts[tensor_rank::tensor], members, strict=True)
        ]
        modules = layers.read_stages(files, tensor_rank, declared)
        shapes = {name: t.shape for module in modules for name, t in module.tensors.items()}
        for number, module, groups in zip(numbers, modules, members, strict=True):
            root = firsts[number].root
            if groups:  # a shared module is listed by every stage; its file is the first stage's
                listed = [{name: shapes[name] for name in group} for group in groups]
                root = {**root, "param_shapes": listed}
            first = replace(firsts[number], root=root, layer_tensors=module.tensors)
            opened[number] = (first, module)
    return [opened[number] for number in sorted(opened)]


def _add_copies(rank: Manifest, module: StageModule) -> Manifest:
    copies: dict[str, list[Chunk]] = {}
    for fqn, tensor in module.copies:
        copies.setdefault(fqn, []).append(tensor.chunk)
    return rank.with_entries(
        replace(entry, chunks=(*entry.chunks, *copies[entry.fqn]))
        if entry.kind in (PARAM, BUFFER) and entry.fqn in copies
        else entry
        for entry in rank.entries.values()
    )


def _list_flat_members(files: RankFiles, first: ModelStates) -> list[list[str]]:
    # A pipeline in bf16 has the BF16_Optimizer at stage 0 too (``runtime/pipe/engine.py``), and the
    # engine lists shapes for ZeRO alone; each rank lists the fragments that it has.
    if first.shapes or not files.optim:
        return []
    groups: list[dict[str, None]] = []
    for rank, path in sorted(files.optim.items()):
        mappings = open_optimizer(path, rank).require_list("param_slice_mappings")
        for number, mapping in enumerate(mappings):
            groups += [{} for _ in range(number + 1 - len(groups))]
            groups[number].update(dict.fromkeys(mapping))
    return [list(group) for group in groups]


def _count_parameters(first: ModelStates) -> int:
    groups = unwrap_optimizer(first.get_section("optimizer")).get("param_groups", [])
    return sum(len(group.get("params", [])) for group in groups)


def _drop_unused(cuts: Cuts, stages: Sequence[Sequence[Manifest]], number: int) -> list[Manifest]:
    ranks = stages[number]
    if number == 0:
        return list(ranks)
    earlier = [rank for stage in stages[:number] for rank in stage]
    names = sorted({fqn for rank in ranks for _, fqn in rank.entries})
    unused = [
        fqn
        for fqn in names
        if cuts.is_from_first_stage(fqn) or _is_trained_only_earlier(fqn, earlier, ranks)
    ]
    for fqn in unused:
        cuts.notes[
            f"{fqn!r} is taken from the first stage; a later stage's copy, which the model does not"
            " use, is left out"
        ] = None
    return [_drop_parameters(rank, unused) for rank in ranks]


def _is_trained_only_earlier(
    fqn: str, earlier: Sequence[Manifest], ranks: Sequence[Manifest]
) -> bool:
    # Stages share only the weights that ``tied_weight_attr`` names: DeepSpeed broadcasts those and
    # sums their gradients (0.19.8 ``runtime/pipe/module.py``, ``_synchronize_tied_weights``). Each
    # stage trains the other weights of a tied module for itself. If a stage does not use one, its
    # gradients are zeros, and so are its moments, while weight decay continues to change the copy.
    if not fqn.startswith(layers.TIED):
        return False
    mine, theirs = _list_slot_chunks(fqn, ranks), _list_slot_chunks(fqn, earlier)
    with SourceFiles() as pool:
        unused = bool(mine) and all(is_zero(pool, chunk) for chunk in mine)
        return unused and not all(is_zero(pool, chunk) for chunk in theirs)


def _list_slot_chunks(fqn: str, ranks: Sequence[Manifest]) -> list[Chunk]:
    return [
        chunk
        for rank in ranks
        for entry in rank.entries.values()
        if entry.fqn == fqn and entry.kind not in WEIGHT_KINDS
        for chunk in entry.chunks
        if chunk.box.volume
    ]


def _drop_parameters(rank: Manifest, unused: Collection[str]) -> Manifest:
    # Copies that the model does not use are listed, because `verify` would otherwise take their
    # bytes for padding.
    entries = rank.entries.values()
    kept = rank.with_entries(entry for entry in entries if entry.fqn not in unused)
    return replace(kept, unused_copies=tuple(entry for entry in entries if entry.fqn in unused))
