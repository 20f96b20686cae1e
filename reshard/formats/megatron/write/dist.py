"""``--ckpt-format torch_dist``: one DCP directory that any grid loads.

Layers are stacked along a first dim, experts along a second; Megatron cuts when it loads. Layers
that differ are not stacked but numbered. The segments of a fused parameter are tensors of their
own. The optimizer is in a form that every grid loads: of the distributed one
``fully_reshardable``, or flat ranges if the source has them (Megatron-core up to 0.15). On request
it is ``dp_reshardable`` (see `flat`), which the same grid loads at any data-parallel size.

Source: Megatron-LM core_v0.16.1 ``core/transformer/transformer_block.py`` and
``core/transformer/moe/experts.py`` (``sharded_state_dict``), ``core/ssm/mamba_mixer.py`` and
``gated_delta_net.py`` (``_split_tensor_factory``), ``core/optimizer/optimizer.py`` and
``distrib_optimizer.py`` (``sharded_state_dict``, ``sharded_param_state_fully_reshardable``),
``training/checkpointing.py`` (``_build_sharded_state_dict_metadata``, ``load_checkpoint``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.script_values import NAMESPACE
from reshard.containers.pickles.values import Call
from reshard.containers.torch_writer import StorageView
from reshard.core.box import Box, Index, intersect, row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Entry, Key, Skeleton
from reshard.errors import UnsupportedError
from reshard.formats.dcp import writer as dcp
from reshard.formats.megatron.arguments import Arguments, is_hybrid, numbers_layers
from reshard.formats.megatron.optimizers.dist_flat import CHAIN
from reshard.formats.megatron.rank_states import RNG
from reshard.formats.megatron.train import SHARDING, STATE_SHARDING
from reshard.formats.megatron.write import chain, flat
from reshard.formats.megatron.write.groups import MegatronGroup, find_common_count
from reshard.formats.megatron.write.ranks import KnownWeight
from reshard.formats.megatron.write.resolved import Resolved
from reshard.layouts.model_parallel import moves
from reshard.layouts.model_parallel.adapters import restore_rows
from reshard.state_dict.torch_state_dict import StateTensor

_LAYERS = re.compile(r"((?:decoder|encoder)\.layers\.)\d+\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_LINEAR = re.compile(
    r"(.*(?:\.layers\.\d+\.(?:self_attention|mlp)|eh_proj|\.(?:in|out|fc1_latent|fc2_latent)_proj|linear_(?:qkv|proj|fc1|fc2|q_proj|(?:q|kv)_(?:down|up)_proj)))"
    r"\.(?:weight|bias)(?:\.\w+)?"
)
_OUTPUT_BIAS = "output_layer.bias"
_INPUT = re.compile(r"\.self_attention\.(?:linear_qkv|linear_kv_up_proj)$")
_RENAMED = re.compile(r"\.(?:input|pre_mlp)_layernorm\.")
_AVOIDS_PREFIX = "chained_optim_avoid_prefix"
RANGES = "fully_sharded_model_space"
_SINCE_015 = (flat.FORM, "fully_reshardable")
_STACKED = "stacked "  # before the key of a tensor that holds several of the source's
_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out_files(choice: Resolved, directory: str, shards: int) -> Iterator[Skeleton]:
    """Yield the files of one iteration's directory."""
    stacks = _Stacks(choice)
    for known in choice.weights:
        stacks.add("", known, *choice.stored(known.weight))
    in_buckets = _name_sharding(choice) == flat.FORM and not choice.wanted.weights_only
    if not choice.wanted.weights_only and not in_buckets:
        _add_optimizer(choice, stacks)
    root: dict[str, Any] = dict(stacks.list_values())
    root.update(flat.lay_out_buckets(choice) if in_buckets else ())
    extra_states = dict.fromkeys(stacks.list_extra_states())
    extra_states.update(choice.wanted.rank_states.select_for_dist([*extra_states]))
    root.update((key, dcp.StoredObject([value])) for key, value in extra_states.items())
    root.update(_lay_out_random(choice))
    attributes = stacks.describe_ranges()
    skeleton = dcp.lay_out_state(root, shards=shards, directory=directory, attributes=attributes)
    yield stacks.unstack(skeleton)
    stamp = choice.state.stamp("common.pt", 0, choice.world)
    yield torch_writer.lay_out_object(f"{directory}/common.pt", _make_common(choice), stamp=stamp)
    yield skeletons.lay_out_bytes(f"{directory}/metadata.json", json.dumps(_METADATA).encode())


def writes_ranges(choice: Resolved) -> bool:
    """Return whether the distributed optimizer is written as flat ranges.

    Megatron-core up to 0.14 loads no other form on any grid, 0.15 both and 0.16 none of it.
    """
    metadata = choice.state.manifest.train.opaque.get("content_metadata")
    saved = metadata.get(SHARDING) if isinstance(metadata, Mapping) else None
    has_segments = any(known.found.rule.segments for known in choice.weights)
    if choice.wanted.sharding is not None:
        return False
    is_old = saved == RANGES or (choice.groups.before_016 and saved not in _SINCE_015)
    return choice.wanted.distributed and is_old and not has_segments


def _name_sharding(choice: Resolved) -> str:
    if not choice.wanted.distributed:
        return ""
    return RANGES if writes_ranges(choice) else choice.wanted.sharding or "fully_reshardable"


def _lay_out_random(choice: Resolved) -> Iterator[tuple[str, dcp.StoredObject]]:
    states_of = choice.wanted.rank_states.rng
    if not states_of or choice.wanted.weights_only:
        return
    extents = [1 + max(numbers) for numbers in zip(*states_of, strict=True)]
    size = ".".join(map(str, extents))
    for rank, states in states_of.items():
        yield f"{RNG}/shard_{'.'.join(map(str, rank))}_{size}", dcp.StoredObject([states])


def _add_optimizer(choice: Resolved, stacks: _Stacks) -> None:
    in_ranges = writes_ranges(choice)
    master = "param" if choice.wanted.distributed and not in_ranges else "fp32_param"
    for known in choice.weights:
        member = choice.groups.members.get(known.weight.fqn)
        if member is None:
            continue
        prefix = f"{_name_chain(choice, known)}optimizer.state"
        for slot, entry in member.slots.items():
            stacks.add(f"{prefix}.{slot}.", known, entry, entry.dtype, in_ranges=in_ranges)
        if choice.wanted.distributed or choice.stored(known.weight)[1] != FLOAT32:
            value = known.weight.value
            stacks.add(f"{prefix}.{master}.", known, value, FLOAT32, in_ranges=in_ranges)


def _name_chain(choice: Resolved, known: KnownWeight) -> str:
    # Megatron-core before 0.14 expects this prefix, and later versions without
    # ``chained_optim_avoid_prefix``.
    if not choice.groups.before_016 or not choice.groups.experts:
        return ""
    return f"chained_{int(known.weight.fqn in choice.groups.experts)}."


# Tensors


@dataclass(slots=True)
class _Stack:
    """Tensors that one tensor of the directory holds, by their position in it.

    Args:
        shape: shape of each.
        row: the row of each weight at which the tensor begins: that of a segment.
        ranges: number of parts of each along its first dim, each of which is stored as a flat range
            (``fully_sharded_model_space``); 0: the tensors are stored in their shape.
    """

    kind: str
    dtype: DType
    shape: Index
    row: int = 0
    ranges: int = 0
    members: dict[Index, Entry] = field(default_factory=dict)

    @property
    def dims(self) -> int:
        return len(next(iter(self.members)))

    def compute_full_shape(self) -> Index:
        """Return the numbers of members, then a member's shape."""
        extents = tuple(
            1 + max(position[dim] for position in self.members) for dim in range(self.dims)
        )
        if prod(extents) != len(self.members):
            raise UnsupportedError(
                next(iter(self.members.values())).fqn,
                f"is one of {len(self.members)} tensors that torch_dist would stack to {extents},"
                " but some of them are missing",
                "write --ckpt-format torch",
            )
        return (*extents, *self.shape)

    def compute_stored_shape(self) -> Index:
        """Return the shape that is stored; see `formats.dcp.flattened`."""
        if not self.ranges:
            return self.compute_full_shape()
        ones = (1,) * (len(self.shape) - 1)
        parts = (*self.compute_full_shape()[: self.dims], self.ranges, *ones)
        return (*parts, prod(self.shape) // self.ranges)

    def restore(self, chunk: Chunk) -> Iterator[Chunk]:
        if not self.ranges:
            yield chunk
            return
        rows, at = self.shape[0] // self.ranges, self.dims
        (*before, first), (*counts, parts) = chunk.box.origin[: at + 1], chunk.box.shape[: at + 1]
        shape = (*counts, rows, *self.shape[1:])
        strides = (*chunk.byte_strides[:at], *row_major(shape[at:], chunk.dtype.itemsize))
        for part in range(parts):
            origin = (*before, (first + part) * rows, *(0,) * (len(self.shape) - 1))
            offset = chunk.byte_offset + part * chunk.byte_strides[at]
            box = Box(origin, shape)
            yield replace(chunk, box=box, byte_offset=offset, byte_strides=strides)


class _Stacks:
    def __init__(self, choice: Resolved) -> None:
        self._stacks: dict[str, _Stack] = {}
        self._places = choice.places
        self._ranks = choice.wanted.sizes.tensor
        self._is_gated = Arguments("", choice.args).gated
        self._alike = not numbers_layers(choice.args) and _are_alike(
            choice.weights, choice.places.layers
        )
        self._te = choice.wanted.dialect == "te"
        self._hybrid = is_hybrid(choice.args)

    def add(
        self,
        prefix: str,
        known: KnownWeight,
        entry: Entry,
        dtype: DType,
        *,
        in_ranges: bool = False,
    ) -> None:
        # A tensor of one dim keeps its shape: core 0.9 has it so, and later versions load it too
        # (``load_legacy_1d_flatten_tensors``).
        has_parts = len(known.shape) + len(self._find_position(known)) > 1
        ranges = max(1, len(known.split.parts)) if in_ranges and has_parts else 0
        key = prefix + self._make_key(known)
        for ending, row, rows in _list_segments(known):
            shape = known.shape if rows is None else (rows, *known.shape[1:])
            stack = self._stacks.get(key + ending)
            if stack is None:
                stack = self._stacks[key + ending] = _Stack(entry.kind, dtype, shape, row, ranges)
            if (stack.shape, stack.dtype) != (shape, dtype):
                raise UnsupportedError(
                    entry.fqn,
                    f"is {dtype.name} {shape}, but others of {key + ending!r} are"
                    f" {stack.dtype.name} {stack.shape}: torch_dist stacks only equal shapes and"
                    " dtypes",
                    "write --ckpt-format torch",
                )
            stack.members[self._find_position(known)] = entry

    def list_values(self) -> Iterator[tuple[str, StateTensor]]:
        for key, stack in self._stacks.items():
            shape = stack.compute_stored_shape()
            entry = Entry(f"{_STACKED}{key}", stack.kind, stack.dtype, shape, ())
            yield key, StateTensor(stack.dtype, shape, entry, divided=True)

    def describe_ranges(self) -> dict[str, Any]:
        # Source: Megatron-LM core_v0.15.3 ``core/dist_checkpointing/strategies/torch.py``
        # (``mcore_data``, which `get_reformulation_metadata` reads).
        shapes = {
            key: stack.compute_full_shape() for key, stack in self._stacks.items() if stack.ranges
        }
        about = {key: {"nd_reformulated_orig_global_shape": shape} for key, shape in shapes.items()}
        return {"mcore_data": about} if about else {}

    def _make_key(self, known: KnownWeight) -> str:
        if known.expert is not None:
            name = known.found.name
            name = _LOCAL_EXPERT.sub(".experts.", name)
        else:
            name = self._places.spell(known, self._choose_dialect(known))
        return _LAYERS.sub(r"\1", name) if self._alike else name

    def _choose_dialect(self, known: KnownWeight) -> str:
        # Megatron-core's own layers save two norms under Transformer Engine's names, but not where
        # attention is latent (``core/models/gpt/gpt_layer_specs.py``, get_gpt_layer_local_spec:
        # ``sharded_state_dict_keys_map``).
        own = self._places.choose_dialect(known, "te" if self._te else "local")
        if self._te or self._hybrid or _RENAMED.search(known.found.name) is None:
            return own
        return own if self._places.is_latent(known) else "te"

    def _find_position(self, known: KnownWeight) -> Index:
        layer = () if known.layer is None or not self._alike else (known.layer,)
        return layer if known.expert is None else (*layer, known.expert)

    def list_extra_states(self) -> Iterator[str]:
        # GPTModel removes it from what it saves. MambaModel does not, nor BertModel with its bias.
        if self._hybrid or _OUTPUT_BIAS in self._stacks:
            yield "output_layer._extra_state/shard_0_1"
        done = set()
        for key, stack in self._stacks.items():
            match = _LINEAR.fullmatch(key)
            if CHAIN.fullmatch(key) or match is None or f"{match[1]}.weight" not in key:
                continue
            if match[1] in done:  # by another segment
                continue
            done.add(match[1])
            extents = stack.compute_full_shape()[: stack.dims] or (1,)
            modules = [match[1]]
            # The core of attention has a state but no parameter: the projection before it stands
            # for it.
            if self._te and _INPUT.search(match[1]):
                modules.append(_INPUT.sub(".self_attention.core_attention", match[1]))
            size = ".".join(map(str, extents))
            for module in modules:
                for position in product(*map(range, extents)):
                    yield f"{module}._extra_state/shard_{'.'.join(map(str, position))}_{size}"

    def unstack(self, skeleton: Skeleton) -> Skeleton:
        entries: dict[Key, Entry] = {}
        chunks: dict[Key, list[Chunk]] = {}
        for stacked in skeleton.entries:
            if not stacked.fqn.startswith(_STACKED):
                entries.setdefault(stacked.key, replace(stacked, chunks=()))
                chunks.setdefault(stacked.key, []).extend(stacked.chunks)
                continue
            stack = self._stacks[stacked.fqn.removeprefix(_STACKED)]
            restored = [block for chunk in stacked.chunks for block in stack.restore(chunk)]
            for position, entry in stack.members.items():
                own = restored
                for number in position:
                    own = list(moves.take_slice(own, number))
                key = entry.kind, entry.fqn
                entries.setdefault(key, replace(entry, dtype=stack.dtype, chunks=()))
                placed = restore_rows(
                    entry.fqn, entry.shape, own, self._ranks, gated=self._is_gated
                )
                chunks.setdefault(key, []).extend(_crop(placed, entry.shape, stack.row))
        unstacked = tuple(replace(e, chunks=tuple(chunks[key])) for key, e in entries.items())
        return Skeleton(skeleton.files, unstacked)


def _crop(chunks: Sequence[Chunk], shape: Index, row: int) -> Iterator[Chunk]:
    """Yield the chunks of a tensor from ``row`` on; what is past its end is zero padding."""
    for chunk in chunks:
        box = chunk.box.shift_rows(row) if row else chunk.box
        common = intersect(box, whole(shape)) if box.volume else None
        if common is not None:
            yield replace(chunk, box=common)


def _list_segments(known: KnownWeight) -> Iterator[tuple[str, int, int | None]]:
    # A weight without segments is one tensor with all of its rows (None).
    names, parts = known.found.rule.segments, known.split.parts
    if not names:
        yield "", 0, None
        return
    unit, row = known.shape[0] // sum(parts), 0
    for name, part in zip(names, parts, strict=True):
        yield f".{name}", row, part * unit
        row += part * unit


def _are_alike(weights: Sequence[KnownWeight], layers: int) -> bool:
    # Layers with Mamba are not alike: Megatron numbers them in any case
    # (``core/ssm/mamba_block.py``).
    if any(known.found.rule.segments for known in weights):
        return False
    names: dict[int, set[str]] = {}
    for known in weights:
        if known.layer is not None:
            names.setdefault(known.layer, set()).add(_LAYERS.sub("", known.found.name))
    return len(names) == layers and len({frozenset(own) for own in names.values()}) <= 1


# Values that are not tensors


def _make_common(choice: Resolved) -> dict[str, Any]:
    wanted = choice.wanted
    avoids = not choice.groups.before_016  # see `_name_chain`
    metadata: dict[str, Any] = {"singleton_local_shards": False, _AVOIDS_PREFIX: avoids}
    if wanted.distributed:
        metadata[SHARDING] = _name_sharding(choice)
        if metadata[SHARDING] not in (RANGES, flat.FORM):
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    # Megatron requires random states and an optimizer of the directory unless these are set.
    args = {
        **choice.args,
        "no_save_rng": not wanted.rank_states.rng,
        "no_save_optim": wanted.weights_only,
    }
    root: dict[str, Any] = {
        "args": Call(NAMESPACE, (), {**args, "ckpt_format": "torch_dist"}),
        "checkpoint_version": 3.0,
        "iteration": 0 if wanted.weights_only else choice.state.step,
        "content_metadata": metadata,
    }
    if not wanted.weights_only:
        root["optimizer"] = _make_optimizers(choice)
        root["opt_param_scheduler"] = choice.scheduler
        root.update(choice.client)
    return root


def _make_optimizers(choice: Resolved) -> dict[Any, Any]:
    fqns = [known.weight.fqn for known in choice.weights]
    chained = chain.make_states(choice, lambda groups: (_make_optimizer(choice, groups), {}), fqns)
    sharding = _name_sharding(choice)
    if sharding:
        # In dp_reshardable each model-parallel group has the state itself.
        own = [{} if sharding == flat.FORM else state for state in chained]
        chained = [{**state, STATE_SHARDING: sharding} for state in own]
    return chained[0] if len(chained) == 1 else dict(enumerate(chained))


def _make_optimizer(choice: Resolved, groups: Sequence[MegatronGroup]) -> chain.State:
    steps = _get_common_step(choice, groups)
    return {
        "state": {} if steps is None else {"common_step": steps},
        "param_groups": [dict(group.hyper) for group in groups],
    }


def _get_common_step(choice: Resolved, groups: Sequence[MegatronGroup]) -> StorageView | None:
    members = choice.groups.members
    counted = [members[fqn] for g in groups if "step" not in g.hyper for fqn in g.fqns]
    step = find_common_count(counted, choice.state, "torch_dist has one number for all of them")
    return None if step is None else torch_writer.build_number(step)
