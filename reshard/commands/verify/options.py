"""The options of ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reshard.commands.output_options import ReadOptions
from reshard.options import option

_checked = partial(option, group="Checks")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ReadOptions):
    """What is checked. Manifests need every byte, so they imply ``deep``."""

    deep: bool = _checked(
        False,
        "Read every byte.",
        flags=("--deep/--quick",),
        unset="only headers; with --history a sample",
    )
    write_manifest: str | Path | None = _checked(
        None, "Write a manifest: the digests of every tensor, if all checks pass.", metavar="FILE"
    )
    against: str | Path | None = _checked(
        None,
        "Compare with a manifest that --write-manifest wrote, for this or another layout.",
        metavar="FILE",
    )
    include: Sequence[str] = _checked(
        (),
        "With --against: read and check only the files with a matching name, such as those of one"
        " rank.",
        metavar="GLOB",
    )
    history: bool = _checked(
        False,
        "Compare the numbered checkpoints of the run SOURCE with one another.",
    )
    ignore: Sequence[str] = _checked(
        (),
        "Accept any values (NaN, infinities, zeros) in tensors with a matching name, and with"
        " --against other values of the train state, e.g. rng or scheduler.",
        metavar="REGEX",
    )

    @property
    def reads_all(self) -> bool:
        """Whether every byte is read."""
        return self.deep or self.write_manifest is not None or self.against is not None
