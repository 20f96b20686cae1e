"""Random checkpoints in real files: known values in every layout that a manifest can describe."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path

import numpy as np

from reshard.containers import safetensors
from reshard.core import dtypes
from reshard.core.box import Box, row_major, run_boxes, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.manifest import Entry, OutputFile, Record, Skeleton, SourceFile
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.layouts.partition import run_chunks

BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
LAYOUTS = ("flat", "equal", "rows", "columns", "grid", "replicas", "whole")
SHAPES = ((), (1,), (13,), (0,), (3, 0, 2), (1, 7, 1), (11, 17), (3, 5, 7), (2, 3, 2, 5), (64, 9))
KINDS = (dtypes.FLOAT32, dtypes.BFLOAT16, dtypes.UINT8, dtypes.FLOAT64, dtypes.BY_NAME["bool"])


@dataclass
class Scene:
    """Source files being written, and what they hold."""

    directory: Path
    chance: random.Random
    entries: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)  # fqn -> array of bits
    contents: dict = field(default_factory=dict)  # file -> bytearray
    records: dict = field(default_factory=dict)  # file -> [(offset, nbytes)]

    def add(self, fqn, shape, dtype, layout):
        """Store random values in a layout."""
        bits = BITS[dtype.itemsize]
        raw = self.chance.randbytes(prod(shape) * dtype.itemsize)
        self.values[fqn] = np.frombuffer(raw, bits).reshape(shape)
        chunks = self._chunks(fqn, shape, dtype, layout)
        if layout != "whole":
            self.chance.shuffle(chunks)
        entry = Entry(fqn, "param", dtype, shape, tuple(chunks))
        self.entries[entry.key] = entry

    def _chunks(self, fqn, shape, dtype, layout):
        if layout in ("flat", "equal"):
            return [c for part in self._runs(shape, layout) for c in self._run(fqn, dtype, *part)]
        boxes = self._boxes(shape, layout)
        if layout == "replicas":
            boxes *= 2
        return [self._stored(fqn, dtype, box) for box in boxes]

    def _runs(self, shape, layout):
        numel, ranks = prod(shape), self.chance.randint(1, 6)
        if layout == "equal":
            step = -(-numel // ranks)
            edges = [min(rank * step, numel) for rank in range(ranks + 1)]
        else:
            edges = sorted([0, numel, *(self.chance.randint(0, numel) for _ in range(ranks))])
        return list(pairwise(edges))

    def _run(self, fqn, dtype, start, stop):
        values = self.values[fqn].reshape(-1)[start:stop]
        file, at = self.append(values.tobytes())
        piece = contiguous(file, at, dtype, whole((stop - start,)))
        return list(run_chunks(piece, 0, self.values[fqn].shape, start, stop))

    def _boxes(self, shape, layout):
        dims = {"rows": 1, "columns": len(shape), "grid": 2, "replicas": 1}.get(layout, 0)
        cut = [len(shape) - 1] if layout == "columns" else list(range(min(dims, len(shape))))
        return boxes_of(self.chance, shape, [d for d in cut if d >= 0])

    def _stored(self, fqn, dtype, box):
        """Store one box, contiguous, permuted, or stepped through a larger storage."""
        values = self.values[fqn][box.slices]
        form = self.chance.choice(("contiguous", "permuted", "stepped"))
        steps = [1] * values.ndim
        order = list(range(values.ndim))
        if form == "permuted":
            self.chance.shuffle(order)
        if form == "stepped":
            steps = [self.chance.randint(1, 3) for _ in order]
        held = np.array(values.transpose(order), order="C")
        wide = tuple(n * steps[d] for n, d in zip(held.shape, order, strict=True))
        raw = bytearray(self.chance.randbytes(prod(wide) * dtype.itemsize))
        storage = np.frombuffer(raw, held.dtype).reshape(wide)
        storage[tuple(slice(None, None, steps[d]) for d in order)] = held
        strides = [0] * values.ndim
        for position, d in enumerate(order):
            strides[d] = row_major(wide, dtype.itemsize)[position] * steps[d]
        file, at = self.append(bytes(raw))
        return Chunk(box, file, at, tuple(strides), dtype)

    def append(self, data):
        """Store bytes in one of the files, between bytes that no tensor uses."""
        file = str(self.directory / f"source{self.chance.randrange(3)}")
        content = self.contents.setdefault(file, bytearray())
        content += self.chance.randbytes(self.chance.choice((1, 5, 8)))
        start = len(content)
        lead = self.chance.choice((0, 0, 3, 16))
        content += self.chance.randbytes(lead) + data
        content += self.chance.randbytes(self.chance.choice((0, 0, 7)))
        self.records.setdefault(file, []).append((start, len(content) - start))
        content += self.chance.randbytes(self.chance.choice((1, 4)))
        return file, start + lead

    def files(self):
        """Write the files; return path -> its record in a manifest, with every storage's CRC."""
        found = {}
        for path, content in self.contents.items():
            Path(path).write_bytes(content)
            records = tuple(
                Record(start, size, zlib.crc32(content[start : start + size]), f"record {number}")
                for number, (start, size) in enumerate(self.records[path])
            )
            found[path] = SourceFile(path, len(content), records)
        return found


def scene(directory, seed, shapes=SHAPES, layouts=LAYOUTS):
    """Return a checkpoint of one tensor of each shape, with random layouts and dtypes."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Scene(directory, random.Random(seed))
    for number, shape in enumerate(shapes):
        made.add(f"t{number:02d}", shape, made.chance.choice(KINDS), made.chance.choice(layouts))
    return made


def boxes_of(chance, shape, dims):
    """Cut a tensor at random along the given dims; empty boxes may be among the parts."""
    edges = []
    for dim, size in enumerate(shape):
        cuts = [chance.randint(0, size) for _ in range(chance.randint(1, 3))] if dim in dims else []
        edges.append(list(pairwise(sorted([0, size, *cuts]))))
    return [
        Box(tuple(a for a, _ in piece), tuple(b - a for a, b in piece)) for piece in product(*edges)
    ]


def whole_target(made, files=1):
    """Return safetensors files that hold every tensor whole."""
    outputs, entries = [], []
    for number in range(files):
        held = [(e, e.dtype) for e in list(made.entries.values())[number::files]]
        name = f"out{number}.safetensors"
        header, placed, size = safetensors.lay_out(name, held, {"format": "pt"})
        outputs.append(OutputFile(name, size, ((0, header),)))
        entries += placed
    return Skeleton(tuple(outputs), tuple(entries))


def sharded_target(made, seed):
    """Return files whose chunks are boxes or runs of the tensors, with gaps between them."""
    chance = random.Random(seed)
    sizes = [0, 0, 0]
    entries = []
    for entry in made.entries.values():
        chunks = []
        for box in _target_boxes(chance, entry.shape):
            number = chance.randrange(3)
            sizes[number] += chance.choice((0, 0, 1, 8))
            at = sizes[number]
            chunks.append(contiguous(f"out{number}", at, entry.dtype, box))
            sizes[number] += box.volume * entry.dtype.itemsize
        entries.append(Entry(entry.fqn, entry.kind, entry.dtype, entry.shape, tuple(chunks)))
    files = tuple(OutputFile(f"out{number}", size + 3) for number, size in enumerate(sizes))
    return Skeleton(files, tuple(entries))


def _target_boxes(chance, shape):
    if chance.random() < 0.3 and shape:
        cut = chance.randint(0, prod(shape))
        return [*run_boxes(shape, 0, cut), *run_boxes(shape, cut, prod(shape))]
    dims = [dim for dim in range(len(shape)) if chance.random() < 0.6]
    return boxes_of(chance, shape, dims) or [whole(shape)]


def expected(made, skeleton):
    """Return file name -> its whole content, painted by numpy."""
    contents = {file.name: bytearray(file.nbytes) for file in skeleton.files}
    for file in skeleton.files:
        for offset, data in file.literals:
            contents[file.name][offset : offset + len(data)] = data
    for entry in skeleton.entries:
        for chunk in entry.chunks:
            data = made.values[entry.fqn][chunk.box.slices].tobytes()
            contents[chunk.file][chunk.byte_offset : chunk.byte_offset + len(data)] = data
    return {name: bytes(content) for name, content in contents.items()}


def single(*entries, gap=0):
    """Return a target file ``o`` that holds the tensors one after the other."""
    at, placed = 0, []
    for entry in entries:
        chunk = contiguous("o", at, entry.dtype, whole(entry.shape))
        placed.append(replace(entry, chunks=(chunk,)))
        at += entry.nbytes + gap
    return Skeleton((OutputFile("o", at),), tuple(placed))


def run(made, skeleton, out, *, window_bytes=4 << 20, workers=1, read_bytes=4 << 20, files=None):
    """Execute a target of a scene into a new directory."""
    out.mkdir()
    planned = Plan(made.entries, skeleton, window_bytes)
    options = MoveOptions(workers=workers, read_bytes=read_bytes)
    return execute(planned, files or made.files(), out, options)
