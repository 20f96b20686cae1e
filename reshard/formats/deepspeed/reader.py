"""A DeepSpeed checkpoint as one manifest: which kind it is, with that kind's reader."""

from __future__ import annotations

from pathlib import Path

from reshard.formats.deepspeed import directory
from reshard.location import Location
from reshard.manifest import Manifest


def read(location: Location, tag: str | None = None, rules: Path | None = None) -> Manifest:
    """Read a run directory (through ``latest`` or ``tag``), a tag directory, or a file of one.

    Args:
        rules: a user's table of how tensor-parallel ranks share parameters; see `cuts.Cuts`.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: files of different steps, world sizes or runs are mixed.
        UsageError: nothing says how tensor-parallel ranks share a parameter.
    """
    location = directory.locate(location, tag)
    if "zero" in location.folders:
        from reshard.formats.deepspeed import universal

        return universal.read(location, rules)
    files = directory.census(location)
    mixed = bool(files.experts or files.expert_optim)
    if files.is_parallel and not mixed:
        from reshard.formats.deepspeed import parallel

        return parallel.read(files, rules)
    if rules:
        from reshard.model_parallel.rules import Table, with_users

        with_users(Table("", ()), rules)  # nothing is cut here: what is wrong with it is told
    if mixed:
        from reshard.formats.deepspeed import experts

        return experts.read(files)
    from reshard.formats.deepspeed import native

    return native.read(files.ranks[0])
