"""Memory of computations that work tile by tile: what a thread keeps between two reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, cast
from weakref import proxy

from reshard.core.box import Box
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.engine.move.fill import Filler
from reshard.engine.planning.copies import Copy, CopyPlanner
from reshard.system.derived import Computation, Reader
from reshard.system.files import SourceFiles

T = TypeVar("T")

_PLANNERS = 8  # a tile is computed from a few tensors


class Tiled(Computation, Protocol):
    """A computation that computes whole tiles only; the last one may be smaller.

    A tile is computed in one way, whatever is read of it, so its bits depend neither on the window
    that needs it nor on the number of workers.
    """

    def compute(self, number: int, reader: TileReader, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tile."""


class TileReader:
    """The memory of one thread for computations, and its access to the tensors that they read.

    Args:
        pool: the open source files, which own this object.
    """

    def __init__(self, pool: Reader) -> None:
        # Without a reference back, the memory of both is freed without the garbage collector.
        files = cast("SourceFiles", proxy(pool))
        self._filler = Filler(files, needs_checksum=lambda _file: False)
        self._kept: dict[str, tuple[object, Any]] = {}
        self._planners: deque[tuple[Entry, CopyPlanner]] = deque(maxlen=_PLANNERS)
        self._last: tuple[Tiled, int] | None = None

    def read(self, entry: Entry, box: Box, dtype: DType, into: memoryview) -> None:
        """Fill ``into`` with a box of a tensor, row-major, in ``dtype``.

        Raises:
            ReshardError: a file cannot be read, or the dtype cannot be cast.
        """
        self.fill(self._find_planner(entry).plan_block(box, dtype).copies, into)

    def read_elements(
        self, entry: Entry, start: int, stop: int, dtype: DType, into: memoryview
    ) -> None:
        """Fill ``into`` with elements ``start`` to ``stop`` of a flattened tensor, in ``dtype``.

        Raises:
            ReshardError: a file cannot be read, or the dtype cannot be cast.
        """
        self.read_run(self._find_planner(entry), start, stop, dtype, into)

    def read_bytes(self, file: str, byte_offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at an offset of a file.

        Raises:
            ReshardError: the file cannot be read.
        """
        self._filler.read_into(file, byte_offset, into)

    def read_run(
        self, planner: CopyPlanner, start: int, stop: int, dtype: DType, into: memoryview
    ) -> None:
        """Fill ``into`` with elements ``start`` to ``stop`` of a flattened tensor, in ``dtype``.

        Raises:
            ReshardError: a file cannot be read, or the dtype cannot be cast.
        """
        self.fill(planner.plan_run(start, stop, dtype, 0), into)

    def fill(self, copies: Iterable[Copy], into: memoryview) -> None:
        """Fill ``into`` with planned copies.

        Raises:
            ReshardError: a file cannot be read, or a dtype cannot be cast.
        """
        for copy in copies:
            self._filler.fill(copy, into)

    def _find_planner(self, entry: Entry) -> CopyPlanner:
        for kept, planner in self._planners:
            # Entries are compared by identity: equality would compare all of their chunks.
            if kept is entry:
                return planner
        self._planners.appendleft((entry, CopyPlanner(entry)))
        return self._planners[0][1]

    def keep(self, slot: str, key: object, make: Callable[[], T]) -> T:
        """Return the value kept in a slot; if it was kept for another key, make it anew."""
        kept = self._kept.get(slot)
        if kept is None or kept[0] != key:
            self._kept.pop(slot, None)  # frees its memory before the new value needs some
            kept = self._kept[slot] = key, make()
        return cast("T", kept[1])

    def read_tiles(self, tiled: Tiled, offset: int, into: memoryview) -> None:
        """Fill ``into`` with computed bytes from an offset on."""
        done = 0
        while done < len(into):
            number, skipped = divmod(offset + done, tiled.tile_nbytes)
            size = min(tiled.tile_nbytes, tiled.nbytes - number * tiled.tile_nbytes)
            part = into[done : done + size - skipped]
            if not part:  # the check of the manifest's bounds makes this impossible
                raise AssertionError(f"{tiled} has no byte {offset + done}")
            if len(part) == size:
                tiled.compute(number, self, part)
            else:
                part[:] = self._get_tile(tiled, number, size)[skipped:][: len(part)]
            done += len(part)

    def _get_tile(self, tiled: Tiled, number: int, size: int) -> memoryview:
        """Return a tile, which is kept: the next read may begin where this one ends in it."""
        tile = memoryview(self.keep("tile", size, lambda: bytearray(size)))
        if self._last is None or self._last[0] is not tiled or self._last[1] != number:
            self._last = None  # this tile overwrites the memory of the last one, also if it fails
            tiled.compute(number, self, tile)
            self._last = tiled, number
        return tile


def find_reader(pool: Reader) -> TileReader:
    """Return the reader of this thread for a pool of open files."""
    if not hasattr(pool.kept, "reader"):
        pool.kept.reader = TileReader(pool)
    return cast("TileReader", pool.kept.reader)
