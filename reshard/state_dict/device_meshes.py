"""Read a DeviceMesh as ``torch.save`` pickles it: its axes, and the ranks along each of them.

Sources: torch 2.13 ``distributed/device_mesh.py`` (``_layout`` and ``_flatten_rank_map`` since
2.10, ``mesh`` and ``_flatten_mesh_list`` before), ``distributed/_mesh_layout.py``; torch 2.15 for
``_preserve_rank_order``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor
from reshard.core.box import Index, as_index, row_major
from reshard.errors import shown


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """The mesh of a DTensor, as the rank that saved it describes it.

    Args:
        device: the type of its devices (``cuda``), or "" if it is not text.
        names: of its axes; none if they have no names.
        sizes: the number of ranks of each axis.
        coordinate: of the rank that saved it; None if that rank is not in the mesh. A damaged
            file may state one outside the mesh.
        disordered: for each axis, the ranks along it if process groups have them in another
            order than the mesh, else none.
        rank: of the process that saved it, and `ranks`, those of all: None before torch 2.10.
    """

    device: str
    names: tuple[str, ...]
    sizes: Index
    coordinate: Index | None
    disordered: tuple[Index, ...]
    rank: int | None
    ranks: Sequence[int] | None


@lru_cache(maxsize=8)  # the tensors of a file share a few meshes
def read_device_mesh(call: Call) -> DeviceMesh:
    """Read a mesh.

    Raises:
        AttributeError, IndexError, TypeError, ValueError: it has another structure.
    """
    axes = _read_axes(call)
    sizes = as_index(prod(extents) for extents, _ in axes)
    coordinate = call.get("_coordinate_on_dim")
    if coordinate is not None:
        if len(coordinate) != len(axes) or not all(type(at) is int for at in coordinate):
            raise TypeError(f"{shown(coordinate)} is not a mesh coordinate")
        coordinate = tuple(coordinate)
    names = _get(call, "mesh_dim_names") or ("",)
    device, rank = _get(call, "device_type"), call.get("_rank")
    return DeviceMesh(
        device if isinstance(device, str) else "",
        tuple(names) if all(isinstance(name, str) for name in names) else (),
        sizes,
        coordinate,
        tuple(_find_disordered(call, axes, coordinate)),
        rank if type(rank) is int else None,
        _read_ranks(call),
    )


def _read_ranks(call: Call) -> Sequence[int] | None:
    # The pickle has the list's values, but of the tensor only its size: then they count from 0.
    ranks, tensor = call.get("_flatten_rank_map"), call.get("_rank_map")
    if isinstance(ranks, (tuple, list)) and all(type(rank) is int for rank in ranks):
        return tuple(ranks)
    return range(prod(tensor.shape)) if isinstance(tensor, Tensor) else None


def _get(mesh: Call, name: str) -> Any:
    """Return an attribute of a mesh, which torch before 2.10 stores as a public one."""
    value = mesh.get(f"_{name}")
    return mesh.get(name) if value is None else value


def _read_axes(mesh: Call) -> list[tuple[Index, Index]]:
    """Return the extents and strides of each axis in the list of ranks, which it may cut twice."""
    layout = mesh.get("_layout")
    if layout is None:
        shape = as_index(mesh.get("mesh").shape)
        return [((extent,), (step,)) for extent, step in zip(shape, row_major(shape), strict=True)]
    axes = layout.get("axes")
    parts = (
        zip(layout.get("shape"), layout.get("stride"), strict=True)
        if axes is None
        else ((axis.get("shape"), axis.get("stride")) for axis in axes)
    )
    return [(_as_extents(extents), _as_extents(steps)) for extents, steps in parts]


def _as_extents(numbers: Any) -> Index:
    return as_index(numbers if isinstance(numbers, (tuple, list)) else (numbers,))


def _find_disordered(
    mesh: Call, axes: Sequence[tuple[Index, Index]], coordinate: Index | None
) -> Iterator[Index]:
    # Process groups have their ranks in ascending order unless ``_preserve_rank_order`` is set.
    # Before torch 2.10 the list has the ranks of this mesh; since then it has those of its root.
    ranks = mesh.get("_flatten_rank_map") or mesh.get("_flatten_mesh_list") or ()
    ordered = mesh.get("_preserve_rank_order") is True or _ascends(ranks)
    if ordered or coordinate is None:
        yield from ((),) * len(axes)
        return
    if prod(prod(extents) for extents, _ in axes) > len(ranks):
        raise ValueError(f"a mesh with more ranks than the {len(ranks)} that it lists")
    offsets = [_compute_offsets(*axis) for axis in axes]
    own = [steps[at] for steps, at in zip(offsets, coordinate, strict=True)]
    position = ranks.index(mesh.get("_rank")) if mesh.get("_layout") else sum(own)
    for steps, at in zip(offsets, own, strict=True):
        line = tuple(ranks[position - at + offset] for offset in steps)
        yield () if _ascends(line) else line


def _compute_offsets(extents: Index, steps: Index) -> list[int]:
    """Return where the ranks of an axis are in the list of ranks, relative to its first.

    >>> _compute_offsets((2, 3), (12, 1))
    [0, 1, 2, 12, 13, 14]
    """
    terms = [range(0, n * step, step) for n, step in zip(extents, steps, strict=True) if n > 1]
    return [sum(parts) for parts in product(*terms)]


def _ascends(ranks: Index) -> bool:
    return all(one < next_one for one, next_one in pairwise(ranks))
