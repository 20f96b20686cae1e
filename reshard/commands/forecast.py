"""The forecast of a dry run: memory, disk and time, by a short probe of source and destination."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard import units
from reshard.core.manifest import SourceFile
from reshard.system import threads
from reshard.system.files import SourceFiles
from reshard.system.paths import is_remote

_BLOCK = 1 << 20  # bytes of one read or write of the probe
_MOST = 64  # the number of blocks that the probe reads and writes at most
_LONGEST_S = 0.5  # seconds after which the probe moves no further block


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would need. Sizes are in bytes, rates in bytes per second.

    Args:
        memory: the peak of the process so far, and the memory of all workers.
        disk: size of the output.
        disk_free: space where the output goes; None in an object store.
        read_rate, write_rate, verify_rate: as the probe measured; None if it could not.
        seconds: time of the run; None if a rate is not known.
    """

    memory: int
    disk: int
    disk_free: int | None
    bytes_read: int
    bytes_written: int
    read_rate: float | None
    write_rate: float | None
    verify_rate: float | None
    seconds: float | None

    def describe(self) -> str:
        """Return the forecast as one line."""
        free = "" if self.disk_free is None else f" of {units.show_bytes(self.disk_free)} free"
        parts = [
            f"memory {units.show_bytes(self.memory)}",
            f"disk {units.show_bytes(self.disk)}{free}",
            f"reads {units.show_bytes(self.bytes_read)}{_format_rate(self.read_rate)}",
            f"writes {units.show_bytes(self.bytes_written)}{_format_rate(self.write_rate)}",
        ]
        time = "time not known" if self.seconds is None else f"about {_format_time(self.seconds)}"
        return f"{time}; {', '.join(parts)}"


def forecast(
    files: Iterable[SourceFile],
    destination: Path,
    *,
    bytes_read: int,
    bytes_written: int,
    buffer_bytes: int,
    workers: int,
    verify: bool,
) -> Forecast:
    """Forecast a run whose output is planned.

    Blocks of the source are read, and a file without a name is written beside the destination and
    is gone at the end of this call. Object stores are read, but not written.

    Args:
        buffer_bytes: the memory that all workers need together.
    """
    read_rate = _probe_source(list(files), workers)
    directory = None if is_remote(str(destination)) else _find_existing(destination)
    write_rate, verify_rate = _probe_destination(directory, bytes_written)
    return Forecast(
        memory=_measure_memory() + buffer_bytes,
        disk=bytes_written,
        disk_free=None if directory is None else shutil.disk_usage(directory).free,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        read_rate=read_rate,
        write_rate=write_rate,
        verify_rate=verify_rate,
        seconds=_add_up(
            (bytes_read, read_rate),
            (bytes_written, write_rate),
            (bytes_written if verify else 0, verify_rate),
        ),
    )


def _add_up(*parts: tuple[int, float | None]) -> float | None:
    seconds = 0.0
    for nbytes, rate in parts:
        if nbytes and rate is None:
            return None
        seconds += nbytes / rate if rate else 0.0
    return seconds


def _find_existing(destination: Path) -> Path | None:
    existing = next((path for path in destination.parents if path.is_dir()), None)
    return existing if existing is not None and os.access(existing, os.W_OK) else None


def _probe_source(files: Sequence[SourceFile], workers: int) -> float | None:
    ranges = list(_choose_blocks(files))
    if not ranges:
        return None
    read, began = [], time.perf_counter()
    with SourceFiles() as pool:

        def read_block(block: tuple[str, int, int]) -> None:
            if time.perf_counter() - began < _LONGEST_S:
                pool.read(*block)
                read.append(block[2])

        threads.parallel_map(ranges, read_block, workers)
    return sum(read) / max(time.perf_counter() - began, 1e-9)


def _choose_blocks(files: Sequence[SourceFile]) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, bytes) of blocks at equal distances in the files one after the other."""
    total = sum(file.nbytes for file in files)
    distance, wanted, start = max(total // _MOST, _BLOCK), 0, 0
    for file in files:
        while wanted < start + file.nbytes:
            offset = wanted - start
            yield file.path, offset, min(_BLOCK, file.nbytes - offset)
            wanted += distance
        start += file.nbytes


def _probe_destination(directory: Path | None, nbytes: int) -> tuple[float | None, float | None]:
    if directory is None or not nbytes:
        return None, None
    # Random bytes, because file systems that compress write zeros faster than tensors.
    block, done = os.urandom(min(_BLOCK, nbytes)), 0
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            began = time.perf_counter()
            while done < min(_MOST * _BLOCK, nbytes) and time.perf_counter() - began < _LONGEST_S:
                done += file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter()
            file.seek(0)
            while file.read(_BLOCK):
                pass
            ended = time.perf_counter()
    except OSError:  # no space or no permission: the run itself will say so
        return None, None
    return done / max(written - began, 1e-9), done / max(ended - written, 1e-9)


def _measure_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f" at {units.show_bytes(rate)}/s"


def _format_time(seconds: float) -> str:
    """Return a time with its largest two units.

    >>> _format_time(0.3), _format_time(75), _format_time(7300)
    ('1 s', '1 min 15 s', '2 h 1 min')
    """
    whole = max(round(seconds), 1)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
