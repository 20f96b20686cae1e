"""Output of a run: lines for people, a JSON line per step for programs.

A line of the log: ``step``, ``loss`` (mean over the micro batches), ``loss_hex`` (its float.hex),
``lr``, ``grad_norm``, ``grad_norm_hex``, ``loss_scale`` (of the next step), ``skipped``,
``samples``, ``tokens_per_s``, ``peak_memory`` (bytes, the largest of the ranks). The last line has
``parameter_hash``.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

from trainer.core.engine import Engine
from trainer.core.errors import SettingsError
from trainer.core.loop import Progress, Step
from trainer.core.ranks import Ranks
from trainer.settings import Settings


class StepLog:
    """Reports each step on rank 0; the other ranks only measure.

    Raises:
        SettingsError: the log file exists and belongs to another run, or cannot be opened.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        self._file: IO[str] | None = None
        self._begin = time.perf_counter()
        if ranks.is_first:
            self._file = _open(settings)

    def step(self, progress: Progress, step: Step, engine: Engine) -> None:
        """Report one step. Every rank calls it."""
        seconds = time.perf_counter() - self._begin
        self._begin += seconds
        peak = self._ranks.all_reduce_max(measure_peak_memory(self._ranks.device))
        losses = step.losses
        # fsum does not depend on the order of its terms, nor therefore on the number of ranks.
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        line: dict[str, Any] = {
            "step": progress.step,
            "loss": loss,
            "loss_hex": loss.hex(),
            "lr": step.lr,
            "grad_norm": step.update.grad_norm,
            "grad_norm_hex": step.update.grad_norm.hex(),
            "loss_scale": engine.scaler.scale,
            "skipped": step.update.skipped,
            "samples": progress.samples,
            "tokens_per_s": self._settings.global_batch * self._settings.seq_len / seconds,
            "peak_memory": peak,
        }
        self._write(line)
        self._show(line)

    def print(self, text: str) -> None:
        """Print a line for people."""
        if self._ranks.is_first:
            print(text, flush=True)  # noqa: T201

    def finish(self, digest: str) -> None:
        """Report the hash of the final parameters."""
        self._write({"parameter_hash": digest})
        self.print(f"parameters sha256 {digest}")

    def _write(self, line: dict[str, Any]) -> None:
        if self._file:
            # JSON has neither nan nor inf.
            finite = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in line.items()
            }
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def _show(self, line: dict[str, Any]) -> None:
        if not self._ranks.is_first:
            return
        skipped = "  skipped: not finite" if line["skipped"] else ""
        every = max(1, self._settings.steps // 10)
        if self._settings.progress and (
            line["step"] % every == 0 or line["step"] == 1 or line["skipped"]
        ):
            self.print(
                f"step {line['step']}/{self._settings.steps}  loss {line['loss']:.4f}  "
                f"lr {line['lr']:.3e}  norm {line['grad_norm']:.3f}  "
                f"{line['tokens_per_s']:.0f} tokens/s{skipped}"
            )

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file:
            self._file.close()


def _open(settings: Settings) -> IO[str] | None:
    """Open the log file: a new one, or to append if the run is resumed."""
    if settings.log is None:
        return None
    path = Path(settings.log)
    if path.exists() and not settings.resume and not settings.overwrite:
        raise SettingsError(
            f"the log file {path} exists",
            "choose another --step-log, or replace it with --overwrite",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a" if settings.resume else "w")
    except OSError as error:
        raise SettingsError(
            f"cannot write the log file {path}: {error.strerror or error}",
            "give --step-log a file that can be written",
            one_rank=True,
        ) from error


def hash_parameters(engine: Engine) -> str:
    """Return the SHA-256 over names, shapes and bytes of the full parameters, in model order."""
    digest = hashlib.sha256()
    for name, value in engine.parameters():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def measure_peak_memory(device: torch.device) -> int:
    """Return the peak of the process's resident set, or of CUDA's allocations, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
