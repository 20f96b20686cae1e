"""Bytes that a pickle of protocol 2 stores as text, addressed as if they were a file.

Protocol 2, which ``torch.save`` uses, has no bytes: they are pickled as ``_codecs.encode(text,
"latin1")``, and the text is stored in UTF-8, where a byte of 128 or more takes two. The data of a
numpy array in a checkpoint are therefore not raw in the file. `make_name` turns the location of
such a text into a file name; `reshard.system.files.SourceFiles` reads the decoded bytes under that
name at any offset, and keeps no more of them in memory than one block.

Source: CPython 3.13 ``Modules/_pickle.c`` (``save_bytes``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from reshard.errors import CorruptError

_MARK = "\0latin1:"  # no file of any system has NUL in its name
_BLOCK = 64 << 10  # bytes of text that are read at once
_TAILS = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that continue a character

Read = Callable[[str, int, int], bytes]  # (file, byte offset, nbytes) -> bytes


@dataclass(frozen=True, slots=True)
class EscapedText:
    """The location of a text in a file, and the number of bytes that it encodes.

    Args:
        number: distinguishes arrays that share one text without being views of each other.
    """

    file: str
    byte_offset: int
    text_nbytes: int
    nbytes: int
    number: int = 0


def make_name(text: EscapedText) -> str:
    """Return the name under which the decoded bytes can be read."""
    numbers = (text.byte_offset, text.text_nbytes, text.nbytes, text.number)
    return f"{text.file}{_MARK}{':'.join(map(str, numbers))}"


def is_escaped(file: str) -> bool:
    """Return whether `make_name` returned this file name."""
    return _MARK in file


def parse_name(file: str) -> EscapedText:
    """Return the text that `make_name` turned into a file name."""
    path, _, numbers = file.rpartition(_MARK)
    return EscapedText(path, *map(int, numbers.split(":")))


def get_real_file(file: str) -> str:
    """Return the file on disk that holds the bytes read under a file name."""
    return parse_name(file).file if is_escaped(file) else file


class Decoder:
    """Read the bytes of one text at any offset.

    The constructor reads the whole text once, to find the decoded offset of each of its blocks.

    Args:
        read: reads raw bytes of the file on disk.
    """

    def __init__(self, file: str, read: Read) -> None:
        self._escaped = parse_name(file)
        self._read = read
        self._starts = [0]  # the decoded offset at which each block of text begins
        for block in range(0, self._escaped.text_nbytes, _BLOCK):
            characters = self._text(block).translate(None, _TAILS)  # without what ends them
            self._starts.append(self._starts[-1] + len(characters))
        if self._starts[-1] != self._escaped.nbytes:
            raise self._changed()

    def read_into(self, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the decoded bytes from an offset on.

        Raises:
            CorruptError: the text is shorter, or has characters that no byte stands for.
        """
        if byte_offset < 0 or byte_offset + len(target) > self._escaped.nbytes:
            raise self._changed()
        done = 0
        while done < len(target):
            at = byte_offset + done
            block = bisect_right(self._starts, at) - 1
            data = self._decoded(block)[at - self._starts[block] :][: len(target) - done]
            target[done : done + len(data)] = data
            done += len(data)

    def _text(self, start: int) -> bytes:
        nbytes = min(_BLOCK, self._escaped.text_nbytes - start)
        return self._read(self._escaped.file, self._escaped.byte_offset + start, nbytes)

    def _decoded(self, block: int) -> bytes:
        """Return the bytes of the characters that begin in a block of text."""
        start = block * _BLOCK
        stop = min(start + _BLOCK + 1, self._escaped.text_nbytes)  # a character can end in the next
        raw = self._read(self._escaped.file, self._escaped.byte_offset + start, stop - start)
        raw = raw[1:] if _is_tail(raw[0]) else raw
        # The additional byte begins a character of the next block, or ends one of this block.
        if stop - start > _BLOCK and not _is_tail(raw[-1]):
            raw = raw[:-1]
        try:
            return raw.decode("utf-8").encode("latin-1")
        except UnicodeError as error:
            raise self._changed() from error

    def _changed(self) -> CorruptError:
        return CorruptError(
            self._escaped.file,
            f"the text of {self._escaped.nbytes} bytes at byte {self._escaped.byte_offset} has"
            " changed since the header was read",
            "the file was written to meanwhile: run the command again after the job has ended",
        )


def _is_tail(byte: int) -> bool:
    return byte & 0xC0 == 0x80
