"""Measure the limit: read the source bytes that a merge needs, and write as many as it writes.

    python bare_loop.py SPANS.json OUTPUT [--threads N] [--shrink 2] [--checks]

SPANS.json lists [file, byte offset, nbytes] in output order. ``--shrink 2`` writes half of every
piece, as a cast from fp32 to bf16 does, without casting. ``--checks`` computes the CRC-32 of the
bytes read, reads the output back and compares it, as a merge does.
"""

from __future__ import annotations

import argparse
import json
import os
import threading

from isal.isal_zlib import crc32

PIECE = 4 << 20
CHECKED_PIECE = 512 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spans")
    parser.add_argument("output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--checks", action="store_true")
    args = parser.parse_args()
    with open(args.spans) as file:  # noqa: PTH123
        spans = json.load(file)
    files = {name: os.open(name, os.O_RDONLY) for name in {span[0] for span in spans}}
    target = os.open(args.output, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    # A checked piece stays in the cache until its last check.
    piece = CHECKED_PIECE * args.shrink if args.checks else PIECE
    pieces = []
    at = 0
    for name, offset, nbytes in spans:
        for start in range(0, nbytes, piece):
            size = min(piece, nbytes - start)
            pieces.append((files[name], offset + start, size, at))
            at += size // args.shrink
    os.ftruncate(target, at)

    def work(number: int) -> None:
        buffer, back = memoryview(bytearray(PIECE)), bytearray(CHECKED_PIECE)
        for source, offset, size, place in pieces[number :: args.threads]:
            os.preadv(source, [buffer[:size]], offset)
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
