"""Read ShardedTensor and DTensor as ``torch.save`` pickles them: which box of a tensor a rank has.

Sources: torch 2.13 ``distributed/_shard/sharded_tensor/api.py`` (``__getstate__``),
``distributed/_shard/metadata.py``, ``distributed/tensor/_api.py``, ``_dtensor_spec.py``,
``placement_types.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from operator import add
from typing import Any, NamedTuple

from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor, TorchFile, is_wrapped, parse_dtype
from reshard.core.box import Box, Index, as_index, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.manifest import Placement
from reshard.errors import ALTERED, CorruptError, UnsupportedError
from reshard.layouts.partition import Cut, compute_mesh_box, compute_packed_boxes
from reshard.quantised import moments
from reshard.state_dict.device_meshes import DeviceMesh, read_device_mesh
from reshard.state_dict.global_tensor import GlobalTensor

XLA_SHARDS = "shard_info"  # in the metadata of torch_xla: the parameters of each shard
_SHARDED_TENSOR = "ShardedTensor"
_DTENSOR = "DTensor"
_NEWER = "a newer torch than reshard supports saved it: save it with DCP instead"


def describe_shards(file: TorchFile, call: Call) -> GlobalTensor | None:
    """Return a sharded tensor with this rank's chunks; None if the call is not a sharded tensor.

    A tensor whose class computes its elements from others is not described either.

    Raises:
        UnsupportedError: a tensor that cannot be described: sparse, quantised, partial ...
        CorruptError: a shard does not match its metadata.
    """
    kind = call.name.rsplit(".", 1)[-1]
    if kind not in (_SHARDED_TENSOR, _DTENSOR) or not call.name.startswith("torch.distributed."):
        if call.name.startswith(("torch._utils.", "torch._tensor.")):
            raise UnsupportedError(
                file.path, f"contains a tensor built by {call.name}, which is not a plain tensor"
            )
        return None
    held = call.get("_local_tensor")
    if is_wrapped(held) and moments.describe(held) is None:
        return None
    try:
        dtype, shape = parse_dtype(call.args[1], file.path), as_index(call.args[2])
        if kind == _DTENSOR:
            spec = call.get("_spec")
            mesh = read_device_mesh(spec.get("mesh"))
            cuts = [_parse_placement(file, placement) for placement in spec.get("placements")]
            chunks = tuple(_read_dtensor(file, call, shape, dtype, cuts, mesh))
            dtype = moments.choose_dtype(chunks, dtype)
            division = _describe_division(mesh.sizes, tuple(cuts))
            return GlobalTensor(dtype, shape, chunks, mesh.device, _name_cuts(mesh, cuts), division)
        shards = tuple(_read_sharded_tensor(file, call, shape, dtype))
        division = f"in {len(call.state[1].get('shards_metadata'))} shards"
        return GlobalTensor(dtype, shape, shards, division=division)
    except (  # pickled objects of another form raise these where the code below reads them
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UnsupportedError(
            file.path,
            f"contains a {kind} of unknown structure ({type(error).__name__}: {error})",
            _NEWER,
        ) from error


class Saver(NamedTuple):
    """The rank that saved a file, as a sharded tensor or torch_xla's metadata in it state it.

    Args:
        ranks: all ranks of the run that saved it; a part of the program's, if it has several runs.
        needed: whether every rank has a block of the tensor that no other has.
    """

    rank: int
    ranks: Sequence[int]
    needed: bool

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


def read_saver(value: Any) -> Saver | None:
    """Return what a value of a file states; None if it is no sharded tensor, or an older one.

    torch stores a DTensor's rank since 2.10, torch_xla in a dict (2.9
    ``xla_fully_sharded_data_parallel.py``, ``get_shard_metadata``).
    """
    try:
        if isinstance(value, dict) and XLA_SHARDS in value:
            return _build_saver(value.get("rank"), range(value["world_size"]), needed=True)
        if not isinstance(value, Call):
            return None
        kind = value.name.rsplit(".", 1)[-1]
        if kind == _SHARDED_TENSOR:
            group = value.state[2]
            ranks = range(group.get("global_world_size"))
            # It is not needed, as a rank without elements has no block.
            return _build_saver(group.get("global_rank"), ranks, needed=False)
        if kind != _DTENSOR:
            return None
        spec = value.get("_spec")
        mesh = read_device_mesh(spec.get("mesh"))
        is_cut = all(placement.name.endswith("Shard") for placement in spec.get("placements"))
        needed = is_cut and prod(mesh.sizes) == len(mesh.ranks or ())
        return _build_saver(mesh.rank, mesh.ranks, needed=needed)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError, AttributeError):
        return None  # another version of torch; `describe_shards` refuses what cannot be read


def _build_saver(rank: Any, ranks: Sequence[int] | None, *, needed: bool) -> Saver | None:
    return Saver(rank, ranks, needed) if type(rank) is int and ranks is not None else None


def _place_shard(file: TorchFile, tensor: Any, box: Box, dtype: DType) -> Chunk:
    values = moments.describe(tensor)
    if values is not None and values.box.shape == box.shape:
        return replace(values, box=box)
    if not isinstance(tensor, Tensor):
        raise TypeError("a shard that is not a tensor")
    if (tensor.shape, tensor.dtype) != (box.shape, dtype):
        raise CorruptError(
            file.path,
            f"contains a shard of {tensor.dtype} {tensor.shape} whose metadata states {dtype}"
            f" {box.origin}+{box.shape}",
            ALTERED,
        )
    return replace(tensor.chunk, box=box)


def _read_sharded_tensor(file: TorchFile, call: Call, shape: Index, dtype: DType) -> list[Chunk]:
    local_shards = call.state[0]
    chunks = []
    for shard in local_shards:
        metadata = shard.get("metadata")
        origin = as_index(metadata.get("shard_offsets"), len(shape))
        box = Box(origin, as_index(metadata.get("shard_sizes"), len(shape)))
        chunks.append(_place_shard(file, shard.get("tensor"), box, dtype))
    return chunks


def _read_dtensor(
    file: TorchFile,
    call: Call,
    shape: Index,
    dtype: DType,
    cuts: Sequence[Cut | None],
    mesh: DeviceMesh,
) -> list[Chunk]:
    spec, sizes, coordinate = call.get("_spec"), mesh.sizes, mesh.coordinate
    if coordinate is None:  # this rank is not in the tensor's mesh
        return []
    if len(sizes) != len(cuts):
        raise ValueError(f"{len(cuts)} placements on a mesh of {sizes}")
    if not all(0 <= at < size for at, size in zip(coordinate, sizes, strict=True)):
        raise CorruptError(
            file.path,
            f"contains a DTensor of a rank with coordinates {coordinate} on a mesh of {sizes}",
            ALTERED,
        )
    for cut, ranks in zip(cuts, mesh.disordered, strict=True):
        if cut and ranks:
            raise UnsupportedError(
                file.path,
                f"contains a DTensor that an axis with the ranks {ranks} shards: torch shards in"
                " the order of the mesh in some operations and by ascending ranks in others",
                "save it with full_tensor(), or on a mesh whose ranks ascend along each axis",
            )
    box = compute_mesh_box(shape, cuts, sizes, coordinate, _read_shard_order(spec, cuts))
    local = call.get("_local_tensor")
    if box is not None:
        chunk = _place_shard(file, local, box, dtype)
        return [chunk] if box.volume or not prod(shape) else []
    packed = compute_packed_boxes(shape, cuts, sizes, coordinate)
    if not packed:
        raise UnsupportedError(
            file.path,
            f"contains a DTensor whose strided shards are not blocks: {cuts} on a mesh of {sizes}",
            "save it with DCP, or gather it before saving",
        )
    last, at = packed[-1]
    held = _place_shard(file, local, whole(tuple(map(add, at, last.shape))), dtype)
    return [_crop(held, box, at) for box, at in packed if box.volume or not prod(shape)]


def _crop(chunk: Chunk, box: Box, at: Index) -> Chunk:
    skipped = sum(start * stride for start, stride in zip(at, chunk.byte_strides, strict=True))
    return replace(chunk, box=box, byte_offset=chunk.byte_offset + skipped)


def _name_cuts(mesh: DeviceMesh, cuts: Sequence[Cut | None]) -> Placement:
    if len(mesh.names) != len(cuts):
        return ()
    dims = [None if cut is None else cut.dim for cut in cuts]
    return tuple(zip(mesh.names, dims, strict=True))


@cache
def _describe_division(sizes: Index, cuts: tuple[Cut | None, ...]) -> str:
    placements = (f"Shard({cut.dim})" if cut else "Replicate()" for cut in cuts)
    return f"over a mesh of {'x'.join(map(str, sizes))} ranks by ({', '.join(placements)})"


def _parse_placement(file: TorchFile, placement: Call) -> Cut | None:
    kind = placement.name.rsplit(".", 1)[-1]
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return Cut(_read_field(placement, "dim", 0))
    if kind == "_StridedShard":
        return Cut(_read_field(placement, "dim", 0), _read_field(placement, "split_factor", 1))
    raise UnsupportedError(
        file.path,
        f"contains a DTensor with the placement {kind}",
        "no rank's file stores its full value: save a gathered or sharded state dict",
    )


def _read_field(placement: Call, name: str, position: int) -> int:
    value = placement.get(name)
    if value is None:
        value = (placement.items or {}).get(name)
    return int(placement.args[position] if value is None else value)


def _read_shard_order(
    spec: Call, placements: Sequence[Cut | None]
) -> dict[int, Sequence[int]] | None:
    entries = spec.get("shard_order")
    if not entries or any(cut and cut.split_factor > 1 for cut in placements):
        return None
    order: dict[int, Sequence[int]] = {}
    for entry in entries:
        # A NamedTuple (torch 2.13) pickles its values as the last arguments of its constructor.
        dim, axes = (
            (entry.get("tensor_dim"), entry.get("mesh_dims")) if entry.state else entry.args[-2:]
        )
        order[int(dim)] = tuple(map(int, axes))
    return order
