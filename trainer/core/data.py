"""Samples by global number: one number is one sample, whichever rank asks.

::

    sample number    0  1  2  3 | 4  5  6  7 | 8 ...      the same sequence for any number of ranks
    2 ranks, step 1  r0 r1 r0 r1    (global batch 4, micro batch 1)
    4 ranks, step 1  r0 r1 r2 r3

No rank has a position of its own, so a change of the number of ranks repeats and skips no sample.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from trainer.core.errors import SettingsError

VOCABULARY = 257
"""Tokens are bytes: token i < 256 is byte i. Token 256, the end of a text, is in no sample."""


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed for ``numbers``, such as (seed of the run, epoch).

    >>> derive_seed(0, 7) == derive_seed(0, 7) != derive_seed(7, 0)
    True
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Corpus:
    """Windows of ``seq_len`` bytes of a text, shuffled anew in each epoch.

    Attributes:
        digest: SHA-256 of the whole text, which checkpoints record.

    Raises:
        SettingsError: the text cannot be read, or is shorter than one sample.
    """

    def __init__(self, path: str | None, seq_len: int, seed: int) -> None:
        text = _read_text(path)
        count = len(text) // seq_len
        if not count:
            raise SettingsError(
                f"{path} has {len(text)} bytes, and one sample needs {seq_len}",
                "use a longer text for --data, or a smaller --seq-len",
            )
        tokens = torch.frombuffer(bytearray(text[: count * seq_len]), dtype=torch.uint8)
        self.digest = hashlib.sha256(text).hexdigest()
        self._windows = tokens.view(count, seq_len)
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffle)  # a batch may span two epochs

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return len(self._windows)

    def get_samples(self, first: int, count: int) -> Tensor:
        """Return ``count`` samples of the endless sequence, int64 of (count, seq_len)."""
        rows = []
        for number in range(first, first + count):
            epoch, position = divmod(number, len(self))
            rows.append(self._windows[self._order(epoch)[position]])
        return torch.stack(rows).long()

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        return torch.randperm(len(self), generator=generator)


def _read_text(path: str | None) -> bytes:
    """Return the bytes of the text; without a path, Python's own language reference."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(
            f"cannot read the training text {path}: {error.strerror or error}",
            "give a readable text file with --data, or leave it out for the built-in text",
        ) from error
