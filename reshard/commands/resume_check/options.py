"""What ``resume-check`` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from reshard.commands.reading import one_of
from reshard.commands.resume_check.report import LEVELS, Level
from reshard.commands.split.options import SplitOptions
from reshard.errors import UsageError
from reshard.formats import targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCheckOptions:
    """Which runs, and what they must show."""

    world_sizes: Sequence[int] = ()  # empty: the source's
    to: Sequence[str] = ()  # of `targets.NAMES`; empty: as the source
    steps: int = 4
    command: str | None = None  # of the user's program; None: our trainer
    require: Level = "trajectory"
    rtol: float = 1e-3  # of losses
    unbroken: Path | None = None  # the log of a run that went on; None: one is started
    control: bool = False  # show that a lost optimizer would be noticed
    timeout_s: float = 3600.0  # of each run
    keep: Path | None = None  # where everything stays; None: nowhere
    html: str | Path | None = None  # where to write the report as a page
    overwrite: bool = False  # replace what is there
    layout: SplitOptions = field(default_factory=SplitOptions)  # the rest of it; and the source's

    @classmethod
    def of(cls, **options: Any) -> ResumeCheckOptions:
        """Those of such names; others are of the layout.

        Raises:
            UsageError: as both.
        """
        own = {each.name for each in fields(cls)} & options.keys()
        chosen = {name: options.pop(name) for name in own}
        return cls(layout=SplitOptions(**options), **chosen)

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: saying what can.
        """
        one_of("require", self.require, LEVELS)
        for target in self.to:
            one_of("to", target, targets.NAMES)
        if self.steps < 1 or self.timeout_s <= 0 or not 0 <= self.rtol < 1:
            raise UsageError(
                f"steps={self.steps}, rtol={self.rtol}, timeout={self.timeout_s}",
                "expected at least one step, a tolerance from 0 to 1, some time",
            )
