"""A run directory: ``<tag>/`` for each checkpoint, and ``latest``, which names one that is whole.

A checkpoint is written under a hidden name, flushed, and renamed when every rank is done; only then
does ``latest`` name it. A kill at any moment leaves the checkpoint before, and ``latest`` true; a
name that is seen is of a whole checkpoint: what is to go loses its name first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.errors import CheckpointError, SettingsError

LATEST = "latest"
STATE = "trainer_state.json"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
LAYOUTS = {
    "DeepSpeed": "*_model_states.pt",
    "FSDP": "pytorch_model_fsdp*",
    "Megatron-LM": MEGATRON_LATEST,
}
"""A file of each layout that every checkpoint in it has."""
_STEP = re.compile(r"global_step(\d+)")
_NUMBERED = re.compile(r"(?:global_step|checkpoint-)(\d{1,18})")
_PART = re.compile(r"pytorch_model_fsdp_0|optimizer_0|iter_\d+|mp_rank_\d+.*")
"""Folders in a checkpoint."""


def tag_of(step: int) -> str:
    """DeepSpeed's name for the checkpoint after ``step`` steps."""
    return f"global_step{step}"


def first_free(stem: str = "run") -> Path:
    """``run-1``, or the first that does not exist."""
    number = 1
    while Path(f"{stem}-{number}").exists():
        number += 1
    return Path(f"{stem}-{number}")


def find(path: Path, tag: str | None) -> Path:
    """Return the checkpoint directory that ``--resume path --tag tag`` means.

    Args:
        path: a run directory, a checkpoint directory, or a file or folder in one.
        tag: the name of a checkpoint in the run directory, or its step.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "give a run directory or a checkpoint")
    if tag is None and not (path / LATEST).exists():
        found = _around(path) or _newest(path)
        if found is None:
            raise CheckpointError(
                f"{path} is not a checkpoint, and has no file 'latest' that names one "
                f"({_listed(path)})",
                "give the run directory that --save named, or one checkpoint directory in it",
            )
        return found
    name = tag or _latest(path)
    _bring_back(path)
    if "/" in name or name in {"", ".", ".."} or not (path / name).is_dir():
        if tag and (numbered := _numbered(path).get(tag)):
            return numbered
        said = "the one that --tag asks for" if tag else "the one that 'latest' names"
        raise CheckpointError(
            f"{path} has no checkpoint {name!r}, {said} ({_listed(path)})",
            "give a --tag that is there, or another directory",
        )
    return path / name


def _around(path: Path) -> Path | None:
    """Return the checkpoint that a path is, or is a file or folder of."""
    if path.is_file():
        path = path.absolute().parent
    if _is_checkpoint(path):
        return path
    if _PART.fullmatch(path.name):
        return next((above for above in list(path.parents)[:2] if _is_checkpoint(above)), None)
    return None


def _is_checkpoint(path: Path) -> bool:
    return (path / STATE).exists() or bool(layout(path))


def _numbered(path: Path) -> dict[str, Path]:
    """Return checkpoints by step, the last the newest: ours, and HF Trainer's ``checkpoint-N``."""
    matches = [
        (match, each) for each in path.glob("*") if (match := _NUMBERED.fullmatch(each.name))
    ]
    found = {int(match[1]): each for match, each in matches if _is_checkpoint(each)}
    return {str(step): found[step] for step in sorted(found)}


def _newest(path: Path) -> Path | None:
    """Return the newest checkpoint below; a run that died before its first ``latest`` has one."""
    return next(reversed(_numbered(path).values()), None)


def _listed(path: Path) -> str:
    names = tags_in(path) or [each.name for each in _numbered(path).values()]
    return f"checkpoints there: {', '.join(names) or 'none'}"


def _latest(path: Path) -> str:
    try:
        return (path / LATEST).read_text().strip()[:255]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / LATEST} cannot be read: {error}", "give --tag") from error


def layout(checkpoint: Path) -> str:
    """Whose files a checkpoint directory holds, a key of ``LAYOUTS``, or an empty string."""
    for name, pattern in LAYOUTS.items():
        if any(checkpoint.glob(pattern)):
            return name
    return ""


def tags_in(path: Path) -> list[str]:
    """Finished checkpoints by step."""
    found = [
        (int(match[1]), match[0]) for p in path.glob("*") if (match := _STEP.fullmatch(p.name))
    ]
    return [name for _, name in sorted(found)]


def replace(made: Path, final: Path, aside: Path) -> None:
    """Give a directory its name; what has the name goes aside, in the same step if that can be."""
    if final.exists() and _exchange(made, final):
        made.rename(aside)
        return
    if final.exists():
        final.rename(aside)
    made.rename(final)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, where the system can: Linux, on most local file systems."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )


def _bring_back(path: Path) -> None:
    """A checkpoint that was put aside has its name again, if its successor never got it."""
    for aside in path.glob(".global_step*.old"):
        name = path / aside.name[1 : -len(".old")]
        if not name.exists():
            with contextlib.suppress(OSError):  # another rank has done it, or none may
                aside.rename(name)


class RunDirectory:
    """Where one run saves. Rank 0 makes, renames and removes; every rank writes its files.

    Args:
        continues: the checkpoint that the run goes on from, if any.

    Raises:
        SettingsError: it holds checkpoints of another run, and ``overwrite`` is off.
    """

    def __init__(self, path: Path, *, continues: Path | None, overwrite: bool, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._lock: int | None = None
        same_run = continues is not None and continues.parent.resolve() == path.resolve()
        self._stale = [] if same_run else tags_in(path)
        self._good = continues.name if same_run and continues else None
        if self._stale and not overwrite:
            raise SettingsError(
                f"{path} already holds {self._stale[-1]}",
                f"go on with --resume {path}, choose another --save, or give --overwrite",
            )

    def claim(self) -> None:
        """Keep other runs out of the directory until ``close`` (rank 0).

        Raises:
            SettingsError: another run is writing there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)  # the directory itself: no file is needed
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SettingsError(
                f"another run is writing to {self.path}", "wait for it, or choose another --save"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
                raise  # where the file system cannot lock a directory, nothing is kept out

    def close(self) -> None:
        """Let other runs in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def prepare(self, step: int) -> Path:
        """Make an empty hidden directory for the checkpoint (rank 0)."""
        partial = self.partial(step)
        self.path.mkdir(parents=True, exist_ok=True)
        _bring_back(self.path)
        for left_over in self.path.glob(".global_step*"):
            shutil.rmtree(left_over)
        partial.mkdir()
        return partial

    def partial(self, step: int) -> Path:
        """Where the checkpoint is written."""
        return self.path / f".{tag_of(step)}.partial"

    def publish(
        self, step: int, sync: Callable[[Path], None], write: Callable[[Path, str], None]
    ) -> Path:
        """Give the finished checkpoint its name, then let ``latest`` say so (rank 0)."""
        partial, final = self.partial(step), self.path / tag_of(step)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if final.exists() and self._good and self._good != final.name:
            # A run that went back to an earlier tag writes this one again. Where the swap takes
            # two steps, ``latest`` must not name what has no name between them.
            write(self.path / LATEST, self._good)
        replace(partial, final, self.path / f".{final.name}.old")
        sync(self.path)
        write(self.path / LATEST, final.name)
        self._good = final.name
        self._prune(final.name, sync)
        return final

    def _prune(self, newest: str, sync: Callable[[Path], None]) -> None:
        """Remove what is replaced, and all but the newest ``keep``."""
        self._remove("old")  # first: without its successor it would be brought back
        doomed = [name for name in self._stale if name != newest]
        self._stale = []
        if self._keep:
            kept = tags_in(self.path)
            # By step, but never the one just written, which a run that went back may number lower.
            doomed += [name for name in kept[: -self._keep] if name != newest]
        for name in dict.fromkeys(doomed):
            if (self.path / name).exists():
                (self.path / name).rename(self.path / f".{name}.gone")
        if doomed:
            sync(self.path)
        self._remove("gone")

    def _remove(self, what: str) -> None:
        for hidden in self.path.glob(f".global_step*.{what}"):
            shutil.rmtree(hidden)
