"""Turn the `StateTensor` leaves of a state dict into the tensors of one rank's file."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.box import Box, Index, whole
from reshard.core.manifest import Entry, OutputFile, Skeleton
from reshard.core.stamps import Stamp
from reshard.layouts.blocks import RankBlocks, RankBoxes
from reshard.layouts.mesh import MeshPlacements, TensorPlacement
from reshard.model import ModelShapes
from reshard.state_dict.sharded_writer import DTensorBuilder
from reshard.state_dict.torch_state_dict import StateTensor, build_optimizer
from reshard.training.state import WritableState


class RankSharder:
    """Converts a tree, replacing each `StateTensor` with the tensor that one rank saves.

    Attributes:
        dtensors: their builder.
        cut: each storage of a cut tensor, and that tensor.
    """

    def __init__(self, placements: MeshPlacements, rank: int) -> None:
        self.dtensors = DTensorBuilder(placements.grid, rank)
        self.cut: dict[Storage, StateTensor] = {}
        self._placements, self._rank = placements, rank
        self._made: dict[int, Any] = {}  # id of a `StateTensor` -> the tensor of all its names
        self._shapes: dict[Index, Index] = {}

    def convert(self, value: Any) -> Any:
        """Convert a tree, or one leaf of it."""
        if isinstance(value, StateTensor):
            if id(value) not in self._made:
                self._made[id(value)] = self._build_tensor(value)
            return self._made[id(value)]
        if isinstance(value, (dict, OrderedDict)):
            return type(value)((key, self.convert(item)) for key, item in value.items())
        return [self.convert(item) for item in value] if isinstance(value, list) else value

    def _build_tensor(self, value: StateTensor) -> Any:
        placed = self._placements.get_placement(value.owner)
        if not value.divided or not placed.axes:
            return build_whole_slot(value)
        box = self._placements.grid.compute_box(value.shape, placed, self._rank)
        local = StorageView(Storage(value.dtype, box.volume, _list_parts(value, box)), box.shape)
        self.cut[local.storage] = value
        # Equal shapes are one tuple, which the pickle stores once.
        shape = self._shapes.setdefault(value.shape, value.shape)
        return self.dtensors.build(shape, value.dtype, placed, local)


class RankFileLayouts:
    """Lays out one file of each rank; all have the same tree, of which each rank stores its blocks.

    Args:
        tree: with a `StateTensor`, or the slot of a whole tensor, for each tensor.
        names: the name of each rank's file.
        stamp: returns the stamp of a rank's file.
    """

    def __init__(
        self,
        tree: Any,
        placements: MeshPlacements,
        names: Sequence[str],
        stamp: Callable[[str, int], Stamp | None],
    ) -> None:
        self._tree = tree
        self._placements = placements
        self._names = tuple(names)
        self._stamp = stamp
        self._boxes: dict[tuple[Index, TensorPlacement], RankBoxes] = {}
        self._starts: list[Sequence[int]] = [()] * len(names)  # of the storages of each rank

    def lay_out(self) -> Skeleton:
        """Lay out the files of all ranks."""
        files: dict[int, OutputFile] = {}
        entries: list[Entry] = []
        for ranks in self._group_ranks():
            sharder = RankSharder(self._placements, ranks[0])
            root = sharder.convert(self._tree)
            meshes = [mesh for _, mesh in sharder.dtensors.meshes]
            template = torch_writer.Template(self._names[ranks[0]], root, varying=meshes)
            firsts: dict[int, str] = {}
            for rank in ranks:
                sharder.dtensors.move_to(rank)
                name = self._names[rank]
                file, starts = template.lay_out_file(name, self._stamp(name, rank))
                first = firsts.setdefault(id(starts), name)  # equal lengths, so equal positions
                files[rank] = replace(file, like="" if first == name else first)
                self._starts[rank] = starts
            if not entries:  # the tensors and their order are the same on all ranks
                entries = list(self._build_entries(template.storages, sharder.cut))
        parts = (Skeleton((), (entry,)) for entry in entries)
        return skeletons.join([Skeleton(tuple(files[rank] for rank in sorted(files)), ()), *parts])

    def _group_ranks(self) -> list[list[int]]:
        # Ranks are grouped whose files differ in what meshes and stamps state about the rank only.
        # Their blocks have equal shapes. A name of one letter is one object in Python, which a
        # pickle stores once even if a storage has that name, too.
        for value in _list_values(self._tree):
            self._find_boxes(value)
        every = [boxes.boxes for boxes in self._boxes.values()]
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for rank in range(len(self._names)):
            named = self._placements.grid.name_groups(rank)
            letters = tuple(name if len(name) == 1 else "" for name in named)
            groups[letters, tuple(boxes[rank].shape for boxes in every)].append(rank)
        return list(groups.values())

    def _find_boxes(self, value: StateTensor) -> RankBoxes:
        placed = self._placements.get_placement(value.owner)
        if not value.divided or not placed.axes:
            placed = TensorPlacement((), ())
        key = value.shape, placed
        if key not in self._boxes:
            grid, ranks = self._placements.grid, range(len(self._names))
            boxes = [grid.compute_box(value.shape, placed, rank) for rank in ranks]
            self._boxes[key] = RankBoxes(value.shape, boxes)
        return self._boxes[key]

    def _build_entries(
        self, storages: Sequence[Storage], cut: Mapping[Storage, StateTensor]
    ) -> Iterator[Entry]:
        for number, storage in enumerate(storages):
            value = cut.get(storage)
            if value is None:
                for part in storage.parts:
                    whole_value = StateTensor(storage.dtype, part.shape)
                    yield self._build_entry(part.kind, part.fqn, number, whole_value)
            elif value.entry is not None and value.numel:
                yield self._build_entry(value.entry.kind, value.entry.fqn, number, value)

    def _build_entry(self, kind: str, fqn: str, number: int, value: StateTensor) -> Entry:
        find_start = partial(_find_start, self._starts, number)  # no list for each tensor
        chunks = RankBlocks(self._names, self._find_boxes(value), find_start, value.dtype)
        return Entry(fqn, kind, value.dtype, value.shape, chunks)


def _find_start(starts: Sequence[Sequence[int]], number: int, rank: int) -> int:
    return starts[rank][number]


def _list_values(tree: Any) -> Iterator[StateTensor]:
    if isinstance(tree, StateTensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _list_values(item)


def _list_parts(value: StateTensor, box: Box) -> tuple[StorageBlock, ...]:
    if value.entry is None or not box.volume:
        return ()
    return (StorageBlock(value.entry.kind, value.entry.fqn, value.shape, box),)


def build_whole_slot(value: StateTensor) -> StorageView:
    """Build a tensor that is stored whole."""
    storage = Storage(value.dtype, value.numel, _list_parts(value, whole(value.shape)), value.data)
    return StorageView(storage, value.shape)


class WholeSlots:
    """Converts each `StateTensor` to a tensor that is stored whole, once for each file."""

    def __init__(self) -> None:
        self._made: dict[int, StorageView] = {}

    def __call__(self, value: Any) -> StorageView | None:
        """Return the slot of a `StateTensor`, the same one each time; None for anything else."""
        if not isinstance(value, StateTensor):
            return None
        if id(value) not in self._made:
            self._made[id(value)] = build_whole_slot(value)
        return self._made[id(value)]


def lay_out_optimizer(
    state: WritableState, file: str, ranks: int, model: ModelShapes | None
) -> Skeleton:
    """Lay out ``torch.optim``'s state of whole tensors in one file, with names for its numbers."""
    root = build_optimizer(state, "index", model, named=True)
    return torch_writer.lay_out_object(
        file, Canonicalizer().convert(root), slot_of=WholeSlots(), stamp=state.stamp(file, 0, ranks)
    )
