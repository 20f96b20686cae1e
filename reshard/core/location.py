"""The location of a checkpoint: a directory, one file of it, or one directory for each node."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NoReturn

from reshard.errors import (
    REQUEST_PERMISSION,
    CorruptError,
    ReshardError,
    UnrecognisedError,
    UsageError,
)
from reshard.system.paths import as_path, explain_tilde, is_remote
from reshard.units import abridge

_LISTED = 8
_SUGGESTED = 3  # names
# Endings of checkpoint files, which must be equal on all nodes; logs and configs may differ.
_PARTS = (
    *(".pt", ".bin", ".pth", ".ckpt", ".pkl", ".tar", ".distcp", ".metadata", ".safetensors"),
    *(".swp", ".index.json", "latest", "latest_universal"),
)
_NUMBER = re.compile(r"(rank[-_.]?)?(\d+)")
_COMPARED = 1 << 20  # bytes at a time


def get_directory(path: str | Path) -> Path:
    """Return the directory that a path is, or that contains its file."""
    path = as_path(path)
    return path if path.is_dir() else path.parent


class Location:
    """The files of one directory by name, also if nodes stored them in several directories.

    Args:
        directories: more than one if each node kept its own files.
        chosen: the name of the file that the user passed, if the user passed a file.
        inner: whether the user did not pass the directories: they are inside of one, or above it.
    """

    def __init__(
        self, directories: Sequence[Path], chosen: str | None = None, *, inner: bool = False
    ) -> None:
        self.directories = tuple(directories)
        self.chosen = chosen
        self._inner = inner

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> Location:
        """Return the location that a user's paths stand for.

        Raises:
            UnrecognisedError: nothing is there.
            UsageError: files and directories together, several files, or no path.
        """
        if not paths:
            raise UsageError("source", "the list of paths is empty", "pass at least one")
        for path in paths:
            if not path.exists():
                if path.is_symlink():
                    refuse_broken_link(path)
                raise UnrecognisedError(path, "does not exist", _suggest_path(path))
        files = [path for path in paths if not path.is_dir()]
        for path in files:
            if not path.is_file():  # opening a pipe would wait for its writer
                raise UsageError(path, "is neither a directory nor a plain file")
        if files and len(paths) > 1:
            raise UsageError(
                files[0],
                "is a file; several sources must be directories, one for each node",
                "pass the directory that contains it",
            )
        if files:
            return cls([files[0].parent], files[0].name)
        return cls(list(dict.fromkeys(paths)))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The file that the user named, else the first directory."""
        first = self.directories[0]
        return first / self.chosen if self.chosen else first

    @property
    def paths(self) -> list[Path]:
        """The file that the user named, else all directories."""
        return [self.path] if self.chosen else list(self.directories)

    @cached_property
    def name(self) -> str:
        """The directory's own name; of a link such as ``latest``, that of its target."""
        target = self.directories[0].resolve().name
        is_pointer = re.search(r"\d", target) and not re.search(r"\d", self.own_name)
        return target if is_pointer else self.own_name

    @property
    def own_name(self) -> str:
        """The directory's own name, also if it is a link."""
        directory = self.directories[0]
        return (directory.resolve() if directory.name in ("", "..") else directory).name

    @cached_property
    def folder(self) -> Location:
        """The directories alone, as if the user had passed them and no file."""
        return Location(self.directories) if self.chosen or self._inner else self

    def get_parent(self) -> Location:
        """Return the parent directory, that of ``.`` included."""
        parents = [d / ".." if d.name in ("", "..") else d.parent for d in self.directories]
        return Location(parents, inner=True)

    @cached_property
    def files(self) -> dict[str, Path]:
        """The files by name, in order of names; equal names must have equal contents.

        Raises:
            CorruptError: two directories have files of one name with different contents.
        """
        by_name: dict[str, Path] = {}
        for directory, entry in self._scan():
            if entry.is_file():
                path = directory / entry.name
                kept = by_name.setdefault(entry.name, path)
                if kept is not path and entry.name.endswith(_PARTS):
                    _refuse_different(kept, path)
        return {name: by_name[name] for name in sorted(by_name)}

    @cached_property
    def folders(self) -> dict[str, Location]:
        """Every subdirectory by name, in order of names."""
        by_name: dict[str, list[Path]] = {}
        for directory, entry in self._scan():
            if entry.is_dir():
                by_name.setdefault(entry.name, []).append(directory / entry.name)
        return {name: Location(by_name[name], inner=True) for name in sorted(by_name)}

    @cached_property
    def broken_links(self) -> dict[str, Path]:
        """The symlinks whose targets do not exist, by name."""
        links = [directory / entry.name for directory, entry in self._scan() if entry.is_symlink()]
        return {link.name: link for link in links if not link.exists()}

    def _scan(self) -> Iterator[tuple[Path, Path | os.DirEntry[str]]]:
        """Yield each directory with each entry; an inner one that is unreadable is empty."""
        for directory in self.directories:
            try:
                for entry in _list_entries(directory):
                    yield directory, entry
            except PermissionError as error:
                if not self._inner:
                    raise ReshardError(directory, "cannot be read", REQUEST_PERMISSION) from error

    def refuse_unreadable(self) -> None:
        """Refuse a location whose directories cannot be listed, also if it is an inner one."""
        self.folder.has_file(bool)

    def has_file(self, matches: Callable[[str], bool]) -> bool:
        """Return whether a file has such a name; not every file of a large folder is listed."""
        return any(matches(entry.name) and entry.is_file() for _, entry in self._scan())

    def find_first(self, names: Iterable[str]) -> Path | None:
        """Return the file with the first of several names that exists, or None."""
        return next((self.files[name] for name in names if name in self.files), None)

    def find_nested(self, name: str) -> Path | None:
        """Return the file at a relative path of several parts, or None."""
        with contextlib.suppress(OSError):  # a name from a document can be too long for a file
            return next((d / name for d in self.directories if (d / name).is_file()), None)
        return None


def _list_entries(directory: Path) -> Iterator[Path | os.DirEntry[str]]:
    """Yield the entries of a directory; local ones know without a system call what they are."""
    if is_remote(str(directory)):
        yield from directory.iterdir()
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            # `DirEntry.is_file` raises an error for a link to itself, and `Path.is_file` does not.
            yield directory / entry.name if entry.is_symlink() else entry


def leads_outside(path: Path, root: Path) -> bool:
    """Return whether a path below ``root`` leads through links to a file outside of it.

    Two such links are not outside: one to the file of the same name in the directory above, which
    belongs to the run, and one from a snapshot of Hugging Face's cache to a blob of the same
    repository (huggingface_hub ``file_download.py``: ``snapshots/REVISION/NAME`` leads to
    ``blobs/HASH``).
    """
    inside, target = root.resolve(), path.resolve()
    is_blob = inside.parent.name == "snapshots" and target.parent == inside.parents[1] / "blobs"
    is_of_run = target == inside.parent / path.relative_to(root)
    return not (target.is_relative_to(inside) or is_blob or is_of_run)


def note_outside(paths: Iterable[Path]) -> list[str]:
    """Return a note for each file that is not copied because it is a link out of the source."""
    return [
        f"{path.name} was not copied: it is a link to {path.resolve()}, outside of the checkpoint;"
        " copy that file beside the output if it belongs to the model"
        for path in paths
    ]


def refuse_broken_link(link: Path, advice: str = "") -> NoReturn:
    """Refuse a symlink whose target does not exist.

    Raises:
        UnrecognisedError: always.
    """
    raise UnrecognisedError(
        link, f"is a symlink to {link.readlink()}, which does not exist", advice
    )


def _suggest_path(missing: Path) -> str:
    if is_remote(str(missing)):
        return ""
    if advice := explain_tilde(missing):
        return advice
    from difflib import get_close_matches  # only an error needs it

    # The first part of the path that does not exist, and the directory that should contain it.
    chain = [missing, *missing.parents]
    wrong = next(path for path in chain if path.parent.exists())
    if wrong.is_symlink():
        return f"{wrong} is a symlink to {wrong.readlink()}, which does not exist"
    names: list[str] = []
    with contextlib.suppress(OSError):  # the parent can be a file, or not readable
        names = [child.name for child in wrong.parent.iterdir()]
    if close := get_close_matches(wrong.name, names, _SUGGESTED):
        return f"did you mean {', '.join(str(wrong.parent / name) for name in close)}?"
    if missing.is_absolute():
        found = f"; it contains {abridge(sorted(names))}" if names else ""
        return f"{wrong.parent} contains no {wrong.name}{found}"
    way_out = (
        f"if it names a model of the Hugging Face Hub, download it (hf download {missing}) and pass"
        " its directory"
        if len(missing.parts) == 2 and wrong != missing
        else "pass an absolute path or change the directory"
    )
    return f"the path is relative to {Path.cwd()}; {way_out}"


def list_missing_ranks(present: Container[int], ranks: Iterable[int]) -> list[int]:
    """Return the first few of some ranks that are not present."""
    return list(islice((rank for rank in ranks if rank not in present), _LISTED))


def name_missing(present: Mapping[int, Path], ranks: Iterable[int]) -> str:
    """Return "FILE is missing" for the files of some ranks, named like those that are present.

    >>> name_missing({0: Path("zero_pp_rank_0_mp_rank_00_optim_states.pt")}, [1])
    'zero_pp_rank_1_mp_rank_00_optim_states.pt is missing'
    >>> name_missing({0: Path("rank_0/model.pt"), 2: Path("rank_2/model.pt")}, [1, 3])
    'rank_1/model.pt, rank_3/model.pt are missing'
    """
    rank, path = min(present.items())
    text = f"{path.parent.name}/{path.name}"
    numbers = [match for match in _NUMBER.finditer(text) if int(match[2]) == rank]
    in_name = [match for match in numbers if match.start() > len(path.parent.name)]
    # Of several numbers that may be the rank's, it is the first behind "rank", or else the last.
    number = next((m for m in (*in_name, *numbers) if m[1]), in_name[-1] if in_name else None)
    if number is None:
        names = [f"the file of rank {missing}" for missing in ranks]
    else:
        start, stop = number.span(2)
        digits = stop - start if text[start] == "0" else 0
        names = [f"{text[:start]}{str(rank).zfill(digits)}{text[stop:]}" for rank in ranks]
        names = [name.rpartition("/")[2] for name in names] if number in in_name else names
    return f"{abridge(names, _LISTED)} {'is' if len(names) == 1 else 'are'} missing"


def _refuse_different(kept: Path, other: Path) -> None:
    # Two directories can have one file by links: it need not be compared with itself.
    same = kept.stat().st_size == other.stat().st_size
    if same and not kept.samefile(other):
        with kept.open("rb") as a, other.open("rb") as b:
            while same and (block := a.read(_COMPARED)):
                same = block == b.read(_COMPARED)
    if not same:
        raise CorruptError(
            other,
            f"differs from {kept}, which has the same name",
            f"if they are the folders of ranks (rank_0, rank_1 ...), pass {kept.parent.parent};"
            " otherwise pass only directories of one checkpoint"
            if kept.parent.parent == other.parent.parent
            else "pass only directories of one checkpoint",
        )
