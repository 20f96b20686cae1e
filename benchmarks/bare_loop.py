"""The limit: pread the source bytes that a merge needs, pwrite the bytes that it makes.

    python bare_loop.py SPANS.json OUTPUT [--threads N]

SPANS.json lists [file, byte offset, nbytes] in output order; ``--shrink 2`` writes half of every
piece, as a cast from fp32 to bf16 does, without casting.
"""

from __future__ import annotations

import argparse
import json
import os
import threading

PIECE = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spans")
    parser.add_argument("output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1)
    args = parser.parse_args()
    with open(args.spans) as file:  # noqa: PTH123
        spans = json.load(file)
    files = {name: os.open(name, os.O_RDONLY) for name in {span[0] for span in spans}}
    target = os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    pieces = []
    at = 0
    for name, offset, nbytes in spans:
        for start in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - start)
            pieces.append((files[name], offset + start, size, at))
            at += size // args.shrink
    os.ftruncate(target, at)

    def work(number: int) -> None:
        buffer = memoryview(bytearray(PIECE))
        for source, offset, size, place in pieces[number :: args.threads]:
            os.preadv(source, [buffer[:size]], offset)
            os.pwrite(target, buffer[: size // args.shrink], place)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(args.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
