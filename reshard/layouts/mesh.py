"""Device meshes: the roles of their axes, and the placement of each parameter on them.

``fully_shard`` after ``parallelize_module`` has its axes in one order: replicate, shard, tensor. It
cuts dim 0 of the block that tensor parallelism leaves to a rank; if tensor parallelism cuts dim 0,
too, the shard is strided. The mesh of a parameter that tensor parallelism does not touch lacks that
axis: it is a slice along the other axes.

Sources: torch 2.13 ``distributed/device_mesh.py`` (``_init_process_groups``, ``_create_sub_mesh``,
``_concatenate``), ``distributed/fsdp/_fully_shard/_fsdp_param.py`` (``_init_sharding_spec_tp``,
``_init_sharding_spec_plain``). Names: torchtitan 0.3 ``distributed/parallel_dims.py``, Accelerate
1.15 ``parallelism_config.py``, transformers 5.23 ``distributed/utils.py``, verl 0.9
``workers/engine/fsdp/utils.py``, torch's own examples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from reshard.core.box import Box, Index, row_major
from reshard.core.manifest import Placement
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.partition import Cut, compute_mesh_box

Role = Literal["replicate", "shard", "tensor"]
Cuts = Sequence[Cut | None]  # one for each mesh axis; None replicates

ROLES: Mapping[str, Role] = {  # in the order in which fully_shard joins them
    **dict.fromkeys(("replicate", "replica", "dp_replicate", "ddp"), "replicate"),
    **dict.fromkeys(("dp", "dp_shard", "dp_shard_cp", "fsdp", "shard", "data_parallel"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel"), "tensor"),
}
_ORDER = list(dict.fromkeys(ROLES.values()))
_OF_ROLE = {"replicate": "replicate", "shard": "shard", "tensor": "are tensor parallel"}
_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d{1,9})", re.ASCII)
_NOT_OURS = {
    "cp": (
        "context-parallel ranks store shards as data-parallel ranks do: pass their product as"
        " dp_shard_cp or fsdp"
    ),
    "sp": "sequence-parallel ranks store shards as data-parallel ranks do: pass their product",
    "pp": "pipeline stages hold different layers: split each stage by itself",
    "ep": "reshard does not write a separate axis for experts yet",
    "efsdp": "reshard does not write a separate axis for experts yet",
}


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The axes of a mesh on which a tensor is placed, and how each of them cuts it.

    Args:
        axes: axes of the tensor's own mesh, in order; empty if every rank stores a plain tensor.
    """

    axes: Index
    cuts: tuple[Cut | None, ...]


@dataclass(frozen=True, slots=True)
class MeshGrid:
    """A device mesh over all ranks, as ``init_device_mesh`` creates it.

    Args:
        names: names of its axes; torch loads a DTensor only into a model on a mesh with the same
            names. A single axis shards, unless its name is one of tensor parallelism.
        device: its type, which must be the model's as well: ``cuda``, ``cpu`` ...
    """

    sizes: Index
    names: tuple[str, ...] | None = None
    device: str = "cuda"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each axis.

        Raises:
            UnsupportedError: the role of an axis is not known.
        """
        if len(self.sizes) == 1:
            return (_get_role(self.names[0] if self.names else ""),)
        unknown = next((name for name in self.names or ("",) if name not in ROLES), None)
        if unknown is not None:
            raise UnsupportedError(
                f"a mesh of {self}", f"the role of axis {unknown!r} is not known"
            )
        return tuple(ROLES[name] for name in self.names or ())

    def size(self, *roles: Role) -> int:
        """Return the number of ranks along the axes with these roles; 1 without such an axis."""
        pairs = zip(self.roles, self.sizes, strict=True)
        return prod(size for role, size in pairs if role in roles)

    def locate(self, rank: int) -> Index:
        """Return the position of a rank on each axis."""
        steps = row_major(self.sizes)
        return tuple(rank // step % size for step, size in zip(steps, self.sizes, strict=True))

    def name_groups(self, rank: int) -> tuple[str, ...]:
        """Return torch's names of a rank's process groups, one per axis.

        torch numbers the groups as it creates them: 0 is the default group, then come the groups
        of each axis in turn. An axis of all ranks uses the default group. This holds if nothing
        created a group before the mesh.
        """
        at, created, names = self.locate(rank), 0, []
        for axis, size in enumerate(self.sizes):
            if size == self.world:
                names.append("0")
                continue
            others = [other for other in range(len(self.sizes)) if other != axis]
            steps = row_major([self.sizes[other] for other in others])
            index = sum(at[other] * step for other, step in zip(others, steps, strict=True))
            names.append(str(created + index + 1))
            created += self.world // size
        return tuple(names)

    def compute_box(self, shape: Index, placed: TensorPlacement, rank: int) -> Box:
        """Return the block of a tensor that a rank stores.

        Raises:
            UnsupportedError: the mesh cannot cut the tensor in this way.
        """
        at = self.locate(rank)
        sizes = [self.sizes[axis] for axis in placed.axes]
        box = compute_mesh_box(shape, placed.cuts, sizes, [at[axis] for axis in placed.axes])
        if box is None:
            raise UnsupportedError(f"{placed.cuts}", f"cannot be placed on a mesh of {self}")
        return box

    def __str__(self) -> str:
        if self.names is None:
            return "x".join(map(str, self.sizes))
        return ",".join(f"{n}={size}" for n, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class MeshPlacements:
    """The placement of each parameter on a mesh.

    Args:
        tensor: how tensor parallelism cuts the parameters that it touches; None replicates.
        uncut: names of the tensors that are no DTensors: every rank stores the whole tensor.
        dims: the dims other than 0 that the shard axis cuts (``shard_placement_fn``), by name.
    """

    grid: MeshGrid
    tensor: Mapping[str, Cut | None] = field(default_factory=dict)
    uncut: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)
    _known: dict[str, TensorPlacement] = field(default_factory=dict, compare=False, repr=False)

    def get_placement(self, fqn: str) -> TensorPlacement:
        """Return the parameter's placement, which its optimizer slots share."""
        if fqn not in self._known:  # computed once for all ranks
            self._known[fqn] = self._compute_placement(fqn)
        return self._known[fqn]

    def _compute_placement(self, fqn: str) -> TensorPlacement:
        if fqn in self.uncut:
            return TensorPlacement((), ())
        touched, cut = fqn in self.tensor, self.tensor.get(fqn)
        dim = self.dims.get(fqn, 0)
        # fully_shard cuts what tensor parallelism left of a dim: a strided shard, see `Cut`.
        factor = self.grid.size("tensor") if cut and cut.dim == dim else 1
        cuts = {"replicate": None, "shard": Cut(dim, factor), "tensor": cut}
        roles = self.grid.roles
        axes = tuple(a for a, role in enumerate(roles) if touched or role != "tensor")
        return TensorPlacement(axes, tuple(cuts[roles[axis]] for axis in axes))


def _get_role(name: str) -> Role:
    """Return the role of the only axis of a mesh, which programs name as they like."""
    return ROLES.get(name, "shard")


def find_only_axis(placements: Collection[Placement]) -> str:
    """Return the name of the axis over which FSDP sharded all DTensors of a source.

    It is empty if the axis has no name, or if there are several axes.
    """
    axes = {tuple(name for name, _ in placement) for placement in placements}
    name = axes.pop()[0] if len(axes) == 1 and len(next(iter(axes))) == 1 else ""
    return name if _get_role(name) == "shard" else ""


def find_sharded_dims(
    placements: Mapping[str, Placement], shapes: Mapping[str, Index], size: int
) -> dict[str, int]:
    """Return the dims but 0 that FSDP cut in the source, where such a cut is even again.

    torch refuses an uneven one (2.13 ``_fsdp_param.py``, ``_init_sharded_param``).

    Args:
        size: number of ranks of the new shard axis.
    """
    dims = {}
    for fqn, placement in placements.items():
        alone = len(placement) == 1
        for name, dim in placement:
            role = _get_role(name) if alone else ROLES.get(name)
            if role == "shard" and dim and fqn in shapes and shapes[fqn][dim] % size == 0:
                dims[fqn] = dim
    return dims


def parse_mesh(text: str, device: str) -> MeshGrid:
    """Parse ``--mesh NAME=SIZE,...``.

    Raises:
        UsageError: the text is not a mesh, an axis has no known role, or torch creates no
            DTensors on such a mesh.
    """
    option = f"--mesh {text}"
    matches = [_AXIS.fullmatch(part.strip()) for part in text.split(",")]
    axes = [(match[1], int(match[2])) for match in matches if match and int(match[2])]
    if len(axes) < len(matches):
        raise UsageError(option, "is not a mesh", "write NAME=SIZE,... as in dp_shard=4,tp=2")
    for name, _ in axes:
        if name not in ROLES:
            raise UsageError(
                option, f"the role of axis {name!r} is not known", _suggest_names(name)
            )
    grid = MeshGrid(tuple(n for _, n in axes), tuple(name for name, _ in axes), device)
    role, times = Counter(grid.roles).most_common(1)[0]
    if times > 1:
        raise UsageError(
            option, f"has {times} axes that {_OF_ROLE[role]}", "merge them into one axis"
        )
    if [_ORDER.index(role) for role in grid.roles] != sorted(map(_ORDER.index, grid.roles)):
        raise UsageError(
            option,
            "its axes are not in the order that fully_shard uses",
            "write replicate before shard before tp",
        )
    if "replicate" in grid.roles and "shard" not in grid.roles:
        raise UsageError(
            option,
            "replicates but does not shard, so all ranks would store the same tensors",
            "write --to torch, or name the axis that shards",
        )
    return grid


def _suggest_names(name: str) -> str:
    known = "; ".join(
        f"{role}: {', '.join(name for name in ROLES if ROLES[name] == role)}" for role in _ORDER
    )
    return _NOT_OURS.get(name, f"the known names are: {known}")
