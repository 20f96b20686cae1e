"""Measure the limit: read the source bytes that a merge needs, and write as many as it writes.

    python bare_loop.py SPANS.json OUTPUT [--threads N] [--shrink 2] [--checks] [--request 8388608]

SPANS.json lists [file or s3:// URL, byte offset, nbytes] in output order. ``--shrink 2`` writes
half of every piece, as a cast from fp32 to bf16 does, without casting. ``--checks`` computes the
CRC-32 of the bytes read, reads the output back and compares it, as a merge does. ``--request``
reads in the order of the files instead, in requests of this size that also cover small gaps: with
16 threads, this is the limit of a storage whose every request takes time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable

from isal.isal_zlib import crc32

PIECE = 4 << 20
CHECKED_PIECE = 512 << 10
SMALL_GAP = 64 << 10

Span = tuple[str, int, int]


def join(spans: list[Span]) -> list[Span]:
    """Sort spans by file and offset, and join those with small gaps between them."""
    joined: list[Span] = []
    for name, start, nbytes in sorted(spans):
        if joined and joined[-1][0] == name and start - sum(joined[-1][1:]) <= SMALL_GAP:
            first = joined[-1][1]
            joined[-1] = name, first, max(sum(joined[-1][1:]), start + nbytes) - first
        else:
            joined.append((name, start, nbytes))
    return joined


def cut(spans: list[Span], piece: int, shrink: int) -> tuple[list[tuple[str, int, int, int]], int]:
    """Return (file, offset, nbytes, offset in the output) of each piece, and the output's size."""
    pieces = []
    at = 0
    for name, offset, nbytes in spans:
        for start in range(0, nbytes, piece):
            size = min(piece, nbytes - start)
            pieces.append((name, offset + start, size, at))
            at += size // shrink
    return pieces, at


def open_all(names: Iterable[str], threads: int) -> Callable[[str, memoryview, int], object]:
    """Return a function that fills a buffer with the bytes of a file or object from an offset."""
    urls = {name for name in names if name.startswith("s3://")}
    files = {name: os.open(name, os.O_RDONLY) for name in names if name not in urls}
    if not urls:
        return lambda name, target, offset: os.preadv(files[name], [target], offset)
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=threads))

    def read(url: str, target: memoryview, offset: int) -> None:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        span = f"bytes={offset}-{offset + len(target) - 1}"
        body = client.get_object(Bucket=bucket, Key=key, Range=span)["Body"]
        done = 0
        while done < len(target):
            done += body.readinto(target[done:])

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spans")
    parser.add_argument("output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--request", type=int)
    args = parser.parse_args()
    with open(args.spans) as file:  # noqa: PTH123
        spans = [tuple(span) for span in json.load(file)]
    # A checked piece stays in the cache until its last check.
    piece = args.request or (CHECKED_PIECE * args.shrink if args.checks else PIECE)
    pieces, nbytes = cut(join(spans) if args.request else spans, piece, args.shrink)
    read = open_all({span[0] for span in spans}, args.threads)
    target = os.open(args.output, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.ftruncate(target, nbytes)

    def work(number: int) -> None:
        # not a bytearray, which is filled with zeros while the other threads wait for the GIL
        buffer, back = memoryview(mmap.mmap(-1, piece)), bytearray(CHECKED_PIECE)
        for name, offset, size, place in pieces[number :: args.threads]:
            read(name, buffer[:size], offset)
            written = buffer[: size // args.shrink]
            os.pwrite(target, written, place)
            if args.checks:
                crc32(buffer[:size])
                if len(back) != len(written):
                    back = bytearray(len(written))
                os.preadv(target, [back], place)
                if back != written:  # a bytearray and a buffer: a single memcmp
                    raise SystemExit("the output differs from what was written")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(args.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
