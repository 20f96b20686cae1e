"""Read a DeepSpeed checkpoint as one manifest, with the reader of its kind."""

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
    files = directory.list_files(location)
    has_experts = bool(files.experts or files.expert_optim)
    if files.is_parallel and not has_experts:
        from reshard.formats.deepspeed import parallel

        return parallel.read(files, rules)
    if rules:
        from reshard.model_parallel.rules import Table, add_user_rules

        # No rank shares a parameter here, but a mistake in the user's file is still reported.
        add_user_rules(Table("", ()), rules)
    if has_experts:
        from reshard.formats.deepspeed import experts

        return experts.read(files)
    from reshard.formats.deepspeed import native

    return native.read(files.ranks[0])
