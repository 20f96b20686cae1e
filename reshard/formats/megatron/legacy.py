"""The reader of the torch format: a folder for each model-parallel rank, with its own tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain
from math import prod
from operator import le
from typing import Any

from reshard.containers.pickles import trust
from reshard.core.box import Index
from reshard.core.dtypes import UINT8
from reshard.core.location import Location
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    Claim,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    index_entries,
)
from reshard.errors import MIXED, CorruptError, IncompleteError
from reshard.formats.megatron import (
    arguments,
    directory,
    grid,
    grouped,
    inferred,
    names,
    parameter_order,
    rank_states,
    train,
)
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import GridPosition
from reshard.formats.megatron.model_chunk import find_norm, list_experts
from reshard.formats.megatron.optimizers import flat_buffers, rank_optimizer
from reshard.formats.megatron.optimizers.flat_buffers import FlatStates
from reshard.formats.megatron.optimizers.frozen import Element, Sample, sample_tensor
from reshard.formats.megatron.optimizers.rank_optimizer import RankParam
from reshard.formats.megatron.rank import RankFile, open_args, open_rank
from reshard.formats.megatron.stated import compare_groups, compare_model, compare_ranks
from reshard.layouts.model_parallel.rules import Table
from reshard.state_dict.tree import as_global
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.system.threads import map_files_by_key

_FINAL_NORM = re.compile(r"(?!mtp\.)(.*\.)?final_(layer)?norm\.")
_EMBEDDING = re.compile(r"(.*\.)?word_embeddings\.")
_MTP = re.compile(r"(.*\.)?mtp\.")
_ENCODERS = ("decoder_num_layers", "pipeline_model_parallel_split_rank")  # arguments of T5
_CHECKSUMS = "a comparison of checksums"
_SEED, _SEED_BYTES = "the seed of its random states", 8
_LAYER_WISE = (
    "each data-parallel rank has the states of some layers, in its own layer_wise_optimizer_N.pt"
)
_AXES = ("tp", "pp", "ep", "etp", "vp")


def read(location: Location, table: Table) -> Manifest:
    """Return every rank's files as one manifest.

    Raises:
        IncompleteError: a rank's folder or file is missing.
        CorruptError: files contradict each other.
        UnsupportedError: Megatron itself did not save every part of the experts.
    """
    first = next(iter(directory.list_rank_folders(location).values()))
    args = inferred.infer_sizes(open_args(directory.find_model_file(first)), location)
    opened = map_files_by_key(directory.find_ranks(location, args), open_rank)
    flat = any(file.flat is not None for file in opened.values())
    chunks = [chunk for file in opened.values() for chunk in file.chunks]
    extra = (name for chunk in chunks for name in chunk.extra)
    shapes = _list_shapes(opened)
    args, layer_notes = inferred.infer_layers(
        inferred.infer_model(args, shapes), table, shapes, extra, in_dist=False
    )
    args = inferred.infer_optimizer(args, distributed=flat)
    is_new = any(chunk.convolution_since_019 for chunk in chunks)
    args = inferred.infer_convolution(args, since_019=is_new)
    begin = min(opened)
    end = min(rank for rank in opened if (rank.pp, rank.tp) == (args.pp - 1, begin.tp))
    args = inferred.infer_tied(args, opened[begin], opened[end])
    _check_ranks(opened, args)
    offsets = _compute_offsets(opened, args)
    ranks: dict[GridPosition, Manifest] = {}
    frozen: dict[tuple[int, int], frozenset[str]] = {}
    # Only the first of the ranks with the same dense layers has the buffers of these.
    for rank in sorted(opened, key=lambda rank: rank.ep):
        known = frozen.get((rank.tp, rank.pp), frozenset())
        ranks[rank] = _read_rank(rank, opened[rank], args, table, offsets[rank.pp], known)
        frozen[rank.tp, rank.pp] = known | ranks[rank].frozen
    whole = grid.join_ranks(ranks, args, table)
    distributed = args.flag("use_distributed_optimizer")
    detail = "torch, distributed optimizer" if distributed else "torch"
    untrained = [entry.fqn for entry in whole.of_kind(PARAM) if entry.fqn in whole.frozen]
    notes = [*whole.warnings, *layer_notes, *rank_optimizer.note_frozen(untrained)]
    # A checkpoint without an optimizer (--no-save-optim) lacks nothing.
    if distributed and not flat and opened[min(opened)].root.get("optimizer"):
        missing = f"no rank has {directory.OPTIMIZER}"
        notes.append(f"{missing}: the checkpoint lacks the optimizer's state")
    files = {**whole.files, **_add_claims(opened, args, whole)}
    whole = replace(whole, files=files, warnings=tuple(notes))
    listed = ([parameter_order.spell(name, args) for name in chunk.params] for chunk in chunks)
    misplaced = next(filter(None, map(parameter_order.find_misplaced, listed)), None)
    found = {
        parameter_order.MISPLACED: misplaced,
        names.MTP_SINCE_017: any(chunk.mtp_since_017 for chunk in chunks),
    }
    opaque = {key: value for key, value in found.items() if value}
    if opaque:
        train_state = replace(whole.train, opaque={**whole.train.opaque, **opaque})
        whole = replace(whole, train=train_state)
    states = rank_states.collect_from_ranks(
        _collect_extra(opened, args, table, offsets), _collect_random(opened, args)
    )
    return rank_states.attach(
        replace(whole, origin=train.make_origin(location, args, detail, whole)), states
    )


def _list_shapes(opened: Mapping[GridPosition, RankFile]) -> dict[str, Index]:
    chunks = (chunk for file in opened.values() for chunk in file.chunks)
    tensors = chain.from_iterable(chunk.params.items() for chunk in chunks)
    return {name: tensor.shape for name, tensor in tensors}


def _collect_extra(
    opened: Mapping[GridPosition, RankFile], args: Arguments, table: Table, offsets: list[list[int]]
) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    for rank, file in opened.items():
        first = list_experts(rank.ep, args.ep, args.experts).start
        for chunk, layers in zip(file.chunks, offsets[rank.pp], strict=True):
            yield (
                (rank.tp, rank.ep),
                {
                    names.shift_numbers(name, layers=layers, experts=first, table=table): value
                    for name, value in chunk.extra.items()
                },
            )


def _collect_random(
    opened: Mapping[GridPosition, RankFile], args: Arguments
) -> dict[tuple[int, ...], Any]:
    return {
        (rank.pp, rank.tp, *([rank.ep] if args.ep > 1 else [])): file.root.get(rank_states.RNG)
        for rank, file in opened.items()
    }


def _check_ranks(opened: Mapping[GridPosition, RankFile], args: Arguments) -> None:
    first = next(iter(opened.values()))
    heads: dict[int, RankFile] = {}
    for rank, file in opened.items():
        # The ranks of a stage train the same layers. Another stage may have frozen ones alone.
        pair = file, heads.setdefault(rank.pp, file)
        lacking = [one for one in pair if one.root.get("optimizer") is None]
        if len(lacking) == 1:
            text = "has no optimizer, but other ranks of its pipeline stage have one"
            raise IncompleteError(lacking[0].path, text, MIXED)
        for what, value, expected in (
            ("iteration", file.root.get("iteration"), first.root.get("iteration")),
            ("checkpoint_version", file.version, first.version),
            ("seed", file.args.values.get("seed"), first.args.values.get("seed")),
            *((axis, getattr(file.args, axis), getattr(first.args, axis)) for axis in _AXES),
        ):
            if value != expected:
                name = as_path(first.path).parent.name
                raise CorruptError(
                    file.path, f"states {what} {value}, but {name} states {expected}", MIXED
                )
        count = len(file.chunks)
        if count != len(first.chunks):
            raise CorruptError(
                file.path,
                f"has {count} model chunks, but other ranks have {len(first.chunks)}",
                MIXED,
            )
        _check_position(rank, file, args)
    # Among ranks with the same dense layers, only the first always has the file; the others have
    # one only if their experts are in buffers, whose optimizer is then the second of a chain.
    first_ep: dict[tuple[int, int], int] = {}
    for rank in opened:
        key = rank.tp, rank.pp
        first_ep[key] = min(rank.ep, first_ep.get(key, rank.ep))
    has_flat = any(file.flat is not None for file in opened.values())
    lacking = [
        file
        for rank, file in opened.items()
        if file.flat is None
        and (
            rank.ep == first_ep[rank.tp, rank.pp]
            or len(rank_optimizer.list_states(file.root.get("optimizer"))) > 1
        )
    ]
    if has_flat and lacking:
        raise IncompleteError(
            as_path(lacking[0].path).parent,
            f"{directory.OPTIMIZER} is missing, but other ranks have it: it stores the distributed"
            " optimizer's state",
            "copy it here; to read only the weights, move this file of all ranks away",
        )


def _check_position(rank: GridPosition, file: RankFile, args: Arguments) -> None:
    saver = file.args.values.get("rank")
    if type(saver) is not int or not 0 <= saver < args.world:
        return
    tp, pp, ep = args.locate_rank(saver)
    if (tp, pp, ep) != (rank.tp, rank.pp, rank.ep):
        folder = GridPosition(pp, ep, tp).name_folder(pp=args.pp, ep=args.ep)
        raise CorruptError(
            file.path,
            f"was saved by rank {saver}, but is in folder {folder}",
            "the folders were renamed or mixed: fetch the checkpoint again as a whole",
        )


def _add_claims(
    opened: Mapping[GridPosition, RankFile], args: Arguments, whole: Manifest
) -> dict[str, SourceFile]:
    claims = {rank: list(_claim_seeds(rank, file, args)) for rank, file in opened.items()}
    of_model = _claim_shared(opened, whole)
    for rank, claim in chain(_claim_contents(opened), _claim_stages(opened, args), of_model):
        claims[rank].append(claim)
    found = {}
    for rank, file in opened.items():
        source = file.files[0].source()
        found[source.path] = replace(source, claims=(*source.claims, *claims[rank]))
    return found


def _claim_shared(
    opened: Mapping[GridPosition, RankFile], whole: Manifest
) -> Iterator[tuple[GridPosition, Claim]]:
    # Of what all ranks state alike only the differences become claims. Those about the model come
    # last, because a file of another rank may be the cause.
    (_, file), *others = opened.items()
    for rank, other in others:
        for what, usual, own in compare_ranks(other.root, file.root):
            yield rank, Claim(what, own, "its root", usual)
    optimizers = [None if f.is_layer_wise else f.root.get("optimizer") for f in opened.values()]
    for number, (what, usual, own) in compare_groups(optimizers):
        yield [*opened][number], Claim(what, own, "its optimizer", usual)
    last = max(opened)
    for what, found, own in compare_model(opened[last].args, whole.entries):
        yield last, Claim(what, own, "its args", found)


def _claim_contents(
    opened: Mapping[GridPosition, RankFile],
) -> Iterator[tuple[GridPosition, Claim]]:
    # Ranks with the same dense layers may have equal files, and so may stages of a model that has
    # not been trained since its layers were copied, but no others.
    first_with: dict[tuple[Any, ...], GridPosition] = {}
    for rank, file in sorted(opened.items()):
        source = file.files[0].source()
        if not (source.has_checksums and file.root.get("optimizer")):
            continue
        first = first_with.setdefault(tuple((r.nbytes, r.crc32) for r in source.records), rank)
        saver = rank if (rank.tp, rank.pp) == (first.tp, first.pp) else first
        own, stated = (as_path(opened[place].path).parent.name for place in (rank, saver))
        yield rank, Claim("rank that saved its tensors", stated, _CHECKSUMS, own)


def _claim_stages(
    opened: Mapping[GridPosition, RankFile], args: Arguments
) -> Iterator[tuple[GridPosition, Claim]]:
    # The first stage has the embedding, unless an encoder on another stage has one, too. A stage
    # with layers of multi-token prediction (MTP) also has one, and gets no claim about the first
    # stage. The last stage has the final norm, unless it has no layers but those of MTP. Source:
    # Megatron-LM core_v0.16.1 ``core/models/gpt/gpt_model.py`` (``pre_process``),
    # ``core/transformer/transformer_block.py`` (``has_final_layernorm_in_this_stage``),
    # ``megatron/model/transformer.py`` of 2.x (``post_process``).
    rows = args.list_layers() if args.mtp and args.states_layers else ()
    counts = list(chain.from_iterable(rows)) or _count_layers(opened, args)
    ends_model = find_norm(counts, mtp=args.mtp > 0) == len(counts) - 1
    begins_model = not any(map(args.values.get, _ENCODERS))
    predicting = {rank for rank, file in opened.items() if _has(file, _MTP)}
    for about, pattern, stage, applies, left_out in (
        ("first pipeline stage", _EMBEDDING, 0, begins_model, predicting),
        ("last pipeline stage", _FINAL_NORM, args.pp - 1, ends_model, set()),
    ):
        having = {rank for rank, file in opened.items() if _has(file, pattern)}
        if args.pp == 1 or not applies or not having:  # a model with other names has none
            continue
        for rank in opened:
            if rank in left_out:
                continue
            stated, expected = (
                "this one" if held else "another" for held in (rank in having, rank.pp == stage)
            )
            yield rank, Claim(about, stated, "its list of parameters", expected)


def _has(file: RankFile, pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(name) for chunk in file.chunks for name in chunk.params)


def _claim_seeds(rank: GridPosition, file: RankFile, args: Arguments) -> Iterator[Claim]:
    # Source: Megatron-LM core_v0.16.1 ``core/tensor_parallel/random.py``
    # (``model_parallel_cuda_manual_seed``): of a seed s the tensor-parallel tracker gets s + 2718 +
    # tp, the expert tracker s + 1024 + 100 * ep + etp. A random state begins with its seed (torch
    # 2.13 ``aten/src/ATen/CPUGeneratorImpl.cpp``, ``cuda/CUDAGeneratorImpl.cpp``).
    stated = file.root.get(rank_states.RNG)
    states = stated[0] if isinstance(stated, list) and stated else None
    trackers = states.get("rng_tracker_states") if isinstance(states, dict) else None
    if not isinstance(states, dict) or not isinstance(trackers, dict):
        return
    base = _read_seed(states.get("torch_rng_state"))
    dense, expert = map(
        _read_seed, map(trackers.get, ("model-parallel-rng", "expert-parallel-rng"))
    )
    # Seeds that were made in another way differ by a number that is not a rank's: no claim then.
    if base is not None and dense is not None and 0 <= (tp := dense - base - 2718) < args.tp:
        yield Claim("tensor-parallel rank", str(tp), _SEED, str(rank.tp))
    if base is not None and expert is not None and expert >= base + 1024:
        ep, etp = divmod(expert - base - 1024, 100)
        if args.ep > 1 and ep < args.ep and etp < args.etp:
            yield Claim("expert-parallel rank", str(ep), _SEED, str(rank.ep))


def _read_seed(state: Any) -> int | None:
    tensor = as_global(state)
    if (
        tensor is None
        or tensor.dtype != UINT8
        or not tensor.chunks
        or prod(tensor.shape) < _SEED_BYTES
    ):
        return None
    with SourceFiles() as pool:
        chunk = tensor.chunks[0]
        return int.from_bytes(pool.read(chunk.file, chunk.byte_offset, _SEED_BYTES), "little")


def _compute_offsets(opened: Mapping[GridPosition, RankFile], args: Arguments) -> list[list[int]]:
    # Each file numbers its layers from 0. The first chunks of all stages come before the second
    # ones.
    flat = _count_layers(opened, args)
    chunks = len(flat) // args.pp
    total = args.number("num_layers", "encoder_num_layers", default=sum(flat))
    if sum(flat) != total and arguments.has_own_configs(args.values):
        flat = _add_empty_layers(flat, args)
    if sum(flat) != total:
        raise CorruptError(
            args.source,
            f"states {total} layers, but the stages' files have {sum(flat)}",
            MIXED,
        )
    starts = [0, *accumulate(flat)]
    return [[starts[vp * args.pp + pp] for vp in range(chunks)] for pp in range(args.pp)]


def _count_layers(opened: Mapping[GridPosition, RankFile], args: Arguments) -> list[int]:
    """Return the number of layers in each chunk, in the order in which layers pass through them."""
    stages = [next(f for r, f in opened.items() if r.pp == pp) for pp in range(args.pp)]
    return [file.chunks[at].layers for at in range(len(stages[0].chunks)) for file in stages]


def _add_empty_layers(found: Sequence[int], args: Arguments) -> list[int]:
    # A layer without attention and MLP has no parameters.
    stated = list(chain.from_iterable(args.list_layers()))
    fits = len(stated) == len(found) and all(map(le, found, stated))
    return stated if fits else list(found)


def _read_rank(
    rank: GridPosition,
    file: RankFile,
    args: Arguments,
    table: Table,
    offsets: Sequence[int],
    known_frozen: frozenset[str],
) -> Manifest:
    """Return one rank's manifest: names of the whole model, shapes of the rank."""
    experts = list_experts(rank.ep, args.ep, args.experts)
    entries: list[Entry] = []
    params: list[RankParam] = []
    for number, (chunk, layers) in enumerate(zip(file.chunks, offsets, strict=True)):
        name_globally = partial(
            names.shift_numbers, layers=layers, experts=experts.start, table=table
        )
        for kind, tensors in ((PARAM, chunk.params), (BUFFER, chunk.buffers)):
            entries += [
                tensor.make_entry(name_globally(name), kind) for name, tensor in tensors.items()
            ]
        params += [
            RankParam(name_globally(name), tensor.shape, tensor.dtype.name, number)
            for name, tensor in chunk.params.items()
        ]
    # One rank's part of a layer-wise optimizer would look like a run that froze the other layers.
    saved = None if file.is_layer_wise else file.root.get("optimizer")
    sample, flat = _make_sample(entries), FlatStates()
    state = rank_optimizer.read(saved, params, args, table, file.path, sample)
    if file.is_layer_wise:
        rank_optimizer.leave_out(state, _LAYER_WISE)
    if file.flat is not None and state.why_unnamed is None:
        count, path = len(rank_optimizer.list_states(saved)), file.files[-1].path
        flat = flat_buffers.read_flat(
            file.flat, count, params, args, table, path, stage=rank.pp, sample=sample
        )
    untrained = known_frozen.union(flat.frozen)
    if untrained:  # no param group has them
        trained = [param for param in params if param.fqn not in untrained]
        state = rank_optimizer.read(saved, trained, args, table, file.path, sample)
    members = {fqn for group in state.groups for fqn in group.fqns}
    frozen = [
        param.fqn
        for param in params
        if members and state.why_unnamed is None and param.fqn not in members
    ]
    entries += flat.entries
    separated = grouped.separate([*entries, *state.entries], experts)
    return Manifest(
        origin=Origin("megatron", file.path),
        entries=index_entries(grouped.reorder_heads(separated, file.version, args)),
        files={opened.path: opened.source() for opened in file.files},
        # Arguments that were inferred alone are not those of the run.
        train=train.make_train_state(
            file.root, args if file.args.values else file.args, state, experts
        ),
        frozen=frozenset(n for fqn in frozen for n in grouped.name_separated(fqn, experts)),
        tied={second: name for chunk in file.chunks for second, name in chunk.tied.items()},
        warnings=tuple(state.notes),
        unnamed_optimizers=state.unnamed_optimizers,
        unnamed=state.why_unnamed,
        unknown_globals=trust.list_unknown(set().union(*(opened.globals for opened in file.files))),
        ordered=True,  # as in the module's state dict; `grid` sorts the joined entries of all ranks
    )


def _make_sample(entries: Iterable[Entry]) -> Sample:
    stored = {entry.fqn: entry for entry in entries if entry.kind == PARAM}

    @cache
    def sample(fqn: str) -> Sequence[Element]:
        with SourceFiles() as files:
            return sample_tensor(stored[fqn].shape, stored[fqn].chunks, files)

    return sample
