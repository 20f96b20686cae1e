"""Build DTensor and ShardedTensor as ``torch.save`` pickles them on one rank.

Sources: torch 2.13 ``distributed/tensor/_api.py``, ``_dtensor_spec.py``, ``placement_types.py``,
``distributed/device_mesh.py``, ``distributed/_mesh_layout.py``;
``distributed/_shard/sharded_tensor/api.py`` (``__getstate__``), ``distributed/_shard/metadata.py``,
``distributed/remote_device.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_writer import Storage, StorageView
from reshard.core import dtypes
from reshard.core.box import Index, row_major
from reshard.core.dtypes import DType
from reshard.layouts.mesh import Cuts, MeshGrid, TensorPlacement
from reshard.layouts.partition import Cut

_DTENSOR = "torch.distributed.tensor.DTensor"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_SHARDED = "torch.distributed._shard.sharded_tensor"
_SHARDED_TENSOR = f"{_SHARDED}.api.ShardedTensor"
_INT32 = dtypes.parse("int32")


@dataclass(eq=False)
class DTensorBuilder:
    """Builds one rank's DTensors, which share their meshes; use one for each file.

    Attributes:
        meshes: the meshes, each with its axes.
    """

    grid: MeshGrid
    rank: int
    meshes: list[tuple[Index, Call]] = field(default_factory=list)
    _meshes: dict[Index, Call] = field(default_factory=dict)
    _first: list[dict[str, Any]] = field(default_factory=list)
    _placements: dict[tuple[Cut | None, ...], tuple[tuple[Call, ...], tuple[Call, ...] | None]] = (
        field(default_factory=dict)
    )

    def build(
        self, shape: Index, dtype: DType, placed: TensorPlacement, local: StorageView
    ) -> Call:
        """Build a DTensor of this shape, of which the rank has ``local``."""
        strides = row_major(shape)
        placements, order = self._get_placements(placed.cuts)
        named = Global(f"torch.{dtype.name}")
        meta = Call(f"{_SPEC}.TensorMeta", (Call("torch.Size", (shape,)), strides, named))
        spec = {
            "mesh": self._get_mesh(placed.axes),
            "placements": placements,
            "tensor_meta": meta,
            "shard_order": order,
            "use_strided_shard_as_shard_order": order is None,
            "_hash": None,
        }
        state = (None, {"_local_tensor": local, "_spec": Call(f"{_SPEC}.DTensorSpec", (), spec)})
        return Call(_DTENSOR, _list_wrapper_args(_DTENSOR, dtype, shape, grad=False), state)

    def move_to(self, rank: int) -> None:
        """Change what the meshes state about the rank."""
        # The ids of the first values are in the memos of pickles, so no other value may get them.
        self._first = self._first or [dict(mesh.state) for _, mesh in self.meshes]
        self.rank = rank
        for axes, mesh in self.meshes:
            mesh.state.update(self._describe_place(axes))

    def _get_mesh(self, axes: Index) -> Call:
        if axes not in self._meshes:
            alone = len(axes) == len(self.grid.sizes) and not self._is_joined
            self._meshes[axes] = self._root if alone else self._build_mesh(axes, self._root)
        return self._meshes[axes]

    @property
    def _is_joined(self) -> bool:
        """Whether ``fully_shard`` joins its axes with those of tensor parallelism."""
        return len(set(self.grid.roles) & {"shard", "tensor"}) > 1

    @cached_property
    def _root(self) -> Call:
        return self._build_mesh(tuple(range(len(self.grid.sizes))), None)

    @cached_property
    def _ranks(self) -> StorageView:
        world = self.grid.world
        # ``DeviceMesh`` keeps its ranks as int32, whatever dtype it is given.
        data = struct.pack(f"<{world}i", *range(world))
        return StorageView(Storage(_INT32, world, data=data), (world,))

    @cached_property
    def _axes(self) -> tuple[Call, ...]:
        sizes = self.grid.sizes
        return tuple(
            Call(
                "torch.distributed._mesh_layout._FlatLayout", (), _describe_flat_layout(size, step)
            )
            for size, step in zip(sizes, row_major(sizes), strict=True)
        )

    def _build_mesh(self, axes: Index, root: Call | None) -> Call:
        grid = self.grid
        layout = {"axes": tuple(self._axes[axis] for axis in axes)}
        state = {
            "_device_type": grid.device,
            "_layout": Call("torch.distributed._mesh_layout._MeshLayout", (), layout),
            "_rank_map": self._ranks,
            "_mesh_dim_names": grid.names and tuple(grid.names[axis] for axis in axes),
            "_root_mesh": root,
            "_preserve_rank_order": False,  # torch 2.15 compares meshes by it; older ones ignore it
            "_flatten_rank_map": tuple(range(grid.world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            **self._describe_place(axes),
            "_hash": None,
        }
        self.meshes.append((axes, Call("torch.distributed.device_mesh.DeviceMesh", (), state)))
        return self.meshes[-1][1]

    def _describe_place(self, axes: Index) -> dict[str, Any]:
        at, groups = self.grid.locate(self.rank), self.grid.name_groups(self.rank)
        return {
            "_dim_group_names": [groups[axis] for axis in axes],
            "_rank": self.rank,
            "_coordinate_on_dim": tuple(at[axis] for axis in axes),
        }

    def _get_placements(
        self, cuts: tuple[Cut | None, ...]
    ) -> tuple[tuple[Call, ...], tuple[Call, ...] | None]:
        # The order has for each dim its mesh axes, left to right. Strided shards state it by
        # themselves.
        if cuts not in self._placements:
            order = (
                None
                if any(cut and cut.split_factor > 1 for cut in cuts)
                else _build_shard_order(cuts)
            )
            self._placements[cuts] = (tuple(map(_build_placement, cuts)), order)
        return self._placements[cuts]


def _describe_flat_layout(size: int, step: int) -> dict[str, Index]:
    # torch's canonical form drops dims of size 1 (``_FlatLayout``).
    return {"shape": (size,), "stride": (step,)} if size > 1 else {"shape": (), "stride": ()}


def _build_shard_order(cuts: Cuts) -> tuple[Call, ...]:
    dims = sorted({cut.dim for cut in cuts if cut})
    axes = {dim: tuple(n for n, cut in enumerate(cuts) if cut and cut.dim == dim) for dim in dims}
    return tuple(Call(f"{_SPEC}.ShardOrderEntry", order) for order in axes.items())


def _build_placement(cut: Cut | None) -> Call:
    if cut is None:
        return Call(f"{_PLACEMENTS}.Replicate", (), {})
    if cut.split_factor > 1:
        state = {"dim": cut.dim, "split_factor": cut.split_factor}
        return Call(f"{_PLACEMENTS}._StridedShard", (), state)
    return Call(f"{_PLACEMENTS}.Shard", (), {"dim": cut.dim})


def _list_wrapper_args(kind: str, dtype: DType, shape: Index, *, grad: bool) -> tuple[object, ...]:
    layout = (_build_strided_layout(), Call("torch.device", ("cpu",)))
    return (Global(kind), Global(f"torch.{dtype.name}"), shape, row_major(shape), 0, *layout, grad)


def _build_strided_layout() -> Call:
    return Call("torch.serialization._get_layout", ("torch.strided",))


def build_sharded_tensor(
    dtype: DType,
    numel: int,
    local: StorageView | None,
    rank: int,
    pieces: Sequence[tuple[int, int]],
) -> Call:
    """Build a 1-d tensor that is cut over all ranks, like FSDP 1's flat parameter.

    A rank without elements has no shard, and the metadata list none for it.

    Args:
        pieces: each rank's ``[start, stop)``.
    """
    shards = {number: piece for number, piece in enumerate(pieces) if piece[0] < piece[1]}
    own = []
    if local is not None and rank in shards:
        shard = (None, {"tensor": local, "metadata": _build_shard_metadata(rank, shards[rank])})
        own.append(Call(f"{_SHARDED}.shard.Shard", (), shard))
    memory = Call(f"{_SHARDED}.metadata.MEM_FORMAT_ENCODING", (0,))
    properties = (Global(f"torch.{dtype.name}"), _build_strided_layout(), True, memory, False)
    metadata = {
        "shards_metadata": [
            _build_shard_metadata(number, piece) for number, piece in shards.items()
        ],
        "size": Call("torch.Size", ((numel,),)),
        "tensor_properties": Call(f"{_SHARDED}.metadata.TensorProperties", (), properties),
    }
    group = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": len(pieces),
        "global_world_size": len(pieces),
    }
    spec = {"dim": 0, "placements": [_build_remote_device(number) for number in range(len(pieces))]}
    sharding = "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"
    state = (
        own,
        Call(f"{_SHARDED}.metadata.ShardedTensorMetadata", (), metadata),
        Call(f"{_SHARDED_TENSOR}.ProcessGroupState", (), group),
        Call(sharding, (), spec),
        False,
    )
    args = _list_wrapper_args(_SHARDED_TENSOR, dtype, (numel,), grad=True)
    return Call(_SHARDED_TENSOR, args, state)


def _build_shard_metadata(rank: int, piece: tuple[int, int]) -> Call:
    start, stop = piece
    state = {
        "shard_offsets": [start],
        "shard_sizes": [stop - start],
        "placement": _build_remote_device(rank),
    }
    return Call("torch.distributed._shard.metadata.ShardMetadata", (), (None, state))


def _build_remote_device(rank: int) -> Call:
    state = {"_worker_name": None, "_rank": rank, "_device": Call("torch.device", ("cpu",))}
    return Call("torch.distributed.remote_device._remote_device", (), state)
