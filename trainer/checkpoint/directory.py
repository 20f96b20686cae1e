"""The run directory: ``<tag>/`` for each checkpoint, and ``latest``, which names a complete one.

A checkpoint is written under a hidden name, flushed, and renamed when every rank is done; only then
does ``latest`` name it. A kill at any moment leaves the checkpoint before, and ``latest`` correct.
Every visible name is of a complete checkpoint: what is to be removed is renamed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
from pathlib import Path

from trainer.checkpoint import files
from trainer.core.errors import CheckpointError, LayoutError, SettingsError

LATEST = "latest"
STATE = "trainer_state.json"
LAYOUTS = {"DeepSpeed": "*_model_states.pt", "FSDP": "pytorch_model_fsdp*"}
"""A file name pattern of each layout, of which every checkpoint in it has a file."""
_STEP = re.compile(r"global_step(\d+)")
_NUMBERED = re.compile(r"(?:global_step|checkpoint-)(\d{1,18})")
# Names of directories inside a checkpoint.
_PART = re.compile(r"pytorch_model_fsdp_0|optimizer_0")
_PATIENCE_S = 30.0  # seconds to wait for another run to finish its save


def make_tag(step: int) -> str:
    """Return DeepSpeed's name for the checkpoint after ``step`` steps."""
    return f"global_step{step}"


def choose_run_directory() -> Path:
    """Return ``run-1``, or the first ``run-N`` that does not exist."""
    number = 1
    while Path(f"run-{number}").exists():
        number += 1
    return Path(f"run-{number}")


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has saved here."""
    return (path / LATEST).exists() or bool(list_tags(path))


def find_checkpoint(path: Path, tag: str | None) -> Path:
    """Return the checkpoint directory that ``--resume path --tag tag`` means.

    Args:
        path: a run directory, a checkpoint directory, or a file or directory in one.
        tag: the name of a checkpoint in the run directory, or its step.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", "give --resume a run directory or a checkpoint directory"
        )
    if tag is None and not (path / LATEST).exists():
        # The newest one, if the run died before it wrote ``latest``.
        checkpoint = _find_enclosing(path) or next(reversed(_find_by_step(path).values()), None)
        if checkpoint is None:
            raise LayoutError(
                f"{path} is not a checkpoint, and has no file 'latest' that names one "
                f"({_list_checkpoints(path)})",
                "give the directory that --save named, or one checkpoint directory in it",
            )
        return checkpoint
    name = tag or _read_latest(path)
    _restore_replaced(path)
    if "/" in name or name in {"", ".", ".."} or not (path / name).is_dir():
        if tag and (checkpoint := _find_by_step(path).get(tag)):
            return checkpoint
        source = "--tag" if tag else f"the file {path / LATEST}"
        raise CheckpointError(
            f"{path} has no checkpoint {name!r}, which {source} names ({_list_checkpoints(path)})",
            "give --tag with a checkpoint that is there, or another run directory",
        )
    return path / name


def _find_enclosing(path: Path) -> Path | None:
    if path.is_file():
        path = path.absolute().parent
    if _is_checkpoint(path):
        return path
    if _PART.fullmatch(path.name):
        return path.parent if _is_checkpoint(path.parent) else None
    return None


def _is_checkpoint(path: Path) -> bool:
    return (path / STATE).exists() or bool(detect_layout(path))


def _find_by_step(path: Path) -> dict[str, Path]:
    """Return step -> checkpoint in ascending order: ours, and HF Trainer's ``checkpoint-N``."""
    matches = [
        (match, each) for each in path.glob("*") if (match := _NUMBERED.fullmatch(each.name))
    ]
    by_step = {int(match[1]): each for match, each in matches if _is_checkpoint(each)}
    return {str(step): by_step[step] for step in sorted(by_step)}


def _list_checkpoints(path: Path) -> str:
    names = list_tags(path) or [each.name for each in _find_by_step(path).values()]
    return f"checkpoints there: {', '.join(names) or 'none'}"


def _read_latest(path: Path) -> str:
    try:
        return (path / LATEST).read_text().strip()[:255]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read {path / LATEST}: {error}", "give --tag with the name of a checkpoint"
        ) from error


def detect_layout(checkpoint: Path) -> str:
    """Return whose files a checkpoint directory has, a key of ``LAYOUTS``, or an empty string."""
    for name, pattern in LAYOUTS.items():
        if any(checkpoint.glob(pattern)):
            return name
    return ""


def list_tags(path: Path) -> list[str]:
    """Return the names of complete checkpoints, by step."""
    numbered = [
        (int(match[1]), match[0]) for p in path.glob("*") if (match := _STEP.fullmatch(p.name))
    ]
    return [name for _, name in sorted(numbered)]


def replace(new: Path, final: Path, aside: Path) -> None:
    """Rename ``new`` to ``final``, and an old ``final`` to ``aside``; atomically if possible."""
    if final.exists() and _exchange(new, final):
        new.rename(aside)
        return
    if final.exists():
        final.rename(aside)
    new.rename(final)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically if the system can: Linux, on most local file systems."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of the Linux headers
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )


def _restore_replaced(path: Path) -> None:
    """Give a checkpoint that was renamed aside its name back, if no successor has the name."""
    for aside in path.glob(".global_step*.old"):
        name = path / aside.name[1 : -len(".old")]
        if not name.exists():
            # Another rank was faster, or the directory is read-only.
            with contextlib.suppress(OSError):
                aside.rename(name)


def wait_until_free(path: Path) -> None:
    """Wait until no run is writing to a directory.

    Raises:
        SettingsError: a run is still writing after 30 seconds.
    """
    if not path.exists():
        return
    deadline = time.monotonic() + _PATIENCE_S
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise _make_busy_error(path)
            time.sleep(0.1)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open directory; return whether no other process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # EBADF: NFS locks exclusively only what is open for writing, which no directory is.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
            raise  # a file system that cannot lock a directory is used without a lock
    return True


def _make_busy_error(path: Path) -> SettingsError:
    return SettingsError(
        f"another run is writing to {path}", "wait for it, or choose another --save"
    )


class RunDirectory:
    """The directory that a run saves into.

    Rank 0 makes, renames and removes; every rank writes its own files.

    Args:
        path: the run directory.
        continues: the checkpoint that the run resumes from, if any.
        overwrite: replace checkpoints of another run.
        keep: number of newest checkpoints to keep; 0 keeps all.

    Raises:
        SettingsError: the directory has checkpoints of another run, and ``overwrite`` is off.
    """

    def __init__(self, path: Path, *, continues: Path | None, overwrite: bool, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._lock: int | None = None
        same_run = continues is not None and continues.parent.resolve() == path.resolve()
        self._stale = [] if same_run else list_tags(path)
        self._complete = continues.name if same_run and continues else None
        if self._stale and not overwrite:
            raise SettingsError(
                f"{path} already has the checkpoint {self._stale[-1]} of another run",
                f"continue that run with --resume {path}, choose another --save, or replace its "
                "checkpoints with --overwrite",
            )

    def claim(self) -> None:
        """Lock the directory against other runs until ``close`` (rank 0).

        Raises:
            SettingsError: another run is writing there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # The lock is on the directory itself, so that no lock file is left.
        self._lock = os.open(self.path, os.O_RDONLY)
        if not _try_lock(self._lock):
            self.close()
            raise _make_busy_error(self.path)
        self.remove_unfinished()

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def prepare(self, step: int) -> Path:
        """Make an empty hidden directory for the checkpoint (rank 0)."""
        partial = self.partial_path(step)
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        partial.mkdir()
        return partial

    def remove_unfinished(self) -> None:
        """Remove the hidden directories of saves that did not end (rank 0)."""
        _restore_replaced(self.path)
        for unfinished in self.path.glob(".global_step*"):
            shutil.rmtree(unfinished)

    def partial_path(self, step: int) -> Path:
        """Return the hidden directory that the checkpoint is written into."""
        return self.path / f".{make_tag(step)}.partial"

    def publish(self, step: int) -> None:
        """Give the complete checkpoint its name, then write the name to ``latest`` (rank 0)."""
        partial, final = self.partial_path(step), self.path / make_tag(step)
        for path in (*partial.rglob("*"), partial):
            files.sync(path)
        if final.exists() and self._complete and self._complete != final.name:
            # A run that resumed from an earlier tag writes this one again. If the swap takes two
            # renames, ``latest`` must not name a checkpoint that has no name between them.
            files.write_text(self.path / LATEST, self._complete)
        replace(partial, final, self.path / f".{final.name}.old")
        files.sync(self.path)
        files.write_text(self.path / LATEST, final.name)
        self._complete = final.name
        self._prune(final.name)

    def _prune(self, newest: str) -> None:
        """Remove replaced checkpoints, and all but the newest ``keep``."""
        self._remove_hidden("old")  # first: without its successor, one would be restored
        doomed = [name for name in self._stale if name != newest]
        self._stale = []
        if self._keep:
            tags = list_tags(self.path)
            # Never the one just written: after a resume from an earlier tag, its step is lower.
            doomed += [name for name in tags[: -self._keep] if name != newest]
        for name in dict.fromkeys(doomed):
            if (self.path / name).exists():
                (self.path / name).rename(self.path / f".{name}.gone")
        if doomed:
            files.sync(self.path)
        self._remove_hidden("gone")

    def _remove_hidden(self, suffix: str) -> None:
        for hidden in self.path.glob(f".global_step*.{suffix}"):
            shutil.rmtree(hidden)
