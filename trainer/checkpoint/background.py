"""Saves in the background: training waits for a copy in host memory, not for the disk.

::

    main thread     step  step |copy| step  step  step |wait if not done, copy| step ...
    another thread             |write, fsync, rename, latest|          |write ...

A save is written like any other: under a hidden name, and renamed when every rank is done. Only one
save is in progress at a time, so host memory holds one copy of what this rank writes. A process
that is killed leaves a hidden directory, which no resume reads and the next save removes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from trainer.checkpoint import saving
from trainer.checkpoint.contents import copy_to_host
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.saving import Unwritten
from trainer.core.errors import TrainerError
from trainer.core.ranks import Ranks
from trainer.settings import Settings

Say = Callable[[str], None]
"""Print a line for people, on rank 0."""


@contextmanager
def open_saves(
    run: RunDirectory, settings: Settings, ranks: Ranks, say: Say
) -> Iterator[Callable[[Unwritten], None]]:
    """Yield the function that writes a checkpoint; all are complete when the block ends.

    Raises:
        TrainerError: on every rank; a save failed, and the save before it is intact.
    """
    if not settings.async_save:
        yield partial(saving.write, run, settings, ranks)
        return
    with BackgroundSaves(run, settings, ranks, say) as saves:
        yield saves.save


class BackgroundSaves:
    """Writes checkpoints in a thread. Every rank makes one, and calls it in the same order."""

    def __init__(self, run: RunDirectory, settings: Settings, ranks: Ranks, say: Say) -> None:
        self._run = run
        self._say: Say | None = say
        self._settings = settings
        # Collectives of two threads must not meet in one group.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout))
        self._ranks = Ranks(ranks.rank, ranks.world, torch.device("cpu"), group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, unwritten: Unwritten) -> None:
        """Wait for the previous save, copy the state, and begin to write it. Collective.

        Raises:
            TrainerError: the save before failed.
        """
        self.finish()
        contents, nbytes = copy_to_host(unwritten.contents)
        if self._say:
            self._say(f"saving in the background, from a copy of {nbytes / 1e6:.1f} MB on rank 0")
            self._say = None
        copied = dataclasses.replace(unwritten, contents=contents)
        self._thread = threading.Thread(target=self._write, args=(copied,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last save is complete and has its name.

        Raises:
            TrainerError: it failed; the save before it is intact.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, unwritten: Unwritten) -> None:
        try:
            saving.write(self._run, self._settings, self._ranks, unwritten)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def __enter__(self) -> BackgroundSaves:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the save if all ranks can: they have ended well, or with the same error."""
        if error is None or isinstance(error, TrainerError):
            self.finish()
