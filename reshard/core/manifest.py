"""The data model: which file, byte offset and strides store each block of each tensor.

Every reader returns a `Manifest` and the planner consumes it. A manifest is a small, printable
value: it contains no tensor bytes and opens no file. `check` proves that the chunks of every entry
are inside their files and cover the tensor exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

from reshard.core.box import Index, find_first_overlap, whole
from reshard.core.chunks import Chunk, Chunks, ComputedChunks, FileSizes, ListedChunks
from reshard.core.dtypes import BFLOAT16, FLOAT32, DType
from reshard.errors import CorruptError, shown
from reshard.system import escaped
from reshard.system.derived import Derived
from reshard.system.versions import FileVersion

Keyed = Literal["fqn", "index"]
PARAM = "param"
BUFFER = "buffer"
MASTER = "master"
WEIGHT_KINDS = (PARAM, BUFFER, MASTER)

Key = tuple[str, str]  # (kind, fqn)
Placement = tuple[tuple[str, int | None], ...]  # mesh axes, each with the dim that it cuts


@dataclass(frozen=True, slots=True)
class Entry:
    """One logical tensor: its name, kind, dtype, shape and chunks.

    Two chunks with the same box are replicas of each other.

    Args:
        kind: `PARAM`, `BUFFER`, `MASTER`, or the name of an optimizer slot, such as "exp_avg".
    """

    fqn: str
    kind: str
    dtype: DType
    shape: Index
    chunks: tuple[Chunk, ...] | ComputedChunks

    @property
    def layout(self) -> Chunks:
        """The chunks as the planner and the checks see them."""
        if isinstance(self.chunks, ComputedChunks):
            return self.chunks
        return ListedChunks(self.chunks, self.shape)

    @property
    def key(self) -> Key:
        """The key of the entry in a manifest: (kind, fqn)."""
        return self.kind, self.fqn

    @property
    def where(self) -> str:
        """The file that stores its first chunk, for messages; its name if it has no chunks."""
        return self.chunks[0].file if self.chunks else self.fqn

    @property
    def stored_dtype(self) -> DType | None:
        """The dtype in which files have the values; None if several, or values times a factor."""
        stored = {(chunk.dtype, chunk.factor) for chunk in self.chunks}
        dtype, factor = stored.pop() if len(stored) == 1 else (None, 1.0)
        return dtype if factor == 1.0 else None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The logical size in bytes, without replicas and padding."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Record:
    """A byte range of a file with its own name, and a stored CRC-32 if the format has one.

    A member of a zip archive is a record.
    """

    byte_offset: int
    nbytes: int
    crc32: int | None
    name: str


class Claim(NamedTuple):
    """What a file states about the save that it belongs to.

    Args:
        about: what the statement is about, for example "file name" or "step".
        evidence: the key or record of the file that makes the statement.
        expected: the value that follows from the name and directory of the file.
            None: every file that makes a claim about the same thing must state the same value.
    """

    about: str
    value: str
    evidence: str
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a checkpoint: its size when it was read, its records, and its claims.

    Args:
        lasting: False for a temporary file of this process.
        version: the version whose header was read; `reshard.formats.read` sets it for a file
            without a header.
    """

    path: str
    nbytes: int
    records: tuple[Record, ...] = ()
    lasting: bool = True
    claims: tuple[Claim, ...] = ()
    version: FileVersion | None = None

    @property
    def has_checksums(self) -> bool:
        """Whether at least one record has a stored checksum."""
        return any(record.crc32 is not None for record in self.records)


MEMBER_LISTS = ("params", "param_names")  # the keys of torch's groups that list their parameters


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One optimizer param group: its hyperparameters, and its parameters in the saved order."""

    hyper: Mapping[str, Any]
    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainState:
    """The part of a training state that is not sharded tensors. Absent parts are None or empty.

    Args:
        step: number of optimizer steps that the run took.
        optimizer_step: fqn -> number of updates that the optimizer applied to the parameter.
        updates_at_start: update counts that the optimizer may show before its first step.
        sums_optimizers: whether ``step`` adds up the updates of all optimizers.
        non_tensor_state: fqn -> optimizer state that is neither a tensor nor a step count.
        clip: gradient norm to clip to, as the optimizer saved it; 0 means no clipping.
        rng: random states of the first rank, converted to plain values.
        rng_files: files that contain only random states, in rank order.
        kept_files: name -> path of files that are copied unchanged (see `training.copied_files`).
        hook_files: the same for the models that hooks of Accelerate's ``save_state`` saved, each in
            a folder of its own.
        client: values that the training script saved beside model and optimizer.
        trainer_state: content of HF Trainer's ``trainer_state.json``, or of our trainer's.
        opaque: values that reshard does not interpret; a conversion copies them or reports them
            as dropped.
        objects: values of ``client`` and ``config`` that have no plain form, as the pickle
            describes them. Targets that are pickles write them again.
        keys: section of the script's state dict, such as "scheduler" -> its dotted key there.
    """

    step: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    optimizer_step: Mapping[str, float] = field(default_factory=dict)
    updates_at_start: tuple[int, ...] = (0,)
    sums_optimizers: bool = False
    non_tensor_state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    param_groups: tuple[ParamGroup, ...] = ()
    scheduler: Any = None
    scaler: Any = None
    clip: float | None = None
    rng: Any = None
    rng_files: tuple[str, ...] = ()
    kept_files: Mapping[str, str] = field(default_factory=dict)
    hook_files: Mapping[str, str] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    trainer_state: Mapping[str, Any] | None = None
    config: Any = None
    opaque: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def updates(self) -> int | None:
        """The steps without those that the loss scaler skipped, as a scheduler counts them."""
        return None if self.step is None else self.step - (self.skipped_steps or 0)

    @property
    def group_of(self) -> dict[str, ParamGroup]:
        """The param group of each parameter that the optimizer lists."""
        return {fqn: group for group in self.param_groups for fqn in group.fqns}

    def sort_groups(self, order: Mapping[str, int]) -> TrainState:
        """Return the state with the names of each param group in an order; unknown ones last."""
        groups = (
            replace(
                group, fqns=tuple(sorted(group.fqns, key=lambda fqn: order.get(fqn, len(order))))
            )
            for group in self.param_groups
        )
        return replace(self, param_groups=tuple(groups))


class Quantisation(NamedTuple):
    """How the weights of a Hugging Face model are quantised, as its config.json states.

    Args:
        method: ``quant_method``, for example "fp8".
        settings: the whole ``quantization_config``.
        stated_in: the path of the file that states it.
        dtype: the dtype in which the model computes; the dtype of dequantised weights.
        decoded: whether the entries are the dequantised weights, not codes and scales as stored.
    """

    method: str
    settings: Mapping[str, Any]
    stated_in: str
    dtype: DType = BFLOAT16
    decoded: bool = False


Padding = Literal["zero", "uninitialized", "unknown"]


@dataclass(frozen=True, slots=True)
class FrameworkFacts:
    """What is true of every checkpoint of the framework that saved this one.

    Args:
        describes_model: whether its files state the model's order of parameters and all buffers.
        wraps_ddp: whether it may save a model inside of DDP.
        shards_by_fsdp: whether FSDP may have sharded the parameters.
        divides_by_decay: whether its optimizer has one param group with weight decay and one
            without, as HF Trainer's has.
    """

    describes_model: bool = False
    wraps_ddp: bool = True
    shards_by_fsdp: bool = False
    divides_by_decay: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The format of a checkpoint, the versions of what wrote it, and its grid of ranks.

    Args:
        detail: the variant of the format, for people; programs read the fields below.
        mesh: axis -> size; "world" is the product.
        precision: torch's name of the dtype that the model was trained in.
        form: the variant by its framework's own name, for example "torch_dist"; empty: only one.
        zero_stage: ZeRO stage of the run; None: it has none, or none is stated.
        padding: what the framework leaves between the tensors of a flat partition.
        device: device type of the mesh of DTensors, for example "cuda"; empty: none is stated.
        weights_only: whether the files are those of a model: weights alone, not in its order.
        facts: what follows from the framework that saved it.
    """

    format: str
    path: str
    detail: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    precision: str = ""
    form: str = ""
    zero_stage: int | None = None
    padding: Padding = "unknown"
    device: str = ""
    weights_only: bool = False
    facts: FrameworkFacts = FrameworkFacts()

    @property
    def world(self) -> int:
        """The number of ranks; 1 if the checkpoint does not state it."""
        return int(self.mesh.get("world", 1))

    @property
    def description(self) -> str:
        """The format and its detail, for messages."""
        return f"{self.format} {self.detail}".rstrip()


class UnnamedOptimizer(NamedTuple):
    """Why the states of an optimizer cannot be assigned to parameters.

    Args:
        reason: what is missing, or what form the states have.
        model: the description of the model that was tried; empty if there was none.
        advice: what to do, if a description of the model does not help.
        misfit: whether there are states of a shape that no weight has.
    """

    reason: str
    model: str = ""
    advice: str = ""
    misfit: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """One training state, and where the files store each part of it.

    Args:
        files: path -> description of each file that has chunks of entries or identifies the save.
        tied: alias fqn -> fqn of the entry that has the weight's value.
        tied_copies: entries of aliases that a file stores again, as bytes of their own.
        unused_copies: copies in the files that the model does not use.
        trained_dtypes: fqn -> dtype of the parameter in the module.
        placements: fqn -> the axes of the device mesh of the source's DTensor, each with the dim
            that it cuts; None: it replicates. An axis without a name is called "".
        wrapped_names: fqn -> name with wrapper prefixes that the optimizer lists, where the two
            differ.
        may_be_ddp: whether DDP may have wrapped the model, or Lightning in the same way. If not, a
            ``module`` in the names is a part of the model.
        unnamed_optimizers: paths of optimizer states that no parameter name belongs to.
        unnamed: why the model's own optimizer has no names; None if it has, or there is none.
        checkpoint_below: path of the run's newest checkpoint, if only the run's model was read.
        absent: fqns that the checkpoint lists without storing a value.
        unknown_globals: names in pickles that no known framework writes.
        unread: values that this manifest does not represent.
        read_files: paths of files that were read and are not in ``files``.
        unread_files: all other files of the checkpoint: name -> path.
        ordered: whether the weights are in the model's order.
        without_frozen: whether the files state that frozen parameters were left out.
        keyed: how the optimizers refer to parameters; None without an optimizer, or if they differ.
        ordered_by_model: whether a model, not the files alone, gave the order.
        quantisation: how the weights are quantised; None if nothing states that they are.
        all_buffers_marked: whether all buffers are entries of that kind, if some are.
    """

    origin: Origin
    entries: Mapping[Key, Entry]
    files: Mapping[str, SourceFile]
    train: TrainState = field(default_factory=TrainState)
    tied: Mapping[str, str] = field(default_factory=dict)
    tied_copies: tuple[Entry, ...] = ()
    unused_copies: tuple[Entry, ...] = ()
    frozen: frozenset[str] = frozenset()
    trained_dtypes: Mapping[str, DType] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    wrapped_names: Mapping[str, str] = field(default_factory=dict)
    may_be_ddp: bool = True
    unnamed_optimizers: tuple[str, ...] = ()
    unnamed: UnnamedOptimizer | None = None
    checkpoint_below: str = ""
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unknown_globals: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    read_files: tuple[str, ...] = ()
    unread_files: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = field(kw_only=True)
    without_frozen: bool = False
    keyed: Keyed | None = None
    ordered_by_model: bool = False
    quantisation: Quantisation | None = None
    all_buffers_marked: bool = True

    def of_kind(self, *kinds: str) -> Iterator[Entry]:
        """Iterate over the entries of the given kinds, in manifest order."""
        return (entry for entry in self.entries.values() if entry.kind in kinds)

    @property
    def weight_shapes(self) -> dict[str, Index]:
        """The shape of each weight and buffer by name, in manifest order."""
        return {entry.fqn: entry.shape for entry in self.of_kind(*WEIGHT_KINDS)}

    def select_weights(self) -> dict[str, Entry]:
        """Return the most precise value of each weight: its fp32 master weight, else the module's.

        Buffers are among them, by their names.
        """
        best = {entry.fqn: entry for entry in self.of_kind(PARAM, BUFFER)}
        best.update((entry.fqn, entry) for entry in self.of_kind(MASTER))
        return best

    def kept_name(self, fqn: str) -> str:
        """Return the name under which a (possibly tied) weight is among the entries."""
        return self.tied.get(fqn, fqn)

    def with_entries(self, entries: Iterable[Entry]) -> Manifest:
        """Return a copy of the manifest with these entries, in the given order."""
        return replace(self, entries=index_entries(entries))

    @property
    def has_optimizer(self) -> bool:
        """Whether the manifest has any optimizer slot."""
        return any(entry.kind not in WEIGHT_KINDS for entry in self.entries.values())

    @property
    def placeholders(self) -> list[str]:
        """The fqns of the weights of shape [0] that stand for a partitioned parameter.

        ZeRO 3 leaves them in a module whose parameters are on other ranks. A weight with an fp32
        master or an optimizer slot is not one of them: its state confirms the empty shape.
        DeepSpeed states all shapes at stage 3, and has no placeholders at other stages.
        """
        if self.origin.zero_stage is not None:
            return []
        confirmed = {fqn for kind, fqn in self.entries if kind not in (PARAM, BUFFER)}
        empty = (entry.fqn for entry in self.of_kind(PARAM) if entry.shape == (0,))
        return [fqn for fqn in empty if fqn not in confirmed]


class StoredChecksum(NamedTuple):
    """A CRC-32 that a file stores of one of its byte ranges.

    Args:
        locations: byte offsets at which the checksum is written, as 4 little-endian bytes.
    """

    byte_offset: int
    nbytes: int
    locations: tuple[int, ...]


Literals = Iterable[tuple[int, bytes]]  # byte offsets, and the bytes there


def patch_literals(
    literals: Literals, changes: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    """Yield literals after changes of bytes in them; both are sorted by offset.

    A change outside of the literals is yielded by itself.
    """
    more = iter(changes)
    change = next(more, None)
    for start, data in literals:
        while change is not None and change[0] < start:
            yield change
            change = next(more, None)
        stop = start + len(data)
        if change is None or change[0] >= stop:
            yield start, data
            continue
        patched = bytearray(data)
        while change is not None and change[0] < stop:
            at = change[0] - start
            patched[at : at + len(change[1])] = change[1]
            change = next(more, None)
        yield start, bytes(patched)
    if change is not None:
        yield change
        yield from more


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its size, and the bytes that are known before any tensor is read.

    Thousands of ranks have millions of literals and checksums, so both may be computed anew by
    every iteration.

    Args:
        name: relative to the destination.
        literals: the known bytes, in file order.
        checksums: those that the file stores of itself.
        like: another file from which only the content of tensors and what states the rank differ;
            empty if none is known.
    """

    name: str
    nbytes: int
    literals: Literals = ()
    checksums: Iterable[StoredChecksum] = ()
    like: str = ""

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> OutputFile:
        """Return a file whose content is known."""
        return cls(name, len(data), ((0, data),) if data else ())


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The layout of an output: its files, and the entries with their chunks in those files.

    The ``file`` of a chunk is an ``OutputFile.name``. Bytes of a file that belong to no chunk and
    no literal are zero, and the format intends them to be zero.
    """

    files: tuple[OutputFile, ...]
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.nbytes for file in self.files)


def index_entries(entries: Iterable[Entry]) -> dict[Key, Entry]:
    """Return the entries by key, in the given order.

    Raises:
        CorruptError: two entries have the same kind and fqn.
    """
    table: dict[Key, Entry] = {}
    for entry in entries:
        if entry.key in table:
            raise CorruptError(
                entry.where,
                f"two tensors are called {entry.fqn!r} ({entry.kind})",
                "rename one of them, e.g. with --rename, or exclude it with --exclude",
            )
        table[entry.key] = entry
    return table


def find_most_common_dtype(dtypes: Iterable[DType]) -> str:
    """Return the most common float dtype, the first one of several; empty if there is none."""
    counts = Counter(dtype for dtype in dtypes if dtype.family == "float")
    return str(max(counts, key=counts.__getitem__)) if counts else ""


def find_main_dtype(tensors: Iterable[tuple[DType, int]]) -> DType:
    """Return the dtype of most elements, from each tensor's dtype and number of elements."""
    sizes: Counter[DType] = Counter()
    for dtype, numel in tensors:
        sizes[dtype] += numel
    return max(sizes, key=sizes.__getitem__, default=FLOAT32)


def find_source_file(files: Mapping[str, SourceFile], file: str) -> SourceFile:
    """Return the description of a chunk's file, which may be computed or text inside a pickle."""
    if isinstance(file, Derived):
        return SourceFile(file, file.computation.nbytes, lasting=False)
    if not escaped.is_escaped(file):
        return files[file]
    return SourceFile(file, escaped.parse_name(file).nbytes, lasting=False)


def check(manifest: Manifest) -> None:
    """Prove that the chunks of every entry cover it exactly once and are inside their files.

    Raises:
        CorruptError: a chunk is out of bounds, two chunks overlap in part, or elements are missing;
            or a name or kind is not text (keys of a pickle can be anything).
    """
    sizes = FileSizes(lambda file: find_source_file(manifest.files, file).nbytes)
    for entry in manifest.entries.values():
        key: tuple[object, object] = (entry.kind, entry.fqn)
        if not all(isinstance(name, str) for name in key):
            raise CorruptError(
                manifest.origin.path, f"the name of a tensor is not a string: {shown(key)}"
            )
        _check_bounds(entry, sizes)
        if not entry.layout.is_partition:  # a partition covers its tensor by its definition
            _check_coverage(entry, manifest)


def _check_bounds(entry: Entry, sizes: FileSizes) -> None:
    for chunk in entry.layout.find_unproven(sizes):
        if not chunk.box.fits(entry.shape):
            raise CorruptError(
                chunk.file,
                f"{entry.fqn!r}: stored block {chunk.box.origin}+{chunk.box.shape} lies outside"
                f" the tensor's shape {entry.shape}",
            )
        start, stop = chunk.byte_span
        size = sizes.size_of(chunk.file)
        # `byte_span` assumes strides of at least 0: a negative one reads bytes outside the span.
        if start < 0 or stop > size or any(s < 0 for s in chunk.byte_strides):
            raise CorruptError(
                chunk.file,
                f"{entry.fqn!r} needs bytes {start} to {stop}, but the file has {size}",
                "the file is truncated or its header is wrong: fetch it again",
            )


def _check_coverage(entry: Entry, manifest: Manifest) -> None:
    """Disjoint boxes inside a tensor fill it exactly when their volumes add up to its volume."""
    distinct = list(dict.fromkeys(chunk.box for chunk in entry.chunks if chunk.box.volume))
    if len(distinct) == 1 and distinct[0] == whole(entry.shape):
        return
    stored = sum(box.volume for box in distinct)
    where = entry.where if entry.chunks else manifest.origin.path
    # More elements than the tensor has are found below: some of them overlap.
    if stored < entry.numel:
        raise CorruptError(
            where,
            f"{entry.fqn!r} ({entry.kind}): the shards contain {stored} of {entry.numel} elements",
            "a shard is missing or belongs to another checkpoint"
            f"{advise_weights_alone(entry, manifest)}",
        )
    pair = find_first_overlap(distinct, entry.shape)
    if pair:
        a, b = (distinct[i] for i in pair)
        raise CorruptError(
            where,
            f"{entry.fqn!r} ({entry.kind}): shards {a.origin}+{a.shape} and {b.origin}+{b.shape}"
            f" overlap; together they contain {stored} elements, expected {entry.numel}",
            "shards of two different runs or world sizes are mixed",
        )


def advise_weights_alone(entry: Entry, manifest: Manifest) -> str:
    """Return how to read only the weights; an empty string if the entry's files have some."""
    if entry.kind in WEIGHT_KINDS:
        return ""
    files = {chunk.file for chunk in entry.chunks}
    weights = (entry for entry in manifest.entries.values() if entry.kind in WEIGHT_KINDS)
    if any(chunk.file in files for weight in weights for chunk in weight.chunks):
        return ""
    return "; to read only the weights, pass a copy of the directory without the optimizer's files"
