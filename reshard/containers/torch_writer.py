"""Lay out a file of ``torch.save`` before its tensors are read, without torch.

The bytes are those that torch writes for the same object to a file of that name, with one
exception: the 40 digits of ``.data/serialization_id`` (and its CRC). torch's are hashes of the
members' names and of their CRCs, in the order of a hash table, and we do not know the CRCs before
the data. Ours are a hash of the pickle and of every storage's size and, if it is known, content. No
known program compares them: `torch.load` only logs them.

Sources: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py``
(``_reduce_ex_internal``), ``caffe2/serialize/inline_container.cc`` (``basename``,
``writeSerializationId``).
"""

from __future__ import annotations

import hashlib
import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.values import Builder, Call, Global
from reshard.containers.zip_writer import ALIGNMENT, ZipLayout
from reshard.core.box import Box, Index, row_major, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import (
    Entry,
    Key,
    OutputFile,
    Skeleton,
    StoredChecksum,
    patch_literals,
)
from reshard.core.stamps import KEY, Stamp
from reshard.errors import UnsupportedError
from reshard.system.checksum import crc32

_DIGITS = 40  # of the id of an archive
_STREAM = "archive"  # root of the archive where torch saves into a stream
_TYPED = "torch._tensor._rebuild_from_type_v2"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"

# Builders for `torch_reader.read` that keep containers as a `Call`, to write them unchanged.
AS_WRITTEN: dict[str, Builder] = {
    name: partial(lambda name, *args: Call(name, args), name)
    for name in """
        collections.OrderedDict collections.defaultdict collections.Counter collections.deque
        torch.Size torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state
    """.split()
}


@dataclass(frozen=True, slots=True)
class StorageBlock:
    """A block of a tensor that is contiguous in a storage.

    Args:
        kind, fqn, shape: the manifest entry.
        box: the elements of the entry that the part has.
        offset: element of the storage at which the block begins.
    """

    kind: str
    fqn: str
    shape: Index
    box: Box
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """One stored buffer; tensors on the same object share it, as tied weights do.

    Args:
        numel: its size in elements; elements that no part fills are zero.
        data: its whole content, if that is already known (a step counter).
    """

    dtype: DType
    numel: int
    parts: tuple[StorageBlock, ...] = ()
    data: bytes | None = None

    def __post_init__(self) -> None:
        if any(not 0 <= p.offset <= self.numel - p.box.volume for p in self.parts):
            raise ValueError("a part that lies outside its storage")
        if self.data is not None and (self.parts or len(self.data) != self.nbytes):
            raise ValueError("a storage whose data have another size, or that also has parts")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StorageView:
    """A tensor: a strided view of a storage, in elements; contiguous without strides."""

    storage: Storage
    shape: Index
    strides: Index | None = None
    offset: int = 0
    requires_grad: bool = False

    def __post_init__(self) -> None:
        steps = self.steps
        if len(steps) != len(self.shape):
            raise ValueError("a tensor whose number of strides differs from its number of dims")
        last = sum((n - 1) * step for n, step in zip(self.shape, steps, strict=True))
        if 0 not in self.shape and not 0 <= self.offset < self.storage.numel - last:
            raise ValueError("a tensor that extends beyond its storage")

    @property
    def steps(self) -> Index:
        """Strides in elements, also those of a contiguous tensor."""
        return row_major(self.shape) if self.strides is None else self.strides


def lay_out(name: str, tensors: Sequence[tuple[Entry, DType]]) -> Skeleton:
    """Lay out a dict of tensors, each with a contiguous storage, in the given order."""
    return lay_out_object(
        name, {entry.fqn: build_whole_tensor(entry, dtype) for entry, dtype in tensors}
    )


def build_whole_tensor(entry: Entry, dtype: DType) -> StorageView:
    """Build a tensor that has all elements of an entry, in its own storage."""
    part = StorageBlock(entry.kind, entry.fqn, entry.shape, whole(entry.shape))
    return StorageView(Storage(dtype, entry.numel, (part,)), entry.shape)


def build_number(value: float, shape: Index = ()) -> StorageView:
    """Build a tensor of one known fp32 number, as torch's optimizers count their steps."""
    return StorageView(Storage(FLOAT32, 1, data=pack_fp32(value)), shape)


def pack_fp32(value: float) -> bytes:
    """Return a number as a tensor stores it."""
    return struct.pack("<f", value)


def lay_out_object(
    name: str,
    root: Any,
    *,
    slot_of: Callable[[Any], StorageView | None] | None = None,
    stamp: Stamp | None = None,
    in_stream: bool = False,
) -> Skeleton:
    """Lay out a file that has any object.

    The chunks of an entry in the skeleton are the parts of it in this file, in file order.

    Args:
        root: values as `unpickle.loads` yields them, with a `StorageView` for each tensor.
        slot_of: returns the slot for a value of another type, or None.
        stamp: states the file's place in its save; not written if the root is not a dict.
        in_stream: whether the framework saves it into a stream, so that the archive is not named
            after the file.
    """
    archive = "" if in_stream else name
    return Template(name, root, slot_of=slot_of).lay_out(name, stamp, archive_of=archive)


class Template:
    """A root that the files of several ranks share, pickled once.

    Each file has its own stamp, and its own state of the objects that vary.

    Args:
        where, root, slot_of: as in `lay_out_object`.
        varying: objects in the root whose state the caller changes before it lays out a file.

    Raises:
        UnsupportedError: ``root`` has a value that cannot be written.
    """

    def __init__(
        self,
        where: str,
        root: Any,
        *,
        slot_of: Callable[[Any], StorageView | None] | None = None,
        varying: Iterable[Call] = (),
    ) -> None:
        self._pickler = _TensorPickler(where, slot_of or (lambda _value: None), varying)
        self._pickler.write(root)
        self._root = root
        self._shared: dict[int, list[bytes]] = {}
        self._layouts: dict[tuple[int, int], _Layout] = {}

    @property
    def storages(self) -> list[Storage]:
        """The storages, in file order."""
        return [storage for storage, _ in self._pickler.storages]

    def lay_out(
        self,
        name: str,
        stamp: Stamp | None = None,
        *,
        hollow: bool = False,
        archive_of: str | None = None,
    ) -> Skeleton:
        """Lay out the file ``name`` of one rank.

        Args:
            archive_of: the file that the archive is named after; None: this one.
            hollow: whether to leave out the entries, which the caller has from another rank's file.
        """
        file, starts = self.lay_out_file(name, stamp, archive_of=archive_of)
        entries: dict[Key, Entry] = {}
        for storage, start in zip(self.storages, starts, strict=True) if not hollow else ():
            for part in storage.parts:
                at = start + part.offset * storage.dtype.itemsize
                chunk = contiguous(name, at, storage.dtype, part.box)
                key = part.kind, part.fqn
                before = entries[key].chunks if key in entries else ()
                chunks = (*before, chunk)
                entries[key] = Entry(part.fqn, part.kind, storage.dtype, part.shape, chunks)
        return Skeleton((file,), tuple(entries.values()))

    def lay_out_file(
        self, name: str, stamp: Stamp | None = None, *, archive_of: str | None = None
    ) -> tuple[OutputFile, Sequence[int]]:
        """Lay out the file ``name`` like `lay_out`; return it, and where each storage begins."""
        pickle = self._finish_pickle(stamp)
        root = get_archive_root(name if archive_of is None else archive_of).encode()
        key = len(root), sum(map(len, pickle))
        if key not in self._layouts:
            self._layouts[key] = _lay_out_archive(root, key[1], self._pickler.storages)
        layout = self._layouts[key]
        literals = _Literals(layout, root, pickle)
        return OutputFile(name, layout.nbytes, literals, layout.checksums), layout.starts

    def _finish_pickle(self, stamp: Stamp | None) -> tuple[bytes, ...]:
        # The stamp is last: a key of the root, or an attribute of a state dict.
        pickler = self._pickler
        size, rest = len(pickler.out), b"."
        if stamp is not None and isinstance(self._root, dict):
            is_module = isinstance(self._root, OrderedDict)
            size, rest = pickler.finish_with({KEY: stamp.as_dict()}, as_state=is_module)
        if size not in self._shared:
            starts = [0, *(part.stop for part in pickler.parts)]
            stops = [*(part.start for part in pickler.parts), size]
            self._shared[size] = [
                bytes(pickler.out[start:stop]) for start, stop in zip(starts, stops, strict=True)
            ]
        first, *others = self._shared[size]
        own = map(pickler.write_again, pickler.parts)
        return (first, *chain.from_iterable(zip(own, others, strict=True)), rest)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The layout of all archives with a root and a pickle of some length.

    Args:
        root: that of the archive from which the others follow.
        names: offsets at which names of members begin, each with the root.
        literals: the known bytes without the content of the two `opened` members.
        opened: the pickle, and the id of the archive.
        checksums: those of the storages.
        starts: where each storage begins.
        identity: what the id digests of the storages.
    """

    nbytes: int
    root: bytes
    names: Sequence[int]
    literals: Sequence[tuple[int, bytes]]
    opened: tuple[StoredChecksum, StoredChecksum]
    checksums: Sequence[StoredChecksum]
    starts: Sequence[int]
    identity: bytes


def _lay_out_archive(
    root: bytes, pickle_nbytes: int, storages: Sequence[tuple[Storage, str]]
) -> _Layout:
    """Lay out an archive; its members have the order in which torch writes them (`_save`)."""
    at = root.decode()
    archive = ZipLayout("")
    archive.reserve(f"{at}/data.pkl", pickle_nbytes)
    head = [(".format_version", b"1")]
    head += [(".storage_alignment", b"%d" % ALIGNMENT), ("byteorder", b"little")]
    for member, data in head:
        archive.add(f"{at}/{member}", data)
    starts = array("Q")
    for storage, key in storages:
        member = f"{at}/data/{key}"
        if storage.data is None:
            starts.append(archive.reserve(member, storage.nbytes))
        else:
            starts.append(archive.add(member, storage.data))
    # torch writes these two when it closes the archive (``writeEndOfFile``).
    archive.add(f"{at}/version", b"3\n")
    archive.reserve(f"{at}/.data/serialization_id", _DIGITS)
    file = archive.finish()
    first, *checksums, last = file.checksums
    sizes = (b"%d:%b" % (storage.nbytes, storage.data or b"") for storage, _ in storages)
    return _Layout(
        nbytes=file.nbytes,
        root=root,
        names=archive.names + archive.listed_names,
        literals=tuple(file.literals),
        opened=(first, last),
        checksums=tuple(checksums),
        starts=starts,
        identity=b"".join(sizes),
    )


@dataclass(frozen=True, slots=True)
class _Literals:
    """The literals of one archive, which follow from those of another one with its layout."""

    layout: _Layout
    root: bytes
    pickle: tuple[bytes, ...]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        identity = hashlib.sha256()
        for part in (*self.pickle, self.layout.identity):
            identity.update(part)
        opened, content = self.layout.opened, (self.pickle, (_format_digits(identity.digest()),))
        crcs, waiting = [], []
        for record, parts in zip(opened, content, strict=True):
            crc, at = 0, record.byte_offset
            for part in filter(None, parts):
                crc = crc32(part, crc)
                waiting.append((at, part))
                at += len(part)
            crcs += [(location, crc.to_bytes(4, "little")) for location in record.locations]
        patched = patch_literals(self.layout.literals, sorted([*self._list_names(), *crcs]))
        for literal in patched:
            while waiting and waiting[0] < literal:
                yield waiting.pop(0)
            yield literal

    def _list_names(self) -> Iterable[tuple[int, bytes]]:
        return zip(self.layout.names, repeat(self.root)) if self.root != self.layout.root else ()


def get_archive_root(name: str) -> str:
    """Return what ``torch.save`` calls the root of the archive that it writes to a file.

    That is the file's name without its last suffix. torch writes names beyond ASCII through a
    stream, and refuses those of which nothing is left.

    >>> get_archive_root("step10/rank.0.pt"), get_archive_root(""), get_archive_root("\u00e9.pt")
    ('rank.0', 'archive', 'archive')
    """
    base = re.split(r"[/\\]", name)[-1]
    stem = base.rpartition(".")[0] if "." in base else base
    return stem if stem and stem.isascii() else _STREAM


def _format_digits(digest: bytes) -> bytes:
    numbers = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8))
    return b"".join(b"%020d" % number for number in numbers)


class _TensorPickler(Pickler):
    """Writes tensors as torch reduces them, and numbers their storages."""

    def __init__(
        self, where: str, slot_of: Callable[[Any], StorageView | None], varying: Iterable[Call]
    ) -> None:
        super().__init__(where, varying)
        self._slot_of = slot_of
        self._keys: dict[Storage, str] = {}

    @property
    def storages(self) -> Sequence[tuple[Storage, str]]:
        return tuple(self._keys.items())

    def write_leaf(self, value: Any) -> None:
        slot = value if isinstance(value, StorageView) else self._slot_of(value)
        if slot is None and isinstance(value, Entry):
            slot = build_whole_tensor(value, value.dtype)
        if slot is None:
            super().write_leaf(value)
            return
        dtype, old = slot.storage.dtype, bool(slot.storage.dtype.storage)
        self.write_global(f"torch._utils._rebuild_tensor_{'v2' if old else 'v3'}")
        self.out += b"("
        self._write_storage(slot.storage, old=old)
        self.write_integer(slot.offset)
        self.write_tuple(slot.shape)
        self.write_tuple(slot.steps)
        self.out += b"\x88" if slot.requires_grad else b"\x89"
        self.write_call("collections.OrderedDict", ())  # backward hooks
        self.memoize()
        if not old:
            self.write_global(f"torch.{dtype.name}")
        self.out += b"t"
        self.memoize()
        self.out += b"R"
        self.memoize(value)

    def _write_storage(self, storage: Storage, *, old: bool) -> None:
        """Write the persistent id; torch has a storage class for the older dtypes only."""
        key = self._keys.setdefault(storage, str(len(self._keys)))
        self.out += b"("
        self.write_text("storage")
        self.write_global(
            f"torch.{storage.dtype.storage}" if old else "torch.storage.UntypedStorage"
        )
        self.write_text(key)
        self.write_text("cpu")
        self.write_integer(storage.numel if old else storage.nbytes)
        self.out += b"t"
        self.memoize()
        self.out += b"Q"

    def write_object(self, call: Call) -> None:
        """Write an object, or a tensor subclass (DTensor), which `torch_reader` reads by class."""
        kind = call.args[0] if call.args else None
        if not isinstance(kind, Global) or kind.name != call.name:
            super().write_object(call)
            return
        if call.items or call.elements:
            raise UnsupportedError(
                self.where, f"a {call.name} with items or elements cannot be written into a pickle"
            )
        self.write_call(_TYPED, (Global(_WRAPPER), kind, call.args, call.state))
        self.memoize(call)
