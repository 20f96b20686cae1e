"""Loads of other libraries, which take the content of some files from memory.

A library that looks for a checkpoint's files by name and then loads them by a function of torch or
safetensors can load a checkpoint that is on no disk: the names are there, and while a block of
`patch_loads` is open these functions read the files of the names from memory:

    torch.load                                     Trainer, Accelerate, DeepSpeed
    safetensors.torch.load_file                    Trainer without FSDP
    torch.distributed.checkpoint.FileSystemReader  FSDP's sharded state dicts

Files of other directories are loaded as always.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.split.options import SplitOptions
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.formats.request import LiveTarget
from reshard.live.files import (
    LiveFiles,
    create_names,
    log_report,
    open_live_files,
    read_options,
)
from reshard.live.safe_load import load_safely
from reshard.system.attributes import replace_attributes

Load = Callable[[OnDemandFiles, str, Any], Any]
"""(files, name, map_location) -> what ``torch.load`` returns for the file of this name."""


def load_checked(files: OnDemandFiles, name: str, map_location: Any = None) -> Any:
    """Return the object in a file of ``torch.save``, after a check of what was read."""
    loaded = load_safely(files.open(name, checks=False), name, map_location)
    files.check()
    return loaded


@contextmanager
def patch_loads(files: OnDemandFiles, folder: Path, load: Load = load_checked) -> Iterator[None]:
    """Let loads of files in ``folder`` read from memory, within this block.

    Each load checks what it has read: the stored checksums of the source, and overflows of casts.

    Args:
        folder: the directory with their names.
        load: what ``torch.load`` does with a file.
    """
    import safetensors.torch
    import torch
    from torch.distributed.checkpoint import filesystem

    find = _Finder(files, folder, load)
    with ExitStack() as patches:
        for owner, name, make in (
            (torch, "load", _patch_torch_load),
            (safetensors.torch, "load_file", _patch_load_file),
            (filesystem.FileSystem, "create_stream", _patch_create_stream),
            (filesystem.FileSystemReader, "read_data", _patch_read_data),
        ):
            patch = make(getattr(owner, name), find)
            patches.enter_context(replace_attributes(owner, **{name: patch}))
        yield


class _Finder:
    def __init__(self, files: OnDemandFiles, folder: Path, load: Load) -> None:
        self.files = files
        self.load = load
        self._folder = folder

    def find(self, path: Any) -> str | None:
        if not isinstance(path, (str, os.PathLike)):
            return None
        try:
            name = Path(path).relative_to(self._folder).as_posix()
        except ValueError:
            return None
        return name if name in self.files and self.files.has_tensors(name) else None


def _patch_torch_load(own: Callable[..., Any], finder: _Finder) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        name = finder.find(f)
        if name is None:
            return own(f, map_location, *args, **options)
        return finder.load(finder.files, name, map_location)

    return load


def _patch_load_file(own: Callable[..., Any], finder: _Finder) -> Callable[..., Any]:
    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> Any:
        name = finder.find(filename)
        if name is None:
            return own(filename, device, **options)
        from safetensors.torch import load

        tensors = load(finder.files.read(name, 0, finder.files.nbytes(name)))
        finder.files.check()
        return {fqn: tensor.to(device) for fqn, tensor in tensors.items()}

    return load_file


def _patch_create_stream(own: Callable[..., Any], finder: _Finder) -> Callable[..., Any]:
    def create_stream(self: Any, path: Any, mode: str) -> Any:
        name = finder.find(path)
        return own(self, path, mode) if name is None else finder.files.open(name, checks=False)

    return create_stream


def _patch_read_data(own: Callable[..., Any], finder: _Finder) -> Callable[..., Any]:
    def read_data(self: Any, *args: Any, **options: Any) -> Any:
        done = own(self, *args, **options)
        finder.files.check()
        return done

    return read_data


@contextmanager
def open_directory(
    source: formats.Paths,
    *,
    decided: Mapping[str, Any],
    given: Mapping[str, Any],
    target: LiveTarget,
    workers: int | None,
) -> Iterator[tuple[Path, LiveFiles]]:
    """Open a directory of names, whose content the library loads from memory in this block.

    Every rank must enter the block. The report is in the log of rank 0.

    Args:
        decided: the options of `split` that the running program decides.
        given: the options of `split` that the user passed.

    Raises:
        ReshardError: on every rank, if the source cannot be read, trusted or written so.
    """
    options = SplitOptions(**read_options(given, decided))
    with open_live_files(source, options, target, workers=workers) as live:
        log_report(live.planned.report)
        with create_names(live.files) as folder, patch_loads(live.files, folder):
            yield folder, live
