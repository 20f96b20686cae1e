"""Options that several commands share: reading tensors, names, values and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard import units
from reshard.checks.identity import Trust
from reshard.commands.options import ReportOptions
from reshard.engine.move.ahead import AHEAD_BYTES
from reshard.engine.move.options import MoveOptions, OnOverflow
from reshard.engine.planning.planner import WINDOW_BYTES
from reshard.errors import ResourceError
from reshard.naming.options import Names
from reshard.options import Options, option, size_option
from reshard.system.ranks.team import ALONE, Progress, Team
from reshard.system.threads import count_cores
from reshard.tensors.replicas import Replicas

_MIN_WINDOW = 64 << 10  # bytes
_MAX_WORKERS = 8  # by default; more threads seldom read faster


@dataclass(frozen=True, kw_only=True)
class ReadOptions(ReportOptions):
    """Options of a command that reads tensors: which pickles it trusts, and its resources."""

    allow_pickle: Sequence[str] = option(
        (),
        "Accept this class in pickles, which reshard does not know; its code never runs.",
        group="Reading",
        metavar="NAME",
        shapes_output=False,
    )
    workers: int = option(
        0,
        "Number of threads; the output does not depend on it.",
        group="Reading",
        minimum=0,
        unset=f"number of cores, at most {_MAX_WORKERS}",
        shapes_output=False,
    )
    max_memory_bytes: int = size_option(
        "256MiB",
        "Memory for the buffers of all workers together.",
        flag="--max-memory",
        group="Reading",
        shapes_output=False,
    )

    def budget(self) -> tuple[int, int]:
        """Return the number of workers, and the bytes of one window.

        A worker uses one window and one read buffer of the same size. The windows of all workers
        take at most half of the memory; the rest is for what is read ahead.

        Raises:
            ResourceError: the memory is too small for one worker.
        """
        most = self.max_memory_bytes // (2 * _MIN_WINDOW)
        if most < 1:
            raise ResourceError(
                f"--max-memory {units.show_bytes(self.max_memory_bytes)}",
                f"one worker needs {units.show_bytes(2 * _MIN_WINDOW)}",
                "pass that size or more",
            )
        workers = min(self.workers or min(count_cores(), _MAX_WORKERS), most)
        most_bytes = max(self.max_memory_bytes // (4 * workers), _MIN_WINDOW)
        return workers, min(WINDOW_BYTES, most_bytes)

    @property
    def ahead_bytes(self) -> int:
        """The memory for what is read ahead, in bytes."""
        return min(self.max_memory_bytes - self.count_buffer_bytes(self.budget()[1]), AHEAD_BYTES)

    def count_buffer_bytes(self, window_bytes: int, computed_bytes: int = 0) -> int:
        """Return the memory of all workers' buffers: a window and a read buffer of the same size.

        Args:
            computed_bytes: the memory in which a worker computes values.
        """
        return self.budget()[0] * (2 * window_bytes + computed_bytes)


@dataclass(frozen=True, kw_only=True)
class ValueOptions(ReadOptions):
    """Options for values that disagree or do not fit; the defaults are the safe ones."""

    on_overflow: OnOverflow = option(
        "error", "What to do if a cast makes a finite value infinite.", group="Output"
    )
    trust: Trust = option(
        "sampled",
        "Check that all files belong to one save, each to its own rank: compare what they state,"
        " and a sample (or all) of the values that are stored twice.",
        group="Output",
        shapes_output=False,
    )
    replicas: Replicas = option(
        "error",
        "If ranks differ in a parameter that they share: fail, write the first rank's values, or"
        " write the mean. A buffer that differs is a warning.",
        group="Output",
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ValueOptions):
    """Options of a command that writes a checkpoint."""

    resume: bool = option(
        False,
        "Continue an interrupted run with the same DESTINATION.",
        group="Output",
        shapes_output=False,
        is_common=True,
    )
    verify: bool = option(
        True,
        "Do not read the output back.",
        group="Output",
        flags=("--no-verify",),
        shapes_output=False,
    )
    dry_run: bool = option(
        False,
        "Print the plan with a forecast of memory, disk and time; write no output.",
        group="Output",
        shapes_output=False,
        is_common=True,
    )
    team: Team = ALONE  # the processes that share the work

    def move_options(self, progress: Progress) -> MoveOptions:
        """Return how bytes are moved."""
        workers, window_bytes = self.budget()
        return MoveOptions(
            workers=workers,
            read_bytes=window_bytes,
            ahead_bytes=self.ahead_bytes,
            clamp=self.on_overflow == "clamp",
            verify=self.verify,
            progress=self.team.with_progress(progress),
            team=self.team,
        )


@dataclass(frozen=True, kw_only=True)
class NamingOptions(Options):
    """Options for the names of the written tensors, and for the model that has these names."""

    names: Names | None = option(
        None,
        "Names of the tensors: those of the source, those that transformers writes (hf), or those"
        " of its model in memory (module).",
        group="Names",
        unset="hf in merged safetensors files (source in one file of a Megatron or Meta run),"
        " module in other output; source if the model is not known",
    )
    family: str | None = option(
        None,
        "Model family of Hugging Face: llama, qwen2, ...",
        group="Names",
        unset="as the source states",
    )
    vocab_size: int | None = option(
        None,
        "Rows of the embedding without padding.",
        group="Names",
        minimum=1,
        unset="as the source states",
    )
