"""Cut a training state into what each model-parallel rank of the new run holds.

Each rank's files are laid out like those of a separate run, of the state that it holds
(`ModelRank.state`, in its local shapes); `ModelRank.lift` then maps them to the whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.box import Box, Index, intersect, whole
from reshard.core.manifest import Entry, Key, Skeleton
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.cuts import TENSOR_PARALLEL_INFO, Cuts
from reshard.formats.deepspeed.directory import NAME
from reshard.formats.deepspeed.experts.layout import are_experts_cut, parse_expert_name
from reshard.formats.deepspeed.write import autotp
from reshard.formats.deepspeed.write.pipeline import (
    Layer,
    get_shared_module,
    is_pipeline,
    is_shared,
    list_layers,
    share_layers,
)
from reshard.formats.request import Request
from reshard.layouts.model_parallel import shards
from reshard.layouts.model_parallel.moves import Move, apply_moves
from reshard.layouts.model_parallel.rules import FORM
from reshard.layouts.model_parallel.shards import REPLICATED, Split
from reshard.training.copied_files import TENSOR
from reshard.training.state import (
    TrainedGroup,
    WritableState,
    change_entries,
    refuse_non_elementwise_slots,
)
from reshard.units import round_up

_UNEVEN = "DeepSpeed itself cuts it unevenly: write --to ds-universal, which it loads at any size"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedTarget(Request):
    """A DeepSpeed run to write.

    Args:
        stage_layers: number of layers of each pipeline stage; None: as DeepSpeed shares them.
        divisible: the vocabulary is padded to a multiple of this times the tensor-parallel size;
            None: it stays as it is.
        experts: number of ranks that share the experts of every layer; None: as many for each layer
            as in the source.
    """

    stage_layers: tuple[int, ...] | None = None
    divisible: int | None = None
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRank:
    """One model-parallel rank.

    Args:
        number: number of the rank; the tensor-parallel ranks of the first stage come first.
        state: what the rank holds, like the state of a separate run.
        layers: the layers whose files it writes; empty if the module is in the model states.
        suffix: a part of the names of its layers' files.
        whole: fqn -> the whole tensor's shape, the moves to it, and how ranks share it.
        tensor: number of ranks that share each layer.
    """

    number: int
    state: WritableState
    layers: tuple[Layer, ...] = ()
    suffix: str = ""
    whole: Mapping[str, tuple[Index, tuple[Move, ...], Split]] = field(default_factory=dict)
    tensor: int = 1

    def lift(self, skeleton: Skeleton) -> Skeleton:
        """Return what is laid out for this rank, as blocks of the whole tensors."""
        return replace(skeleton, entries=tuple(map(self._lift, skeleton.entries)))

    def _lift(self, entry: Entry) -> Entry:
        # A script's own tensor is whole on every rank, and so is the state of a single rank.
        if entry.kind == TENSOR or not self.whole:
            return entry
        shape, moves, split = self.whole[entry.fqn]
        lifted = replace(entry, shape=shape, chunks=tuple(apply_moves(entry.chunks, moves)))
        return shards.scale_shares(lifted, split, self.tensor)


@dataclass(frozen=True, slots=True)
class ModelGrid:
    """All ranks; ``layered`` is whether the module is in files of its layers."""

    ranks: tuple[ModelRank, ...]
    layered: bool
    notes: tuple[str, ...]


def is_whole(state: WritableState, target: DeepSpeedTarget) -> bool:
    """Return whether a single rank holds everything, with the module in the model states."""
    return target.parallel.is_one and not is_pipeline(state.manifest)


def has_experts(state: WritableState) -> bool:
    """Return whether a state has experts of ``deepspeed.moe``."""
    return any(parse_expert_name(weight.fqn) for weight in state.weights)


def make_cuts(
    state: WritableState, target: DeepSpeedTarget, ranks: int
) -> tuple[Cuts, dict[str, Any]]:
    """Return how ranks share parameters, and the metadata of the source that says so."""
    found = state.manifest.train.opaque.get(TENSOR_PARALLEL_INFO)
    info: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    # AutoTP before 0.19 states no cuts.
    origin = state.manifest.origin
    is_older = origin.format == NAME and origin.mesh.get("tp", 1) > 1
    if not info and target.parallel.tensor > 1 and target.rules is None and not is_older:
        info = autotp.describe_cuts(state)
    cuts = Cuts(
        state.manifest.origin.path,
        info,
        {weight.fqn: weight.shape for weight in state.weights},
        ranks=ranks,
        buffers=[weight.fqn for weight in state.weights if weight.is_buffer],
        rules=target.rules,
        may_be_autotp=is_older,
    )
    return cuts, info


def cut_state(state: WritableState, target: DeepSpeedTarget) -> ModelGrid:
    """Return what each model-parallel rank holds.

    Raises:
        UsageError: nothing says how a parameter is cut, or it does not divide; a module without
            layer files is to be cut into stages; there are no experts to share.
        UnsupportedError: the order of parameters is lost; a slot does not have a value for each
            element.
    """
    manifest, sizes = state.manifest, target.parallel
    if sizes.expert > 1 and not has_experts(state):
        raise UsageError(
            f"--ep {sizes.expert}",
            f"{manifest.origin.path} contains no experts of deepspeed.moe",
            "leave it out",
        )
    _refuse_round_robin(state)
    refuse_non_elementwise_slots(state, "no file states how model-parallel ranks share it")
    layers = list_layers(manifest)
    if sizes.pipeline > 1 and has_experts(state):
        raise UsageError(
            f"--pp {sizes.pipeline}",
            f"{manifest.origin.path} contains experts, which reshard does not write for several"
            " pipeline stages",
            "pass --pp 1, whose output a PipelineModule of one stage loads, or another --to",
        )
    if sizes.pipeline > 1 and not layers:
        raise UsageError(
            f"--pp {sizes.pipeline}",
            f"{manifest.origin.path} is not a pipeline: no file states which layers its module"
            " has, and in which order",
            "leave out --pp",
        )
    notes: list[str] = []
    stages: list[Sequence[Layer]] = [layers]
    if layers:
        ranges, how = share_layers(manifest, layers, sizes.pipeline, target.stage_layers)
        stages = [[layer for layer in layers if layer.number in own] for own in ranges]
        shown = " | ".join(f"{r.start}-{r.stop - 1}" if len(r) else "none" for r in ranges)
        if sizes.pipeline > 1:
            notes.append(f"layers of the stages: {shown}, {how}")
    cutter = _Cutter(state, target)
    # A topology with a tensor-parallel axis names it in the files of layers, also at size 1
    # (DeepSpeed 0.19.8 ``runtime/pipe/topology.py``, ``get_rank_repr``).
    suffixed = any("-model_" in path for path in manifest.files) or sizes.tensor > 1
    ranks = [
        _cut_rank(
            stage * sizes.tensor + tensor,
            _select_stage(state, own) if layers else state,
            cutter,
            tensor,
            tuple(layer for layer in own if layer.has_file),
            f"-model_{tensor:02d}" if suffixed else "",
        )
        for stage, own in enumerate(stages)
        for tensor in range(sizes.tensor)
    ]
    return ModelGrid(tuple(ranks), bool(layers), (*notes, *cutter.notes))


def _refuse_round_robin(state: WritableState) -> None:
    """Refuse ``round_robin_gradients``, which reorders each model-parallel rank's parameters."""
    mesh, config = state.manifest.origin.mesh, state.manifest.train.config
    if flat_order.requests_round_robin(config) and mesh.get("dp", 1) > 1:
        raise UnsupportedError(
            state.manifest.origin.path,
            "was trained with round_robin_gradients, under which each model-parallel rank has its"
            " own order of parameters",
            "save the checkpoint once without round_robin_gradients",
        )


def _select_stage(state: WritableState, layers: Sequence[Layer]) -> WritableState:
    # Shared modules lead, in the order of their first use on the stage.
    own = [fqn for layer in layers for fqn in layer.names.values()]
    modules = dict.fromkeys(get_shared_module(fqn) for fqn in own if is_shared(fqn))
    order_of = {module: number for number, module in enumerate(modules)}
    held = set(own)

    def place(fqn: str) -> int:
        return order_of[get_shared_module(fqn)] if is_shared(fqn) else len(order_of)

    groups = []
    for group in state.groups:
        members = [member for member in group.members if member.fqn in held]
        members.sort(key=lambda member: place(member.fqn))
        groups.append(TrainedGroup(group.hyper, tuple(members)))
    weights = [weight for weight in state.weights if weight.fqn in held]
    weights.sort(key=lambda weight: place(weight.fqn))
    return replace(state, weights=tuple(weights), groups=tuple(groups))


class _Cutter:
    def __init__(self, state: WritableState, target: DeepSpeedTarget) -> None:
        self.size = target.parallel.tensor
        self._state = state
        self._blocks: dict[tuple[str, int], tuple[Index, tuple[tuple[Box, Box], ...]]] = {}
        self.notes: list[str] = []
        cuts, self.info = make_cuts(state, target, self.size)
        shapes = {weight.fqn: weight.shape for weight in state.weights}
        if self.size > 1 and not cuts.are_known:
            raise UsageError(
                f"--tp {self.size}",
                f"{state.manifest.origin.path} is not a tensor-parallel run: no file states how"
                f" such ranks share its parameters ({next(iter(shapes), 'none')!r} ...)",
                "for more ranks without --tp: --world-size N; for Megatron-LM: --to megatron --tp"
                f" {self.size}; for FSDP 2: --to fsdp2 --mesh dp_shard=N,tp={self.size}; or state"
                f" it with --rules FILE: {FORM}",
            )
        keeps_experts = not are_experts_cut(state.manifest.origin.mesh)
        self.splits = {
            fqn: REPLICATED
            if keeps_experts and parse_expert_name(fqn)
            else cuts.find_split(fqn, shape)
            for fqn, shape in shapes.items()
        }
        self._shapes = {
            fqn: self._pad(fqn, shape, target.divisible) for fqn, shape in shapes.items()
        }
        self.notes += cuts.notes
        self._note_shares(state)

    def _note_shares(self, state: WritableState) -> None:
        """Note how ranks share parameters where DeepSpeed may cut them otherwise."""
        is_other_size = self.size != state.manifest.origin.mesh.get("tp", 1)
        is_new = bool(self.info) and TENSOR_PARALLEL_INFO not in state.manifest.train.opaque
        if is_new:
            self.notes.append(
                "tensor-parallel ranks share evenly, as DeepSpeed's AutoTP cuts a model whose"
                f" key-value heads {self.size} divides (tensor_parallel.autotp_size: {self.size})"
            )
        elif is_other_size and ("sub_param_shard_widths" in self.info or "affine_map" in self.info):
            self.info = _share_evenly(self.info, self.size)
            if self.size > 1:
                self.notes.append(
                    "tensor-parallel ranks share evenly, but AutoTP cuts at key-value heads: if"
                    f" {self.size} does not divide their number, write --to ds-universal, because"
                    " DeepSpeed does not load this output"
                )

    def _pad(self, fqn: str, shape: Index, divisible: int | None) -> Index:
        if not self.splits[fqn].padded or divisible is None:
            return shape
        unit, vocabulary = divisible * self.size, self.info.get("original_vocab_size")
        if not isinstance(vocabulary, int):
            raise UsageError(
                "--make-vocab-size-divisible-by",
                f"{self._state.manifest.origin.path} does not state which rows of {fqn!r} are"
                " padding",
            )
        rows = round_up(vocabulary, unit)
        if rows != shape[0]:
            self.notes.append(
                f"{fqn!r} has {rows} rows, {vocabulary} of them without padding; the source has"
                f" {shape[0]}"
            )
            self.info["padded_vocab_size"] = rows
        return (rows, *shape[1:])

    def list_blocks(self, fqn: str, rank: int) -> tuple[Index, tuple[tuple[Box, Box], ...]]:
        """Return a rank's shape of a tensor, and pairs (block of the whole, block of its own)."""
        key = fqn, rank
        if key not in self._blocks:
            split = self.splits[fqn]
            # Stored widths are those of the source's ranks; other ranks share evenly.
            if split.widths and len(split.widths[0]) != self.size:
                split = replace(split, widths=())
            try:
                blocks = shards.list_blocks(fqn, self._shapes[fqn], split, self.size, rank)
            except UsageError as error:
                if split is self.splits[fqn]:
                    raise
                raise UsageError(error.where, error.problem, _UNEVEN) from error
            self._blocks[key] = blocks
        return self._blocks[key]


def _share_evenly(info: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    widths = {
        text: [[sum(part) // ranks] * ranks for part in parts]
        for text, parts in (info.get("sub_param_shard_widths") or {}).items()
    }
    return {
        **{key: value for key, value in info.items() if key != "affine_map"},
        "sub_param_shard_widths": widths,
    }


def _cut_rank(
    number: int,
    state: WritableState,
    cutter: _Cutter,
    tensor: int,
    layers: tuple[Layer, ...],
    suffix: str,
) -> ModelRank:
    lifts: dict[str, tuple[Index, tuple[Move, ...], Split]] = {}
    local: dict[Key, Entry] = {}

    def cut(entry: Entry) -> Entry:
        if entry.key not in local:
            shape, blocks = cutter.list_blocks(entry.fqn, tensor)
            local[entry.key] = replace(entry, shape=shape, chunks=())
            moves = tuple(_list_moves(blocks, entry.shape))
            lifts[entry.fqn] = entry.shape, moves, cutter.splits[entry.fqn]
        return local[entry.key]

    own = change_entries(state, cut)
    train = own.manifest.train
    if cutter.info:
        train = replace(train, opaque={**train.opaque, TENSOR_PARALLEL_INFO: cutter.info})
    own = replace(own, manifest=replace(own.manifest, train=train))
    return ModelRank(number, own, layers, suffix, lifts, cutter.size)


def _list_moves(blocks: Sequence[tuple[Box, Box]], shape: Index) -> Iterator[Move]:
    """Yield the moves from a rank's tensor to the whole one; padding rows are in no move."""
    for block, local in blocks:
        stored = intersect(block, whole(shape)) if shape and block.volume else block
        if stored is not None:
            yield Move(Box(local.origin, stored.shape), stored.origin)
