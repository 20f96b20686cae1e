"""The control run of `resume-check`: a copy without its optimizer, so that losses must differ."""

from __future__ import annotations

from pathlib import Path

from reshard.core.chunks import Chunk
from reshard.core.manifest import WEIGHT_KINDS, Manifest
from reshard.errors import IncompleteError, UnsupportedError

_BLOCK = 1 << 20


def wipe_optimizer(manifest: Manifest) -> int:
    """Overwrite every optimizer tensor with zeros, in place; steps and param groups stay.

    The checkpoint must be a temporary copy.

    Returns:
        The number of tensors wiped.

    Raises:
        IncompleteError: the checkpoint has no optimizer tensors.
        UnsupportedError: the bytes of an optimizer tensor include those of another tensor.
    """
    slots = [e for e in manifest.entries.values() if e.kind not in WEIGHT_KINDS and e.numel]
    if not slots:
        raise IncompleteError(
            manifest.origin.path, "has no optimizer tensors that could be set to zero"
        )
    for entry in slots:
        for chunk in entry.chunks:
            _wipe(chunk)
    return len(slots)


def _wipe(chunk: Chunk) -> None:
    start, stop = chunk.byte_span
    if stop - start != chunk.box.volume * chunk.dtype.itemsize:
        raise UnsupportedError(
            chunk.file, f"bytes {start} to {stop} belong to more than one tensor", "omit --control"
        )
    with Path(chunk.file).open("r+b") as file:
        file.seek(start)
        while start < stop:
            start += file.write(bytes(min(_BLOCK, stop - start)))
