"""Samples by global number: the same sample for a number, whoever asks.

A rank never has a position of its own, so a change of the number of ranks repeats and loses none.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import SettingsError


def counter_seed(*numbers: int) -> int:
    """A 63-bit seed for one event, from its coordinates alone.

    >>> counter_seed(0, 7) == counter_seed(0, 7) != counter_seed(7, 0)
    True
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Corpus:
    """Windows of ``seq_len`` bytes of a text, in an order shuffled anew each epoch.

    Attributes:
        digest: SHA-256 of the whole text.

    Raises:
        SettingsError: the text cannot be read, or holds no whole sample.
    """

    def __init__(self, path: str | None, seq_len: int, seed: int) -> None:
        text = _read(path)
        count = len(text) // seq_len
        if not count:
            raise SettingsError(f"{path}: {len(text)} bytes are no sample of {seq_len} tokens")
        tokens = torch.frombuffer(bytearray(text[: count * seq_len]), dtype=torch.uint8)
        self.digest = hashlib.sha256(text).hexdigest()
        self._windows = tokens.view(count, seq_len)
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._windows)

    def samples(self, first: int, count: int) -> Tensor:
        """``count`` samples of the endless sequence from ``first`` on: (count, seq_len) int64."""
        rows = []
        for number in range(first, first + count):
            epoch, position = divmod(number, len(self))
            rows.append(self._windows[self._order(epoch)[position]])
        return torch.stack(rows).long()

    def _shuffled(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(counter_seed(self._seed, epoch))
        return torch.randperm(len(self), generator=generator)


def _read(path: str | None) -> bytes:
    """The text's bytes; without a path, the language reference that every Python carries."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read the text: {error}") from error
