"""The model-parallel ranks of a run to come: what each holds of the state.

Each rank's files are those of a run of its own, of the state that it holds (`ModelRank.state`, in
the shapes that it has there); what is laid out for it is then lifted to the whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.box import Box, Index, intersect, whole
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import order
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.layers import TIED
from reshard.formats.deepspeed.write.pipeline import Layer, layers_of, stages
from reshard.manifest import Entry, Key, Skeleton
from reshard.model_parallel import shards
from reshard.model_parallel.moves import Move, apply_moves
from reshard.model_parallel.rules import FORM
from reshard.model_parallel.shards import Split
from reshard.model_parallel.sizes import ONE, Sizes
from reshard.training.state import (
    TrainedGroup,
    Training,
    change_entries,
    refuse_non_elementwise_slots,
)

_INFO = "universal_checkpoint_info"
_ANY_SIZE = (
    "DeepSpeed cuts it unevenly by itself: write --to ds-universal, which it loads at any size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The grid that was asked for.

    Args:
        stage_layers: layers of each pipeline stage; None: as DeepSpeed would share them.
        divisible: the vocabulary is padded to a multiple of this times the tensor-parallel size;
            None: it stays as it is.
        rules: a user's table of how parameters are cut.
        experts: ranks that share the experts of every layer; None: each layer's as in the source.
    """

    sizes: Sizes = ONE
    stage_layers: tuple[int, ...] | None = None
    divisible: int | None = None
    rules: Path | None = None
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRank:
    """One model-parallel rank.

    Args:
        number: tensor-parallel ranks of the first stage first.
        state: what it holds, as if that were all there is.
        layers: those that it writes a file of; none where the module lies with the rest.
        suffix: of its layers' files.
        whole: what its tensors are blocks of: shape, the moves there, and how ranks share it.
        tensor: ranks that share each layer.
    """

    number: int
    state: Training
    layers: tuple[Layer, ...] = ()
    suffix: str = ""
    whole: Mapping[str, tuple[Index, tuple[Move, ...], Split]] = field(default_factory=dict)
    tensor: int = 1

    def lifted(self, skeleton: Skeleton) -> Skeleton:
        """What is laid out for this rank, as blocks of the whole tensors."""
        return replace(skeleton, entries=tuple(self._lifted(e) for e in skeleton.entries))

    def _lifted(self, entry: Entry) -> Entry:
        shape, moves, split = self.whole[entry.fqn]
        lifted = replace(entry, shape=shape, chunks=tuple(apply_moves(entry.chunks, moves)))
        return shards.scale_shares(lifted, split, self.tensor)


@dataclass(frozen=True, slots=True)
class Grid:
    """All ranks; ``layered`` where the module lies in files of its layers."""

    ranks: tuple[ModelRank, ...]
    layered: bool
    notes: tuple[str, ...]


def is_whole(state: Training, wanted: Wanted) -> bool:
    """Whether a single rank holds everything and the module lies in its own file."""
    return wanted.sizes.is_one and not layers_of(state.manifest)


def grid(state: Training, wanted: Wanted) -> Grid:
    """What each model-parallel rank holds.

    Raises:
        UsageError: a parameter that nothing says how to cut, or that does not divide; a module
            without layers of its own is to be cut into stages; experts, of which there are none.
        UnsupportedError: an order of parameters that is lost; state that is not by element.
    """
    manifest, sizes = state.manifest, wanted.sizes
    if sizes.expert > 1:
        raise UsageError(
            f"--ep {sizes.expert}",
            f"{manifest.origin.path} holds no experts of deepspeed.moe",
            "leave it out",
        )
    _refuse_turns(state)
    refuse_non_elementwise_slots(state, "nothing says how model-parallel ranks share it")
    layers = layers_of(manifest)
    if sizes.pipeline > 1 and not layers:
        raise UsageError(
            f"--pp {sizes.pipeline}",
            f"{manifest.origin.path} is of no pipeline: nothing says in which layers its module is"
            " and in which order they stand",
            "leave out --pp",
        )
    notes: list[str] = []
    placed: list[Sequence[Layer]] = [layers]
    if layers:
        ranges, how = stages(manifest, layers, sizes.pipeline, wanted.stage_layers)
        placed = [[x for x in layers if x.number in held] for held in ranges]
        shown = " | ".join(f"{r.start}-{r.stop - 1}" if len(r) else "none" for r in ranges)
        if sizes.pipeline > 1:
            notes.append(f"layers of the stages: {shown}, {how}")
    cutter = _Cutter(state, wanted)
    suffixed = any("-model_" in path for path in manifest.files) or sizes.tensor > 1
    ranks = [
        _rank(
            stage * sizes.tensor + tensor,
            _of_stage(state, held) if layers else state,
            cutter,
            tensor,
            tuple(x for x in held if x.filed),
            f"-model_{tensor:02d}" if suffixed else "",
        )
        for stage, held in enumerate(placed)
        for tensor in range(sizes.tensor)
    ]
    return Grid(tuple(ranks), bool(layers), (*notes, *cutter.notes))


def _refuse_turns(state: Training) -> None:
    """The turns of a model-parallel rank's parameters are its own: they cannot be put together."""
    mesh, config = state.manifest.origin.mesh, state.manifest.train.config
    if order.requests_round_robin(config) and mesh.get("dp", 1) > 1:
        raise UnsupportedError(
            state.manifest.origin.path,
            "was trained with round_robin_gradients, under which each model-parallel rank has an"
            " order of its own",
            "save it once without",
        )


def _of_stage(state: Training, layers: Sequence[Layer]) -> Training:
    """What a stage holds; a shared module is the first that is made, so its parameters lead."""
    held = {fqn for layer in layers for fqn in layer.holds}
    groups = []
    for group in state.groups:
        members = [member for member in group.members if member.fqn in held]
        members.sort(key=lambda member: not member.fqn.startswith(TIED))
        groups.append(TrainedGroup(group.hyper, tuple(members)))
    weights = [weight for weight in state.weights if weight.fqn in held]
    weights.sort(key=lambda weight: not weight.fqn.startswith(TIED))
    return replace(state, weights=tuple(weights), groups=tuple(groups))


class _Cutter:
    """Cuts every tensor of the state over tensor-parallel ranks."""

    def __init__(self, state: Training, wanted: Wanted) -> None:
        self.size = wanted.sizes.tensor
        self._state = state
        self._shapes: dict[str, Index] = {}
        self._blocks: dict[tuple[str, int], tuple[Index, tuple[tuple[Box, Box], ...]]] = {}
        self.notes: list[str] = []
        info = state.manifest.train.opaque.get(_INFO)
        self.info: dict[str, Any] = dict(info) if isinstance(info, dict) else {}
        shapes = {weight.fqn: weight.shape for weight in state.weights}
        buffers = [weight.fqn for weight in state.weights if weight.is_buffer]
        cuts = Cuts(
            state.manifest.origin.path,
            self.info,
            shapes,
            ranks=self.size,
            buffers=buffers,
            rules=wanted.rules,
        )
        if self.size > 1 and not cuts.are_known:
            raise UsageError(
                f"--tp {self.size}",
                f"{state.manifest.origin.path} is of no tensor-parallel run: nothing says how such"
                f" ranks share its parameters ({next(iter(shapes), 'none')!r} ...)",
                f"for more ranks without --tp: --world-size N; for Megatron-LM --to megatron --tp"
                f" {self.size}; for FSDP 2 --to fsdp2 --mesh dp_shard=N,tp={self.size}; or say it"
                f" with --rules FILE: {FORM}",
            )
        self.splits = {fqn: cuts.split(fqn, shape) for fqn, shape in shapes.items()}
        for fqn, shape in shapes.items():
            self._shapes[fqn] = self._padded(fqn, shape, wanted.divisible)
        self.notes += cuts.notes
        of_others = self.size != state.manifest.origin.mesh.get("tp", 1)
        if of_others and ("sub_param_shard_widths" in self.info or "affine_map" in self.info):
            self.info = _evenly(self.info, self.size)
            if self.size > 1:
                self.notes.append(
                    "tensor-parallel ranks share evenly; AutoTP cuts at key-value heads: where"
                    f" {self.size} does not divide them, DeepSpeed loads --to ds-universal alone"
                )

    def _padded(self, fqn: str, shape: Index, divisible: int | None) -> Index:
        """The shape with the padding of a vocabulary that this grid wants."""
        if not self.splits[fqn].padded or divisible is None:
            return shape
        unit, words = divisible * self.size, self.info.get("original_vocab_size")
        if not isinstance(words, int):
            raise UsageError(
                "--make-vocab-size-divisible-by",
                f"{self._state.manifest.origin.path} does not say which rows of {fqn!r} are words",
            )
        rows = -(-words // unit) * unit
        if rows != shape[0]:
            self.notes.append(
                f"{fqn!r} has {rows} rows, {words} of them words; they were {shape[0]}"
            )
            self.info["padded_vocab_size"] = rows
        return (rows, *shape[1:])

    def blocks(self, fqn: str, rank: int) -> tuple[Index, tuple[tuple[Box, Box], ...]]:
        """What a rank holds of a tensor: its shape, and (block of the whole, block of it)."""
        key = fqn, rank
        if key not in self._blocks:
            split = self.splits[fqn]
            if split.widths and len(split.widths[0]) != self.size:
                split = replace(split, widths=())
            try:
                held = shards.list_blocks(fqn, self._shapes[fqn], split, self.size, rank)
            except UsageError as error:
                if split is self.splits[fqn]:
                    raise
                raise UsageError(error.where, error.problem, _ANY_SIZE) from error
            self._blocks[key] = held
        return self._blocks[key]


def _evenly(info: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The metadata of fused parameters for another number of ranks, which share them evenly."""
    widths = {
        text: [[sum(each) // ranks] * ranks for each in held]
        for text, held in (info.get("sub_param_shard_widths") or {}).items()
    }
    return {
        **{key: value for key, value in info.items() if key != "affine_map"},
        "sub_param_shard_widths": widths,
    }


def _rank(
    number: int,
    state: Training,
    cutter: _Cutter,
    tensor: int,
    layers: tuple[Layer, ...],
    suffix: str,
) -> ModelRank:
    """One rank's part of a stage's state."""
    lifts: dict[str, tuple[Index, tuple[Move, ...], Split]] = {}
    local: dict[Key, Entry] = {}

    def cut(entry: Entry) -> Entry:
        if entry.key not in local:
            shape, blocks = cutter.blocks(entry.fqn, tensor)
            local[entry.key] = replace(entry, shape=shape, chunks=())
            moves = tuple(_moves(blocks, entry.shape))
            lifts[entry.fqn] = entry.shape, moves, cutter.splits[entry.fqn]
        return local[entry.key]

    own = change_entries(state, cut)
    train = own.manifest.train
    if cutter.info:
        train = replace(train, opaque={**train.opaque, _INFO: cutter.info})
    own = replace(own, manifest=replace(own.manifest, train=train))
    return ModelRank(number, own, layers, suffix, lifts, cutter.size)


def _moves(blocks: Sequence[tuple[Box, Box]], shape: Index) -> Iterator[Move]:
    """From a rank's tensor to the whole one; rows of padding are nobody's."""
    for block, local in blocks:
        held = intersect(block, whole(shape)) if shape and block.volume else block
        if held is not None:
            yield Move(Box(local.origin, held.shape), held.origin)
