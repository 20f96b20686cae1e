"""DTensor and ShardedTensor as ``torch.save`` pickles one rank's: what `sharded` reads.

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
from math import prod

from reshard import dtypes
from reshard.box import Box, Index, row_major
from reshard.dtypes import DType
from reshard.errors import UnsupportedError
from reshard.formats.torch_writer import Slot, Storage
from reshard.layout import Cut, mesh_box
from reshard.unpickle import Call, Global

_DTENSOR = "torch.distributed.tensor.DTensor"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_SHARDED = "torch.distributed._shard.sharded_tensor"
_SHARDED_TENSOR = f"{_SHARDED}.api.ShardedTensor"
_INT32 = dtypes.parse("int32")

Cuts = Sequence[Cut | None]  # one a mesh axis; None replicates


@dataclass(frozen=True, slots=True)
class Grid:
    """A device mesh over all ranks, as ``init_device_mesh`` makes it.

    Args:
        names: of its axes; torch loads a DTensor only into a model on a mesh of the same names.
        device: its type, which must be the model's as well: ``cuda``, ``cpu`` ...
    """

    sizes: Index
    names: tuple[str, ...] | None = None
    device: str = "cuda"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def coordinate(self, rank: int) -> Index:
        """Where a rank stands."""
        steps = row_major(self.sizes)
        return tuple(rank // step % size for step, size in zip(steps, self.sizes, strict=True))

    def box(self, shape: Index, cuts: Cuts, rank: int) -> Box:
        """The block of a tensor that a rank holds."""
        box = mesh_box(shape, cuts, self.sizes, self.coordinate(rank))
        if box is None:
            raise UnsupportedError(f"{cuts}", f"are no cuts of a mesh of {self.sizes}")
        return box


@dataclass(eq=False)
class DTensors:
    """Makes one rank's DTensors, which share a mesh; one for each file.

    Args:
        grid: the mesh; its process group is torch's default one where it has a single axis.
    """

    grid: Grid
    rank: int
    _placements: dict[tuple[Cut | None, ...], tuple[tuple[Call, ...], tuple[Call, ...]]] = field(
        default_factory=dict
    )

    def make(self, shape: Index, dtype: DType, cuts: Cuts, local: Slot) -> Call:
        """A tensor of which this rank holds ``local``."""
        strides = row_major(shape)
        placements, order = self._placed(tuple(cuts))
        named = Global(f"torch.{dtype.name}")
        meta = Call(f"{_SPEC}.TensorMeta", (Call("torch.Size", (shape,)), strides, named))
        spec = {
            "mesh": self._mesh,
            "placements": placements,
            "tensor_meta": meta,
            "shard_order": order,
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        state = (None, {"_local_tensor": local, "_spec": Call(f"{_SPEC}.DTensorSpec", (), spec)})
        return Call(_DTENSOR, _wrapper(_DTENSOR, dtype, shape, "cpu", grad=False), state)

    @cached_property
    def _mesh(self) -> Call:
        sizes, world = self.grid.sizes, self.grid.world
        axes = tuple(
            Call("torch.distributed._mesh_layout._FlatLayout", (), {"shape": (n,), "stride": (s,)})
            for n, s in zip(sizes, row_major(sizes), strict=True)
        )
        layout = Call("torch.distributed._mesh_layout._MeshLayout", (), {"axes": axes})
        ranks = struct.pack(f"<{world}i", *range(world))
        state = {
            "_device_type": self.grid.device,
            "_layout": layout,
            "_rank_map": Slot(Storage(_INT32, world, data=ranks), (world,)),
            "_mesh_dim_names": self.grid.names,
            "_root_mesh": None,
            "_flatten_rank_map": tuple(range(world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": ["0"] if len(sizes) == 1 else [],
            "_rank": self.rank,
            "_coordinate_on_dim": self.grid.coordinate(self.rank),
        }
        return Call("torch.distributed.device_mesh.DeviceMesh", (), state)

    def _placed(self, cuts: tuple[Cut | None, ...]) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """Placements, and the order of the cuts: per tensor dim the mesh axes, left to right."""
        if cuts not in self._placements:
            dims = sorted({cut.dim for cut in cuts if cut})
            order = tuple(
                Call(f"{_SPEC}.ShardOrderEntry", (dim, _axes_of(cuts, dim))) for dim in dims
            )
            self._placements[cuts] = (tuple(map(_placement, cuts)), order)
        return self._placements[cuts]


def _axes_of(cuts: Cuts, dim: int) -> Index:
    return tuple(axis for axis, cut in enumerate(cuts) if cut and cut.dim == dim)


def _placement(cut: Cut | None) -> Call:
    if cut is None:
        return Call(f"{_PLACEMENTS}.Replicate", (), {})
    if cut.split_factor > 1:
        raise UnsupportedError("a strided shard", "cannot be written yet", "write DCP instead")
    return Call(f"{_PLACEMENTS}.Shard", (), {"dim": cut.dim})


def _wrapper(
    kind: str, dtype: DType, shape: Index, device: str, *, grad: bool
) -> tuple[object, ...]:
    """The arguments of ``_rebuild_wrapper_subclass``."""
    made = (_layout(), Call("torch.device", (device,)))
    return (Global(kind), Global(f"torch.{dtype.name}"), shape, row_major(shape), 0, *made, grad)


def _layout() -> Call:
    return Call("torch.serialization._get_layout", ("torch.strided",))


def sharded_tensor(
    dtype: DType, numel: int, local: Slot | None, rank: int, pieces: Sequence[tuple[int, int]]
) -> Call:
    """A 1-d tensor cut over all ranks, as FSDP 1's flat parameter is.

    Args:
        pieces: each rank's ``[start, stop)``.

    A rank without elements has no shard, and none is told of it.
    """
    held = {number: piece for number, piece in enumerate(pieces) if piece[0] < piece[1]}
    own = []
    if local is not None and rank in held:
        shard = (None, {"tensor": local, "metadata": _shard(rank, held[rank])})
        own.append(Call(f"{_SHARDED}.shard.Shard", (), shard))
    memory = Call(f"{_SHARDED}.metadata.MEM_FORMAT_ENCODING", (0,))
    properties = (Global(f"torch.{dtype.name}"), _layout(), True, memory, False)
    about = {
        "shards_metadata": [_shard(number, piece) for number, piece in held.items()],
        "size": Call("torch.Size", ((numel,),)),
        "tensor_properties": Call(f"{_SHARDED}.metadata.TensorProperties", (), properties),
    }
    group = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": len(pieces),
        "global_world_size": len(pieces),
    }
    spec = {"dim": 0, "placements": [_device(number) for number in range(len(pieces))]}
    sharding = "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"
    state = (
        own,
        Call(f"{_SHARDED}.metadata.ShardedTensorMetadata", (), about),
        Call(f"{_SHARDED_TENSOR}.ProcessGroupState", (), group),
        Call(sharding, (), spec),
        False,
    )
    args = _wrapper(_SHARDED_TENSOR, dtype, (numel,), "cpu", grad=True)
    return Call(_SHARDED_TENSOR, args, state)


def _shard(rank: int, piece: tuple[int, int]) -> Call:
    start, stop = piece
    state = {
        "shard_offsets": [start],
        "shard_sizes": [stop - start],
        "placement": _device(rank),
    }
    return Call("torch.distributed._shard.metadata.ShardMetadata", (), (None, state))


def _device(rank: int) -> Call:
    state = {"_worker_name": None, "_rank": rank, "_device": Call("torch.device", ("cpu",))}
    return Call("torch.distributed.remote_device._remote_device", (), state)
