"""Build the 0-d optimizer values that all members of one flat tensor share.

ZeRO's partitions and FSDP 1's flat parameters are one parameter to the optimizer, which keeps one
``mu_product`` (NAdam) or ``eta`` and ``mu`` (ASGD) for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from reshard.containers.torch_objects import read_number
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView, build_number
from reshard.core.box import whole
from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry
from reshard.errors import UnsupportedError
from reshard.system.files import SourceFiles
from reshard.training import optimizers
from reshard.training.state import TrainedParameter, collect_scalar_names


def build_shared_scalars(
    members: Sequence[TrainedParameter], why: str, remedy: str
) -> dict[str, StorageView]:
    """Return the 0-d values of a flat tensor's state, which all its members share.

    Args:
        why: what holds one value for all of them, for the message.
    """
    scalars: dict[str, StorageView] = {}
    for name in sorted(collect_scalar_names(members)):
        entries = {m.fqn: entry for m in members if (entry := m.slots.get(name)) is not None}
        if name in optimizers.RECOMPUTED:  # one value serves all
            entries = dict(islice(entries.items(), 1))
        _refuse_unequal(name, entries, why, remedy)
        # All members fill the one element, so that each counts as written.
        parts = tuple(StorageBlock(name, fqn, (), whole(())) for fqn in entries)
        scalars[name] = StorageView(Storage(next(iter(entries.values())).dtype, 1, parts), ())
    return scalars


def copy_scalars(members: Sequence[TrainedParameter]) -> dict[str, StorageView]:
    """Return the 0-d values of one flat tensor's members, for another one that has no state."""
    found: dict[str, Entry] = {}
    for member in members:
        for name in collect_scalar_names([member]):
            found.setdefault(name, member.slots[name])
    with SourceFiles() as files:
        return {
            name: build_number(read_number(files, entry.chunks[0]))
            for name, entry in sorted(found.items())
        }


def _refuse_unequal(name: str, entries: Mapping[str, Entry], why: str, remedy: str) -> None:
    values: dict[Chunk, float] = {}
    first: tuple[str, float] | None = None
    with SourceFiles() as files:
        for fqn, entry in entries.items():
            chunk = entry.chunks[0]
            if chunk not in values:
                values[chunk] = read_number(files, chunk)
            first = first or (fqn, values[chunk])
            if values[chunk] != first[1]:
                raise UnsupportedError(
                    chunk.file,
                    f"{name} is {first[1]} for {first[0]!r} and {values[chunk]} for {fqn!r}: {why}",
                    remedy,
                )
