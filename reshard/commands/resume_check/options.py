"""The options of ``resume-check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from reshard.commands.output_options import ValueOptions
from reshard.commands.resume_check.report import Level
from reshard.commands.split.options import LayoutOptions, SplitOptions
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.formats.registry import list_writers_using
from reshard.options import option

_run = partial(option, group="Runs", is_common=True)


@dataclass(frozen=True, kw_only=True)
class ResumeCheckOptions(LayoutOptions, ValueOptions):
    """Options that choose the runs to compare, and what they must show."""

    world_sizes: Sequence[int] = _run(
        (),
        "Number of ranks to continue on; repeatable.",
        flags=("--world-size", "--num-shards"),
        minimum=1,
        unset="same as the source",
    )
    to: Sequence[str] = _run(
        (),
        "Layout to continue from; repeatable.",
        choices=tuple(registry.list_built_in_writers()),
        find_choices=registry.list_writers,
        unset="same as the source",
    )
    steps: int = _run(4, "Number of steps of each run.", minimum=1)
    command: str | None = _run(
        None,
        "Your program, with {checkpoint}, {log}, {steps} or {until}, {world_size}, {out}.",
        metavar="WORDS",
        unset="python -m trainer",
    )
    require: Level = _run("trajectory", "Level that every layout must reach for exit code 0.")
    rtol: float | None = _run(
        None,
        "Relative tolerance of losses for the level trajectory.",
        unset="measured with one more run",
    )
    unbroken: Path | None = _run(
        None,
        "Log of the run that saved SOURCE and continued.",
        metavar="LOG",
        unset="continue from SOURCE now",
    )
    control: bool = _run(False, "Also check that the losses would show the loss of one moment.")
    timeout_s: float = _run(3600.0, "Time limit of each run, in seconds.", flags=("--timeout",))
    keep: Path | None = _run(None, "Keep checkpoints, logs and outputs in DIR.", metavar="DIR")

    def __post_init__(self) -> None:
        """Refuse values that are not allowed.

        Raises:
            UsageError: a value is not allowed; the message names the option.
        """
        super().__post_init__()
        if self.timeout_s <= 0 or not 0 <= (self.rtol or 0.0) < 1:
            raise UsageError(
                f"rtol={self.rtol}, timeout={self.timeout_s}",
                "expected a tolerance of at least 0 and below 1, and a positive time",
            )

    def split_options(self, to: str | None, world_size: int | None) -> SplitOptions:
        """Return the options of the split that writes one layout.

        An option that this target does not use, but another target of the check does, is left out.
        """
        shared = {field.name for field in fields(SplitOptions)} & {
            field.name for field in fields(self)
        }
        shared -= {"to", "html", "overwrite"}  # the page is the check's; splits go to new folders
        if to is not None:
            others = {name for name in shared if {*self.to} & {*list_writers_using(name)}}
            shared -= {name for name in others if to not in list_writers_using(name)}
        chosen = {name: getattr(self, name) for name in shared}
        return SplitOptions(to=to, world_size=world_size, **chosen)
