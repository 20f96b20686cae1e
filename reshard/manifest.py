"""What every reader yields and every planner consumes: where each block of each tensor lies.

A manifest is a small, printable value. It holds no tensor bytes and opens no file; `check` proves
that the chunks of every entry lie inside their files and cover the tensor exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from reshard import escaped
from reshard.box import Box, Index, first_overlap, row_major, whole
from reshard.dtypes import DType
from reshard.errors import CorruptError, shown

Keyed = Literal["fqn", "index"]
PARAM = "param"
BUFFER = "buffer"
MASTER = "master"
WEIGHT_KINDS = (PARAM, BUFFER, MASTER)

Key = tuple[str, str]  # (kind, fqn)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored block of a logical tensor.

    Args:
        box: which elements of the tensor.
        file: path of the file that holds them.
        byte_offset: of the box's first element in the file.
        byte_strides: distance in the file between neighbours along each dim.
        dtype: as stored.
        factor: what a stored element is multiplied by to be the tensor's.
    """

    box: Box
    file: str
    byte_offset: int
    byte_strides: Index
    dtype: DType
    factor: float = 1.0

    @property
    def byte_span(self) -> tuple[int, int]:
        """The smallest file interval ``[start, stop)`` that holds every element of the chunk."""
        if self.box.volume == 0:
            return self.byte_offset, self.byte_offset
        reach = sum((n - 1) * s for n, s in zip(self.box.shape, self.byte_strides, strict=True))
        return self.byte_offset, self.byte_offset + reach + self.dtype.itemsize


class Partition(Sequence[Chunk]):
    """Chunks that follow from a few numbers: every element of a tensor in exactly one of them.

    A thousand parameters on thousands of ranks are millions of chunks: they are computed when they
    are asked for, and have no replicas.
    """

    __slots__ = ()

    @abstractmethod
    def outside(self, files: Mapping[str, SourceFile]) -> Chunk | None:
        """A chunk that does not lie inside its file, if there is one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One logical tensor; two chunks with the same box are replicas of each other."""

    fqn: str
    kind: str
    dtype: DType
    shape: Index
    chunks: tuple[Chunk, ...] | Partition

    @property
    def key(self) -> Key:
        """What the entry is called in a manifest."""
        return self.kind, self.fqn

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical size in bytes, replicas and padding not counted."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Record:
    """A byte range of a file that has a stored checksum of its own, as a zip member does."""

    byte_offset: int
    nbytes: int
    crc32: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What a file states about the save that it belongs to.

    Args:
        about: what the statement is about, for example "file name" or "step".
        value: what the file states.
        evidence: where in the file the statement stands.
        expected: what the place of the file in the checkpoint says instead of the file itself.
            None: every file that makes a claim about the same thing must state the same value.
    """

    about: str
    value: str
    evidence: str
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a checkpoint: its size when the manifest was made, and its records."""

    path: str
    nbytes: int
    records: tuple[Record, ...] = ()
    lasting: bool = True  # False: made for one run, and gone with it
    claims: tuple[Claim, ...] = ()  # what the file says about the save that it belongs to

    @property
    def has_checksums(self) -> bool:
        """Whether it stores a checksum of any of its records."""
        return any(record.crc32 is not None for record in self.records)


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One optimizer parameter group: hyper-parameters, and the parameters in flat order."""

    hyper: Mapping[str, Any]
    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything of a training state that is not a sharded tensor. Absent parts are None.

    ``opaque`` keeps what the file carried and reshard does not interpret, so that a conversion
    can carry it on or name what it drops; ``loose`` what an optimizer keeps of a parameter that is
    neither tensor nor step. ``objects`` are values of ``client`` or ``config`` that do not print,
    as a pickle describes them: what a target that is a pickle writes again.
    """

    step: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    optimizer_step: Mapping[str, float] = field(default_factory=dict)  # fqn -> updates applied
    updates_at_start: tuple[int, ...] = (0,)  # how many updates the optimizer may count at step 0
    loose: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fqn -> values by name
    param_groups: tuple[ParamGroup, ...] = ()
    scheduler: Any = None
    scaler: Any = None
    clip: float | None = None  # gradient norm to clip to, as the optimizer itself saved it; 0: none
    rng: Any = None  # the first rank's, as far as it prints
    rng_files: tuple[str, ...] = ()  # those that keep random states and no more, in rank order
    kept_files: Mapping[str, str] = field(default_factory=dict)  # name -> path; see `formats.kept`
    client: Mapping[str, Any] = field(default_factory=dict)
    trainer_state: Mapping[str, Any] | None = None  # of HF Trainer: its account of the run
    config: Any = None
    opaque: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a checkpoint, and on what grid."""

    format: str
    path: str
    detail: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)  # axis -> size; "world" is the product
    precision: str = ""  # torch's name of the dtype in which the model was trained

    @property
    def world(self) -> int:
        """All ranks; one where nothing says."""
        return int(self.mesh.get("world", 1))

    @property
    def in_words(self) -> str:
        """The format, and which form of it."""
        return f"{self.format} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One training state as it lies in files."""

    origin: Origin
    entries: Mapping[Key, Entry]
    files: Mapping[str, SourceFile]
    train: TrainState = field(default_factory=TrainState)
    tied: Mapping[str, str] = field(default_factory=dict)  # alias fqn -> kept fqn
    tied_again: tuple[Entry, ...] = ()  # aliases of which a file has another copy than the kept one
    set_aside: tuple[Entry, ...] = ()  # copies in the files that the model does not use
    frozen: frozenset[str] = frozenset()
    trained_dtypes: Mapping[str, DType] = field(default_factory=dict)  # fqn -> dtype in the module
    wrapped: Mapping[str, str] = field(default_factory=dict)  # fqn -> in ``named_parameters``
    nameless: tuple[str, ...] = ()  # optimizers whose states nothing names
    absent: tuple[str, ...] = ()  # fqns that the checkpoint lists and holds no value for
    warnings: tuple[str, ...] = ()
    unknown_globals: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)  # values that nothing here stands for
    ordered: bool = field(kw_only=True)  # whether the weights stand in the model's order
    without_frozen: bool = False  # the files say that frozen parameters were left out of them
    keyed: Keyed | None = None  # how its optimizers call parameters; None: none, or in several ways
    told_order: bool = False  # whether a model, and not files alone, gave the order

    def of_kind(self, *kinds: str) -> Iterator[Entry]:
        """The entries of the given kinds, in manifest order."""
        return (entry for entry in self.entries.values() if entry.kind in kinds)

    def kept_name(self, fqn: str) -> str:
        """The name under which a tied weight is among the entries."""
        return self.tied.get(fqn, fqn)

    def with_entries(self, entries: Iterable[Entry]) -> Manifest:
        """The same checkpoint with other entries; the order given is kept."""
        return replace(self, entries=keyed(entries))

    @property
    def has_optimizer(self) -> bool:
        """Whether any optimizer slot is present."""
        return any(entry.kind not in WEIGHT_KINDS for entry in self.entries.values())

    @property
    def placeholders(self) -> list[str]:
        """Weights of shape [0]: what ZeRO 3 leaves in a module whose parameters lie on other ranks.

        Not those with an fp32 master or an optimizer slot, which say that the shape is meant.
        """
        stated = {fqn for kind, fqn in self.entries if kind not in (PARAM, BUFFER)}
        hollow = (entry.fqn for entry in self.of_kind(PARAM) if entry.shape == (0,))
        return [fqn for fqn in hollow if fqn not in stated]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written: its size, and the bytes that are known before any tensor is read."""

    name: str  # relative to the destination
    nbytes: int
    literals: tuple[tuple[int, bytes], ...] = ()  # (byte offset, bytes)


@dataclass(frozen=True, slots=True)
class StoredChecksum:
    """A CRC-32 that a file keeps of a range of its own: where it must be written, little-endian."""

    file: str
    byte_offset: int
    nbytes: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What a target format lays out: its files, and the entries as they will lie in them.

    Chunks name files as ``OutputFile.name`` does. Bytes of a file outside every chunk and literal
    are zero, and the format that laid them out means them to be.
    """

    files: tuple[OutputFile, ...]
    entries: tuple[Entry, ...]
    checksums: tuple[StoredChecksum, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all its files."""
        return sum(file.nbytes for file in self.files)


def keyed(entries: Iterable[Entry]) -> dict[Key, Entry]:
    """Entries by key.

    Raises:
        CorruptError: two entries have the same kind and fqn.
    """
    table: dict[Key, Entry] = {}
    for entry in entries:
        if entry.key in table:
            raise CorruptError(
                entry.chunks[0].file if entry.chunks else entry.fqn,
                f"two tensors are called {entry.fqn!r} ({entry.kind})",
                "rename one of them, e.g. with --rename, or exclude it with --exclude",
            )
        table[entry.key] = entry
    return table


def most_common_dtype(dtypes: Iterable[DType]) -> str:
    """The float dtype of most tensors, of the first where they are as many; empty without any."""
    found = Counter(dtype for dtype in dtypes if dtype.family == "float")
    return str(max(found, key=found.__getitem__)) if found else ""


def contiguous(file: str, byte_offset: int, dtype: DType, box: Box, stored: Index) -> Chunk:
    """A chunk whose box lies in the file as a contiguous tensor of shape ``stored``."""
    return Chunk(box, file, byte_offset, row_major(stored, dtype.itemsize), dtype)


def source_of(files: Mapping[str, SourceFile], file: str) -> SourceFile:
    """Return what is known of a chunk's file, which may be a text inside a pickle."""
    if not escaped.is_escaped(file):
        return files[file]
    return SourceFile(file, escaped.place_of(file).nbytes, lasting=False)


def check(manifest: Manifest) -> None:
    """Prove that every entry is covered exactly once by chunks that lie inside their files.

    Raises:
        CorruptError: a chunk out of bounds, two chunks that overlap in part, or a hole; a name or a
            slot that is no text (keys of a pickle can be anything).
    """
    for entry in manifest.entries.values():
        said: tuple[object, object] = (entry.kind, entry.fqn)
        if not all(isinstance(name, str) for name in said):
            raise CorruptError(
                manifest.origin.path, f"names a tensor {shown(said)}, which is no name"
            )
        if isinstance(entry.chunks, Partition):
            outside = entry.chunks.outside(manifest.files)
            _check_bounds(entry, (outside,) if outside else (), manifest.files)
            continue
        _check_bounds(entry, entry.chunks, manifest.files)
        _check_coverage(entry)


def _check_bounds(entry: Entry, chunks: Iterable[Chunk], files: Mapping[str, SourceFile]) -> None:
    for chunk in chunks:
        if not chunk.box.fits(entry.shape):
            raise CorruptError(
                chunk.file,
                f"{entry.fqn!r}: stored block {chunk.box.origin}+{chunk.box.shape} lies outside"
                f" the tensor's shape {entry.shape}",
            )
        start, stop = chunk.byte_span
        size = source_of(files, chunk.file).nbytes
        if start < 0 or stop > size or any(s < 0 for s in chunk.byte_strides):
            raise CorruptError(
                chunk.file,
                f"{entry.fqn!r} would lie at bytes {start} to {stop}, but the file has {size}",
                "the file is truncated or its header is wrong: fetch it again",
            )


def _check_coverage(entry: Entry) -> None:
    """Disjoint boxes inside a tensor fill it exactly when their volumes add up to its volume."""
    distinct = list(dict.fromkeys(chunk.box for chunk in entry.chunks if chunk.box.volume))
    if len(distinct) == 1 and distinct[0] == whole(entry.shape):
        return
    held = sum(box.volume for box in distinct)
    where = entry.chunks[0].file if entry.chunks else entry.fqn
    if held < entry.numel:
        raise CorruptError(
            where,
            f"{entry.fqn!r} ({entry.kind}): the shards hold {held} of {entry.numel} elements",
            "a shard is missing or belongs to another checkpoint",
        )
    pair = first_overlap(distinct, entry.shape)
    if pair:
        a, b = (distinct[i] for i in pair)
        raise CorruptError(
            where,
            f"{entry.fqn!r} ({entry.kind}): shards {a.origin}+{a.shape} and {b.origin}+{b.shape}"
            f" overlap; together they hold {held} elements for {entry.numel}",
            "shards of two different runs or world sizes are mixed",
        )
