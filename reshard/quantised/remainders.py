"""fp32 master weights of which an optimizer stores the lower 16 bits only, as a remainder.

The upper 16 bits of a master are those of its bf16 weight, minus one if the remainder is negative:
the weight is the master rounded half up, and the remainder the difference of their bits as a signed
number. Megatron copies remainders into float32 where it gathers an optimizer's state, so a file
holds them as int16 or as whole numbers in float32.

Sources: TransformerEngine 2.9 ``common/multi_tensor/adam.cu`` (AdamFunctorMasterParamRemainder),
``pytorch/optimizers/fused_adam.py`` (store_param_remainders); Megatron-LM core_v0.16.1
``core/optimizer/distrib_optimizer.py`` (get_parameter_state_dp_zero).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.core.computed import ComputedValues
from reshard.core.dtypes import BFLOAT16, BY_NAME, FLOAT32, DType, round_to_bfloat16
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest, check
from reshard.engine.planning.copies import Copy, CopyPlanner
from reshard.errors import CorruptError, UnsupportedError
from reshard.system.derived import Derived, Reader
from reshard.system.files import SourceFiles
from reshard.units import abridge, counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

INT16 = BY_NAME["int16"]
TE_MASTER = "master_param"
_LEAST, _MOST = -(1 << 15), (1 << 15) - 1
_BLOCK = 1 << 17  # elements; what is computed at a time stays in a core's cache
_SAMPLED_TENSORS = 16
_SAMPLED = 64  # elements of each


@dataclass(frozen=True, eq=False)
class WholeMaster(ComputedValues):
    """A master weight from its bf16 weight and its remainder."""

    @property
    def detail(self) -> str:
        """The name of the weight."""
        return f"master of {self.sources[0].fqn} from its remainder"

    @cached_property
    def _planners(self) -> list[CopyPlanner]:
        return list(map(CopyPlanner, self.sources))

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the masters from a byte offset on."""
        import numpy as np

        out = np.frombuffer(target, "<u4")
        first = byte_offset // FLOAT32.itemsize
        weights, remainders = self._planners
        for start in range(0, len(out), _BLOCK):
            block = out[start : start + _BLOCK]
            run = first + start, first + start + len(block)
            upper = np.frombuffer(_read_run(pool, weights, *run, BFLOAT16), "<u2")
            np.left_shift(upper, 16, out=block, dtype="<u4")
            # Unsigned sums of 32 bits wrap around, as the borrow of a negative remainder needs it.
            np.add(block, self._read_remainders(pool, remainders, run).view("<u4"), out=block)

    def _read_remainders(self, pool: Reader, planner: CopyPlanner, run: tuple[int, int]) -> Array:
        import numpy as np

        remainder = self.sources[1]
        dtype = remainder.dtype
        raw = _read_run(pool, planner, *run, dtype)
        if dtype == INT16:
            return np.frombuffer(raw, "<i2").astype("<i4")
        stored = np.frombuffer(raw, "<f4")
        with np.errstate(invalid="ignore"):  # of a NaN, which is refused below
            numbers: Array = stored.astype("<i4")
        wrong = (numbers != stored) | (stored < _LEAST) | (stored > _MOST)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise CorruptError(
                remainder.where,
                f"{remainder.fqn!r} has {stored[at]} at element {run[0] + at}, expected a"
                " remainder of 16 bits as in the rest of this optimizer",
            )
        return numbers


def _read_run(pool: Reader, planner: CopyPlanner, start: int, stop: int, dtype: DType) -> bytearray:
    # The thread's `TileReader` may be reading these masters (for an average), and has one buffer.
    buffer = bytearray((stop - start) * dtype.itemsize)
    for copy in planner.plan_run(start, stop, dtype, 0):
        _fill(pool, copy, memoryview(buffer))
    return buffer


def _fill(pool: Reader, copy: Copy, buffer: memoryview) -> None:
    if copy.is_run:
        nbytes = copy.numel * copy.dtype.itemsize
        into = buffer[copy.target_offset : copy.target_offset + nbytes]
        pool.read_into(copy.file, copy.byte_offset, into)
        return
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    size = copy.dtype.itemsize
    reach = sum((n - 1) * s for n, s in zip(copy.shape, copy.byte_strides, strict=True)) + size
    stored = np.frombuffer(pool.read(copy.file, copy.byte_offset, reach), f"<u{size}")
    target = np.frombuffer(buffer[copy.target_offset :], f"<u{size}")
    as_strided(target, copy.shape, copy.target_strides)[...] = as_strided(
        stored, copy.shape, copy.byte_strides
    )


def is_computed(master: Entry) -> bool:
    """Return whether a master is computed from its weight, so that they cannot disagree."""
    return not master.layout.is_partition and any(
        isinstance(chunk.file, Derived) and isinstance(chunk.file.computation, WholeMaster)
        for chunk in master.chunks
    )


def round_ties_as_stored(
    masters: bytes | bytearray, rounded: bytearray, stored: bytes | bytearray
) -> None:
    """Change the bf16 casts of fp32 masters to the stored weights where those are rounded half up.

    Only a master in the middle between two weights has a choice.
    """
    import numpy as np

    bits = np.frombuffer(masters, "<u4")
    half_up = ((bits + 0x8000) >> 16).astype("<u2")
    fits = ((bits & 0xFFFF) == 0x8000) & (half_up == np.frombuffer(stored, "<u2"))
    np.copyto(np.frombuffer(rounded, "<u2"), half_up, where=fits)


def name_masters(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Return a manifest with the masters of Transformer Engine's Adam as masters, and notes.

    In a state dict by name they are a slot of the optimizer, which only that Adam understands.

    Raises:
        CorruptError: remainders do not cover their tensor.
        UnsupportedError: a remainder has no bf16 weight.
    """
    named = {
        e.fqn: e for e in manifest.of_kind(TE_MASTER) if (MASTER, e.fqn) not in manifest.entries
    }
    if not named:
        return manifest, []
    renamed = manifest.with_entries(
        replace(e, kind=MASTER) if named.get(e.fqn) is e else e for e in manifest.entries.values()
    )
    found = complete_masters(renamed, may_be_float=False)
    lost = [e.fqn for e in found.of_kind(MASTER) if e.fqn in named and e.dtype == INT16]
    if lost:
        raise UnsupportedError(
            manifest.origin.path,
            f"has remainders of masters ({TE_MASTER}) of {abridge(lost, 1)}, whose weights are not"
            " in bfloat16 or not in the checkpoint",
            "pass a checkpoint with both",
        )
    note = f"{TE_MASTER} of {counted(len(named), 'parameter')}: Transformer Engine's masters"
    return found, [note]


def complete_masters(manifest: Manifest, *, may_be_float: bool) -> Manifest:
    """Return a manifest with whole masters in place of remainders.

    Args:
        may_be_float: whether float32 masters can be remainders too, as a sample of values shows.
    """
    pairs = list(_pair(manifest, INT16))
    if may_be_float and not pairs:
        pairs = list(_pair(manifest, FLOAT32))
        pairs = pairs if pairs and _are_remainders(pairs) else []
    if not pairs:
        return manifest
    # The entries below no longer have these blocks, so nothing later proves their coverage.
    check(manifest.with_entries(remainder for _, remainder in pairs))
    completed = {
        remainder.key: replace(
            remainder, dtype=FLOAT32, chunks=WholeMaster((weight, remainder)).chunks
        )
        for weight, remainder in pairs
    }
    note = (
        f"{counted(len(pairs), 'master weight')} stored as 16-bit remainders of the weights: the"
        " masters are computed from both"
    )
    return replace(
        manifest.with_entries(completed.get(key, e) for key, e in manifest.entries.items()),
        warnings=(*manifest.warnings, note),
    )


def _pair(manifest: Manifest, dtype: DType) -> Iterator[tuple[Entry, Entry]]:
    for stored in manifest.of_kind(MASTER):
        weight = manifest.entries.get((PARAM, stored.fqn))
        if (
            weight is not None
            and weight.shape == stored.shape
            and weight.layout.dtypes <= {BFLOAT16}
            and stored.layout.dtypes == {dtype}
            and stored.numel
        ):
            yield weight, stored


def _are_remainders(pairs: Sequence[tuple[Entry, Entry]]) -> bool:
    # Remainders are whole numbers of 16 bits. Some masters are such numbers, too (norms of 1,
    # biases of 0), but then they equal the weights beside them.
    largest = sorted(pairs, key=lambda pair: -pair[0].numel)[:_SAMPLED_TENSORS]
    differ = False
    with SourceFiles() as pool:
        for weight, stored in largest:
            start = max((weight.numel - _SAMPLED) // 2, 0)
            stop = min(start + _SAMPLED, weight.numel)
            raw = _read_run(pool, CopyPlanner(stored), start, stop, FLOAT32)
            numbers = struct.unpack(f"<{stop - start}f", raw)
            if not all(n.is_integer() and _LEAST <= n <= _MOST for n in numbers):
                return False
            bits = struct.unpack(f"<{stop - start}I", raw)
            copies = _read_run(pool, CopyPlanner(weight), start, stop, BFLOAT16)
            differ = differ or [round_to_bfloat16(number) for number in bits] != list(
                struct.unpack(f"<{stop - start}H", copies)
            )
    return differ
