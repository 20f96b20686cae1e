"""Read the random states of ranks, derive new ones, and build the files that hold them.

Accelerate and HF Trainer save one file for each rank: Python's Mersenne Twister, numpy's, torch's
on the CPU and those of devices. The states are taken apart into numbers and bytes, so that no
object of a source's pickle passes into an output.

Sources: Accelerate 1.15 ``checkpointing.py`` (``save_accelerator_state``), transformers 5.23
``trainer.py`` (``_save_rng_state``), numpy 2 ``ndarray.__reduce__``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.pickles import trust
from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.containers.torch_writer import AS_WRITTEN, Storage, StorageView
from reshard.core.chunks import Chunk
from reshard.core.dtypes import UINT8
from reshard.core.manifest import SourceFile
from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.system.threads import map_files

_WORDS = 624  # of 32 bits; Python stores a Mersenne Twister's position behind them
_MAX_BYTES = 1 << 20  # of one generator's state; torch's on the CPU has 5056
_DEVICES = ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa")
_RECONSTRUCT = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The keys of one library's file; ``device`` has the name of the device in it."""

    python: str
    numpy: str
    cpu: str
    device: str


ACCELERATE = Dialect(
    "random_state", "numpy_random_seed", "torch_manual_seed", "torch_{}_manual_seed"
)
HF_TRAINER = Dialect("python", "numpy", "cpu", "{}")
MEGATRON = Dialect("random_rng_state", "np_rng_state", "torch_rng_state", "{}_rng_state")


@dataclass(frozen=True, slots=True)
class Twister:
    """A Mersenne Twister: 624 words, the position, and a Gaussian number drawn in advance."""

    words: tuple[int, ...]
    position: int
    has_gauss: bool
    gauss: float


@dataclass(frozen=True, slots=True)
class RankRng:
    """The generators of one rank.

    Args:
        cpu: the bytes of torch's generator on the CPU.
        devices: device type -> bytes of all its generators, or of the only one that the rank used.
    """

    python: Twister
    numpy: Twister
    cpu: bytes
    devices: Mapping[str, tuple[bytes, ...] | bytes] = field(default_factory=dict)


# Reading


def read(paths: Iterable[str]) -> tuple[RankRng, ...]:
    """Read the states in several files."""
    with SourceFiles() as pool:
        return tuple(map_files(paths, lambda path: _read(_open(path), pool)))


def describe_files(paths: Sequence[str]) -> dict[str, SourceFile]:
    """Describe the files of random states, with what they state about themselves."""
    return dict(zip(paths, map_files(paths, lambda path: _open(path).source()), strict=True))


def has_states(path: str) -> bool:
    """Return whether a file has states, not only the step that Accelerate stores with them."""
    return _find_dialect(_open(path)) is not None


def _open(path: str) -> TorchFile:
    return torch_reader.read(as_path(path), builders=AS_WRITTEN)


def _find_dialect(file: TorchFile) -> Dialect | None:
    root = file.root if isinstance(file.root, dict) else {}
    return next((d for d in (ACCELERATE, HF_TRAINER) if d.cpu in root and d.python in root), None)


def _read(file: TorchFile, pool: SourceFiles) -> RankRng:
    dialect, unknown = _find_dialect(file), trust.list_unknown(file.globals)
    if unknown:
        raise UnsafeError(file.path, f"its pickle names {unknown[0]}", "leave it out: --rng drop")
    if dialect is None:
        raise CorruptError(file.path, "holds no random states", "leave them out: --rng drop")
    devices: dict[str, tuple[bytes, ...] | bytes] = {}
    for name in _DEVICES:
        stored = file.root.get(dialect.device.format(name))
        if isinstance(stored, (list, tuple)):
            devices[name] = tuple(_read_bytes_entry(file, value, pool) for value in stored)
        elif stored is not None:
            devices[name] = _read_bytes_entry(file, stored, pool)
    return RankRng(
        parse_python(file.path, file.root[dialect.python]),
        parse_numpy(file.path, file.root.get(dialect.numpy)),
        _read_bytes_entry(file, file.root[dialect.cpu], pool),
        devices,
    )


def _read_bytes_entry(file: TorchFile, value: Any, pool: SourceFiles) -> bytes:
    return read_bytes(file.path, value.chunk if isinstance(value, Tensor) else None, pool)


def read_bytes(where: str, chunk: Chunk | None, pool: SourceFiles) -> bytes:
    """Read the state of one of torch's generators.

    Raises:
        UnsupportedError: it is not a vector of bytes.
    """
    if chunk is None or chunk.dtype != UINT8 or len(chunk.box.shape) != 1 or not chunk.is_dense:
        raise _build_unsupported_error(
            where, "a state of torch's generator that is not a byte vector"
        )
    # The state is read into memory at once, unlike weights.
    if chunk.box.volume > _MAX_BYTES:
        raise _build_unsupported_error(where, f"a generator of {chunk.box.volume} bytes")
    buffer = bytearray(chunk.box.volume)
    pool.read_into(chunk.file, chunk.byte_offset, memoryview(buffer))
    return bytes(buffer)


def parse_python(where: str, value: Any) -> Twister:
    """Parse a value of ``random.getstate``: 3, the words and position, a Gaussian or None.

    Raises:
        UnsupportedError: it is another state.
    """
    match value:
        case (3, [*numbers], (float() | None) as gauss):
            if len(numbers) == _WORDS + 1 and _are_words(numbers):
                return Twister(tuple(numbers[:-1]), numbers[-1], gauss is not None, gauss or 0.0)
    raise _build_unsupported_error(where, "a malformed state of Python's generator")


def parse_numpy(where: str, value: Any) -> Twister:
    """Parse a value of ``numpy.random.get_state``; its words are an array of uint32.

    Raises:
        UnsupportedError: it is the state of another generator.
    """
    match value:
        case (
            "MT19937",
            Call(state=(1, (n,), dtype, _, bytes(raw))) as array,
            int(at),
            has,
            float() | int() as gauss,
        ):
            little = isinstance(dtype, Call) and dtype.args[:1] == ("u4",)
            little = little and isinstance(dtype.state, tuple) and "<" in dtype.state[:2]
            if array.name in _RECONSTRUCT and little and n == _WORDS and len(raw) == 4 * n:
                return Twister(struct.unpack(f"<{n}I", raw), at, bool(has), float(gauss))
    raise _build_unsupported_error(where, "a state of numpy's generator that is not MT19937")


def _are_words(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 32 for number in numbers)


def _build_unsupported_error(where: str, what: str) -> UnsupportedError:
    return UnsupportedError(where, f"holds {what}", "leave random states out: --rng drop")


# Derivation


def derive(first: RankRng, ranks: int) -> tuple[RankRng, ...]:
    """Derive generators for any number of ranks from the state of the source's first rank.

    The seed of rank ``r`` is the first 8 bytes of the SHA-256 of torch's CPU state of the source's
    rank 0 followed by ``r`` in 8 bytes, all little-endian. All three generators are seeded with it
    (numpy with its lower 32 bits). The result has no generators of devices.
    """
    return tuple(_seed(derive_seed(first, rank)) for rank in range(ranks))


def derive_seed(first: RankRng, rank: int) -> int:
    """Return the 64-bit seed of a rank; see `derive`."""
    digest = hashlib.sha256(first.cpu + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def _seed(seed: int) -> RankRng:
    import random

    import numpy as np
    import torch

    _, words, _ = random.Random(seed).getstate()  # noqa: S311 - no secret
    python = Twister(words[:-1], words[-1], has_gauss=False, gauss=0.0)
    state: Any = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
    key = tuple(map(int, state["state"]["key"]))
    numpy = Twister(key, int(state["state"]["pos"]), has_gauss=False, gauss=0.0)
    cpu = torch.Generator().manual_seed(seed).get_state()
    return RankRng(python, numpy, cpu.numpy().tobytes())


# Writing


def build_file(state: RankRng, dialect: Dialect) -> dict[str, Any]:
    """Build the content of a library's file of one rank, for `torch_writer.lay_out_object`."""
    return dict(_iterate_items(state, dialect))


def _iterate_items(state: RankRng, dialect: Dialect) -> Iterator[tuple[str, Any]]:
    python, numpy = state.python, state.numpy
    gauss = python.gauss if python.has_gauss else None
    yield dialect.python, (3, (*python.words, python.position), gauss)
    yield (
        dialect.numpy,
        ("MT19937", _build_array(numpy.words), numpy.position, int(numpy.has_gauss), numpy.gauss),
    )
    yield dialect.cpu, build_tensor(state.cpu)
    for name, stored in state.devices.items():
        built = (
            build_tensor(stored)
            if isinstance(stored, bytes)
            else [build_tensor(state) for state in stored]
        )
        yield dialect.device.format(name), built


def _build_array(words: Sequence[int]) -> Call:
    dtype = Call("numpy.dtype", ("u4", False, True), (3, "<", None, None, None, -1, -1, 0))
    state = (1, (len(words),), dtype, False, struct.pack(f"<{len(words)}I", *words))
    return Call(_RECONSTRUCT[0], (Global("numpy.ndarray"), (0,), b"b"), state)


def build_tensor(raw: bytes) -> StorageView:
    """Build a vector of bytes."""
    return StorageView(Storage(UINT8, len(raw), data=raw), (len(raw),))
