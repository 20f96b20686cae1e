"""The reader of both Megatron formats."""

from __future__ import annotations

from reshard.formats.megatron import directory, dist, legacy
from reshard.location import Location
from reshard.manifest import Manifest
from reshard.model_parallel.rules import Table, load_whole_table


def read(location: Location, table: Table | None = None) -> Manifest:
    """Return the manifest of the checkpoint in a directory ``iter_0000003`` or ``release``.

    Args:
        table: how parameters are cut; None: the built-in table of Megatron.

    Raises:
        IncompleteError: a rank's part is missing.
        CorruptError: files contradict each other.
        UsageError: the location is one rank's part, or no rule describes how a parameter is cut.
    """
    location = directory.find_checkpoint(location)
    table = table or load_whole_table(directory.NAME)
    return (
        dist.read(location, table) if directory.is_dist(location) else legacy.read(location, table)
    )
