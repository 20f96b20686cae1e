"""Join the manifests of a run's model-parallel ranks: tensor, expert, then pipeline ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from reshard.core.box import Index
from reshard.core.join import join
from reshard.core.manifest import PARAM, Entry, Manifest, ParamGroup, index_entries
from reshard.errors import CorruptError
from reshard.formats.megatron import names, parameter_order
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import GridPosition
from reshard.layouts.model_parallel import combine
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.shards import REPLICATED, Split


def join_ranks(ranks: Mapping[GridPosition, Manifest], args: Arguments, table: Table) -> Manifest:
    """Return the whole model's manifest.

    Args:
        ranks: the manifests of all ranks that save, with global names and local shapes.
    """

    def cut(name: str, shape: Index) -> Split:
        split = find_split(name, args, table)
        _check_latent(name, shape, split, args)
        return split

    ordered = [ranks[rank] for rank in sorted(ranks)]
    stages = []
    for pp in range(args.pp):
        manifests = {(r.tp, r.ep): manifest for r, manifest in ranks.items() if r.pp == pp}
        # The expert ranks of a tensor rank save the same dense layers, which become replicas.
        dense = [
            combine.join_stages(
                [_select(m, table, experts=False) for (at, _), m in manifests.items() if at == tp]
            )
            for tp in sorted({tp for tp, _ in manifests})
        ]
        stages.append(combine.join_tensor_ranks(dense, cut))
        for ep in sorted({ep for _, ep in manifests}):
            # Of several copies the first is that of the weights (core/transformer/moe/experts.py,
            # ``replica_id``). With one expert rank Megatron lets the copies of tensor ranks differ.
            pieces = {
                args.get_expert_tensor_rank(tp, at): _select(m, table, experts=True)
                for (tp, at), m in sorted(manifests.items(), key=lambda item: item[0], reverse=True)
                if at == ep
            }
            stages.append(combine.join_tensor_ranks([pieces[etp] for etp in sorted(pieces)], cut))
    # The loops have seen some ranks several times: all but the entries is joined once, from all.
    whole = combine.join_stages(stages)
    joined = join(ordered, sort_entries(whole.entries.values()))
    position = {entry.fqn: at for at, entry in enumerate(joined.of_kind(PARAM))}
    return _tie_embeddings(replace(joined, train=joined.train.sort_groups(position)), args)


def _select(manifest: Manifest, table: Table, *, experts: bool) -> Manifest:
    return manifest.with_entries(
        entry
        for entry in manifest.entries.values()
        if (names.find_expert(entry.fqn, table) is not None) is experts
    )


def find_split(name: str, args: Arguments, table: Table) -> Split:
    """Return how tensor ranks cut a dense parameter, or expert-tensor ranks an expert's."""
    ranks = args.tp if names.find_expert(name, table) is None else args.etp
    if ranks == 1:
        match = table.find(name, {})
        # One rank has the whole, and its files need not state what is cut apart on several.
        if match is None or match.rule.segments:
            return REPLICATED
        return match.rule.split(gated=args.gated, te=args.te)
    rule = table.require(name, {}).rule
    return rule.split(gated=args.gated, te=args.te, args=args.values, source=args.source)


def _check_latent(name: str, shape: Index, split: Split, args: Arguments) -> None:
    # Whether ranks cut a down projection of latent attention follows from ``transformer_impl``
    # alone, which a fork may not keep.
    width = names.find_latent_width(name, args)
    rows = shape[0] * (1 if split.dim is None else args.tp)
    if width and rows != width:
        raise CorruptError(
            args.source,
            f"{name!r} has {shape[0]} rows on each of {args.tp} tensor-parallel ranks. With"
            f" transformer_impl {args.values.get('transformer_impl')!r} that is {rows} rows in"
            f" total, but the arguments state {width}",
            "state with --rules FILE whether the ranks cut it (cut: column or cut: replicated)",
        )


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries layer after layer, independent of the stage that has them."""
    return sorted(entries, key=lambda entry: parameter_order.sort_key(entry.fqn))


def _tie_embeddings(manifest: Manifest, args: Arguments) -> Manifest:
    # ``models/common/language_module/language_module.py`` (tie_embeddings_and_output_weights_...).
    if not args.tied:
        return manifest
    aliases = {copy: name for name, copy in names.COPIES.items()}
    fqns = {entry.fqn for entry in manifest.entries.values()}
    tied = {alias: kept for alias, kept in aliases.items() if kept in fqns}
    entries: list[Entry] = []
    for entry in manifest.entries.values():
        if entry.fqn in tied:
            continue
        # The copy on the last stage has moments too, so each kind of entry is joined.
        copies = [
            manifest.entries[entry.kind, alias]
            for alias, kept in tied.items()
            if kept == entry.fqn and (entry.kind, alias) in manifest.entries
        ]
        chunks = [chunk for copy in copies for chunk in copy.chunks]
        entries.append(replace(entry, chunks=(*entry.chunks, *chunks)))
    groups = tuple(
        ParamGroup(group.hyper, tuple(fqn for fqn in group.fqns if fqn not in tied))
        for group in manifest.train.param_groups
    )
    steps = {f: s for f, s in manifest.train.optimizer_step.items() if f not in tied}
    return replace(
        manifest,
        entries=index_entries(entries),
        tied={**manifest.tied, **tied},
        train=replace(manifest.train, param_groups=groups, optimizer_step=steps),
        trained_dtypes={f: d for f, d in manifest.trained_dtypes.items() if f not in tied},
    )
