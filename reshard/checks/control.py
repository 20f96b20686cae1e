"""A checkpoint spoilt on purpose: a check of training must see that its optimizer is gone."""

from __future__ import annotations

from pathlib import Path

from reshard.chunks import Chunk
from reshard.errors import IncompleteError, UnsupportedError
from reshard.manifest import WEIGHT_KINDS, Manifest

_BLOCK = 1 << 20


def forget_optimizer(manifest: Manifest) -> int:
    """Write zeros over every optimizer tensor, in place; steps and groups stay.

    The checkpoint must be a copy that nobody needs.

    Returns:
        How many tensors.

    Raises:
        IncompleteError: there are none.
        UnsupportedError: one does not lie by itself.
    """
    slots = [e for e in manifest.entries.values() if e.kind not in WEIGHT_KINDS and e.numel]
    if not slots:
        raise IncompleteError(manifest.origin.path, "holds no optimizer tensor that could be lost")
    for entry in slots:
        for chunk in entry.chunks:
            _wipe(chunk)
    return len(slots)


def _wipe(chunk: Chunk) -> None:
    start, stop = chunk.byte_span
    if stop - start != chunk.box.volume * chunk.dtype.itemsize:
        raise UnsupportedError(
            chunk.file, f"bytes {start} to {stop} are not of one tensor alone", "leave --control"
        )
    with Path(chunk.file).open("r+b") as file:
        file.seek(start)
        while start < stop:
            start += file.write(bytes(min(_BLOCK, stop - start)))
