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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.values import Builder, Call, Global
from reshard.containers.zip_writer import ALIGNMENT, ZipLayout
from reshard.core.box import Box, Index, row_major, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Entry, Key, Skeleton
from reshard.core.stamps import KEY, Stamp
from reshard.errors import UnsupportedError

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
class Part:
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
    parts: tuple[Part, ...] = ()
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
class Slot:
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


def build_whole_tensor(entry: Entry, dtype: DType) -> Slot:
    """Build a tensor that has all elements of an entry, in its own storage."""
    part = Part(entry.kind, entry.fqn, entry.shape, whole(entry.shape))
    return Slot(Storage(dtype, entry.numel, (part,)), entry.shape)


def build_number(value: float, shape: Index = ()) -> Slot:
    """Build a tensor of one known fp32 number, as torch's optimizers count their steps."""
    return Slot(Storage(FLOAT32, 1, data=pack_fp32(value)), shape)


def pack_fp32(value: float) -> bytes:
    """Return a number as a tensor stores it."""
    return struct.pack("<f", value)


def lay_out_object(
    name: str,
    root: Any,
    *,
    slot_of: Callable[[Any], Slot | None] | None = None,
    stamp: Stamp | None = None,
    in_stream: bool = False,
) -> Skeleton:
    """Lay out a file that has any object.

    The chunks of an entry in the skeleton are the parts of it in this file, in file order.

    Args:
        root: values as `unpickle.loads` yields them, with a `Slot` for each tensor.
        slot_of: returns the slot for a value of another type, or None.
        stamp: states the file's place in its save; not written if the root is not a dict.
        in_stream: whether the framework saves it into a stream, so that the archive is not named
            after the file.
    """
    archive = "" if in_stream else name
    return Template(name, root, slot_of=slot_of).lay_out(name, stamp, archive_of=archive)


class Template:
    """A root that the files of several ranks share, pickled once; each file has its own stamp.

    Args:
        where, root, slot_of: as in `lay_out_object`.

    Raises:
        UnsupportedError: ``root`` has a value that cannot be written.
    """

    def __init__(
        self, where: str, root: Any, *, slot_of: Callable[[Any], Slot | None] | None = None
    ) -> None:
        self._pickler = _TensorPickler(where, slot_of or (lambda _value: None))
        self._pickler.write(root)
        self._root = root
        self._shared = self._whole = b""

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
        shared, pickle = self._finish_pickle(stamp)
        archive = ZipLayout(name)
        root = get_archive_root(name if archive_of is None else archive_of)
        archive.add(f"{root}/data.pkl", pickle, shared)
        # The members have the order in which torch writes them (`_save`).
        head = [(".format_version", b"1")]
        head += [(".storage_alignment", b"%d" % ALIGNMENT), ("byteorder", b"little")]
        for member, data in head:
            archive.add(f"{root}/{member}", data)
        entries: dict[Key, Entry] = {}
        identity = hashlib.sha256(shared)
        identity.update(pickle)
        for storage, key in self._pickler.storages:
            identity.update(b"%d:" % storage.nbytes)
            _store_storage(archive, f"{root}/data/{key}", storage, None if hollow else entries)
            identity.update(storage.data or b"")
        # torch writes these two when it closes the archive (``writeEndOfFile``).
        archive.add(f"{root}/version", b"3\n")
        archive.add(f"{root}/.data/serialization_id", _format_digits(identity.digest()))
        file, checksums = archive.finish()
        return Skeleton((file,), tuple(entries.values()), checksums)

    def _finish_pickle(self, stamp: Stamp | None) -> tuple[bytes, bytes]:
        """Return the pickle; the stamp is last: a key of the root, or an attribute of a state dict.

        The first part is one object for all files, of which there may be thousands.
        """
        if stamp is None or not isinstance(self._root, dict):
            self._whole = self._whole or self._pickler.finish()
            return self._whole, b""
        is_module = isinstance(self._root, OrderedDict)
        size, rest = self._pickler.finish_with({KEY: stamp.as_dict()}, as_state=is_module)
        # The pickles of all files begin with the bytes of the root, and share one copy of them.
        self._shared = self._shared or bytes(self._pickler.out[:size])
        return self._shared, rest


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


def _store_storage(
    archive: ZipLayout, member: str, storage: Storage, entries: dict[Key, Entry] | None
) -> None:
    """Add a storage's member; its parts become chunks of their entries, if those are requested."""
    if storage.data is not None:
        archive.add(member, storage.data)
        return
    start = archive.reserve(member, storage.nbytes)
    if entries is None:
        return
    for part in storage.parts:
        at = start + part.offset * storage.dtype.itemsize
        chunk = contiguous(archive.name, at, storage.dtype, part.box)
        key = part.kind, part.fqn
        before = entries[key].chunks if key in entries else ()
        entries[key] = Entry(part.fqn, part.kind, storage.dtype, part.shape, (*before, chunk))


def _format_digits(digest: bytes) -> bytes:
    """Format two 64-bit numbers with 20 digits each."""
    numbers = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8))
    return b"".join(b"%020d" % number for number in numbers)


class _TensorPickler(Pickler):
    """Writes tensors as torch reduces them, and numbers their storages."""

    def __init__(self, where: str, slot_of: Callable[[Any], Slot | None]) -> None:
        super().__init__(where)
        self._slot_of = slot_of
        self._keys: dict[Storage, str] = {}

    @property
    def storages(self) -> Sequence[tuple[Storage, str]]:
        """The storages in file order, with their names."""
        return tuple(self._keys.items())

    def write_leaf(self, value: Any) -> None:
        """Write a tensor: a `Slot`, a value that has one, or an `Entry`, which is stored whole."""
        slot = value if isinstance(value, Slot) else self._slot_of(value)
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
