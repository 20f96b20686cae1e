"""A model-parallel run: what each model-parallel rank holds, joined.

Ranks are numbered tensor-parallel first: ``mp_rank_MM`` is stage ``MM // TP``, tensor-parallel rank
``MM % TP`` (DeepSpeed 0.19.8 ``runtime/pipe/topology.py``, ``PipeModelDataParallelTopology``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import counts
from reshard.containers.torch_objects import is_zero
from reshard.errors import CorruptError, IncompleteError
from reshard.files import SourceFiles
from reshard.formats.deepspeed import layers, native, whole
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.directory import Census, Files
from reshard.formats.deepspeed.states import ModelStates, open_optimizer
from reshard.manifest import WEIGHT_KINDS, Chunk, Manifest
from reshard.model_parallel import combine
from reshard.state_dict.plain_values import to_plain

_INFO = "universal_checkpoint_info"


def read(files: Files, rules: Path | None = None) -> Manifest:
    """Describe the training state that all ranks hold together.

    Args:
        rules: a user's table of how tensor-parallel ranks share parameters.

    Raises:
        IncompleteError: a rank's or a layer's file is missing.
        CorruptError: the files contradict each other.
        UsageError: nothing says how tensor-parallel ranks share a parameter.
    """
    firsts = [native.first_of(census) for _, census in sorted(files.ranks.items())]
    tensor, pipeline = sizes_of(files, firsts)
    opened = _with_layers(files, firsts, tensor) if files.layers else [(f, ()) for f in firsts]
    ranks = [
        native.read(files.ranks[number], first, held) for number, (first, held) in enumerate(opened)
    ]
    stages = [ranks[at : at + tensor] for at in range(0, len(ranks), tensor)]
    cuts = _cuts(files, firsts[0], stages, rules)
    joined = combine.stages(
        [
            combine.tensor_ranks(_of_stage(cuts, stages, number), cuts.split)
            for number in range(len(stages))
        ]
    )
    data = int(joined.origin.mesh["dp"])
    mesh = {"world": data * len(ranks), "dp": data, "tp": tensor, "pp": pipeline}
    return replace(
        joined,
        origin=replace(joined.origin, mesh=mesh),
        warnings=(*joined.warnings, *cuts.notes),
    )


def sizes_of(files: Files, firsts: Sequence[ModelStates]) -> tuple[int, int]:
    """(tensor-parallel ranks, pipeline stages), as names and files say.

    Raises:
        IncompleteError: model states of a rank are missing.
        CorruptError: a layer has another number of files than the ranks would have.
    """
    count, where = len(firsts), firsts[0].file.path
    said = firsts[0].mapping("checkpoint_parallel_dimensions")
    if files.layers:
        tensor = max(rank for ranks in files.layers.values() for rank in ranks) + 1
    else:
        tensor = counts.count(where, "tp_degree", said.get("tp_degree"), default=count)
    stages = counts.count(where, "pp_degree", said.get("pp_degree"), default=1)
    ranks = counts.count(where, "mp_world_size", firsts[0].root.get("mp_world_size"), default=1)
    wanted = max(ranks, stages * tensor)
    if count < wanted:
        raise IncompleteError(
            files.location,
            f"{wanted} model-parallel ranks saved it; model states of {count} are here",
            "copy the missing mp_rank_* files here",
        )
    if count % tensor:
        raise CorruptError(
            files.location,
            f"holds model states of {count} ranks, and files of {tensor} tensor-parallel ranks",
            "files of two runs are mixed: move those of the other run away",
        )
    return tensor, count // tensor


def _with_layers(
    files: Files, firsts: Sequence[ModelStates], tensor: int
) -> list[tuple[ModelStates, Sequence[Any]]]:
    """The model states with the module that their layers' files hold."""
    found: dict[int, tuple[ModelStates, Sequence[Any]]] = {}
    for rank in range(tensor):
        held = firsts[rank::tensor]
        members = [
            _flat_members(files.ranks[number], first)
            for number, first in zip(range(rank, len(firsts), tensor), held, strict=True)
        ]
        said = [
            layers.Said(
                first.names | {name: None for group in groups for name in group},
                None if groups or first.shapes else _count(first),
            )
            for first, groups in zip(held, members, strict=True)
        ]
        modules = layers.modules(files, rank, said)
        shapes = {name: t.shape for module in modules for name, t in module.tensors.items()}
        for stage, module in enumerate(modules):
            root, groups = held[stage].root, members[stage]
            if groups:  # a shared module is in every stage's, and its file in the first one's
                told = [{name: shapes[name] for name in group} for group in groups]
                root = {**root, "param_shapes": told}
            first = replace(held[stage], root=root, elsewhere=module.tensors)
            found[stage * tensor + rank] = (first, module.files)
    return [found[number] for number in sorted(found)]


def _flat_members(census: Census, first: ModelStates) -> list[list[str]]:
    """The members of each flat tensor in order, where the model states do not list them.

    A pipeline in bf16 has the BF16_Optimizer at stage 0 too (``runtime/pipe/engine.py``), and the
    engine lists shapes for ZeRO alone; each rank says which fragments it has.
    """
    if first.shapes or not census.optim:
        return []
    groups: list[dict[str, None]] = []
    for rank, path in sorted(census.optim.items()):
        for number, mapping in enumerate(open_optimizer(path, rank).listed("param_slice_mappings")):
            groups += [{} for _ in range(number + 1 - len(groups))]
            groups[number].update(dict.fromkeys(mapping))
    return [list(group) for group in groups]


def _count(first: ModelStates) -> int:
    """How many parameters an optimizer by index has."""
    groups = whole.torch_optimizer(first).get("param_groups", [])
    return sum(len(group.get("params", [])) for group in groups)


def _cuts(
    files: Files, first: ModelStates, stages: Sequence[Sequence[Manifest]], rules: Path | None
) -> Cuts:
    info = to_plain(first.root.get(_INFO))
    shapes = {entry.fqn: entry.shape for ranks in stages for entry in ranks[0].entries.values()}
    buffers = {entry.fqn for ranks in stages for entry in ranks[0].of_kind("buffer")}
    return Cuts(
        str(files.location),
        info if isinstance(info, dict) else {},
        shapes,
        ranks=len(stages[0]),
        buffers=buffers,
        rules=rules,
    )


def _of_stage(cuts: Cuts, stages: Sequence[Sequence[Manifest]], number: int) -> list[Manifest]:
    """Return the ranks of a stage without the copies for which only an earlier stage's counts."""
    ranks = stages[number]
    if number == 0:
        return list(ranks)
    earlier = [rank for stage in stages[:number] for rank in stage]
    names = sorted({fqn for rank in ranks for _, fqn in rank.entries})
    unused = [
        fqn for fqn in names if cuts.is_first_stages(fqn) or _is_trained_only(fqn, earlier, ranks)
    ]
    for fqn in unused:
        cuts.notes[
            f"{fqn!r} is taken from the first stage; the last one's copy, which the model does not"
            " use, is left out"
        ] = None
    return [_without(rank, unused) for rank in ranks]


def _is_trained_only(fqn: str, earlier: Sequence[Manifest], ranks: Sequence[Manifest]) -> bool:
    """Return whether a tied module's parameter got gradients on earlier stages and none on these.

    Stages share only the weights that ``tied_weight_attr`` names: DeepSpeed broadcasts those and
    sums their gradients (0.19.8 ``runtime/pipe/module.py``, ``_synchronize_tied_weights``). What
    else a tied module has, each stage trains for itself. Where a stage does not use it, its
    gradients are zeros, and so are its moments, while weight decay goes on changing the copy.
    """
    if not fqn.startswith(layers.TIED):
        return False
    mine, theirs = _slots(fqn, ranks), _slots(fqn, earlier)
    with SourceFiles() as pool:
        unused = bool(mine) and all(is_zero(pool, chunk) for chunk in mine)
        return unused and not all(is_zero(pool, chunk) for chunk in theirs)


def _slots(fqn: str, ranks: Sequence[Manifest]) -> list[Chunk]:
    """Return what the optimizers of ranks store of a parameter beside its master."""
    return [
        chunk
        for rank in ranks
        for entry in rank.entries.values()
        if entry.fqn == fqn and entry.kind not in WEIGHT_KINDS
        for chunk in entry.chunks
        if chunk.box.volume
    ]


def _without(rank: Manifest, unused: Collection[str]) -> Manifest:
    """Return a rank without parameters that the model does not use there, which lie in its files.

    Neither their values nor their moments are padding, as `verify` would take them for.
    """
    entries = rank.entries.values()
    kept = rank.with_entries(entry for entry in entries if entry.fqn not in unused)
    return replace(kept, unused_copies=tuple(entry for entry in entries if entry.fqn in unused))
