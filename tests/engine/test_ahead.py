"""Reading ahead: few large requests, many in flight where reads wait, and the same bytes."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reshard.engine.move.ahead import AHEAD_BYTES, NOTHING, ReadAhead
from reshard.engine.move.fill import Filler
from reshard.errors import CorruptError
from reshard.system.files import SourceFiles
from reshard.system.threads import parallel_for

_MIB = 1 << 20


@dataclass
class _SlowFiles(SourceFiles):
    """Files whose every read takes some time, like those of a network."""

    seconds: float = 0.01
    sizes: list[int] = field(default_factory=list)  # of the reads
    most: int = 0  # reads in flight together

    def __post_init__(self) -> None:
        super().__init__()
        self._active = 0
        self._counted = threading.Lock()

    def read_into(self, path, byte_offset, target):
        with self._counted:
            self.sizes.append(len(target))
            self._active += 1
            self.most = max(self.most, self._active)
        time.sleep(self.seconds)
        super().read_into(path, byte_offset, target)
        with self._counted:
            self._active -= 1

    def open(self, path):
        time.sleep(self.seconds)  # the first reads, which show that reads wait, go this way
        return super().open(path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(24 * _MIB))
    return str(path)


def _use(pool, items, *, nbytes=AHEAD_BYTES, workers=2, slow=False):
    """Read each item, a list of ranges, by a filler; return their bytes, and what was held."""
    ahead = ReadAhead(pool, lambda item: item[1], nbytes=nbytes, workers=workers)
    ahead._is_slow = slow
    found, held_items = {}, []

    def make():
        filler = Filler(pool, needs_checksum=lambda _: False)

        def use(item):
            (number, ranges), held = item
            with held:
                filler.held = held
                held_items.append(held is not NOTHING)
                parts = [bytearray(size) for _, _, size in ranges]
                for (path, start, _), part in zip(ranges, parts, strict=True):
                    filler.read_into(path, start, memoryview(part))
                found[number] = b"".join(parts)

        return use

    with ahead:
        parallel_for(ahead.iterate(enumerate(items)), make, workers)
    return [found[number] for number in range(len(items))], held_items


def _expect(path, items):
    content = Path(path).read_bytes()
    return [b"".join(content[start : start + size] for _, start, size in item) for item in items]


@pytest.mark.parametrize("nbytes", [0, _MIB, 4 * _MIB, AHEAD_BYTES])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("slow", [False, True])
def test_any_memory_and_number_of_workers_give_the_same_bytes(file, nbytes, workers, slow):
    rng = random.Random(nbytes + workers)
    items = []
    for _ in range(25):
        ranges = [(rng.randrange(23 * _MIB), rng.choice([1, 99, 5000, _MIB])) for _ in range(5)]
        items.append([(file, start, size) for start, size in ranges])
    with SourceFiles() as pool:
        found, held = _use(pool, items, nbytes=nbytes, workers=workers, slow=slow)
    assert found == _expect(file, items)
    assert any(held) == (slow and nbytes >= _MIB)


def test_reads_that_wait_are_large_and_many_in_flight(file):
    items = [[(file, start, 64 << 10)] for start in range(0, 24 * _MIB, 64 << 10)]
    with _SlowFiles() as pool:
        found, held = _use(pool, items, nbytes=64 * _MIB, slow=True)
    assert found == _expect(file, items)
    assert all(held)
    assert len(pool.sizes) <= 6
    assert max(pool.sizes) <= 8 * _MIB


def test_requests_in_flight_follow_the_requests_not_the_workers(file):
    far = [(file, start, 8) for start in range(0, 24 * _MIB, 256 << 10)]
    with _SlowFiles() as pool:
        _use(pool, [far], workers=1, slow=True)
    assert pool.most > 16


def test_reads_of_cached_files_are_left_to_the_workers(file):
    items = [[(file, start, _MIB)] for start in range(0, 24 * _MIB, _MIB)]
    with SourceFiles() as pool:
        found, held = _use(pool, items)
    assert found == _expect(file, items)
    assert not any(held)


def test_small_adjacent_ranges_are_fetched_together_in_any_case(file):
    pieces = [(file, start, 16) for start in range(0, 16 * 3200, 16)]
    random.Random(1).shuffle(pieces)
    items = [pieces[at : at + 64] for at in range(0, 3200, 64)]
    with _SlowFiles(seconds=0) as pool:
        found, held = _use(pool, items)
    assert found == _expect(file, items)
    assert all(held)
    assert pool.sizes == [16 * 3200]


@pytest.mark.parametrize("slow", [False, True])
def test_a_file_that_ends_too_early_gives_the_error_of_the_range(file, slow):
    items = [[(file, start, _MIB)] for start in range(0, 26 * _MIB, _MIB)]
    with SourceFiles() as pool, pytest.raises(CorruptError, match=f"expected {_MIB} bytes"):
        _use(pool, items, slow=slow)


def test_an_error_of_a_worker_ends_the_readers(file):
    items = [[(file, start, _MIB)] for start in range(0, 24 * _MIB, _MIB)]
    with _SlowFiles() as pool:
        ahead = ReadAhead(pool, lambda item: item, nbytes=16 * _MIB, workers=2)
        ahead._is_slow = True

        def fail(item):
            with item[1]:
                raise CorruptError("a", "is damaged")

        before = threading.active_count()
        with pytest.raises(CorruptError, match="is damaged"), ahead:
            parallel_for(ahead.iterate(items), lambda: fail, 2)
    assert threading.active_count() == before
