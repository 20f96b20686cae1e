"""All settings of a call: those of training (``core/settings.py``), its ranks, files and output.

The command line is built from these fields (``cli.py``), and the configuration files of DeepSpeed
and Accelerate are read into them (``config_files.py``). `resolve.resolve` returns the Settings of a
run, which have no contradictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.settings import ZERO, CoreSettings, declare

AUTO = "auto"
"""The value of ``resume`` that means the run in ``save``, if there is one yet."""


@dataclass(frozen=True, kw_only=True)
class Settings(CoreSettings):
    """The settings of a run."""

    # The ranks, and the text
    nproc: int = declare(1, "number of ranks; a launcher (torchrun, accelerate launch) sets it")
    device: str = declare("auto", "auto: cuda if there is a GPU", "auto", "cpu", "cuda")
    threads: int = declare(1, "CPU threads per rank; bitwise equal results need the same number")
    timeout: int = declare(300, "seconds to wait for another rank before giving up")
    data: str | None = declare(
        None, "training text, a file (default: Python's own documentation topics)"
    )

    # Checkpoints
    save: str | None = declare(None, "run directory to write (default: the first free run-N)")
    save_every: int = declare(0, "steps between checkpoints (0: one at the end)")
    async_save: bool = declare(
        False, "write checkpoints in the background, from a copy in host memory"
    )
    keep: int = declare(0, "number of newest checkpoints to keep (0: all)")
    overwrite: bool = declare(False, "replace checkpoints of another run in the run directory")
    resume: str | None = declare(
        None, "run directory or checkpoint to continue from; auto: --save, if it has one"
    )
    tag: str | None = declare(None, "checkpoint of the run directory (default: latest)")

    # Output
    log: str | None = declare(None, "file for a JSON line per step")
    progress: bool = declare(True, "print lines for steps")
    parameter_hash: bool = declare(True, "report the SHA-256 of the final parameters")

    @property
    def layout(self) -> str:
        """The layout of the checkpoints: DeepSpeed or FSDP."""
        return "DeepSpeed" if self.strategy in ZERO else "FSDP"


def get_default_reduction(settings: Settings) -> str:
    """Return "canonical" for ddp and ZeRO, and "fast" for FSDP."""
    return "canonical" if settings.strategy in ZERO else "fast"


def supports_canonical(settings: Settings) -> bool:
    """Return whether the run can add gradients in micro batch order."""
    sharded = settings.fsdp_sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    return settings.strategy in ZERO or sharded
