"""Name the files of ranks that are missing, where tensors are not whole because of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from reshard.core.location import Location, get_directory
from reshard.errors import (
    FETCH_MISSING,
    CorruptError,
    IncompleteError,
    ReshardError,
    StaleError,
)


@contextmanager
def naming_lost_files(location: Location) -> Iterator[None]:
    """Turn an error about tensors that are not whole into one that names the missing files.

    Raises:
        IncompleteError: files of ranks are missing.
    """
    try:
        yield
    except StaleError:
        raise
    except CorruptError as error:
        from reshard.formats.pytorch.ranks import find_lost_files  # which few checkpoints need

        lost = ""
        # A run has its checkpoints in directories below; nodes have one directory each.
        folder = get_directory(error.where)
        where = location if folder in location.directories else Location([folder])
        with suppress(ReshardError, OSError):  # a damaged file explains the error, too
            lost = find_lost_files(where)
        if lost:
            raise IncompleteError(folder, f"{lost}: {error.problem}", FETCH_MISSING) from error
        raise
