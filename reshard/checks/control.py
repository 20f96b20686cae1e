"""The copies of `resume-check`: one without a moment, and one with its weights rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from reshard.core.chunks import Chunk
from reshard.core.manifest import MASTER, PARAM, WEIGHT_KINDS, Entry, Manifest
from reshard.errors import IncompleteError, UnsupportedError

_BLOCK = 1 << 20
_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}  # of a stored significand
_ROUNDED = 19  # weights change by 2**-19 of their size: few of them, if a unit is more than that


def wipe_moment(manifest: Manifest) -> Entry:
    """Overwrite one optimizer tensor with zeros, in place; steps and param groups stay.

    It is the smallest matrix: a check that notices its loss notices that of larger ones. In the
    noise of 16-bit training, a single bias cannot be noticed.

    The checkpoint must be a temporary copy.

    Raises:
        IncompleteError: no optimizer tensor has a value other than zero.
        UnsupportedError: the bytes of each optimizer tensor include those of other tensors.
    """
    first: dict[str, Entry] = {}  # of each parameter: `exp_avg` before `exp_avg_sq`
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS and entry.numel and entry.dtype.family == "float":
            other = first.setdefault(entry.fqn, entry)
            first[entry.fqn] = min(other, entry, key=lambda entry: entry.kind)
    slots = sorted(first.values(), key=lambda entry: (len(entry.shape) < 2, entry.numel))
    whole = [entry for entry in slots if all(map(_is_whole, entry.chunks))]
    for entry in whole:
        if any(any(block) for block in _read(entry)):
            for chunk in entry.chunks:
                _overwrite(chunk, lambda block: bytes(len(block)))
            return entry
    if slots and not whole:
        raise UnsupportedError(
            slots[0].chunks[0].file,
            "the bytes of each optimizer tensor include those of other tensors",
            "omit --control",
        )
    raise IncompleteError(
        manifest.origin.path, "has no optimizer tensors that could be set to zero"
    )


def round_weights(manifest: Manifest) -> int:
    """Change the weights as another order of sums would, in place, by 2**-19 of their size.

    fp32 master weights change if there are any, otherwise the weights. The checkpoint must be a
    temporary copy.

    Returns:
        The number of tensors changed.

    Raises:
        UnsupportedError: no tensor can be changed in place.
    """
    masters = list(manifest.of_kind(MASTER))
    weights = masters or list(manifest.of_kind(PARAM))
    changed, done = 0, set()
    for entry in weights:
        chunks = [chunk for chunk in entry.chunks if _is_whole(chunk) and chunk.dtype.name in _BITS]
        for chunk in chunks:
            seed = crc32(f"{entry.fqn} {chunk.box}".encode())  # the same for every copy
            if (place := (chunk.file, chunk.byte_offset)) not in done:
                _overwrite(chunk, _make_rounding(chunk.dtype.name, seed))
            done.add(place)
        changed += bool(chunks)
    if not changed:
        raise UnsupportedError(manifest.origin.path, "has no weights that could be rounded")
    return changed


def _make_rounding(dtype: str, seed: int) -> Callable[[bytes], bytes]:
    """Return a function that changes last places at random; zeros, infinities and NaN stay."""
    import numpy as np

    bits, stored_type = _BITS[dtype], np.dtype("<u4" if dtype == "float32" else "<u2")
    chance = np.random.default_rng(seed)
    largest = (1 << (8 * stored_type.itemsize - 1 - bits)) - 1
    units = max(1, 1 << max(bits - _ROUNDED, 0))

    def round_block(data: bytes) -> bytes:
        stored = np.frombuffer(data, stored_type)
        exponents = (stored << 1) >> (bits + 1)
        is_changed = (exponents > 0) & (exponents < largest - 1)
        is_changed &= chance.random(len(stored)) < 2.0 ** (bits - _ROUNDED + 1)
        signs = chance.integers(0, 2, len(stored)) * 2 - 1
        changes = np.where(is_changed, signs * units, 0)
        return bytes((stored + changes).astype(stored_type).data)

    return round_block


def _is_whole(chunk: Chunk) -> bool:
    """Return whether the chunk's bytes are its own, in a local file."""
    start, stop = chunk.byte_span
    return stop - start == chunk.box.volume * chunk.dtype.itemsize and Path(chunk.file).is_file()


def _read(entry: Entry) -> Iterator[bytes]:
    for chunk in entry.chunks:
        start, stop = chunk.byte_span
        with Path(chunk.file).open("rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK, stop - start))
                start += len(block)
                yield block


def _overwrite(chunk: Chunk, change: Callable[[bytes], bytes]) -> None:
    start, stop = chunk.byte_span
    with Path(chunk.file).open("r+b") as file:
        while start < stop:
            file.seek(start)
            block = file.read(min(_BLOCK, stop - start))
            file.seek(start)
            file.write(change(block))
            start += len(block)
